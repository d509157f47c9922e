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

constexpr int MOST_AHEAD = 32;    // units

// Lines that are read later: some at a time.
struct Cursor {
    const uint8_t* const* units;  // null: nothing is asked for
    int lines;                    // of a unit
    INLINE_MEMBER void fetch(int unit, int from, int count) const {
        if (!units) return;
        const uint8_t* at = units[unit] + from * LINE;
        for (int line = 0; line < count; line++) ::fetch(at + line * LINE);
    }
    INLINE_MEMBER void fetch(int unit) const { fetch(unit, 0, lines); }
};

// Scores of units [first, end) with 16 queries, in registers 4 to 7: sums may stay in the others meanwhile. Queries of
// heads of at most 64 stay in registers. A last tile of keys overlaps the one before it where heads are an odd multiple
// of 16, and half of its queries are 0.
template <int STEPS>
static void score_units(const uint16_t* q, const uint16_t* const* keys, const Cursor& ahead, int first, int end, int A, float* scores) {
    const int steps = (A + DEPTH - 1) / DEPTH, last = std::max(0, A - DEPTH) * UNIT;
    if constexpr (STEPS > 0) load_tile<4>(q, LINE);
    if constexpr (STEPS > 1) load_tile<5>(q + TILE / 2, LINE);
    for (int unit = first; unit < end; unit++) {
        const uint16_t* from = keys[unit];
        clear_tile<6>();
        ahead.fetch(unit);
        if constexpr (STEPS == 0) {
            for (int step = 0; step < steps; step++) {
                load_tile<4>(q + step * (TILE / 2), LINE);
                load_tile<7>(from + std::min(step * (TILE / 2), last), LINE);
                multiply_tile<6, 4, 7>();
            }
        } else {
            load_tile<7>(from + (STEPS == 1 ? last : 0), LINE);
            multiply_tile<6, 4, 7>();
            if constexpr (STEPS > 1) load_tile<7>(from + last, LINE), multiply_tile<6, 5, 7>();
        }
        store_tile<6>(scores + unit * UNIT, SCORES * sizeof(float));
    }
}

// A sum over the segment's weights times values, whose steps may be done some at a time: it stays in registers 0 to 3.
struct ValueSums {
    const uint16_t *weights, *const *values;
    int first, end;  // steps of 32 keys
    int A;
    float* to;
    int span;
    Cursor ahead;
    int done = 0;

    static constexpr int WIDE = 4 * SIDE;  // columns at once
    int work() const { return (A + WIDE - 1) / WIDE * (end - first); }

    // As much as makes `until` of `work` done.
    void sum(int until) {
        while (done < until) {
            const int column = done / (end - first) * WIDE, step = first + done % (end - first);
            const int last = std::min(end, step + until - done);
            done += last - step;
            switch (std::min(4, (A - column) / SIDE)) {
                case 4: columns<4>(column, step, last); break;
                case 3: columns<3>(column, step, last); break;
                case 2: columns<2>(column, step, last); break;
                case 1: columns<1>(column, step, last); break;
            }
        }
    }

