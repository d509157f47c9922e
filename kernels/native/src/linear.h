// Products with a packed weight, cut into items that threads take.
//
// Sums run along K in one order whatever the number of rows: a row's result is the same to the last
// bit in every batch.
#pragma once
#include <vector>

#include "select.h"
#include "tiles_float.h"
#include "tiles_integer.h"
#include "tiles_matrix.h"
#include "tiles_words.h"

// y[r, 0 .. C * W) of M rows from `row` on.
template <Kind kind, int M, int C>
INLINE void tile(const Weight& weight, size_t size, const uint8_t* data, const void* x, int64_t row, const float* bias, float* y, size_t stride, const uint8_t* later) {
    const int K = weight.K;
#if VECTORS
    if constexpr (arithmetic_of(kind) == BYTES) {
        const Quantized& in = *(const Quantized*)x;
        const float* scale = in.scale + row * (K / GROUP) * 2;
        bytes_tile<kind, KEPT, M, C>(data, size, (const int8_t*)in.q + row * K, scale, K / GROUP, K, false, in.unit + row, bias, y, stride, later);
    } else if constexpr (arithmetic_of(kind) == WORDS) {
        const Quantized& in = *(const Quantized*)x;
        words_tile<M, C>(data, size, (const int16_t*)in.q + row * K, in.scale + row, K, bias, y, stride, later);
    } else {
        float_tile<kind, M, C>(data, size, (const float*)x + row * K, K, bias, y, stride, later);
    }
#else
    static_assert(C == 1, "the portable build has no registers for more");
    if constexpr (kind >= Q8) number_tile<kind, M>(data, (const float*)x + row * K, K, bias, y, stride);
    else float_tile<kind, M, C>(data, size, (const float*)x + row * K, K, bias, y, stride, later);
#endif
}

// `rows` of them, at most M.
template <Kind kind, int M, int C>
INLINE void some_rows(int64_t rows, const Weight& weight, size_t size, const uint8_t* data, const void* x, int64_t row, const float* bias, float* y, size_t stride, const uint8_t* later) {
    if (rows == M) return tile<kind, M, C>(weight, size, data, x, row, bias, y, stride, later);
    if constexpr (M > 1) some_rows<kind, M - 1, C>(rows, weight, size, data, x, row, bias, y, stride, later);
}

// The next tile's rows, where `left` tiles of at most M share out [row, end): as evenly as can be, a small one is slow.
INLINE int64_t even_share(int64_t row, int64_t end, int64_t left) { return (end - row + left - 1) / left; }

// C column blocks from `block` on, rows [row, end), in tiles of at most M. y begins at the block's first column of row
// 0. `later` is fetched by the first tile.
template <Kind kind, int M, int C>
static void tiles(const Weight& weight, const void* x, int64_t row, int64_t end, int64_t block, float* y, size_t stride, const uint8_t* later) {
    const size_t size = block_bytes(kind, weight.K);
    const uint8_t* data = weight.data + block * size;
    const float* bias = weight.bias ? weight.bias + block * W : nullptr;
    for (int64_t left = (end - row + M - 1) / M; left > 0; left--, later = nullptr) {
        const int64_t rows = even_share(row, end, left);
        some_rows<kind, M, C>(rows, weight, size, data, x, row, bias, y + row * stride, stride, later);
        row += rows;
    }
}

#if VECTORS
// Some groups of a product with Q4: what tiles of any number of rows have in common.
struct Part {
    const uint8_t* data;  // of the first group of the first block, which are `size` apart
    size_t size;
    int groups;
    size_t K;
    bool goes_on;       // from what y holds
    const float* bias;  // of the first block, or null
    uint8_t* spread;
};

// `rows` of them, at most M. unit: null where another part follows.
template <Form form, int M, int C>
INLINE void part_rows(int64_t rows, const Part& part, const int8_t* q, const float* scale, const float* unit, float* y, size_t stride, const uint8_t* later) {
    if (rows == M) {
        const bool spread = form == SPREAD_OUT;
        return bytes_tile<Q4, form, M, C>(spread ? part.spread : part.data, spread ? part.groups * SPREAD : part.size, q, scale, part.groups, part.K, part.goes_on, unit, part.bias, y, stride, later, part.spread);
    }
    if constexpr (M > 1) part_rows<form, M - 1, C>(rows, part, q, scale, unit, y, stride, later);
}

