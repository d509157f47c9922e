// Products of 8-bit weights with inputs in 16-bit words: exact sums of a group of 32 inputs, as in tiles_integer.h.
#pragma once
#include "tiles_integer.h"

#if VECTORS

// Two inputs a step; a pair of products is summed in 32 bits, and cannot overflow in a group.
template <int M, int C>
INLINE void words_step(Integers (&sums)[C][M], const uint8_t* group, size_t block, const int16_t* q, size_t K) {
    Integers w[C];
    UNROLL
    for (int c = 0; c < C; c++) w[c] = signed_words(group + c * block);
    UNROLL
    for (int r = 0; r < M; r++) {
        const Integers x = four(q + r * K);
        UNROLL
        for (int c = 0; c < C; c++) add32(sums[c][r], multiply_words(w[c], x));
    }
}

template <int M, int C>
INLINE void words_group(Integers (&sums)[C][M], const uint8_t* group, size_t block, const int16_t* q, size_t K) {
    UNROLL
    for (int c = 0; c < C; c++)
        UNROLL
        for (int r = 0; r < M; r++) sums[c][r] = Integers{};
    if constexpr (M * C < 12) {  // measured on Zen 3: small tiles are twice as fast without the loop, large ones slower
        UNROLL
        for (int step = 0; step < GROUP / 2; step++) words_step(sums, group + 2 * W * step, block, q + 2 * step, K);
    } else {
#pragma GCC unroll 2
        for (int step = 0; step < GROUP / 2; step++) words_step(sums, group + 2 * W * step, block, q + 2 * step, K);
    }
}

template <int M, int C>
INLINE void words_tile(
    const uint8_t* weight, size_t block, const int16_t* q, const float* scale, int K, const float* bias, float* y,
    size_t stride, const uint8_t* later
) {
    F acc[C][M];
    UNROLL
    for (int c = 0; c < C; c++)
        UNROLL
        for (int r = 0; r < M; r++) acc[c][r] = F{};
    for (int g = 0; g < K / GROUP; g++, weight += group_bytes(Q8), q += GROUP) {
        Integers sums[C][M];
        if (later) fetch_lines<C * group_bytes(Q8)>(later + g * C * group_bytes(Q8));
        words_group(sums, weight, block, q, K);
        UNROLL
        for (int c = 0; c < C; c++) {
            const F d = from_half((const uint16_t*)(weight + c * block + scales_at(Q8)));
            UNROLL
            for (int r = 0; r < M; r++) acc[c][r] = fma(to_float((I)sums[c][r]), d, acc[c][r]);
        }
    }
    UNROLL
    for (int c = 0; c < C; c++)
        UNROLL
        for (int r = 0; r < M; r++)
            store(y + r * stride + c * W, fma(acc[c][r], scale[r], bias ? load<F>(bias + c * W) : F{}));
}
#endif
