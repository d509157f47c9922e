// The machine's unit for products of small matrices (AMX): eight tiles of 16 rows of 64 bytes. A process must have asked
// for it (kernels.native.build does).
//
//     sums    [16 rows, 16 columns]     floats
//     left    [16 rows, 32 inputs]      bfloat16, a row of inputs as it lies
//     right   [16 pairs, 16 columns]    of bfloat16: inputs 2 k and 2 k + 1 of a column side by side
//
//     sums += left x right, for each sum in one order whatever the rows beside it: first the products of even inputs,
//     then those of odd ones, then both to the sum
#pragma once
#include "vec.h"

#if defined(__AMX_BF16__)
#define MATRIX 1
#else
#define MATRIX 0
#endif

constexpr int SIDE = 16;   // rows and columns of a tile
constexpr int DEPTH = 32;  // inputs of a product of tiles

#if MATRIX
constexpr int TILE = 1024;  // bytes

// All tiles of a thread are of full size. Whoever used the unit before on this thread may have left others.
INLINE void shape_tiles() {
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
    } shape;
    asm volatile("" : "+m"(shape));  // GCC 12 thinks that only its first word is read
    _tile_loadconfig(&shape);
}

// One tile, by its number: its rows lie `stride` bytes apart.
template <int tile>
INLINE void load_tile(const void* from, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
INLINE void store_tile(void* to, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
}
template <int tile>
INLINE void clear_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}
template <int sums, int left, int right>
INLINE void multiply_tile() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(left), "i"(right));
}
#else
INLINE void shape_tiles() {}
#endif
