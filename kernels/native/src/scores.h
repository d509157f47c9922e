// The two products of attention on registers: queries times keys, weights times values.
//
// A product takes as many rows (queries) at once as there are registers for their sums, and each sum runs in one
// order whatever the number of rows: what a query gets does not depend on who is beside it.
#pragma once
#include "kv.h"

constexpr int CHUNK = 64;  // keys between two corrections of the softmax

// Registers for sums: all that the set has but those for operands.
constexpr int SUMS = 12;

// scores[r, 16 n + t] = q[r] . key t of unit n, for M rows and N units [A, 16]. `ahead` are the units in the cache that
// will be read next, or null: a block may lie anywhere, so the processor cannot guess them, and asking for many lines
// at once would hold up the reads that are waited for.
template <int M, int N, class T, class S>
INLINE void score_rows(const float* q, int stride, const T* const* keys, const S* const* ahead, int A, float* scores) {
    constexpr int V = UNIT / W;
    F acc[M][N * V];
    const T* from[N];
    const S* next[N];
    UNROLL
    for (int n = 0; n < N; n++) from[n] = keys[n], next[n] = ahead ? ahead[n] : nullptr;
    UNROLL
    for (int r = 0; r < M; r++)
        UNROLL
        for (int v = 0; v < N * V; v++) acc[r][v] = F{};
    constexpr int STEP = LINE / (UNIT * sizeof(S));  // A is a multiple of 16
    for (int first = 0; first < A; first += STEP) {
        if (ahead) {
            UNROLL
            for (int n = 0; n < N; n++) __builtin_prefetch(next[n] + first * UNIT);
        }
        UNROLL
        for (int d = first; d < first + STEP; d++) {
            if constexpr (M <= N * V) {
                F x[M];
                UNROLL
                for (int r = 0; r < M; r++) x[r] = splat(q[r * stride + d]);
                UNROLL
                for (int v = 0; v < N * V; v++) {
                    const F k = wide(from[v / V] + d * UNIT + v % V * W);
                    UNROLL
                    for (int r = 0; r < M; r++) hold(acc[r][v] = fma(k, x[r], acc[r][v]));
                }
            } else {
                F k[N * V];
                UNROLL
                for (int v = 0; v < N * V; v++) k[v] = wide(from[v / V] + d * UNIT + v % V * W);
                UNROLL
                for (int r = 0; r < M; r++)
                    UNROLL
                    for (int v = 0; v < N * V; v++) acc[r][v] = fma(k[v], q[r * stride + d], acc[r][v]);
            }
        }
    }
    UNROLL
    for (int r = 0; r < M; r++)
        UNROLL
        for (int v = 0; v < N * V; v++) store(scores + r * CHUNK + v * W, acc[r][v]);
}

// out[r] += sum over keys [from, to) of every unit of weights[r, t] * values[t], for M rows and V vectors of columns.
// Accumulators stay in registers over all units. WHOLE: [0, UNIT), which the compiler then knows: a tenth faster.
template <int M, int V, bool WHOLE, class T, class S>
INLINE void add_columns(
    float* out, int stride, const float* weights, const T* const* units, const S* const* ahead, int count, int column,
    int A, int from, int to
) {
    F acc[M][V];
    UNROLL
    for (int r = 0; r < M; r++)
        UNROLL
        for (int v = 0; v < V; v++) acc[r][v] = load<F>(out + r * stride + column + v * W);
    for (int u = 0; u < count; u++, weights += UNIT) {
        const T* values = units[u] + column;
        const char* next = ahead ? (const char*)(ahead[u] + column * UNIT) : (const char*)values;
#pragma GCC unroll 4
        for (int t = WHOLE ? 0 : from; t < (WHOLE ? UNIT : to); t++, next += V * W * sizeof(S)) {
            __builtin_prefetch(next);
            if constexpr (M <= V) {
                F x[M];
                UNROLL
                for (int r = 0; r < M; r++) x[r] = splat(weights[r * CHUNK + t]);
                UNROLL
                for (int v = 0; v < V; v++) {
                    const F value = wide(values + t * A + v * W);
                    UNROLL
                    for (int r = 0; r < M; r++) acc[r][v] = fma(value, x[r], acc[r][v]);
                }
            } else {
                F x[V];
                UNROLL
                for (int v = 0; v < V; v++) x[v] = wide(values + t * A + v * W);
                UNROLL
                for (int r = 0; r < M; r++)
                    UNROLL
                    for (int v = 0; v < V; v++) acc[r][v] = fma(x[v], weights[r * CHUNK + t], acc[r][v]);
            }
        }
    }
    UNROLL
    for (int r = 0; r < M; r++)
        UNROLL
        for (int v = 0; v < V; v++) store(out + r * stride + column + v * W, acc[r][v]);
}

