// Products by tiles (matrix.h): rows of bfloat16 with weights that are bfloat16, or are spread to it, some groups of 32
// inputs at a time, which stay in the first cache for all rows. It takes as long for one row as for 16: that is for
// prompts, and for weights of two bytes, which memory gives no faster.
//
// A sum runs along K in one order whatever the rows and the parts: between two parts it waits in memory as it is.
#pragma once
#include "rowwise.h"

#if MATRIX

// Bits are cut off where a weight becomes bfloat16. Made this much larger before, it is as often rounded up as down, as
// mantissas are spread (1 / ln 2 on average); a number that is a bfloat16 already stays the same.
constexpr float UNCUT = 1.0f + 0.00390625f * 0.69314718f;

// (x & mask) | bits
INLINE __m512i masked_or(__m512i x, int32_t mask, int32_t bits) {
    return _mm512_ternarylogic_epi32(x, _mm512_set1_epi32(mask), _mm512_set1_epi32(bits), 0xea);
}
INLINE __m512i masked_or(__m512i x, int32_t mask, __m512i bits) {
    return _mm512_ternarylogic_epi32(x, _mm512_set1_epi32(mask), bits, 0xea);
}

// A number in the mantissa of a float, at bit `at`, which then is 2^(23 - at) + number.
constexpr int32_t exponent_at(int at) { return (127 + 23 - at) << 23; }
constexpr float whole_at(int at) { return float(1 << (23 - at)); }

// Weights of 16 outputs: numbers of `bits` bits times d plus m, of even inputs and of odd ones: a row of a right tile.
template <int bits, int even, int odd>
struct Spread {  // numbers are at bits `even` and `odd` when they are put
    F d, of_even, of_odd;  // m less what the exponents add

    INLINE_MEMBER Spread(F scale, F m) {
        d = scale * UNCUT;
        of_even = fma(d, -whole_at(even), m * UNCUT);
        of_odd = fma(d, -whole_at(odd), m * UNCUT);
    }
    INLINE_MEMBER void put(__m512i evens, __m512i odds, uint8_t* to) const {
        constexpr int32_t mask = (1 << bits) - 1;
        const F low = fma((F)masked_or(evens, mask << even, exponent_at(even)), d, of_even);
        const F high = fma((F)masked_or(odds, mask << odd, exponent_at(odd)), d, of_odd);
        store(to, masked_or((__m512i)high, int32_t(0xffff0000), _mm512_srli_epi32((__m512i)low, 16)));
    }
};
template <int left>
INLINE __m512i shifted(__m512i x) {
    if constexpr (left >= 0) return _mm512_slli_epi32(x, left);
    else return _mm512_srli_epi32(x, -left);
}

template <Kind kind>
INLINE void spread_group(const uint8_t* group, uint8_t* to) {
    const uint16_t* scales = (const uint16_t*)(group + scales_at(kind));
    const F d = from_half(scales);
    if constexpr (kind == Q4) {
        const Spread<4, 12, 16> spread(d, from_half(scales + W));
        UNROLL
        for (int i = 0; i < 4; i++, to += 4 * LINE) {
            const __m512i eight = load<__m512i>(group + LINE * i);
            const __m512i x = shifted<12>(eight), y = shifted<4>(eight), z = shifted<-4>(eight), w = shifted<-12>(eight);
            spread.put(x, x, to);
            spread.put(y, y, to + LINE);
            spread.put(z, z, to + 2 * LINE);
            spread.put(w, w, to + 3 * LINE);
        }
    } else {
        const Spread<8, 7, 15> spread(d, d * -128.0f);
        UNROLL
        for (int i = 0; i < 4; i++, to += 4 * LINE) {
            const __m512i evens = load<__m512i>(group + LINE * i), odds = load<__m512i>(group + LINE * (i + 4));
            spread.put(shifted<7>(evens), shifted<15>(odds), to);
            spread.put(shifted<-1>(evens), shifted<7>(odds), to + LINE);
            spread.put(shifted<-9>(evens), shifted<-1>(odds), to + 2 * LINE);
            spread.put(shifted<-17>(evens), shifted<-9>(odds), to + 3 * LINE);
        }
    }
}

