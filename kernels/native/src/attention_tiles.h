// Attention by products of tiles (matrix.h), over keys and values in pairs (kv.h).
//
// A segment's keys are scored for 16 queries at once, their weights are rounded to bfloat16, and both times a tile's sum
// has its one order whatever the queries beside it. A key that a query does not see has the weight 0. Its value must be
// finite then: what nobody of the tile sees is copied as zeros, and where a value that some see is not finite, each
// token's queries are multiplied by copies of their own.
#pragma once
#include "attention.h"

#if MATRIX

constexpr int KEYS = 32;          // of a tile of weights, or of values
constexpr int AHEAD = 16 << 10;   // bytes that are asked for before they are read

// 2^x of each, for x <= 0: off by 9e-5 of it at most, where the rounding that follows is by up to 4e-3. Exact at 0.
INLINE F rough_power_of_two(F x) {
    const F rest = (F)_mm512_maskz_reduce_ps(EVERY, (__m512)x, 9);  // x less the whole number below it; of -inf 0
    F p = fma(rest, splat(7.70672403e-2f), splat(2.27644978e-1f));
    p = fma(p, rest, splat(6.95116631e-1f));
    p = fma(p, rest, splat(1.0f));
    const __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);  // a denormal takes hundreds of cycles
    return (F)_mm512_maskz_scalef_ps(kept, (__m512)p, (__m512)x);
}

// Lines that are read later: some at a time.
struct Cursor {
    const uint8_t* const* units;  // null: nothing is asked for
    int lines;                    // of a unit
    INLINE_MEMBER void fetch(int unit, int from, int count) const {
        if (!units) return;
        const uint8_t* at = units[unit] + from * LINE;
        for (int line = 0; line < count; line++) __builtin_prefetch(at + line * LINE, 0, 3);
    }
    INLINE_MEMBER void fetch(int unit) const { fetch(unit, 0, lines); }
};

// One unit of keys against 16 queries whose tiles are in registers 4 to 7, as far as they fit. `last`: where the keys'
// last tile begins; it overlaps the one before it where heads are an odd multiple of 16, and half of its queries are 0.
template <int sums, int STEPS>
INLINE void score_unit(const uint16_t* q, const uint16_t* keys, int steps, int last, float* to) {
    clear_tile<sums>();
    if constexpr (STEPS == 0) {
        for (int step = 0; step < steps; step++) {
            load_tile<4>(q + step * (TILE / 2), LINE);
            load_tile<2>(keys + std::min(step * (TILE / 2), last), LINE);
            multiply_tile<sums, 4, 2>();
        }
    } else {
        constexpr auto of = [](int step) { return step * (TILE / 2); };
        load_tile<2>(keys + (STEPS == 1 ? last : 0), LINE);
        multiply_tile<sums, 4, 2>();
        if constexpr (STEPS > 1) load_tile<3>(keys + (STEPS == 2 ? last : of(1)), LINE), multiply_tile<sums, 5, 3>();
        if constexpr (STEPS > 2) load_tile<2>(keys + (STEPS == 3 ? last : of(2)), LINE), multiply_tile<sums, 6, 2>();
        if constexpr (STEPS > 3) load_tile<3>(keys + last, LINE), multiply_tile<sums, 7, 3>();
    }
    store_tile<sums>(to, SCORES * sizeof(float));
}

template <int STEPS>
static void score_units(const uint16_t* q, const uint16_t* const* keys, const Cursor& ahead, int first, int end, int A, float* scores) {
    const int steps = (A + DEPTH - 1) / DEPTH, last = std::max(0, A - DEPTH) * UNIT;
    if constexpr (STEPS > 0) load_tile<4>(q, LINE);
    if constexpr (STEPS > 1) load_tile<5>(q + TILE / 2, LINE);
    if constexpr (STEPS > 2) load_tile<6>(q + 2 * (TILE / 2), LINE);
    if constexpr (STEPS > 3) load_tile<7>(q + 3 * (TILE / 2), LINE);
    for (int unit = first; unit < end; unit++) {
        ahead.fetch(unit - first);
        if (unit % 2) score_unit<1, STEPS>(q, keys[unit], steps, last, scores + unit * UNIT);
        else score_unit<0, STEPS>(q, keys[unit], steps, last, scores + unit * UNIT);
    }
}

