// Products of quantized numbers: M rows x C column blocks at a time, a group of 32 inputs after the other.
// y, bias and what a sum goes on from begin at the tile's first column.
// `later`: the weights of another tile, which are fetched meanwhile; or null.
#pragma once
#include "formats.h"

#if VECTORS

#if defined(__AVX512BW__)
typedef __m512i Integers;
INLINE Integers splat_four(int32_t x) { return _mm512_set1_epi32(x); }
INLINE Integers low_nibbles(Integers b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
INLINE Integers high_nibbles(Integers b) { return low_nibbles(_mm512_srli_epi16(b, 4)); }
INLINE Integers multiply_bytes(Integers u, Integers q) { return _mm512_maddubs_epi16(u, q); }
INLINE Integers multiply_words(Integers a, Integers b) { return _mm512_madd_epi16(a, b); }
INLINE Integers signed_words(const uint8_t* q) { return _mm512_cvtepi8_epi16(load<__m256i>(q)); }
#else
typedef __m256i Integers;
INLINE Integers splat_four(int32_t x) { return _mm256_set1_epi32(x); }
INLINE Integers low_nibbles(Integers b) { return _mm256_and_si256(b, _mm256_set1_epi8(15)); }
INLINE Integers high_nibbles(Integers b) { return low_nibbles(_mm256_srli_epi16(b, 4)); }
INLINE Integers multiply_bytes(Integers u, Integers q) { return _mm256_maddubs_epi16(u, q); }
INLINE Integers multiply_words(Integers a, Integers b) { return _mm256_madd_epi16(a, b); }
INLINE Integers signed_words(const uint8_t* q) { return _mm256_cvtepi8_epi16(load<__m128i>(q)); }
#endif

// sum += value, as one instruction: with 16 registers the compiler would make a tree of a chain of sums, and spill
// its leaves.
#if defined(__AVX512BW__)
INLINE void add16(Integers& sum, Integers value) { sum = _mm512_add_epi16(sum, value); }
INLINE void add32(Integers& sum, Integers value) { sum = _mm512_add_epi32(sum, value); }
#else
INLINE void add16(Integers& sum, Integers value) { asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(value)); }
INLINE void add32(Integers& sum, Integers value) { asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(value)); }
#endif

INLINE Integers four(const void* from) {  // 4 bytes or 2 words of a row, before every output
    int32_t x;
    std::memcpy(&x, from, 4);
    return splat_four(x);
}

// sum += u * q, 4 inputs. Without VNNI pairs are summed in 16 bits: at most 16 x 2 x 15 x 127 in a group of nibbles.
template <bool first>
INLINE void add_bytes(Integers& sum, Integers u, Integers q) {
#if defined(__AVX512VNNI__)
    sum = _mm512_dpbusd_epi32(first ? _mm512_setzero_si512() : sum, u, q);
#else
    const Integers product = multiply_bytes(u, q);
    if (first) sum = product;
    else add16(sum, product);
#endif
}

// The sum of one group, times the group's whole number. Without VNNI that is what adds up its pairs.
INLINE F group_total(Integers sum, const float* scale) {
#if defined(__AVX512VNNI__)
    return to_float((I)sum) * scale[0];
#else
    return to_float((I)multiply_words(sum, four(scale)));
#endif
}

template <bool first, int M, int C>
INLINE void bytes_step(Integers (&sums)[C][M], const Integers (&u)[C], const int8_t* q, size_t K) {
    UNROLL
    for (int r = 0; r < M; r++) {
        const Integers x = four(q + r * K);
        UNROLL
        for (int c = 0; c < C; c++) add_bytes<first>(sums[c][r], u[c], x);
    }
}

// Q4 as a tile of many rows reads it: a group's low nibbles, its high ones, a byte each, then W floats d and W floats m.
constexpr int SPREAD = 40 * W;  // bytes of a group of one column block

// How a tile reads its weights: as they are kept, the same and spreads them for the tiles after it, or spread.
enum Form { KEPT, SPREADING, SPREAD_OUT };