// Sums of R x C tiles, in registers 0 to 3, and their way to memory and back: rows of a tile are `stride` floats apart.
template <int R, int C>
INLINE void clear_sums() {
    clear_tile<0>();
    if constexpr (C == 2) clear_tile<1>();
    if constexpr (R == 2) clear_tile<2>();
    if constexpr (R == 2 && C == 2) clear_tile<3>();
}
template <int R, int C>
INLINE void load_sums(const float* from, size_t stride) {
    load_tile<0>(from, stride * 4);
    if constexpr (C == 2) load_tile<1>(from + SIDE, stride * 4);
    if constexpr (R == 2) load_tile<2>(from + SIDE * stride, stride * 4);
    if constexpr (R == 2 && C == 2) load_tile<3>(from + SIDE * stride + SIDE, stride * 4);
}
template <int R, int C>
INLINE void store_sums(float* to, size_t stride) {
    store_tile<0>(to, stride * 4);
    if constexpr (C == 2) store_tile<1>(to + SIDE, stride * 4);
    if constexpr (R == 2) store_tile<2>(to + SIDE * stride, stride * 4);
    if constexpr (R == 2 && C == 2) store_tile<3>(to + SIDE * stride + SIDE, stride * 4);
}

// One step along K: left tiles of R tiles of rows `rows` numbers apart, right tiles of C blocks `block` bytes apart.
template <int R, int C>
INLINE void multiply_tiles(const uint16_t* x, size_t rows, const uint8_t* right, size_t block) {
    load_tile<4>(x, LINE);
    load_tile<6>(right, LINE);
    multiply_tile<0, 4, 6>();
    if constexpr (C == 2) {
        load_tile<7>(right + block, LINE);
        multiply_tile<1, 4, 7>();
    }
    if constexpr (R == 2) {
        load_tile<5>(x + rows, LINE);
        multiply_tile<2, 5, 6>();
        if constexpr (C == 2) multiply_tile<3, 5, 7>();
    }
}

// Some steps of a product: 16 R rows, C column blocks. The rest of a split row lies `rest` inputs behind it; 0: there
// is none. Sums begin, or go on from `from`.
template <int R, int C>
INLINE void multiply_part(const uint16_t* x, size_t x_rows, int64_t rest, const uint8_t* right, size_t block, int steps, const float* from, size_t from_stride, float* to, size_t to_stride) {
    if (from) load_sums<R, C>(from, from_stride);
    else clear_sums<R, C>();
    for (int step = 0; step < steps; step++, x += TILE / 2, right += TILE) {
        multiply_tiles<R, C>(x, x_rows, right, block);
        if (rest) multiply_tiles<R, C>(x + rest, x_rows, right, block);
    }
    store_sums<R, C>(to, to_stride);
}

constexpr int MOST_SPREAD = 6;  // groups that are spread at once: measured, 9 and more take up to half as long again

// Which column blocks a thread multiplies together: `block`, and where there are two the one `apart` behind it.
struct Columns {
    int64_t block, apart;
};