// The same for Q4 and many rows: the first tile spreads the weights for all others, some groups at a time, which stay in
// the first cache. Sums go on from what y holds: a float is the same in memory as in a register.
template <int M, int C>
static void spread_tiles(const Weight& weight, const Quantized& x, int64_t row, int64_t end, int64_t block, float* y, size_t stride, const uint8_t* later) {
    constexpr int MOST = (24 << 10) / (C * SPREAD);
    alignas(64) uint8_t spread[C * MOST * SPREAD];
    const int groups = weight.K / GROUP, parts = (groups + MOST - 1) / MOST;
    const size_t K = weight.K, size = block_bytes(Q4, K);
    const float* bias = weight.bias ? weight.bias + block * W : nullptr;
    for (int p = 0; p < parts; p++) {
        const int first = groups * p / parts, count = groups * (p + 1) / parts - first;
        const Part part{weight.data + block * size + first * group_bytes(Q4), size, count, K, p > 0, bias, spread};
        int64_t at = row;
        for (int64_t left = (end - row + M - 1) / M; left > 0; left--) {
            const int64_t rows = even_share(at, end, left);
            const float* unit = p + 1 < parts ? nullptr : x.unit + at;
            const int8_t* q = (const int8_t*)x.q + at * K + first * GROUP;
            const float* scale = x.scale + (at * groups + first) * 2;
            if (at > row) part_rows<SPREAD_OUT, M, C>(rows, part, q, scale, unit, y + at * stride, stride, nullptr);
            else part_rows<SPREADING, M, C>(rows, part, q, scale, unit, y + at * stride, stride, later ? later + first * C * group_bytes(Q4) : nullptr);
            at += rows;
        }
    }
}
#endif

constexpr int COLUMN_BLOCKS = 4;  // of one item, and ROWS

// The last block of a weight whose outputs do not fill it: nothing is written beyond them.
template <Kind kind, int M>
static void partial_block(const Weight& weight, const void* x, int64_t row, int64_t end, float* y, size_t stride) {
    const int64_t block = weight.blocks() - 1, columns = weight.N - block * W;
    alignas(64) float whole[M * W];
    for (; row < end; row += M) {
        const int64_t rows = std::min<int64_t>(M, end - row);
        tiles<kind, M, 1>(weight, x, row, row + rows, block, whole - row * W, W, nullptr);
        for (int64_t r = 0; r < rows; r++)
            std::memcpy(y + (row + r) * stride + block * W, whole + r * W, sizeof(float) * columns);
    }
}

// What threads fetch while they work: the weights `lead` blocks on, or those that come after this product.
struct Later {
    int64_t lead;
    const uint8_t* next;  // null: nothing comes after it
    size_t bytes;         // of that
};

INLINE const uint8_t* later_than(const Weight& weight, int64_t block, int64_t count, const Later& later) {
    const size_t size = block_bytes(weight.kind, weight.K);
    if (later.lead == 0) return nullptr;
    if (block + later.lead < weight.blocks()) return weight.data + (block + later.lead) * size;
    const size_t beyond = (block + later.lead - weight.blocks()) * size;
    return later.next && beyond + count * size <= later.bytes ? later.next + beyond : nullptr;
}

template <Kind kind>
static void linear_item(const Weight& weight, const void* x, int64_t row, int64_t end, int64_t block, float* y, size_t stride, const Later& later) {
    constexpr int NARROW = 4;  // rows of a tile of one block, or with weights that are spread: its sums fit the registers
    int64_t last = std::min<int64_t>(weight.blocks(), block + COLUMN_BLOCKS);
    if (last * W > weight.N) {
        last--;
        partial_block<kind, NARROW>(weight, x, row, end, y, stride);
    }
#if VECTORS
    constexpr int M = kind == Q4 && W == 8 ? 4 : 6;  // 12 sums, two weights and their high nibbles are more than 16 registers
    constexpr int C = 2, FLAT = 2, MANY = 16;        // FLAT: rows of a tile of four blocks; MANY: weights are spread
    if (end - row <= FLAT && last - block == 4)
        return tiles<kind, FLAT, 4>(weight, x, row, end, block, y + block * W, stride, later_than(weight, block, 4, later));
    if (kind == Q4 && end - row >= MANY)
        for (; block + C <= last; block += C)
            spread_tiles<NARROW, C>(weight, *(const Quantized*)x, row, end, block, y + block * W, stride, later_than(weight, block, C, later));
    for (; block + C <= last; block += C)
        tiles<kind, M, C>(weight, x, row, end, block, y + block * W, stride, later_than(weight, block, C, later));
#endif
    for (; block < last; block++)
        tiles<kind, NARROW, 1>(weight, x, row, end, block, y + block * W, stride, later_than(weight, block, 1, later));
}

INLINE int64_t row_items(int64_t N) { return (N + W * COLUMN_BLOCKS - 1) / (W * COLUMN_BLOCKS); }

