// Weights [N outputs, K inputs] as they lie in memory, packed when a model is loaded.
//
// A weight is a row of column blocks, W outputs each (the last one padded with zeros). A block goes
// along K, so that a product reads memory in one direction:
//
//     F32, F16, BF16   per input: W values
//     PAIRS            of bfloat16: per two inputs W pairs, as tiles have them (matrix.h)
//     Q8, Q4           per group of 32 inputs: the numbers, then W halves d, then (Q4) W halves m
//                      weight = d * u + m,   u unsigned; Q8: u = q + 128, so m = -128 d; q itself for WORDS
//         Q8  steps of 4, 2 or 1 inputs: W times so many bytes
//         Q4  such steps: the low nibbles hold inputs 0 to 15 of the group, the high ones 16 to 31
//         where prompts are multiplied by tiles, a group's even inputs take the place of 0 to 15, odd ones that of 16
//         to 31: the bytes of a row of inputs lie in that order too
//
// The other factor of a quantized product is quantized as well, as `arithmetic_of` says for this build:
//
//     BYTES   a signed byte q, a whole number n for each group of 32 inputs, and one scale s for a row:
//             y = s (sum over groups of d n (sum of u q) + m n (sum of q))
//     WORDS   16 bits q, and one scale s for a row:                       y = s (sum over groups of d (sum of the products))
//     FLOATS  as it is: the portable build makes floats of the weights
//     SPLIT   two bfloat16, whose sum has 16 bits: with PAIRS, which lose nothing
//     MIXED   where there are tiles: tokens of prompts as bfloat16, and so are the weights while a tile multiplies them;
//             all others as BYTES. A token is one or the other whatever step computes it.
//
// Sums over a group are exact in integers. Words cost Q8 nothing where the machine has no product of
// bytes that adds up in 32 bits (VNNI), and lose next to nothing.
#pragma once
#include "matrix.h"

constexpr int GROUP = 32;
constexpr int ROWS = 256;  // of one item of a product, at most: what a weight's blocks are read for

enum Kind : int32_t { F32 = 0, F16 = 1, BF16 = 2, Q8 = 3, Q4 = 4, PAIRS = 5 };

enum Inputs : int32_t { FLOATS = 0, BYTES = 1, WORDS = 2, MIXED = 3, SPLIT = 4 };

static constexpr Inputs arithmetic_of(Kind kind) {
    if (kind < Q8 || !VECTORS) return FLOATS;
    if (kind == PAIRS) return SPLIT;
#if defined(__AVX512VNNI__)
    return BYTES;
#else
    return kind == Q4 ? BYTES : WORDS;
#endif
}

// What a row of inputs is rounded to.
static constexpr Inputs inputs_of(Kind kind) {
    const Inputs inputs = arithmetic_of(kind);
    return MATRIX && inputs == BYTES ? MIXED : inputs;
}

static constexpr size_t group_bytes(Kind kind) { return kind == Q4 ? 20 * W : 34 * W; }
static constexpr int scales_at(Kind kind) { return (kind == Q4 ? 16 : 32) * W; }

// Inputs whose bytes stand side by side, and where the number of input k of a group stands for one of W outputs.
static constexpr int step_of(Kind kind) { return arithmetic_of(kind) == BYTES ? 4 : arithmetic_of(kind) == WORDS ? 2 : 1; }
struct Place {
    int byte;
    bool high;  // nibble
};
static constexpr Place place_of(Kind kind, int k, int lane) {
    const int step = step_of(kind), at = MATRIX ? k / 2 + k % 2 * 16 : k, byte = kind == Q4 ? at % 16 : at;
    return {byte / step * step * W + lane * step + byte % step, kind == Q4 && at >= 16};
}
// What turns u into the byte that is kept. A signed byte becomes a word in one instruction.
static constexpr uint8_t flipped(Kind kind) { return arithmetic_of(kind) == WORDS ? 128 : 0; }

// How a weight that is asked for as `kind` is kept by this build.
static constexpr Kind kept_as(Kind kind, int64_t K) { return MATRIX && kind == BF16 && K % DEPTH == 0 ? PAIRS : kind; }

// Bytes of one column block of K inputs.
INLINE size_t block_bytes(Kind kind, int64_t K) {
    switch (kind) {
        case F32: return 4 * W * K;
        case F16:
        case BF16:
        case PAIRS: return 2 * W * K;
        default: return group_bytes(kind) * (K / GROUP);
    }
}

struct Weight {
    Kind kind;
    int32_t N, K;
    const uint8_t* data;
    const float* bias;  // N rounded up to whole blocks, or null
    int64_t blocks() const { return (N + W - 1) / W; }
    size_t bytes() const { return size_t(blocks()) * block_bytes(kind, K); }
};

