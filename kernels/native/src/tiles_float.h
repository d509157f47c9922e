// Products with floats: M rows x C column blocks at a time. y and bias begin at the tile's first column.
// `later`: the weights of another tile, which are fetched meanwhile; or null.
#pragma once
#include "formats.h"

template <Kind kind>
INLINE F float_weights(const uint8_t* at) {
    if constexpr (kind == F32) return load<F>(at);
    else if constexpr (kind == F16) return from_half((const uint16_t*)at);
    else return from_bfloat((const uint16_t*)at);
}

// The sum of every output runs along K in one order and in one accumulator, whatever M and C.
template <Kind kind, int M, int C>
INLINE void float_tile(
    const uint8_t* weight, size_t block, const float* x, int K, const float* bias, float* y, size_t stride,
    const uint8_t* later
) {
    constexpr int size = (kind == F32 ? 4 : 2) * W;
    F acc[C][M];
    UNROLL
    for (int c = 0; c < C; c++)
        UNROLL
        for (int r = 0; r < M; r++) acc[c][r] = bias ? load<F>(bias + c * W) : F{};
    const int part = later ? GROUP : K;  // the end of a short loop is never foreseen
    for (int from = 0; from < K; from += part) {
        if (later) fetch_lines<C * GROUP * size>(later + size_t(from) * C * size);
        for (int k = from; k < std::min(K, from + part); k++) {
            F w[C];
            UNROLL
            for (int c = 0; c < C; c++) w[c] = float_weights<kind>(weight + c * block + size_t(k) * size);
            UNROLL
            for (int r = 0; r < M; r++)
                UNROLL
                for (int c = 0; c < C; c++) acc[c][r] = fma(w[c], x[size_t(r) * K + k], acc[c][r]);
        }
    }
    UNROLL
    for (int c = 0; c < C; c++)
        UNROLL
        for (int r = 0; r < M; r++) store(y + r * stride + c * W, acc[c][r]);
}

#if !VECTORS
// Numbers of groups as floats, for a build without products of integers.
template <Kind kind, int M>
static void number_tile(const uint8_t* group, const float* x, int K, const float* bias, float* y, size_t stride) {
    typedef uint8_t Lane __attribute__((vector_size(W)));
    F acc[M];
    UNROLL
    for (int r = 0; r < M; r++) acc[r] = bias ? load<F>(bias) : F{};
    for (int g = 0; g < K / GROUP; g++, group += group_bytes(kind), x += GROUP) {
        const uint16_t* scales = (const uint16_t*)(group + scales_at(kind));
        const F d = from_half(scales);
        const F m = kind == Q4 ? from_half(scales + W) : d * -128.0f;
        for (int k = 0; k < (kind == Q4 ? GROUP / 2 : GROUP); k++) {
            const Lane bytes = load<Lane>(group + k * W);
            if (kind == Q4) {
                const F low = fma(__builtin_convertvector(bytes & 15, F), d, m);
                const F high = fma(__builtin_convertvector(bytes >> 4, F), d, m);
                UNROLL
                for (int r = 0; r < M; r++) {
                    acc[r] = fma(low, x[size_t(r) * K + k], acc[r]);
                    acc[r] = fma(high, x[size_t(r) * K + k + GROUP / 2], acc[r]);
                }
            } else {
                const F w = fma(__builtin_convertvector(bytes, F), d, m);
                UNROLL
                for (int r = 0; r < M; r++) acc[r] = fma(w, x[size_t(r) * K + k], acc[r]);
            }
        }
    }
    UNROLL
    for (int r = 0; r < M; r++) store(y + r * stride, acc[r]);
}
#endif