// Rows that an item has: all of prompts, or none.
struct RowsOfItem {
    int64_t row, end;
    bool prompt;
};
// Rows [row, end) as items have them, added to a list. Those of prompts end where tiles do.
static void cut_rows(int64_t row, int64_t end, bool prompt, std::vector<RowsOfItem>& to) {
    while (row < end) {
        const int64_t next = std::min<int64_t>(end, (prompt ? row / SIDE * SIDE : row) + ROWS);
        to.push_back({row, next, prompt});
        row = next;
    }
}

INLINE int64_t linear_items(const Weight& weight, const std::vector<RowsOfItem>& rows) { return row_items(weight.N) * int64_t(rows.size()); }

struct LinearItem {
    int64_t row, end, block;
    bool prompt;
};
// Items are counted from the end: threads take the last one first, and so read the weight from its beginning.
INLINE LinearItem item_of(const Weight& weight, const std::vector<RowsOfItem>& rows, int64_t item) {
    const int64_t across = row_items(weight.N);
    item = linear_items(weight, rows) - 1 - item;
    const RowsOfItem& of = rows[item / across];
    return {of.row, of.end, item % across * COLUMN_BLOCKS, of.prompt};
}

// One item by tiles.
static void linear_by_tiles(const Weight& weight, const Quantized& x, const LinearItem& item, float* y, size_t stride, const Later& later) {
#if MATRIX
    const auto [row, end, block, prompt] = item;
    const int64_t last = std::min<int64_t>(weight.blocks(), block + COLUMN_BLOCKS);
    const auto ahead = [&](int64_t from, int64_t count) { return later_than(weight, from, count, later); };
    switch (weight.kind) {
        case Q8: return matrix_blocks<Q8>(weight, x, row, end, block, last, y, stride, ahead);
        case Q4: return matrix_blocks<Q4>(weight, x, row, end, block, last, y, stride, ahead);
        default: return matrix_blocks<PAIRS>(weight, x, row, end, block, last, y, stride, ahead);
    }
#endif
}

// Whether gates and what they let through can be multiplied side by side.
INLINE bool can_be_gated(const Weight& weight) { return MATRIX && (weight.kind == Q8 || weight.kind == Q4 || weight.kind == PAIRS) && weight.N % (W * COLUMN_BLOCKS) == 0; }
// One item of such a product and of the gate behind it: half its columns, and what belongs to them in the other half.
static void linear_gated(const Weight& weight, const Quantized& x, const LinearItem& item, uint16_t* to) {
#if MATRIX
    for (int64_t block = item.block / 2, end = block + COLUMN_BLOCKS / 2; block < end; block++) switch (weight.kind) {
        case Q8: matrix_gated<Q8>(weight, x, item.row, item.end, block, to); break;
        case Q4: matrix_gated<Q4>(weight, x, item.row, item.end, block, to); break;
        default: matrix_gated<PAIRS>(weight, x, item.row, item.end, block, to);
    }
#endif
}

// One item. y begins at column 0 of row 0.
static void linear(const Weight& weight, const void* x, const LinearItem& item, float* y, size_t stride, const Later& later) {
    const auto [row, end, block, prompt] = item;
    if (MATRIX && (prompt || weight.kind == PAIRS)) return linear_by_tiles(weight, *(const Quantized*)x, item, y, stride, later);
    switch (weight.kind) {
        case F32: return linear_item<F32>(weight, x, row, end, block, y, stride, later);
        case F16: return linear_item<F16>(weight, x, row, end, block, y, stride, later);
        case BF16: return linear_item<BF16>(weight, x, row, end, block, y, stride, later);
        case Q8: return linear_item<Q8>(weight, x, row, end, block, y, stride, later);
        case Q4: return linear_item<Q4>(weight, x, row, end, block, y, stride, later);
        case PAIRS: return;  // where there are tiles only
    }
}

// The same where only the largest of a row is asked for. Rows of y are the largest of each item, and whose they
// are: the product itself never leaves the cache.
static void linear_largest(const Weight& weight, const void* x, const LinearItem& item, float* y, size_t stride, const Later& later) {
    constexpr int COLUMNS = COLUMN_BLOCKS * W;
    alignas(64) float whole[ROWS * COLUMNS];
    const int64_t first = item.block * W;
    const int columns = int(std::min<int64_t>(COLUMNS, weight.N - first));
    linear(weight, x, item, whole - item.row * COLUMNS - first, COLUMNS, later);
    for (int64_t row = item.row; row < item.end; row++) {
        Largest& to = ((Largest*)(y + row * stride))[item.block / COLUMN_BLOCKS];
        to = largest_of_row(whole + (row - item.row) * COLUMNS, columns);
        to.id += int32_t(first);
    }
}