// Rows of inputs that were quantized. Made anew in every step.
struct Quantized {
    void* q;       // [T, K], int8 or int16
    uint16_t* shorts;  // bfloat16 as left tiles
    float* scale;  // BYTES: [T, K / 32, 2]: n, and n times the sum of q. WORDS: [T]
    float* unit;   // BYTES: [T]
};

// Inputs of two bytes lie as left tiles (matrix.h), 16 rows after the other: [K / 32][16 rows][32], and behind them what
// they leave of a row where that is kept.
static constexpr int64_t shorts_of_row(Inputs inputs, int64_t K) { return inputs == SPLIT ? 2 * K : K; }
INLINE int64_t short_at(int64_t row, int64_t k, int64_t of_row) {
    return row / SIDE * SIDE * of_row + k / DEPTH * DEPTH * SIDE + row % SIDE * DEPTH + k % DEPTH;
}

// Rows of a plain matrix [N, K] of 4 or 2 byte values into column blocks, `side` inputs side by side.
template <int side, class T>
static void pack_plain(const T* from, int64_t N, int64_t K, T* to) {
    for (int64_t block = 0; block < (N + W - 1) / W; block++, to += W * K)
        for (int lane = 0; lane < W; lane++) {
            const int64_t n = block * W + lane;
            for (int64_t k = 0; k < K; k++) to[(k / side * W + lane) * side + k % side] = n < N ? from[n * K + k] : T(0);
        }
}

// Unsigned numbers u [N, K] (bytes), halves d and m [N, K / 32] into column blocks.
static void pack_groups(Kind kind, const uint8_t* u, const uint16_t* d, const uint16_t* m, int64_t N, int64_t K, uint8_t* to) {
    const int64_t groups = K / GROUP;
    for (int64_t block = 0; block < (N + W - 1) / W; block++)
        for (int64_t g = 0; g < groups; g++, to += group_bytes(kind)) {
            std::memset(to, 0, group_bytes(kind));
            uint16_t* scales = (uint16_t*)(to + scales_at(kind));
            for (int lane = 0; lane < W && block * W + lane < N; lane++) {
                const int64_t n = block * W + lane;
                const uint8_t* from = u + n * K + g * GROUP;
                for (int k = 0; k < GROUP; k++) {
                    const Place at = place_of(kind, k, lane);
                    to[at.byte] = uint8_t(to[at.byte] | (from[k] ^ flipped(kind)) << (at.high ? 4 : 0));
                }
                scales[lane] = d[n * groups + g];
                if (kind == Q4) scales[W + lane] = m[n * groups + g];
            }
        }
}

INLINE float bfloat_to_float(uint16_t h) {
    const uint32_t bits = uint32_t(h) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

// Row n of a packed weight as floats: an embedding that shares its memory with the head.
static void unpack_row(const Weight& weight, int64_t n, float* y) {
    const uint8_t* block = weight.data + n / W * block_bytes(weight.kind, weight.K);
    const int lane = int(n % W), K = weight.K;
    switch (weight.kind) {
        case F32:
            for (int k = 0; k < K; k++) y[k] = ((const float*)block)[size_t(k) * W + lane];
            return;
        case F16:
            for (int k = 0; k < K; k++) y[k] = half_to_float(((const uint16_t*)block)[size_t(k) * W + lane]);
            return;
        case BF16:
        case PAIRS:
            for (int k = 0, side = weight.kind == PAIRS ? 2 : 1; k < K; k++)
                y[k] = bfloat_to_float(((const uint16_t*)block)[(size_t(k) / side * W + lane) * side + k % side]);
            return;
        case Q8:
            for (int g = 0; g < K / GROUP; g++, block += group_bytes(Q8), y += GROUP) {
                const float scale = half_to_float(((const uint16_t*)(block + scales_at(Q8)))[lane]);
                for (int k = 0; k < GROUP; k++) y[k] = scale * float((block[place_of(Q8, k, lane).byte] ^ flipped(Q8)) - 128);
            }
            return;
        case Q4:
            for (int g = 0; g < K / GROUP; g++, block += group_bytes(Q4), y += GROUP) {
                const uint16_t* scales = (const uint16_t*)(block + scales_at(Q4));
                const float scale = half_to_float(scales[lane]), minimum = half_to_float(scales[W + lane]);
                for (int k = 0; k < GROUP; k++) {
                    const Place at = place_of(Q4, k, lane);
                    y[k] = scale * float(at.high ? block[at.byte] >> 4 : block[at.byte] & 15) + minimum;
                }
            }
    }
}