// to[r, 16 c] = sum over steps [first, end) of the weights of 32 keys times their values, for C tiles of columns.
template <int C>
INLINE void sum_columns(const uint16_t* weights, const uint16_t* const* values, const Cursor& ahead, int first, int end, int A, int column, float* to, int span) {
    const size_t stride = size_t(4) * A;
    const int half = ahead.lines / 2;
    clear_tile<0>();
    if constexpr (C > 1) clear_tile<1>();
    if constexpr (C > 2) clear_tile<2>();
    if constexpr (C > 3) clear_tile<3>();
    for (int step = first; step < end; step++) {
        const uint16_t* from = values[step] + 2 * column;
        const int unit = 2 * (step - first);
        load_tile<4>(weights + step * (TILE / 2), LINE);
        load_tile<5>(from, stride);
        if constexpr (C == 4) ahead.fetch(unit, 0, half);
        else ahead.fetch(unit), ahead.fetch(unit + 1);
        multiply_tile<0, 4, 5>();
        if constexpr (C > 1) load_tile<6>(from + 2 * SIDE, stride);
        if constexpr (C == 4) ahead.fetch(unit, half, half);
        if constexpr (C > 1) multiply_tile<1, 4, 6>();
        if constexpr (C > 2) load_tile<7>(from + 4 * SIDE, stride);
        if constexpr (C == 4) ahead.fetch(unit + 1, 0, half);
        if constexpr (C > 2) multiply_tile<2, 4, 7>();
        if constexpr (C == 4) {
            load_tile<5>(from + 6 * SIDE, stride);
            ahead.fetch(unit + 1, half, half);
            multiply_tile<3, 4, 5>();
        }
    }
    const size_t row = span * sizeof(float);
    store_tile<0>(to + column, row);
    if constexpr (C > 1) store_tile<1>(to + column + SIDE, row);
    if constexpr (C > 2) store_tile<2>(to + column + 2 * SIDE, row);
    if constexpr (C > 3) store_tile<3>(to + column + 3 * SIDE, row);
}
static void sum_values(const uint16_t* weights, const uint16_t* const* values, Cursor ahead, int first, int end, int A, float* to, int span) {
    int column = 0;
    for (; column + 4 * SIDE <= A; column += 4 * SIDE, ahead.units = nullptr)
        sum_columns<4>(weights, values, ahead, first, end, A, column, to, span);
    switch ((A - column) / SIDE) {
        case 3: return sum_columns<3>(weights, values, ahead, first, end, A, column, to, span);
        case 2: return sum_columns<2>(weights, values, ahead, first, end, A, column, to, span);
        case 1: return sum_columns<1>(weights, values, ahead, first, end, A, column, to, span);
    }
}

template <>
struct Attention<Bfloat> : Item {
    const Cache<Bfloat>& cache;
    const Tile* next;  // what this thread does then, if it is known
    MatrixScratch& m;
    const int steps = (A + DEPTH - 1) / DEPTH;         // along a head
    const int tiles = (lane_rows + SIDE - 1) / SIDE;   // of a lane's queries
    const bool paired = cache.U == UNIT;               // so that tiles can be read from the cache
    const bool keys_direct = paired && A >= DEPTH;
    int begin = 0, stop = 0;                           // of the segment's keys that are read
    const uint16_t *keys[SEGMENT / UNIT], *values[SEGMENT / KEYS];
    const uint8_t* sequence[3 * SEGMENT / UNIT + 2];   // units in the order in which they are read

