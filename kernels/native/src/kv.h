// Keys and values in the paged cache.
//
// A block of the cache holds P tokens of every layer. Per layer and block it has the keys of all heads and then their
// values, since memory gives longer pieces faster (32 rows of 256 tokens in blocks of 16: a tenth of attention). Of a
// head of A values:
//
//     keys     units of U tokens   [P / U, A, U]   so that a vector holds one value of several keys
//     values                       [P, A]
//
// as floats, halves, or bytes. Behind the bytes of either stand P floats: what each token's bytes are worth.
// U = 16 where P is a multiple of it, else 1.
//
// Or in pairs of bfloat16, so that 16 rows of 64 bytes are a right tile of the matrix unit:
//
//     keys     two values of a key side by side    [P / U, A / 2, U, 2]
//     values   those of two tokens side by side    [P / 2, A, 2]; [P, A] where U = 1
#pragma once
#include "rowwise.h"

constexpr int UNIT = 16;  // keys that are read at once
constexpr int MOST_HEAD = 256;

enum CacheKind : int32_t { HALVES = 0, WHOLE = 1, INTEGERS = 2, PAIRED = 3 };  // floats of 2 or 4 bytes, bytes, pairs

struct Bfloat {  // a number of a pair
    uint16_t bits;
};

template <class T>
struct Cache {
    static constexpr bool SCALED = sizeof(T) == 1;
    static constexpr int SCALE = SCALED ? sizeof(float) / sizeof(T) : 0;  // of a token, in numbers
    T* keys;  // of one layer
    T* values;
    int32_t P, U, K, A;  // tokens per block, tokens per unit, heads, head size
    int64_t head_at(int64_t block, int head) const { return (block * 2 * K + head) * P * (A + SCALE); }
    T* key_unit(int64_t block, int head, int offset) const {
        return keys + head_at(block, head) + int64_t(offset / U) * U * A;
    }
    T* value_rows(int64_t block, int head, int offset) const {
        return values + head_at(block, head) + int64_t(offset) * A;
    }
    float* key_scales(int64_t block, int head) const { return (float*)key_unit(block, head, P); }
    float* value_scales(int64_t block, int head) const { return (float*)value_rows(block, head, P); }
};

INLINE F wide(const uint16_t* at) { return from_half(at); }
INLINE F wide(const float* at) { return load<F>(at); }
INLINE F wide(const int8_t* at) {
#if defined(__AVX512F__)
    return (F)_mm512_maskz_cvtepi32_ps(EVERY, _mm512_maskz_cvtepi8_epi32(EVERY, load<__m128i>(at)));
#elif defined(__AVX2__)
    return (F)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at)));
#else
    return __builtin_convertvector(load<Narrow>(at), F);
#endif
}
INLINE void narrow(uint16_t* to, F v) { to_half(to, v); }
INLINE void narrow(float* to, F v) { store(to, v); }
INLINE void narrow(int8_t* to, F v) { store(to, __builtin_convertvector(nearest(v), Narrow)); }

// How much one step of a byte is worth for a head: NaN where any of x is not finite.
INLINE float byte_scale(const float* x, int A) {
    I largest{};
    for (int d = 0; d < A; d += W) largest = larger(magnitude(load<F>(x + d)), largest);
    return largest_of(largest) / 127.0f;
}

template <class T>
static void write_kv(const Cache<T>& cache, int64_t slot, int head, const float* k, const float* v) {
    const int64_t block = slot / cache.P;
    const int offset = int(slot % cache.P), U = cache.U;
    T* keys = cache.key_unit(block, head, offset) + offset % U;
    T* values = cache.value_rows(block, head, offset);
    float by_k = 1.0f, by_v = 1.0f;
    if constexpr (Cache<T>::SCALED) {
        const float one_k = cache.key_scales(block, head)[offset] = byte_scale(k, cache.A);
        const float one_v = cache.value_scales(block, head)[offset] = byte_scale(v, cache.A);
        by_k = one_k > 0 ? 1.0f / one_k : 0.0f;
        by_v = one_v > 0 ? 1.0f / one_v : 0.0f;
    }
    for (int d = 0; d < cache.A; d += W) {
        T key[W];
        const F x = load<F>(k + d), y = load<F>(v + d);
        narrow(key, Cache<T>::SCALED ? x * by_k : x);
        UNROLL
        for (int i = 0; i < W; i++) keys[(d + i) * U] = key[i];
        narrow(values + d, Cache<T>::SCALED ? y * by_v : y);
    }
}

#if defined(__AVX512BF16__)
// Others may write the other halves of the values' pairs at the same time: nothing but this token's is touched.
static void write_kv(const Cache<Bfloat>& cache, int64_t slot, int head, const float* k, const float* v) {
    const int64_t block = slot / cache.P;
    const int offset = int(slot % cache.P), U = cache.U, odd = U == 1 ? 0 : offset % 2;
    int32_t* keys = (int32_t*)cache.key_unit(block, head, offset) + offset % U;
    uint16_t* values = (uint16_t*)cache.value_rows(block, head, offset - odd);
    const __mmask32 mine = odd ? 0xaaaaaaaa : 0x55555555;
    for (int d = 0; d < cache.A; d += W) {
        const __m256i key = to_bfloats(load<F>(k + d)), value = to_bfloats(load<F>(v + d));
        alignas(32) int32_t pairs[W / 2];
        store(pairs, key);
        UNROLL
        for (int i = 0; i < W / 2; i++) keys[(d / 2 + i) * U] = pairs[i];
        if (U == 1) {
            store(values + d, value);
            continue;
        }
        const __m512i wide = _mm512_maskz_cvtepu16_epi32(EVERY, value);
        _mm512_mask_storeu_epi16(values + 2 * d, mine, odd ? _mm512_slli_epi32(wide, 16) : wide);
    }
}
#endif
