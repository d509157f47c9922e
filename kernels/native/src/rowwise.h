// What is done to each token by itself: norms, rotation, gates, quantization, rows of the embedding.
#pragma once
#include "formats.h"

INLINE I nearest(F v) {  // ties to even, for numbers below 2^22
#if defined(__AVX512F__)
    return (I)_mm512_maskz_cvtps_epi32(EVERY, (__m512)v);
#elif defined(__AVX2__)
    return (I)_mm256_cvtps_epi32((__m256)v);
#else
    return (I)(v + 12582912.0f) - 0x4b400000;  // the last bit of the sum is worth 1
#endif
}

// e^x for |x| <= 87, to 2 units in the last place; a NaN stays one. Cody and Waite's reduction, a polynomial of
// degree 6 (Taylor around 0, on half a power of two to each side).
INLINE F exponential(F x) {
    const I whole = nearest(x * LOG2_E);
    const F k = to_float(whole);
    const F r = fma(k, 2.12194440e-4f, fma(k, -0.693359375f, x));
    F p = fma(r, 1.3888889e-3f, splat(8.3333333e-3f));
    p = fma(p, r, splat(4.1666667e-2f));
    p = fma(p, r, splat(1.6666667e-1f));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r, splat(1.0f));
    p = fma(p, r, splat(1.0f));
    return p * (F)((whole + 127) << 23);
}
// The same for x <= 0; below -87 it is 0.
INLINE F exp_below_zero(F x) { return x < -87.0f ? F{} : exponential(x); }

INLINE I magnitude(F v) { return (I)v & 0x7fffffff; }  // ordered like |v|; what is not finite is above all
INLINE int32_t largest_lane(I v) { return across(v, larger); }
INLINE float largest_of(I magnitudes) {  // NaN where any of them is not finite
    const int32_t bits = largest_lane(magnitudes);
    float most;
    std::memcpy(&most, &bits, 4);
    return bits < 0x7f800000 ? most : NAN;
}
INLINE int32_t sum_of(I v) {
    return across(v, [](I a, I b) { return a + b; });
}

constexpr int VECTORS_OF_GROUP = GROUP / W;

INLINE I largest_of_group(const float* x) {
    I largest{};
    UNROLL
    for (int v = 0; v < VECTORS_OF_GROUP; v++) largest = larger(magnitude(load<F>(x + v * W)), largest);
    return largest;
}

// The bytes of one group, and their sum.
INLINE int32_t bytes_of_group(const float* x, float inverse, int8_t* q) {
    I n[VECTORS_OF_GROUP], totals{};
    UNROLL
    for (int v = 0; v < VECTORS_OF_GROUP; v++) {
        n[v] = nearest(load<F>(x + v * W) * inverse);
        totals += n[v];
    }
#if MATRIX  // even ones first (formats.h)
    const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30), one = _mm512_set1_epi32(1);
    store(q, _mm512_maskz_cvtepi32_epi8(EVERY, _mm512_permutex2var_epi32((__m512i)n[0], evens, (__m512i)n[1])));
    store(q + W, _mm512_maskz_cvtepi32_epi8(EVERY, _mm512_permutex2var_epi32((__m512i)n[0], _mm512_or_si512(evens, one), (__m512i)n[1])));
#elif defined(__AVX2__) && !defined(__AVX512BW__)
    const __m256i low = _mm256_packs_epi32((__m256i)n[0], (__m256i)n[1]);
    const __m256i high = _mm256_packs_epi32((__m256i)n[2], (__m256i)n[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    store(q, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order));
#else
    for (int v = 0; v < VECTORS_OF_GROUP; v++) store(q + v * W, __builtin_convertvector(n[v], Narrow));
#endif
    return sum_of(totals);
}

// A group's scale is a whole number of units, of which the largest has so many: the sum of a group of 4-bit numbers times
// that fits 32 bits. Smaller scales are rounded up, and lose nothing that counts beside the largest.
constexpr int UNITS = 1 << 14;

INLINE void put_number(int32_t n, float* scale) {
#if defined(__AVX512VNNI__)
    *scale = float(n);
#else
    n |= n << 16;  // two words: the sum of a group comes in two
    std::memcpy(scale, &n, 4);
#endif
}

