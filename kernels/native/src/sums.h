// What a tile of attention keeps: the sums of its queries, and a thread's memory for its work.
//
// Scores are logarithms to base 2: weights are powers of two.
#pragma once
#include "matrix.h"
#include "plan.h"

struct Sums {  // of one query: its output, totals in so many lanes, and the largest score
    float *out, *total, *largest;
};

// Sums of a tile's queries over one segment, or over several.
struct State {
    alignas(64) float out[(QUERIES + SIDE) * (MOST_HEAD + 16)];  // whole tiles are written
    alignas(64) float total[QUERIES * W];
    alignas(64) float largest[QUERIES + W];
    Sums of(int r, int span) { return {out + r * span, total + r * W, largest + r}; }
};

INLINE F power_of_two(F x) {
    F one[1] = {x};
    powers_of_two(one);
    return one[0];
}
INLINE float weight_of(float largest, float most) {  // of what was summed below a smaller largest score
    return largest == most ? 1.0f : power_of_two(splat(largest - most))[0];
}

// A query's sums, and those of its next segment: added up. One copy, so that all tiles round alike.
static __attribute__((noinline)) void fold(const Sums& to, const Sums& more, int A) {
    const float most = *to.largest > *more.largest ? *to.largest : *more.largest;
    const F a = splat(weight_of(*to.largest, most)), b = splat(weight_of(*more.largest, most));
    for (int d = 0; d < A; d += W) store(to.out + d, fma(load<F>(more.out + d), b, load<F>(to.out + d) * a));
    store(to.total, fma(load<F>(more.total), b, load<F>(to.total) * a));
    *to.largest = most;
}

constexpr int SCORES = SEGMENT + 16;  // floats from a query's scores to the next one's

struct MatrixScratch {  // of one thread, where attention multiplies tiles (attention_tiles.h)
    alignas(64) uint16_t q[LANES * SIDE * MOST_HEAD];     // left tiles of queries
    alignas(64) float scores[2][SIDE * SCORES];
    alignas(64) uint16_t weights[2][SIDE * SEGMENT];      // left tiles, 32 keys each
    alignas(64) uint16_t keys[SEGMENT * MOST_HEAD];       // what does not lie in the cache as tiles need it
    alignas(64) uint16_t values[SEGMENT * MOST_HEAD];
    alignas(64) float spare[SIDE * MOST_HEAD];            // sums of which not all rows are wanted
};

struct Scratch {  // of one thread
    // a query's row is 16 floats longer than a head: rows that lie a power of two apart fight for the same cache lines
    alignas(64) float q[QUERIES * (MOST_HEAD + 16)];
    alignas(64) float scores[QUERIES * CHUNK];
    alignas(64) float wide[CHUNK * MOST_HEAD];      // keys or values as floats
    alignas(64) float gathered[CHUNK * MOST_HEAD];  // units gathered from small blocks
    alignas(64) float scales[LANES][2][CHUNK];      // of keys and of values, where they have any
    alignas(64) float factor[QUERIES + W], fresh[QUERIES + W];
    State states[2];
    const void* units[LANES][(SEGMENT + CHUNK) / UNIT];  // of keys: a segment's, and those that follow it
    const void* fetched = nullptr;  // the first keys of the tile that was prepared for
#if MATRIX
    MatrixScratch matrix;
#endif
    uint64_t shaped = 0;            // the run that this thread last shaped its tiles for
};