// 2^x of each, for x <= 0, step by step for all of them: one alone is a chain, which leaves a core waiting. Errors stay
// below 2e-7 of it: a polynomial that is 1 at 0, best on [-0.5, 0.5] otherwise. Below -127 it is 0, of a NaN a NaN.
template <int N>
INLINE void powers_of_two(F (&x)[N]) {
    constexpr float terms[] = {9.67151299e-3f, 5.55073358e-2f, 2.40222424e-1f, 6.93147004e-1f, 1.0f};
    constexpr float whole = 12582912.0f;  // added, it leaves the nearest integer in a float's last bits
    F rest[N], p[N];
    I power[N];
    UNROLL
    for (int i = 0; i < N; i++) {
        const F kept = greater(splat(-127.0f), x[i]), sum = kept + whole;
        rest[i] = kept - (sum - whole);
        power[i] = ((I)sum << 23) + (127 << 23);
        p[i] = splat(1.32647273e-3f);
    }
    UNROLL
    for (int term = 0; term < 5; term++)
        UNROLL
        for (int i = 0; i < N; i++) p[i] = fma(p[i], rest[i], splat(terms[term]));
    UNROLL
    for (int i = 0; i < N; i++) x[i] = p[i] * (F)power[i];
}

constexpr int TALL = VECTORS ? 6 : 3;  // rows whose accumulators fit the registers

// `run` for all rows: as many at once as there are registers for. run(M, r): M a constant.
template <class Run>
INLINE void in_rows(int r, int end, const Run& run) {
    for (; r + TALL <= end; r += TALL) run(std::integral_constant<int, TALL>(), r);
    switch (end - r) {
#if VECTORS
        case 5: run(std::integral_constant<int, 3>(), r), r += 3; [[fallthrough]];
        case 2: return run(std::integral_constant<int, 2>(), r);
        case 4: return run(std::integral_constant<int, 4>(), r);
        case 3: return run(std::integral_constant<int, 3>(), r);
#else
        case 2: return run(std::integral_constant<int, 2>(), r);
#endif
        case 1: return run(std::integral_constant<int, 1>(), r);
    }
}

// Scores of `rows` rows with `count` units of a chunk. Only the first rows look ahead.
template <class T, class S>
static void score_units(
    const float* q, int stride, int rows, const T* const* keys, const S* const* ahead, int count, int A, float* scores
) {
    in_rows(0, rows, [&](auto m, int r) {
        constexpr int M = decltype(m)::value, one = M * (UNIT / W);
        constexpr int N = !VECTORS || 2 * one > SUMS ? 1 : M == 1 && 4 * one <= SUMS ? 4 : 2;
        const auto next = [&](int n) { return ahead && r == 0 ? ahead + n : nullptr; };
        int n = 0;
        for (; n + N <= count; n += N)
            score_rows<M, N>(q + r * stride, stride, keys + n, next(n), A, scores + r * CHUNK + n * UNIT);
        for (; N > 1 && n < count; n++)
            score_rows<M, 1>(q + r * stride, stride, keys + n, next(n), A, scores + r * CHUNK + n * UNIT);
    });
}

// out[r] += weights[r] times values, for rows [first, end), whose keys are [from, to) of every unit.
template <bool WHOLE = false, class T, class S>
static void add_units(
    float* out, int stride, int first, int end, const float* weights, const T* const* units, const S* const* ahead,
    int count, int A, int from, int to
) {
    const auto columns = [&](auto v, int column) {
        in_rows(first, end, [&](auto m, int r) {
            constexpr int M = decltype(m)::value, V = decltype(v)::value;
            if constexpr (M * V <= SUMS)
                add_columns<M, V, WHOLE>(
                    out + r * stride, stride, weights + r * CHUNK, units, r == first ? ahead : nullptr, count, column,
                    A, from, to
                );
        });
    };
    int column = 0;
    if (VECTORS && end - first <= SUMS / 4)
        for (; column + 4 * W <= A; column += 4 * W) columns(std::integral_constant<int, VECTORS ? 4 : 1>(), column);
    for (; column + 2 * W <= A; column += 2 * W) columns(std::integral_constant<int, 2>(), column);
    for (; column < A; column += W) columns(std::integral_constant<int, 1>(), column);
}
