// What media change about one token: the axes of its position, and rows that take its embedding's place or are added.
#pragma once
#include <cmath>
#include <cstring>

#include "rowwise.h"

// cos and sin of the sum over three axes of position times frequency, [3, E], times scale: E values each. As of one
// axis, the angle is of floats, its cosine that of a double.
static void rope_angles_of_axes(const int64_t* position, const float* inverse_frequency, float scale, int E, float* to) {
    for (int e = 0; e < E; e++) {
        float sum = 0;
        for (int axis = 0; axis < 3; axis++) sum += float(position[axis]) * inverse_frequency[axis * E + e];
        to[e] = float(std::cos(double(sum)) * double(scale));
        to[e + E] = float(std::sin(double(sum)) * double(scale));
    }
}

// What the tokens of a step read of media; of the last axes, the tokens' own where there are none.
struct Media {
    const int64_t* axes;    // [3, tokens]; null: every token has its one position on all three
    const int32_t* row_of;  // [tokens]: which row it reads, or -1; null: none does
    const float* rows;      // [rows, parts, D]
    int64_t row;            // floats from a row to the next

    // Part `part` of what the token reads; null where it reads nothing.
    const float* of(int64_t token, int part, int D) const {
        return row_of && row_of[token] >= 0 ? rows + row_of[token] * row + int64_t(part) * D : nullptr;
    }
    void rope_angles(int64_t token, int64_t tokens, int64_t position, const float* frequency, float scale, int E, float* to) const {
        int64_t at[3] = {position, position, position};
        for (int axis = 0; axes && axis < 3; axis++) at[axis] = axes[axis * tokens + token];
        rope_angles_of_axes(at, frequency, scale, E, to);
    }
    void replace(int64_t token, int part, int D, float* to) const {
        if (const float* from = of(token, part, D)) std::memcpy(to, from, sizeof(float) * D);
    }
    void add(int64_t token, int part, int D, float* to) const {
        if (const float* from = of(token, part, D)) add_row(to, from, D);
    }
};
