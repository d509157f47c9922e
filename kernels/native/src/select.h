// The largest of a row of logits: one, or k of them in order. A NaN is above all, so that it is seen.
//
// k of V without sorting V: the row is cut into parts, and the k-th largest of their maxima is a threshold that at
// least k values reach. Few others do, and only the parts whose maximum reaches it are read again.
#pragma once
#include <vector>

#include "vec.h"

// Integers in the order of floats: -inf, ..., 0, ..., inf, NaN. The sum makes -0 the 0 that it equals.
INLINE I ordered(F v) {
    const I bits = (I)(v + 0.0f);
    return v == v ? bits ^ ((bits >> 31) & 0x7fffffff) : I{} + INT32_MAX;
}
INLINE int32_t ordered_one(float v) {
    int32_t bits;
    const float sum = v + 0.0f;
    std::memcpy(&bits, &sum, 4);
    return v == v ? bits ^ ((bits >> 31) & 0x7fffffff) : INT32_MAX;
}

static int32_t largest_key(const float* x, int n) {
    I most = I{} + INT32_MIN;
    int i = 0;
    for (; i + W <= n; i += W) {
        const I key = ordered(load<F>(x + i));
        most = larger(key, most);
    }
    int32_t key = INT32_MIN;
    for (; i < n; i++) key = std::max(key, ordered_one(x[i]));
    for (int lane = 0; lane < W; lane++) key = std::max(key, int32_t(most[lane]));
    return key;
}

INLINE float value_of(int32_t key) {
    key = key ^ ((key >> 31) & 0x7fffffff);  // bits again
    float value;
    std::memcpy(&value, &key, 4);
    return value;
}

// Its value; a NaN is the largest.
static float largest_value(const float* x, int n) { return value_of(largest_key(x, n)); }

struct Largest {
    int32_t key, id;
};

// The first of the largest of a row.
INLINE Largest largest_of_row(const float* x, int n) {
    I most = I{} + INT32_MIN, place{};
    int i = 0;
    for (; i + W <= n; i += W) {
        const I key = ordered(load<F>(x + i));
        place = key > most ? I{} + i : place;
        most = larger(key, most);
    }
    for (int lane = 0; lane < W; lane++) place[lane] += lane;
    Largest best;
    best.key = across(most, larger);
    best.id = across(most == best.key ? place : I{} + INT32_MAX, [](I a, I b) { return a < b ? a : b; });
    for (; i < n; i++)
        if (const int32_t key = ordered_one(x[i]); key > best.key) best = {key, i};
    return best;
}

struct Selection {  // memory of one thread
    struct Candidate {
        int32_t key, id;
        bool operator<(const Candidate& other) const { return key != other.key ? key > other.key : id < other.id; }
    };
    std::vector<int32_t> maxima, order;
    std::vector<Candidate> candidates;

    // The k largest of V in falling order, of equals the first. Both results hold min(k, V).
    void top(const float* x, int V, int k, int32_t* ids, float* values) {
        k = std::min(k, V);
        if (k <= 0) return;
        const int part = std::max(1, std::min(64, V / (2 * k))), parts = (V + part - 1) / part;
        maxima.resize(parts);
        for (int p = 0; p < parts; p++) maxima[p] = largest_key(x + p * part, std::min(part, V - p * part));
        order = maxima;
        std::nth_element(order.begin(), order.begin() + (k - 1), order.end(), std::greater<int32_t>());
        const int32_t threshold = order[k - 1];
        candidates.clear();
        for (int p = 0; p < parts; p++)
            if (maxima[p] >= threshold)
                for (int id = p * part; id < std::min(V, (p + 1) * part); id++)
                    if (const int32_t key = ordered_one(x[id]); key >= threshold) candidates.push_back({key, id});
        std::nth_element(candidates.begin(), candidates.begin() + (k - 1), candidates.end());
        std::sort(candidates.begin(), candidates.begin() + k);
        for (int i = 0; i < k; i++) ids[i] = candidates[i].id, values[i] = x[candidates[i].id];
    }
};