    Attention(const Cache<Bfloat>& cache, Plan& plan, const Tile& tile, const Tile* next, Scratch& s)
        : Item(plan, tile, s, cache.A), cache(cache), next(next), m(s.matrix) {}

    // Queries as left tiles, those of a lane after those of the lane before.
    void round_queries(const float* q, size_t stride, int G, float scale) {
        scale *= 1.44269504088896341f;  // of e: weights are powers of two
        int row = 0;
        for (int at = 0; at < tile.groups; at++)
            each_query(plan.group(tile, at), G, [&](int token, int head) {
                const float* from = q + size_t(token) * stride + size_t(head) * A;
                const int of_lane = row % lane_rows;
                uint16_t* to = m.q + (row / lane_rows * tiles + of_lane / SIDE) * steps * (TILE / 2) + of_lane % SIDE * DEPTH;
                for (int d = 0; d + DEPTH <= A; d += DEPTH, to += TILE / 2)
                    store(to, to_bfloats(load<F>(from + d) * scale, load<F>(from + d + W) * scale));
                const F rest = A % DEPTH ? load<F>(from + A - W) * scale : F{};
                if (A == W) store(to, to_bfloats(rest, F{}));
                else if (A % DEPTH) store(to, to_bfloats(F{}, rest));
                row++;
            });
    }

    const uint16_t* key_unit(const Group& g, int position) const {
        return (const uint16_t*)cache.key_unit(g.blocks[position / cache.P], g.kv_head, position % cache.P);
    }
    const uint16_t* value_rows(const Group& g, int position) const {
        return (const uint16_t*)cache.value_rows(g.blocks[position / cache.P], g.kv_head, position % cache.P);
    }

    void find_keys(const Group& g) {
        const int deep = std::max(A, DEPTH);
        for (int at = begin / UNIT * UNIT; at < stop; at += UNIT) {
            const int unit = (at - segment) / UNIT;
            if (keys_direct) {
                keys[unit] = key_unit(g, at);
                continue;
            }
            uint16_t* into = m.keys + unit * UNIT * deep;
            keys[unit] = into;
            std::memset(into + UNIT * A, 0, UNIT * (deep - A) * sizeof(uint16_t));
            if (paired) std::memcpy(into, key_unit(g, at), UNIT * A * sizeof(uint16_t));
            for (int t = std::max(0, begin - at); !paired && t < UNIT && at + t < stop; t++) {
                const uint16_t* key = key_unit(g, at + t);
                for (int pair = 0; pair < A / 2; pair++) std::memcpy(into + (pair * UNIT + t) * 2, key + 2 * pair, 4);
            }
        }
    }

    // Values of 32 tokens from `at` on, zeros but for those from `from` to `end`. Whether these are finite.
    bool copy_values(const Group& g, int at, int from, int end, uint16_t* into) const {
        __mmask32 bad = 0;
        for (int pair = at; pair < at + KEYS; pair += 2, into += 2 * A) {
            const bool first = pair >= from && pair < end, second = pair + 1 >= from && pair + 1 < end;
            const uint16_t* low = first || (second && paired) ? value_rows(g, pair) : nullptr;
            const uint16_t* high = second && !paired ? value_rows(g, pair + 1) : nullptr;
            const __mmask32 kept = (first ? 0x55555555 : 0) | (second ? 0xaaaaaaaa : 0);
            for (int d = 0; d < A; d += W) {
                __m512i x{};
                if (paired && kept) x = _mm512_maskz_mov_epi16(kept, load<__m512i>(low + 2 * d));
                if (!paired && first) x = _mm512_maskz_cvtepu16_epi32(EVERY, load<__m256i>(low + d));
                if (!paired && second) x = _mm512_or_si512(x, _mm512_slli_epi32(_mm512_maskz_cvtepu16_epi32(EVERY, load<__m256i>(high + d)), 16));
                const __m512i exponent = _mm512_set1_epi16(0x7f80);
                bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
                store(into + 2 * d, x);
            }
        }
        return !bad;
    }
    // The segment's values that stand in [from, end). Whether a weight of 0 hides all of them.
    bool find_values(const Group& g, int from, int end) {
        bool hidden = true;
        for (int step = (begin - segment) / KEYS; step * KEYS < stop - segment; step++) {
            const int at = segment + step * KEYS;
            const bool seen = from <= at && at + KEYS <= end, partial = tokens > 1 && !whole(at, KEYS);
            if (seen && !partial && paired && cache.P % KEYS == 0) {
                values[step] = value_rows(g, at);
                continue;
            }
            values[step] = m.values + step * KEYS * A;
            const bool finite = copy_values(g, at, from, end, m.values + step * KEYS * A);
            hidden &= finite || !partial;
        }
        return hidden;
    }