// One row in groups of 32: bytes, a whole number for each group and that times their sum; and a unit, which is NaN where
// something is not finite. A row whose unit would be no normal float counts as 0. Some groups at a time, step by step:
// divisions are done for W of them at once, and no group waits for the one before it.
static void quantize_bytes(const float* x, int K, int8_t* q, float* scale, float* unit) {
    constexpr int MOST = 64;
    alignas(64) float largest[MOST]{}, inverse[MOST];
    alignas(64) int32_t number[MOST];
    I row{};
    for (int g = 0; g < K / GROUP; g++) {
        const I of_group = largest_of_group(x + g * GROUP);
        row = larger(row, of_group);
        const int32_t bits = largest_lane(of_group);
        std::memcpy(scale + 2 * g, &bits, 4);
    }
    const float most = largest_of(row), units = most >= 1e-31f ? UNITS / most : 0.0f;
    *unit = most / (127.0f * UNITS);
    for (int left = K / GROUP; left > 0; left -= MOST) {
        const int count = std::min(left, MOST);
        for (int g = 0; g < count; g++) largest[g] = units > 0 ? scale[2 * g] : 0.0f;
        for (int g = 0; g < count; g += W) {
            const F exact = load<F>(largest + g) * units;
            I n = __builtin_convertvector(exact, I);
            n -= to_float(n) < exact;  // rounded up: what holds is -1
            n = n < UNITS ? n : I{} + UNITS;
            store(number + g, n);
            store(inverse + g, n > 0 ? 1.0f / (to_float(n) * *unit) : F{});
        }
        for (int g = 0; g < count; g++, x += GROUP, q += GROUP, scale += 2) {
            put_number(number[g], scale);
            scale[1] = float(number[g]) * float(bytes_of_group(x, inverse[g], q));
        }
    }
}

// One row: 16 bits each, one scale.
static void quantize_words(const float* x, int K, int16_t* q, float* scale) {
    I largest{};
    for (int i = 0; i < K; i += W) largest = larger(magnitude(load<F>(x + i)), largest);
    const float most = largest_of(largest), inverse = most > 0 ? 32767.0f / most : 0.0f;
    for (int i = 0; i < K; i += W) store(q + i, __builtin_convertvector(nearest(load<F>(x + i) * inverse), Half));
    *scale = most / 32767.0f;
}

// One row as bfloat16, to nearest, in its place among left tiles; and where it is asked for what that leaves.
static void quantize_shorts(const float* x, int K, bool split, uint16_t* q, int64_t row) {
#if MATRIX
    const int64_t of_row = split ? 2 * K : K;
    for (int i = 0; i < K; i += W) {
        const F v = load<F>(x + i);
        uint16_t* to = q + short_at(row, i, of_row);
        store(to, to_bfloats(v));
        if (split) store(to + SIDE * K, to_bfloats(v - from_bfloat(to)));
    }
#endif
}

// x scaled to a mean square of 1, times the weight. `added` is added to x before, where it is not null.
static void rms_norm_row(float* x, const float* added, const float* weight, int D, float eps, float* y) {
    constexpr int CHAINS = 4;  // of sums: each waits for its last one
    F squares[CHAINS]{};
    const auto add_vector = [=](int i, F& to) {
        F v = load<F>(x + i);
        if (added) store(x + i, v += load<F>(added + i));
        to = fma(v, v, to);
    };
    int i = 0;
    for (; i + CHAINS * W <= D; i += CHAINS * W)
        UNROLL
        for (int c = 0; c < CHAINS; c++) add_vector(i + c * W, squares[c]);
    for (; i + W <= D; i += W) add_vector(i, squares[0]);
    float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (; i < D; i++) {
        if (added) x[i] += added[i];
        total += x[i] * x[i];
    }
    const float factor = 1.0f / std::sqrt(total / float(D) + eps);
    for (i = 0; i + W <= D; i += W) store(y + i, load<F>(x + i) * factor * load<F>(weight + i));
    for (; i < D; i++) y[i] = x[i] * factor * weight[i];
}

static void add_row(float* to, const float* x, int D) {
    for (int i = 0; i < D; i++) to[i] += x[i];
}

// cos and sin of the position's angles, times scale: E values each. The angle is a product of floats, its cosine
// that of a double: as the reference says.
static void rope_angles(int64_t position, const float* inverse_frequency, float scale, int E, float* to) {
    for (int e = 0; e < E; e++) {
        const double angle = double(float(position) * inverse_frequency[e]);
        to[e] = float(std::cos(angle) * double(scale));
        to[e + E] = float(std::sin(angle) * double(scale));
    }
}

// Pairs half a head apart are turned by the position's angles; cos and sin hold A / 2 values each.
static void rope_head(float* x, const float* cos, const float* sin, int half) {
    int i = 0;
    for (; i + W <= half; i += W) {
        const F a = load<F>(x + i), b = load<F>(x + i + half), c = load<F>(cos + i), s = load<F>(sin + i);
        store(x + i, a * c - b * s);
        store(x + i + half, b * c + a * s);
    }
    for (; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}

INLINE F silu(F x) {
    const F least = splat(-87.0f);
    const F e = exponential(greater(least, -greater(least, x)));  // of -x, as far as it matters
    return x / (e + 1.0f);
}
// silu(gate) * up of [2, F].
static void silu_mul_row(const float* x, int width, float* y) {
    int i = 0;
    for (; i + W <= width; i += W) store(y + i, silu(load<F>(x + i)) * load<F>(x + width + i));
    for (; i < width; i++) y[i] = x[i] / (1.0f + std::exp(-x[i])) * x[width + i];
}
