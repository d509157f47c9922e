// Vectors of this build's width, and the few operations that compilers do not find by themselves.
//
// Float arithmetic is written once with the compiler's vector types. A build for an instruction set
// (ISA) chooses the width: 16 lanes with AVX-512, 8 with AVX2, else 4, which SSE2 and NEON have.
#pragma once
#include <cstdint>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <cstdlib>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

// Loops over the registers of a tile must be unrolled, or the registers become memory.
#define UNROLL _Pragma("GCC unroll 16")

// Whether there are products of integers, and what else the kernels for vectors of 8 and more need.
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define VECTORS 1
#else
#define VECTORS 0
#pragma GCC diagnostic ignored "-Wpsabi"  // of vectors as arguments: every function that takes one is inline
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int W = 16;
constexpr __mmask16 EVERY = 0xffff;  // all lanes: GCC 12 warns of its own header where a conversion has no mask
#elif VECTORS
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
constexpr int LINE = 64;  // bytes of a cache line
constexpr float LOG2_E = 1.44269504088896341f;

typedef float F __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint16_t H __attribute__((vector_size(2 * W)));
typedef int16_t Half __attribute__((vector_size(2 * W)));
typedef int8_t Narrow __attribute__((vector_size(W)));

template <class V, class T>
INLINE V load(const T* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
template <class V, class T>
INLINE void store(T* to, V v) {
    std::memcpy(to, &v, sizeof v);
}
// The line of `at` comes nearer, past the first cache, where lines of the present would have to make room for it.
INLINE void fetch(const void* at) { __builtin_prefetch(at, 0, 2); }
template <size_t bytes>
INLINE void fetch_lines(const uint8_t* from) {
    UNROLL
    for (size_t at = 0; at < bytes; at += LINE) fetch(from + at);
}
INLINE F splat(float x) { return x - F{}; }  // not a sum: -0 + 0 is 0, so that it would be computed

// a * b + c, rounded once where the machine can: said outright, so that every copy of a loop rounds alike.
INLINE F fma(F a, F b, F c) {
#if defined(__AVX512F__)
    return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
INLINE F fma(F a, float b, F c) { return fma(a, splat(b), c); }
// A sum stays in a register: GCC 12 counts wrongly where a loop's sums and operands fill the set, and put some of them
// on the stack.
INLINE void hold(F& sum) {
#if defined(__AVX512VL__)
    asm("" : "+v"(sum));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    asm("" : "+x"(sum));
#endif
    (void)sum;
}
// a where it is greater than b, else b: where either is a NaN too.
INLINE F greater(F a, F b) {
#if defined(__AVX512F__)
    return (F)_mm512_maskz_max_ps(EVERY, (__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (F)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// ---- 16-bit floats: IEEE halves and bfloat16 ----

INLINE float half_to_float(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    uint32_t sign = uint32_t(h & 0x8000) << 16, body = h & 0x7fff, bits;
    if (body >= 0x7c00) {
        bits = 0x7f800000 | (body & 0x3ff) << 13;
    } else if (body >= 0x400) {
        bits = (body << 13) + 0x38000000;
    } else {
        float tiny = float(body) * 5.9604644775390625e-8f;
        std::memcpy(&bits, &tiny, 4);
    }
    bits |= sign;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
#endif
}

INLINE uint16_t float_to_half(float f) {  // to nearest, ties to even
#if defined(__F16C__)
    return _cvtss_sh(f, 0);
#else
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    uint32_t sign = bits >> 16 & 0x8000, body = bits & 0x7fffffff;
    if (body > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (body >= 0x47800000 - 0x1000) return uint16_t(sign | 0x7c00);
    if (body < 0x38800000) {
        float scaled;
        std::memcpy(&scaled, &body, 4);
        scaled += 0.5f;  // the sum's last bit is worth 2^-24, the smallest half
        uint32_t rounded;
        std::memcpy(&rounded, &scaled, 4);
        return uint16_t(sign | (rounded - 0x3f000000));
    }
    body += 0xfff + (body >> 13 & 1);
    return uint16_t(sign | (body - 0x38000000) >> 13);
#endif
}

INLINE F from_half(const uint16_t* h) {
#if defined(__AVX512F__)
    return (F)_mm512_maskz_cvtph_ps(EVERY, load<__m256i>(h));
#elif defined(__F16C__)
    return (F)_mm256_cvtph_ps(load<__m128i>(h));
#else
    const I bits = __builtin_convertvector(load<H>(h), I), body = bits & 0x7fff;
    const F finite = (F)(body << 13) * 5.192296858534828e33f;  // 2^112: exponents have other zeros
    const I special = (body << 13) | 0x7f800000;
    return (F)((body < 0x7c00 ? (I)finite : special) | (bits & 0x8000) << 16);
#endif
}

INLINE void to_half(uint16_t* h, F f) {
#if defined(__AVX512F__)
    store(h, _mm512_maskz_cvtps_ph(EVERY, (__m512)f, 0));
#elif defined(__F16C__)
    store(h, _mm256_cvtps_ph((__m256)f, 0));
#else
    for (int i = 0; i < W; i++) h[i] = float_to_half(f[i]);
#endif
}

INLINE F from_bfloat(const uint16_t* h) {
#if defined(__AVX512F__)
    return (F)((I)_mm512_maskz_cvtepu16_epi32(EVERY, load<__m256i>(h)) << 16);
#elif defined(__AVX2__)
    return (F)((I)_mm256_cvtepu16_epi32(load<__m128i>(h)) << 16);
#else
    return (F)(__builtin_convertvector(load<H>(h), I) << 16);
#endif
}

#if defined(__AVX512BF16__)
INLINE __m256i to_bfloats(F v) { return (__m256i)_mm512_cvtneps_pbh((__m512)v); }  // to nearest
INLINE __m512i to_bfloats(F low, F high) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }
#endif

INLINE F to_float(I i) { return __builtin_convertvector(i, F); }

INLINE I larger(I a, I b) { return a > b ? a : b; }

// All lanes combined, in halves: by a sum, or by whatever else.
template <int half, class V>
INLINE V swap_lanes(V v) {  // lane i becomes lane i ^ half
#if defined(__AVX512F__)
    // GCC 12 moves lanes of such a vector one by one
    if constexpr (half == 8) return (V)_mm512_shuffle_i32x4((__m512i)v, (__m512i)v, 0x4e);
    else if constexpr (half == 4) return (V)_mm512_shuffle_i32x4((__m512i)v, (__m512i)v, 0xb1);
    else return (V)_mm512_shuffle_epi32((__m512i)v, half == 2 ? _MM_PERM_BADC : _MM_PERM_CDAB);
#else
    V other;
    UNROLL
    for (int i = 0; i < W; i++) other[i] = v[i ^ half];
    return other;
#endif
}
template <class V, class Combine, int half = W / 2>
INLINE auto across(V v, const Combine& combine) {
    if constexpr (half == 0) return v[0];
    else return across<V, Combine, half / 2>(combine(v, swap_lanes<half>(v)), combine);
}
INLINE float sum(F f) {
    return across(f, [](F a, F b) { return a + b; });
}