    // ---- what will be read: after a lane's keys its values, then the next one's keys ----

    int units_ahead() const { return std::min(SEGMENT / UNIT, std::max(2, AHEAD / int(UNIT * A * sizeof(Bfloat)))); }
    int first_of(const Tile& t) const { return std::max(plan.group(t, 0).low, t.from) / UNIT * UNIT; }
    const uint8_t** keys_from(const Group& g, int at, int end, const uint8_t** to) const {
        for (int left = units_ahead(); left > 0 && at < end; left--, at += UNIT) *to++ = (const uint8_t*)key_unit(g, at);
        return to;
    }
    Cursor find_sequence(int lane) {
        if (!keys_direct) return {nullptr, 0};
        const uint8_t** to = sequence;
        const int64_t values_at = (const char*)cache.values - (const char*)cache.keys;
        for (int unit = (begin - segment) / UNIT; segment + unit * UNIT < stop; unit++) *to++ = (const uint8_t*)keys[unit];
        const int count = int(to - sequence);
        for (int unit = 0; unit < count; unit++) *to++ = sequence[unit] + values_at;
        const uint8_t** behind = to;
        if (lane + 1 < lanes) to = keys_from(of_lane(lane + 1), begin / UNIT * UNIT, stop, to);
        else if (stop < this->to) to = keys_from(group, stop, this->to, to);
        else if (next) {
            to = keys_from(plan.group(*next, 0), first_of(*next), next->to, to);
            s.fetched = *behind;
        }
        while (to < sequence + 2 * count + units_ahead() + 2) *to = to[-1], to++;
        return {sequence + units_ahead(), A / 2};
    }
    // What nobody asked for in time: the first keys of a tile.
    void fetch_first() {
        if (!keys_direct) return;
        const uint8_t* first[SEGMENT / UNIT];
        const uint8_t** end = keys_from(group, low / UNIT * UNIT, to, first);
        if (s.fetched == first[0]) return;
        for (const uint8_t** unit = first; unit < end; unit++) Cursor{unit, A / 2}.fetch(0);
    }

    void score(const uint16_t* q, const Cursor& ahead) const {
        const int first = (begin - segment) / UNIT, end = (stop - segment + UNIT - 1) / UNIT;
        switch (steps) {
            case 1: return score_units<1>(q, keys, ahead, first, end, A, m.scores);
            case 2: return score_units<2>(q, keys, ahead, first, end, A, m.scores);
            case 3: return score_units<3>(q, keys, ahead, first, end, A, m.scores);
            case 4: return score_units<4>(q, keys, ahead, first, end, A, m.scores);
        }
        score_units<0>(q, keys, ahead, first, end, A, m.scores);
    }