template <Kind kind, Form form>
INLINE constexpr size_t stride_of_groups() { return form == SPREAD_OUT ? SPREAD : group_bytes(kind); }

// d and m of a group: weight = d * u + m.
template <Kind kind, Form form>
INLINE void read_scales(const uint8_t* group, F& d, F& m, uint8_t* to) {
    if constexpr (form == SPREAD_OUT) {
        d = load<F>((const float*)(group + 32 * W));
        m = load<F>((const float*)(group + 36 * W));
    } else {
        const uint16_t* scales = (const uint16_t*)(group + scales_at(kind));
        d = from_half(scales);
        m = kind == Q4 ? from_half(scales + (kind == Q4 ? W : 0)) : d * -128.0f;
        if constexpr (form == SPREADING) {
            store((float*)(to + 32 * W), d);
            store((float*)(to + 36 * W), m);
        }
    }
}

// The integer sums of one group. `to`: where it is spread, its blocks `to_block` apart.
template <Kind kind, Form form, int M, int C>
INLINE void bytes_group(Integers (&sums)[C][M], const uint8_t* group, size_t block, const int8_t* q, size_t K, uint8_t* to, size_t to_block) {
    constexpr bool nibbles = kind == Q4 && form != SPREAD_OUT;
    constexpr int steps = nibbles ? 4 : 8;
    UNROLL
    for (int step = 0; step < steps; step++) {
        Integers u[C], high[C];
        UNROLL
        for (int c = 0; c < C; c++) {
            u[c] = load<Integers>(group + c * block + 4 * W * step);
            if (nibbles) {
                high[c] = high_nibbles(u[c]);
                u[c] = low_nibbles(u[c]);
            }
            if constexpr (form == SPREADING) {
                store(to + c * to_block + 4 * W * step, u[c]);
                store(to + c * to_block + 4 * W * (step + 4), high[c]);
            }
        }
        if (step == 0) bytes_step<true>(sums, u, q, K);
        else bytes_step<false>(sums, u, q + 4 * step, K);
        if (nibbles) bytes_step<false>(sums, high, q + 4 * step + 16, K);
    }
}

// Inputs of so many groups; rows of q are K apart, and their scales. Sums begin with what y holds where they go on from
// there, else with 0. y = unit * sums + bias, or the sums themselves where they are to go on later: `unit` is null then.
// `to`: where weights are spread, a block's groups one after the other.
template <Kind kind, Form form, int M, int C>
INLINE void bytes_tile(
    const uint8_t* weight, size_t block, const int8_t* q, const float* scale, int groups, size_t K, bool goes_on,
    const float* unit, const float* bias, float* y, size_t stride, const uint8_t* later, uint8_t* to = nullptr
) {
    const size_t to_block = groups * SPREAD;
    F acc[C][M];
    UNROLL
    for (int c = 0; c < C; c++)
        UNROLL
        for (int r = 0; r < M; r++) acc[c][r] = goes_on ? load<F>(y + r * stride + c * W) : F{};
    for (int g = 0; g < groups; g++, weight += stride_of_groups<kind, form>(), q += GROUP, scale += 2, to += SPREAD) {
        Integers sums[C][M];
        if (later) fetch_lines<C * group_bytes(kind)>(later + g * C * group_bytes(kind));
        bytes_group<kind, form>(sums, weight, block, q, K, to, to_block);
        UNROLL
        for (int c = 0; c < C; c++) {
            F d, m;
            read_scales<kind, form>(weight + c * block, d, m, to + c * to_block);
            UNROLL
            for (int r = 0; r < M; r++) {
                const float* s = scale + r * (K / GROUP * 2);
                acc[c][r] = fma(group_total(sums[c][r], s), d, fma(m, s[1], acc[c][r]));
            }
        }
    }
    UNROLL
    for (int c = 0; c < C; c++)
        UNROLL
        for (int r = 0; r < M; r++) {
            const F sum = unit ? fma(acc[c][r], unit[r], bias ? load<F>(bias + c * W) : F{}) : acc[c][r];
            store(y + r * stride + c * W, sum);
        }
}
#endif