  private:
    // to[r, 16 c] = sum over steps [step, last) for C tiles of columns.
    template <int C>
    INLINE_MEMBER void columns(int column, int step, int last) const {
        const size_t stride = size_t(4) * A;
        const int half = column == 0 ? ahead.lines / 2 : 0;
        if (step == first) {
            clear_tile<0>();
            if constexpr (C > 1) clear_tile<1>();
            if constexpr (C > 2) clear_tile<2>();
            if constexpr (C > 3) clear_tile<3>();
        }
        for (; step < last; step++) {
            const uint16_t* from = values[step] + 2 * column;
            load_tile<4>(weights + step * (TILE / 2), LINE);
            load_tile<5>(from, stride);
            ahead.fetch(2 * step, 0, half);
            multiply_tile<0, 4, 5>();
            if constexpr (C > 1) load_tile<6>(from + 2 * SIDE, stride);
            ahead.fetch(2 * step, half, half);
            if constexpr (C > 1) multiply_tile<1, 4, 6>();
            if constexpr (C > 2) load_tile<7>(from + 4 * SIDE, stride);
            ahead.fetch(2 * step + 1, 0, half);
            if constexpr (C > 2) multiply_tile<2, 4, 7>();
            if constexpr (C > 3) load_tile<5>(from + 6 * SIDE, stride);
            ahead.fetch(2 * step + 1, half, half);
            if constexpr (C > 3) multiply_tile<3, 4, 5>();
        }
        if (last < end) return;
        const size_t row = span * sizeof(float);
        store_tile<0>(to + column, row);
        if constexpr (C > 1) store_tile<1>(to + column + SIDE, row);
        if constexpr (C > 2) store_tile<2>(to + column + 2 * SIDE, row);
        if constexpr (C > 3) store_tile<3>(to + column + 3 * SIDE, row);
    }
};

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
    const uint8_t* sequence[LANES * 2 * SEGMENT / UNIT + MOST_AHEAD + 2];

    Attention(const Cache<Bfloat>& cache, Plan& plan, const Tile& tile, const Tile* next, Scratch& s)
        : Item(plan, tile, s, cache.A), cache(cache), next(next), m(s.matrix) {}

    // Queries as left tiles, those of a lane after those of the lane before.
    void round_queries(const float* q, size_t stride, int G, float scale) {
        scale *= LOG2_E;  // weights are powers of two
        each_row(G, [&](int row, int token, int head) {
            const float* from = q + size_t(token) * stride + size_t(head) * A;
            const int of_lane = row % lane_rows;
            uint16_t* to = m.q + (row / lane_rows * tiles + of_lane / SIDE) * steps * (TILE / 2) + of_lane % SIDE * DEPTH;
            for (int d = 0; d + DEPTH <= A; d += DEPTH, to += TILE / 2)
                store(to, to_bfloats(load<F>(from + d) * scale, load<F>(from + d + W) * scale));
            const F rest = A % DEPTH ? load<F>(from + A - W) * scale : F{};
            if (A == W) store(to, to_bfloats(rest, F{}));
            else if (A % DEPTH) store(to, to_bfloats(F{}, rest));
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

    // ---- units in the order in which they are read: of each segment and lane the keys, then the values ----

    int units_ahead() const { return std::min(MOST_AHEAD, std::max(2, AHEAD / int(UNIT * A * sizeof(Bfloat)))); }
    int first_of(const Tile& t) const { return std::max(plan.group(t, 0).low, t.from) / UNIT * UNIT; }
    // Those of a tile from `at` on, up to `end`.
    const uint8_t** list_units(const Tile& t, int at, const uint8_t** to, const uint8_t** end) const {
        const Group& g = plan.group(t, 0);
        const int64_t next_head = cache.head_at(0, 1) * sizeof(Bfloat), values_at = (const char*)cache.values - (const char*)cache.keys;
        while (at < t.to && to < end) {
            const int stop = std::min(t.to, (at / SEGMENT + 1) * SEGMENT), count = (stop - at + UNIT - 1) / UNIT;
            const uint8_t* units[SEGMENT / UNIT];
            for (int unit = 0; unit < count; unit++) units[unit] = (const uint8_t*)key_unit(g, at + unit * UNIT);
            for (int part = 0; part < 2 * t.lanes; part++)
                for (int unit = 0; unit < count && to < end; unit++) *to++ = units[unit] + part / 2 * next_head + part % 2 * values_at;
            at = stop;
        }
        return to;
    }
    // Those of a segment, and some that follow.
    void list_segment() {
        if (!keys_direct) return;
        const uint8_t **end = sequence + lanes * 2 * units() + units_ahead() + 2, **to = list_units(tile, begin / UNIT * UNIT, sequence, end);
        if (next && to < end) {
            const uint8_t** first = to;
            to = list_units(*next, first_of(*next), to, end);
            s.fetched = *first;
        }
        for (; to < end; to++) *to = to[-1];
    }
    // What nobody asked for in time: the first ones of a tile.
    void fetch_first() {
        if (!keys_direct) return;
        const uint8_t **end = list_units(tile, low / UNIT * UNIT, sequence, sequence + units_ahead());
        if (s.fetched == sequence[0]) return;
        for (const uint8_t** unit = sequence; unit < end; unit++) Cursor{unit, A / 2}.fetch(0);
    }
    int units() const { return (stop - begin / UNIT * UNIT + UNIT - 1) / UNIT; }  // of the segment

    // Of a lane's queries in a tile, units [first, end) of keys.
    void score(int lane, int at, const Cursor& ahead, int first, int end) const {
        const uint16_t* q = m.q + (lane * tiles + at) * steps * (TILE / 2);
        float* scores = m.scores[at % 2];
        switch (steps) {
            case 1: return score_units<1>(q, keys, ahead, first, end, A, scores);
            case 2: return score_units<2>(q, keys, ahead, first, end, A, scores);
        }
        score_units<0>(q, keys, ahead, first, end, A, scores);
    }

    // Scores of R queries of a lane, from `row` on, become weights, all of them step by step: a row by itself is a chain.
    // A total is that of the rounded weights, as these are what values are multiplied by: then the parts of a sum are 1
    // together.
    template <int R>
    void soften(State& sums, int lane, int row) const {
        const int first_step = (begin - segment) / KEYS, end_step = (stop - segment + KEYS - 1) / KEYS;
        float* scores = m.scores[row / SIDE % 2] + row % SIDE * SCORES;
        uint16_t* weights = m.weights[row / SIDE % 2] + row % SIDE * DEPTH;
        // keys that the first and the last query see: those between see no more
        const int token = shared ? 0 : row / heads, last_token = shared ? 0 : (row + R - 1) / heads, size = stop - segment;
        const int from = std::max(begin - segment, sees_from(token, segment)), end = sees_to(last_token, segment, size);
        const int seen = from < end ? from / KEYS : end_step, seen_end = from < end ? (end + KEYS - 1) / KEYS : end_step;
        const auto nothing = [&](int step, int stop_step) {
            for (; step < stop_step; step++)
                for (int r = 0; r < R; r++) store(weights + step * (TILE / 2) + r * DEPTH, __m512i{});
        };
        nothing(first_step, seen);
        nothing(seen_end, end_step);
        for (int r = 0; r < R; r++) {
            const int token = shared ? 0 : (row + r) / heads;
            hide(scores + r * SCORES, seen * KEYS, std::min(seen_end * KEYS, std::max(begin - segment, sees_from(token, segment))));
            hide(scores + r * SCORES, std::max(seen * KEYS, sees_to(token, segment, size)), seen_end * KEYS);
        }
        F most[R];
        UNROLL
        for (int r = 0; r < R; r++) most[r] = splat(-INFINITY);
        for (int t = seen * KEYS; t < seen_end * KEYS; t += W)
            UNROLL
            for (int r = 0; r < R; r++) most[r] = greater(load<F>(scores + r * SCORES + t), most[r]);
        F total[R];
        UNROLL
        for (int r = 0; r < R; r++) {
            const float largest = across(most[r], [](F a, F b) { return greater(a, b); });
            sums.largest[lane * lane_rows + row + r] = largest;
            most[r] = splat(largest == -INFINITY ? 0.0f : largest);  // where nothing is seen, no key has a weight
            total[r] = F{};
        }
        for (int step = seen; step < seen_end; step++)
            UNROLL
            for (int r = 0; r < R; r++) {
                const float* at = scores + r * SCORES + step * KEYS;
                const F low = rough_power_of_two(load<F>(at) - most[r]), high = rough_power_of_two(load<F>(at + W) - most[r]);
                const __m512i rounded = to_bfloats(low, high);
                total[r] = (F)_mm512_dpbf16_ps((__m512)total[r], (__m512bh)rounded, (__m512bh)_mm512_set1_epi16(0x3f80));  // 1
                store(weights + step * (TILE / 2) + r * DEPTH, rounded);
            }
        UNROLL
        for (int r = 0; r < R; r++) store(sums.total + (lane * lane_rows + row + r) * W, total[r]);
    }
    void soften(State& sums, int lane, int row, int end) const {
        for (; row + 4 <= end; row += 4) soften<4>(sums, lane, row);
        switch (end - row) {
            case 3: return soften<3>(sums, lane, row);
            case 2: return soften<2>(sums, lane, row);
            case 1: return soften<1>(sums, lane, row);
        }
    }
    // Keys [from, end) of a query.
    static void hide(float* scores, int from, int end) {
        while (from < end) {
            const int lane = from % W, stop = std::min(W, lane + end - from);
            _mm512_mask_storeu_ps(scores + from - lane, __mmask16((1u << stop) - (1u << lane)), _mm512_set1_ps(-INFINITY));
            from += stop - lane;
        }
    }

    // Keys [begin, stop) of one segment, and one lane. While a tile's scores become weights, in quarters, the next one is
    // scored and the one before it is summed: the matrix unit goes to sleep after 0.3 us, and takes as long to wake.
    void sum_lane(State& sums, int lane) {
        const Group& g = of_lane(lane);
        const int first_unit = (begin - segment) / UNIT, first = (begin - segment) / KEYS, end = (stop - segment + KEYS - 1) / KEYS;
        find_keys(g);
        Cursor ahead{keys_direct ? sequence + lane * 2 * units() + units_ahead() - first_unit : nullptr, A / 2};
        score(lane, 0, ahead, first_unit, first_unit + units());
        if (ahead.units) ahead.units += units();
        ValueSums pending{}, mine{};
        bool hidden = false;
        for (int at = 0; at < tiles; at++) {
            const int row = at * SIDE, last = std::min(lane_rows, row + SIDE);
            for (int quarter = 0; quarter < 4; quarter++) {
                soften(sums, lane, std::min(last, row + quarter * SIDE / 4), std::min(last, row + (quarter + 1) * SIDE / 4));
                if (at + 1 < tiles)
                    score(lane, at + 1, {nullptr, 0}, first_unit + units() * quarter / 4, first_unit + units() * (quarter + 1) / 4);
                pending.sum(pending.work() * (quarter + 1) / 4);
            }
            float* out = sums.out + (lane * lane_rows + row) * span;
            if (at == 0) hidden = find_values(g, begin, stop);
            mine = {m.weights[at % 2], values, first, end, A, out, span, at == 0 ? ahead : Cursor{nullptr, 0}};
            if (hidden) pending = mine;
            else sum_each(mine, lane, row, last);
        }
        pending.sum(pending.work());
    }
    // The same for each token by itself, whose queries see all of the values that are copied.
    void sum_each(ValueSums of_tile, int lane, int row, int end) {
        for (int token = row / heads; token * heads < end; token++) {
            find_values(of_lane(lane), std::max(begin, segment + sees_from(token, segment)), segment + sees_to(token, segment, stop - segment));
            ValueSums mine = of_tile;
            mine.to = m.spare, mine.span = A, mine.ahead = {nullptr, 0};
            mine.sum(mine.work());
            for (int r = std::max(row, token * heads); r < std::min(end, (token + 1) * heads); r++)
                std::memcpy(of_tile.to + (r - row) * span, m.spare + (r - row) * A, sizeof(float) * A);
        }
    }

    void run(const float* q, size_t q_stride, float scale, float* y, size_t y_stride, int G) {
        round_queries(q, q_stride, G, scale);
        fetch_first();
        s.fetched = nullptr;
        each_segment(y, y_stride, G, [this](State& sums, int at, int end) {
            begin = at, stop = end;
            list_segment();
            for (int lane = 0; lane < lanes; lane++) sum_lane(sums, lane);
        });
    }
};
#endif