    // Scores of queries `row` to `end` of a lane become weights. A total is that of the rounded weights, as these are
    // what values are multiplied by: then the parts of a sum are 1 together.
    void soften(State& sums, int lane, int row, int end) const {
        const __m512 nothing = _mm512_set1_ps(-INFINITY);
        const int first_step = (begin - segment) / KEYS, end_step = (stop - segment + KEYS - 1) / KEYS;
        for (int r = 0; r < end - row; r++) {
            const int token = shared ? 0 : (row + r) / heads, size = stop - segment;
            const int from = std::max(begin - segment, sees_from(token, segment)), last = sees_to(token, segment, size);
            const int seen = from < last ? from / KEYS : end_step, seen_end = from < last ? (last + KEYS - 1) / KEYS : end_step;
            float* scores = m.scores + r * SCORES;
            uint16_t* weights = m.weights + r * DEPTH;
            for (int step = first_step; step < seen; step++) store(weights + step * (TILE / 2), __m512i{});
            for (int step = seen_end; step < end_step; step++) store(weights + step * (TILE / 2), __m512i{});
            const auto hide = [&](int step, uint32_t lanes) {
                _mm512_mask_storeu_ps(scores + step * KEYS, __mmask16(lanes), nothing);
                _mm512_mask_storeu_ps(scores + step * KEYS + W, __mmask16(lanes >> 16), nothing);
            };
            if (from < last && from % KEYS) hide(seen, (1u << from % KEYS) - 1);
            if (from < last && last % KEYS) hide(seen_end - 1, ~0u << last % KEYS);
            F most = splat(-INFINITY);
            for (int t = seen * KEYS; t < seen_end * KEYS; t += W) most = greater(load<F>(scores + t), most);
            const float largest = across(most, [](F a, F b) { return greater(a, b); });
            // nothing is seen: no weight to any key
            const F shift = splat(largest == -INFINITY ? 0.0f : largest);
            __m512 total = _mm512_setzero_ps();
            const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
            for (int step = seen; step < seen_end; step++) {
                const F low = rough_power_of_two(load<F>(scores + step * KEYS) - shift);
                const F high = rough_power_of_two(load<F>(scores + step * KEYS + W) - shift);
                const __m512i rounded = to_bfloats(low, high);
                total = _mm512_dpbf16_ps(total, (__m512bh)rounded, ones);
                store(weights + step * (TILE / 2), rounded);
            }
            const int query = lane * lane_rows + row + r;
            sums.largest[query] = largest;
            store(sums.total + query * W, total);
        }
    }

    // Keys [begin, stop) of one segment, and one lane.
    void sum_lane(State& sums, int lane) {
        const Group& g = of_lane(lane);
        find_keys(g);
        Cursor ahead = find_sequence(lane);
        bool found = false;
        for (int at = 0; at < tiles; at++, ahead.units = nullptr) {
            const int row = at * SIDE, end = std::min(lane_rows, row + SIDE);
            const int first_step = (begin - segment) / KEYS, end_step = (stop - segment + KEYS - 1) / KEYS;
            float* out = sums.out + (lane * lane_rows + row) * span;
            score(m.q + (lane * tiles + at) * steps * (TILE / 2), ahead);
            soften(sums, lane, row, end);
            if (ahead.units) ahead.units += (stop - begin / UNIT * UNIT + UNIT - 1) / UNIT;
            if (!found) found = find_values(g, begin, stop);
            if (found) {
                sum_values(m.weights, values, ahead, first_step, end_step, A, out, span);
                continue;
            }
            for (int token = row / heads; token * heads < end; token++) {
                find_values(g, std::max(begin, segment + sees_from(token, segment)), segment + sees_to(token, segment, stop - segment));
                sum_values(m.weights, values, {nullptr, 0}, first_step, end_step, A, m.spare, A);
                for (int r = std::max(row, token * heads); r < std::min(end, (token + 1) * heads); r++)
                    std::memcpy(out + (r - row) * span, m.spare + (r - row) * A, sizeof(float) * A);
            }
        }
    }

    void run(const float* q, size_t q_stride, float scale, float* y, size_t y_stride, int G) {
        round_queries(q, q_stride, G, scale);
        fetch_first();
        s.fetched = nullptr;
        each_segment(y, y_stride, G, [this](State& sums, int at, int end) {
            begin = at, stop = end;
            for (int lane = 0; lane < lanes; lane++) sum_lane(sums, lane);
        });
    }
};
#endif
