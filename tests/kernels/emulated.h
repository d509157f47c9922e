// AVX-512 for a machine without it: the few intrinsics that the kernels use, as pairs of AVX2's. Included before
// all else, so that their sources take the ways that they take on such a machine. Slow, and exact.
#pragma once
#include <immintrin.h>

#pragma GCC diagnostic ignored "-Wpsabi"  // of vectors as arguments: every function that takes one is inline
#define EMULATED static inline __attribute__((always_inline))

namespace emulated {
template <class Whole, class Half>
union Pair {
    Whole whole;
    Half half[2];
};
typedef Pair<__m512i, __m256i> Integers;
typedef Pair<__m512, __m256> Floats;

template <class Run>
EMULATED __m512i integers(const Run& run) {
    Integers y;
    for (int i = 0; i < 2; i++) y.half[i] = run(i);
    return y.whole;
}
template <class Run>
EMULATED __m512 floats(const Run& run) {
    Floats y;
    for (int i = 0; i < 2; i++) y.half[i] = run(i);
    return y.whole;
}
EMULATED __m256i of(__m512i x, int i) { return Integers{x}.half[i]; }
EMULATED __m256 of(__m512 x, int i) { return Floats{x}.half[i]; }
EMULATED __m128i of(__m256i x, int i) { return i ? _mm256_extracti128_si256(x, 1) : _mm256_castsi256_si128(x); }

EMULATED __m512 fmadd(__m512 a, __m512 b, __m512 c) {
    return floats([&](int i) { return _mm256_fmadd_ps(of(a, i), of(b, i), of(c, i)); });
}
EMULATED __m512 from_halves(__m256i x) {
    return floats([&](int i) { return _mm256_cvtph_ps(of(x, i)); });
}
EMULATED __m256i to_halves(__m512 x) {
    return _mm256_set_m128i(_mm256_cvtps_ph(of(x, 1), 0), _mm256_cvtps_ph(of(x, 0), 0));
}
EMULATED __m512i widened_words(__m256i x) {
    return integers([&](int i) { return _mm256_cvtepu16_epi32(of(x, i)); });
}
EMULATED __m512i widened_bytes(__m256i x) {
    return integers([&](int i) { return _mm256_cvtepi8_epi16(of(x, i)); });
}
EMULATED __m512i widened_bytes_twice(__m128i x) {
    return integers([&](int i) { return _mm256_cvtepi8_epi32(i ? _mm_unpackhi_epi64(x, x) : x); });
}
EMULATED __m512 as_floats(__m512i x) {
    return floats([&](int i) { return _mm256_cvtepi32_ps(of(x, i)); });
}
EMULATED __m512 larger(__m512 a, __m512 b) {
    return floats([&](int i) { return _mm256_max_ps(of(a, i), of(b, i)); });
}
EMULATED __m512i rounded(__m512 x) {
    return integers([&](int i) { return _mm256_cvtps_epi32(of(x, i)); });
}
EMULATED __m512i conjunction(__m512i a, __m512i b) {
    return integers([&](int i) { return _mm256_and_si256(of(a, i), of(b, i)); });
}
EMULATED __m512i shifted(__m512i x, int bits) {
    return integers([&](int i) { return _mm256_srli_epi16(of(x, i), bits); });
}
EMULATED __m512i multiply_bytes(__m512i a, __m512i b) {
    return integers([&](int i) { return _mm256_maddubs_epi16(of(a, i), of(b, i)); });
}
EMULATED __m512i multiply_words(__m512i a, __m512i b) {
    return integers([&](int i) { return _mm256_madd_epi16(of(a, i), of(b, i)); });
}
EMULATED __m512i add16(__m512i a, __m512i b) {
    return integers([&](int i) { return _mm256_add_epi16(of(a, i), of(b, i)); });
}
EMULATED __m512i add32(__m512i a, __m512i b) {
    return integers([&](int i) { return _mm256_add_epi32(of(a, i), of(b, i)); });
}
// Four products of a byte without and one with a sign, in 32 bits: the even ones and the odd ones as words.
EMULATED __m512i dot_bytes(__m512i sum, __m512i u, __m512i q) {
    const __m256i low = _mm256_set1_epi16(255);
    return integers([&](int i) {
        const __m256i a = of(u, i), b = of(q, i);
        const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, low), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
        const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
        return _mm256_add_epi32(of(sum, i), _mm256_add_epi32(even, odd));
    });
}
// Four lanes of 32 bits at a time change places, or those within each four.
EMULATED __m512i swapped_fours(__m512i x, bool halves) {  // of the whole, else the fours of each half
    return integers([&](int i) {
        const __m256i y = of(x, halves ? 1 - i : i);
        return halves ? y : _mm256_permute4x64_epi64(y, 0x4e);
    });
}
EMULATED __m512i swapped_in_fours(__m512i x, bool twos) {
    return integers([&](int i) {
        return twos ? _mm256_shuffle_epi32(of(x, i), 0x4e) : _mm256_shuffle_epi32(of(x, i), 0xb1);
    });
}
EMULATED __m512i same32(int x) {
    return integers([&](int) { return _mm256_set1_epi32(x); });
}
EMULATED __m512i same16(int x) {
    return integers([&](int) { return _mm256_set1_epi16(short(x)); });
}
EMULATED __m512i same8(int x) {
    return integers([&](int) { return _mm256_set1_epi8(char(x)); });
}
}  // namespace emulated

#define __AVX512F__ 1
#define __AVX512BW__ 1
#ifdef EMULATE_VNNI
#define __AVX512VNNI__ 1
#endif
#undef _mm512_maskz_cvtps_ph
#undef _mm512_shuffle_i32x4
#undef _mm512_shuffle_epi32
#define _mm512_shuffle_i32x4(a, b, how) emulated::swapped_fours(a, (how) == 0x4e)  // of one vector, the two ways that are used
#define _mm512_shuffle_epi32(x, how) emulated::swapped_in_fours(x, (how) == _MM_PERM_BADC)
#define _mm512_fmadd_ps(a, b, c) emulated::fmadd(a, b, c)
#define _mm512_maskz_cvtph_ps(mask, x) emulated::from_halves(x)
#define _mm512_maskz_cvtps_ph(mask, x, how) emulated::to_halves(x)
#define _mm512_maskz_cvtepu16_epi32(mask, x) emulated::widened_words(x)
#define _mm512_maskz_cvtps_epi32(mask, x) emulated::rounded(x)
#define _mm512_maskz_cvtepi32_ps(mask, x) emulated::as_floats(x)
#define _mm512_maskz_cvtepi8_epi32(mask, x) emulated::widened_bytes_twice(x)
#define _mm512_maskz_max_ps(mask, a, b) emulated::larger(a, b)
#define _mm512_cvtepi8_epi16(x) emulated::widened_bytes(x)
#define _mm512_and_si512(a, b) emulated::conjunction(a, b)
#define _mm512_srli_epi16(x, bits) emulated::shifted(x, bits)
#define _mm512_maddubs_epi16(a, b) emulated::multiply_bytes(a, b)
#define _mm512_madd_epi16(a, b) emulated::multiply_words(a, b)
#define _mm512_add_epi16(a, b) emulated::add16(a, b)
#define _mm512_add_epi32(a, b) emulated::add32(a, b)
#define _mm512_dpbusd_epi32(sum, u, q) emulated::dot_bytes(sum, u, q)
#define _mm512_setzero_si512() emulated::same32(0)
#define _mm512_set1_epi32(x) emulated::same32(x)
#define _mm512_set1_epi16(x) emulated::same16(x)
#define _mm512_set1_epi8(x) emulated::same8(x)