// Rows [row, end), by whole tiles of rows. Rows of sums [C][16] are given to finish(row, sums), but where `direct`(row)
// says that y takes two tiles of them from there on as they are.
template <Kind kind, int C, class Direct, class Finish>
INLINE void multiply_columns(const Weight& weight, const Quantized& x, int64_t row, int64_t end, Columns columns, float* y, size_t stride, const uint8_t* later, const Direct& direct, const Finish& finish) {
    constexpr bool spreads = kind != PAIRS;
    constexpr int64_t WIDTH = SIDE * C;
    alignas(64) uint8_t spread[spreads ? C * MOST_SPREAD * TILE : 1];
    alignas(64) float sums[(ROWS + 2 * SIDE) * WIDTH];  // what is not complete, or not all wanted
    const int groups = weight.K / DEPTH, parts = spreads ? (groups + MOST_SPREAD - 1) / MOST_SPREAD : 1;
    const size_t apart = columns.apart * block_bytes(kind, weight.K), of_tile = SIDE * shorts_of_row(kind == PAIRS ? SPLIT : MIXED, weight.K);
    const uint8_t* data = weight.data + columns.block * block_bytes(kind, weight.K);
    const int64_t rest = kind == PAIRS ? SIDE * weight.K : 0, begin = row / SIDE * SIDE;
    for (int p = 0; p < parts; p++) {
        const int first = groups * p / parts, count = groups * (p + 1) / parts - first;
        const uint8_t* right = data + first * TILE;
        size_t right_apart = apart;
        if constexpr (spreads) {
            constexpr size_t bytes = group_bytes(kind);
            right = spread, right_apart = count * TILE;
            for (int g = 0; g < count; g++) {
                if (later) fetch_lines<C * bytes>(later + (first + g) * C * bytes);
                UNROLL
                for (int c = 0; c < C; c++) spread_group<kind>(data + c * apart + (first + g) * bytes, spread + (c * count + g) * TILE);
            }
        }
        for (int64_t at = begin; at < end; at += 2 * SIDE) {
            const uint16_t* from = x.shorts + at / SIDE * of_tile + first * (TILE / 2);
            float* mine = sums + (at - begin) * WIDTH;
            const float* before = p > 0 ? mine : nullptr;
            const bool done = p + 1 == parts && direct(at);
            float* to = done ? y + at * stride : mine;
            const size_t to_stride = done ? stride : WIDTH;
            if (end - at > SIDE) multiply_part<2, C>(from, of_tile, rest, right, right_apart, count, before, WIDTH, to, to_stride);
            else multiply_part<1, C>(from, of_tile, rest, right, right_apart, count, before, WIDTH, to, to_stride);
        }
    }
    for (int64_t at = row; at < end; at++)
        if (!direct((at - begin) / (2 * SIDE) * (2 * SIDE) + begin)) finish(at, sums + (at - begin) * WIDTH);
}

// C column blocks from `block` on. y begins at the block's first column of row 0.
template <Kind kind, int C>
static __attribute__((noinline)) void matrix_columns(const Weight& weight, const Quantized& x, int64_t row, int64_t end, int64_t block, float* y, size_t stride, const uint8_t* later) {
    const bool as_it_is = !weight.bias && (block + C) * W <= weight.N;
    const auto direct = [=](int64_t at) { return as_it_is && at >= row && at + 2 * SIDE <= end; };
    F bias[C]{};
    __mmask16 kept[C];
    for (int c = 0; c < C; c++) {
        const int64_t first = (block + c) * W;
        if (weight.bias) bias[c] = load<F>(weight.bias + first);
        kept[c] = __mmask16((1u << std::min<int64_t>(W, weight.N - first)) - 1);
    }
    multiply_columns<kind, C>(weight, x, row, end, {block, 1}, y, stride, later, direct, [&](int64_t at, const float* sums) {
        UNROLL
        for (int c = 0; c < C; c++)
            _mm512_mask_storeu_ps(y + at * stride + c * W, kept[c], (__m512)(load<F>(sums + c * SIDE) + bias[c]));
    });
}

// Where the outputs are gates and, behind them, what they let through: silu(gate) * up as the next product reads it.
template <Kind kind>
static __attribute__((noinline)) void matrix_gated(const Weight& weight, const Quantized& x, int64_t row, int64_t end, int64_t block, uint16_t* to) {
    const int64_t gates = weight.N / 2, column = block * W;
    const F bias = weight.bias ? load<F>(weight.bias + column) : F{}, bias_up = weight.bias ? load<F>(weight.bias + gates + column) : F{};
    const auto nothing = [](int64_t) { return false; };
    multiply_columns<kind, 2>(weight, x, row, end, {block, gates / W}, nullptr, 0, nullptr, nothing, [&](int64_t at, const float* sums) {
        const F gated = silu(load<F>(sums) + bias) * (load<F>(sums + SIDE) + bias_up);
        store(to + short_at(at, column, gates), to_bfloats(gated));
    });
}

template <Kind kind, class Later>
INLINE void matrix_blocks(const Weight& weight, const Quantized& x, int64_t row, int64_t end, int64_t block, int64_t last, float* y, size_t stride, const Later& later) {
    for (; block + 2 <= last; block += 2) matrix_columns<kind, 2>(weight, x, row, end, block, y + block * W, stride, later(block, 2));
    if (block < last) matrix_columns<kind, 1>(weight, x, row, end, block, y + block * W, stride, later(block, 1));
}
#endif
