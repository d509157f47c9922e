// The interface to C. Structures stand in formats.h (Weight) and program.h (Instruction, Buffer, Step).
#include "draw.h"
#include "program.h"

#include <functional>

// run(row) for all rows, by the pool where there is one.
static void each_row(Pool* pool, int64_t rows, const std::function<void(int64_t)>& run) {
    if (rows <= 0) return;
    if (pool) pool->run({{uint32_t(rows), uint32_t(rows), {}}}, [&](uint32_t, uint32_t row, int) { run(row); });
    else for (int64_t row = 0; row < rows; row++) run(row);
}
static thread_local Drawing memory;

// Adds the time of a call to what the pool's callers have spent.
struct Spent {
    Pool* const pool;
    const uint64_t begun = now();
    ~Spent() {
        if (pool) pool->spent.fetch_add(now() - begun, std::memory_order_relaxed);
    }
};

extern "C" {
int triptych_width() { return W; }
int triptych_inputs(int kind) { return inputs_of(Kind(kind)); }
// The kind as which a weight of K inputs is kept.
int triptych_kept_as(int kind, int64_t K) { return kept_as(Kind(kind), K); }
// Whether attention serves heads of this size.
int triptych_serves(int head_size) { return Program::serves(head_size); }
// The kind of a cache whose numbers have two bytes that suits this build best.
int triptych_cache() { return MATRIX ? PAIRED : HALVES; }

// Items of a row of a product: so many pairs are what LINEAR_LARGEST writes of it.
int64_t triptych_row_items(int64_t N) { return row_items(N); }

Pool* triptych_pool(int threads, int spins) { return new Pool(threads, spins); }
void triptych_pool_free(Pool* pool) { delete pool; }
// Where the pool counts the nanoseconds that callers have spent in programs and selections.
const std::atomic<uint64_t>* triptych_spent(const Pool* pool) { return &pool->spent; }

void* triptych_pages(int64_t bytes) { return pages(size_t(bytes)); }
void triptych_pages_free(void* at) { std::free(at); }

int64_t triptych_packed_bytes(int kind, int64_t N, int64_t K) { return (N + W - 1) / W * int64_t(block_bytes(Kind(kind), K)); }
void triptych_pack_plain(int kind, const void* from, int64_t N, int64_t K, void* to) {
    if (kind == F32) pack_plain<1>((const uint32_t*)from, N, K, (uint32_t*)to);
    else if (kind == PAIRS) pack_plain<2>((const uint16_t*)from, N, K, (uint16_t*)to);
    else pack_plain<1>((const uint16_t*)from, N, K, (uint16_t*)to);
}
void triptych_pack_groups(int kind, const uint8_t* u, const uint16_t* d, const uint16_t* m, int64_t N, int64_t K, uint8_t* to) {
    pack_groups(Kind(kind), u, d, m, N, K, to);
}
void triptych_unpack_row(const Weight* weight, int64_t n, float* y) { unpack_row(*weight, n, y); }

// `cache_kind`: CacheKind. The list and the buffers are copied; weights must outlive the program.
Program* triptych_program(const Instruction* list, int count, const Buffer* buffers, int num_buffers, int cache_kind) {
    return new Program(list, count, buffers, num_buffers, cache_kind);
}
void triptych_program_free(Program* program) { delete program; }
// 0; -1: no memory for so many tokens; -2: a head size or a length of the list that is not served.
int triptych_run(Program* program, Pool* pool, const Step* step) {
    const Spent spent{pool};
    return program->run(*pool, *step);
}
// Times of instructions are summed from now on (1), or not taken (0).
void triptych_profile(Program* program, int on) { program->profile(on != 0); }
// Seconds of each instruction since then.
void triptych_times(const Program* program, double* seconds) { program->spent(seconds); }

// y = x times a weight that is kept in floats, and its bias: x [rows, K], y [rows, N].
void triptych_product(Pool* pool, const Weight* weight, const float* x, int64_t rows, float* y) {
    const Spent spent{pool};
    std::vector<RowsOfItem> cut;
    cut_rows(0, rows, false, cut);
    each_row(pool, linear_items(*weight, cut), [=, &cut](int64_t item) { linear(*weight, x, item_of(*weight, cut, item), y, weight->N, {0, nullptr, 0}); });
}

// The largest of each row of logits [rows, V], a row `stride` floats behind the other: its number. A NaN is the largest.
void triptych_largest(Pool* pool, const float* logits, int64_t rows, int64_t V, int64_t stride, int32_t* ids) {
    const Spent spent{pool};
    each_row(pool, rows, [=](int64_t row) { ids[row] = largest_of_row(logits + row * stride, int(V)).id; });
}
// The k largest of each row in falling order, of equals the first: [rows, k], k at most V.
void triptych_top(Pool* pool, const float* logits, int64_t rows, int64_t V, int64_t stride, int64_t k, int32_t* ids, float* values) {
    const Spent spent{pool};
    each_row(pool, rows, [=](int64_t row) {
        memory.selection.top(logits + row * stride, int(V), int(k), ids + row * k, values + row * k);
    });
}
// A token for each of `count` cuts, drawn from the row that it names.
void triptych_draw(Pool* pool, const float* logits, int64_t V, int64_t stride, int64_t count, const Cut* cuts, int32_t* ids) {
    const Spent spent{pool};
    each_row(pool, count, [=](int64_t at) { ids[at] = memory.draw(logits + cuts[at].row * stride, int(V), cuts[at]); });
}
// Of each row, the logarithm of the sum of exponentials, and the rank of one of its tokens.
void triptych_weigh(Pool* pool, const float* logits, int64_t rows, int64_t V, int64_t stride, const int32_t* ids, float* totals, int32_t* ranks) {
    const Spent spent{pool};
    each_row(pool, rows, [=](int64_t row) {
        const float* x = logits + row * stride;
        totals[row] = log_sum_exp(x, int(V));
        ranks[row] = rank_of(x[ids[row]], x, int(V));
    });
}
}
