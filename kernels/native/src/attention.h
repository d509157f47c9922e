// Attention over paged keys and values: decode and chunked prefill in one kernel.
//
// Keys are visited in chunks of 64 from position 0, with the online softmax (Milakov and Gimelshein, 2018; Dao et
// al., 2022), and every 256 the sums begin anew and are folded together (plan.h). A value is read for the tokens
// that see it only: a NaN reaches none before it.
#pragma once
#include "item.h"

constexpr int BITE = 12 << 10;  // bytes of keys, or of values

// One tile at work.
template <class T>
struct Attention : Item {
    const Cache<T>& cache;
    const Tile* next;  // what this thread does then, if it is known
    static constexpr const T* const* NONE = nullptr;  // no units that will be read next

    Attention(const Cache<T>& cache, Plan& plan, const Tile& tile, const Tile* next, Scratch& s)
        : Item(plan, tile, s, cache.A), cache(cache), next(next) {}

    void begin(const float* q, size_t stride, int G, float scale) {
        scale *= LOG2_E;  // weights are powers of two
        each_row(G, [&](int row, int token, int head) {
            const float* from = q + size_t(token) * stride + size_t(head) * A;
            for (int d = 0; d < A; d += W) store(s.q + row * span + d, load<F>(from + d) * scale);
        });
    }

    void clear(State& sums) const {
        for (int r = 0; r < rows; r++) {
            std::memset(sums.out + r * span, 0, sizeof(float) * A);
            store(sums.total + r * W, F{});
            sums.largest[r] = -INFINITY;
        }
    }

    // The keys [A, 16] and values [16, A] of a unit.
    const T* keys_of(const Group& g, int position) const {
        return cache.key_unit(g.blocks[position / cache.P], g.kv_head, position % cache.P);
    }
    const T* values_of(const Group& g, int position) const {
        return cache.value_rows(g.blocks[position / cache.P], g.kv_head, position % cache.P);
    }

    // Where they do not lie so in the cache they are gathered. `unit` of a chunk.
    template <class Copy>
    const T* gather(int position, int unit, const Copy& copy) const {
        T* into = (T*)s.gathered + unit * UNIT * A;
        for (int t = std::max(0, low - position); t < UNIT && position + t < to; t++) copy(into, position + t, t);
        return into;
    }

    // Finds the units of a segment, and those of the chunk after it.
    void find_units() const {
        if (cache.U != UNIT) return;
        const int first = std::max(segment, low / UNIT * UNIT), end = std::min(segment + SEGMENT + CHUNK, to);
        int block = first / cache.P, offset = first % cache.P;
        for (int at = first; at < end; at += UNIT) {
            const T* unit = cache.keys + cache.head_at(group.blocks[block], group.kv_head) + offset * A;
            for (int lane = 0; lane < lanes; lane++, unit += cache.head_at(0, 1)) s.units[lane][(at - segment) / UNIT] = unit;
            if ((offset += UNIT) == cache.P) offset = 0, block++;
        }
    }
    const T* unit_at(int lane, int position, bool values) const {
        const T* keys = (const T*)s.units[lane][(position - segment) / UNIT];
        return values ? keys + (cache.values - cache.keys) : keys;
    }

    const T* keys_at(int lane, int position, int unit) const {
        if (cache.U == UNIT) return unit_at(lane, position, false);
        return gather(position, unit, [this, lane](T* into, int at, int t) {
            const T* key = keys_of(of_lane(lane), at);
            for (int d = 0; d < A; d++) into[d * UNIT + t] = key[d];
        });
    }
    const T* values_at(int lane, int position, int unit) const {
        if (cache.U == UNIT) return unit_at(lane, position, true);
        return gather(position, unit, [this, lane](T* into, int at, int t) {
            std::memcpy(into + t * A, values_of(of_lane(lane), at), sizeof(T) * A);
        });
    }

    // Units that are read at once, and those that will be read after them: they are asked for meanwhile.
    struct Units {
        const T* now[CHUNK / UNIT];
        const T* then[CHUNK / UNIT];
    };
    struct Ahead {  // the next of these; tile null: nowhere
        const Tile* tile;
        bool values;
        int at, lane = 0;
    };
    // What lies side by side in a block is asked for so, all its heads in turn: memory is faster in that order.
    void look_ahead(Units& units, int count, Ahead& ahead) const {
        for (int u = 0; u < count; u++) {
            units.then[u] = units.now[u];
            if (cache.U != UNIT || !ahead.tile || ahead.at >= ahead.tile->to) continue;
            const bool mine = ahead.tile == &tile;
            units.then[u] = mine ? unit_at(ahead.lane, ahead.at, ahead.values)
                                 : keys_of(plan.group(*ahead.tile, ahead.lane), ahead.at);
            if (++ahead.lane == ahead.tile->lanes) ahead.lane = 0, ahead.at += UNIT;
        }
    }
    int first_of(const Tile& t) const { return std::max(plan.group(t, 0).low, t.from) / UNIT * UNIT; }
    // Units of all lanes that are read before the next, at most: they and those stay in the first cache.
    int bite() const {
        return lanes == 1 ? CHUNK / UNIT : std::max(1, std::min(CHUNK, BITE / int(lanes * A * sizeof(T))) / UNIT);
    }
    Ahead after(int chunk) const {
        if (chunk + CHUNK < to) return {&tile, false, chunk + CHUNK};
        if (!next) return {nullptr, false, 0};
        s.fetched = keys_of(plan.group(*next, 0), first_of(*next));
        return {next, false, first_of(*next)};
    }
    // What nobody asked for in time: the first keys of a tile.
    void fetch(int first) const {
        const int end = std::min(to, first + bite() * UNIT);
        if (cache.U != UNIT || s.fetched == keys_of(group, first)) return;
        for (int at = first; at < end; at += UNIT)
            for (int lane = 0; lane < lanes; lane++) {
                const T* unit = keys_of(of_lane(lane), at);
                for (int i = 0; i < UNIT * A; i += LINE / sizeof(T)) __builtin_prefetch(unit + i);
            }
    }

    bool widens() const { return sizeof(T) < 4 && lane_rows > 4; }  // as many rows read it: floats are made once
    const float* widen(const T* unit, int number) const {
        float* into = s.wide + number * UNIT * A;
        for (int i = 0; i < UNIT * A; i += UNIT)
            UNROLL
            for (int v = 0; v < UNIT; v += W) store(into + i + v, wide(unit + i + v));
        return into;
    }
    // A unit that not every query sees: zeros where none does. Whether the rest is finite: then a weight of 0 hides it.
    bool widen_part(const T* unit, int at, int number) const {
        float* into = s.wide + number * UNIT * A;
        F bad{};
        for (int t = 0; t < UNIT; t++)
            for (int d = 0; d < A; d += W) {
                const bool seen = at + t >= low && at + t < to;
                const F x = seen ? wide(unit + t * A + d) : F{};
                store(into + t * A + d, x);
                bad = fma(x, 0.0f, bad);
            }
        return sum(bad) == 0.0f;
    }

    // What the bytes of keys and values are worth, of a chunk's positions [begin, size).
    void scale_chunk(int chunk, int begin, int size) const {
        for (int lane = 0; lane < lanes; lane++)
            for (int t = begin; t < size; t++) {
                const int at = chunk + t, kv_head = of_lane(lane).kv_head;
                const bool seen = at >= low && at < to;
                const int64_t block = seen ? group.blocks[at / cache.P] : 0;
                s.scales[lane][0][t] = seen ? cache.key_scales(block, kv_head)[at % cache.P] : 0.0f;
                s.scales[lane][1][t] = seen ? cache.value_scales(block, kv_head)[at % cache.P] : 0.0f;
            }
    }

    void score(int lane, int first, int count, Ahead& ahead, float* scores) const {
        const float* q = s.q + lane * lane_rows * span;
        Units keys;
        for (int u = 0; u < count; u++) keys.now[u] = keys_at(lane, first + u * UNIT, u);
        look_ahead(keys, count, ahead);
        if (!widens()) return score_units(q, span, lane_rows, keys.now, keys.then, count, A, scores);
        for (int u = 0; u < count; u++) {
            const float* floats = widen(keys.now[u], 0);
            score_units(q, span, lane_rows, &floats, keys.then + u, 1, A, scores + u * UNIT);
        }
    }

    // Of N vectors of scores.
    template <int N>
    static void weigh(float* scores, const float* scales, float shift, F& total) {
        F e[N];
        UNROLL
        for (int i = 0; i < N; i++) e[i] = load<F>(scores + i * W) - shift;
        powers_of_two(e);
        UNROLL
        for (int i = 0; i < N; i++) {
            total += e[i];
            // a weight of 0 stays one whatever the scale: it may be NaN
            if (Cache<T>::SCALED) e[i] = e[i] == 0.0f ? F{} : e[i] * load<F>(scales + i * W);
            store(scores + i * W, e[i]);
        }
    }

    // Scores of a chunk become weights, `size` of them from `chunk` on; what was summed before is brought to the new
    // largest score.
    void soften(State& sums, int chunk, int begin, int size, bool masked) const {
        for (int r = 0; r < rows; r++) {
            float* scores = s.scores + r * CHUNK;
            if constexpr (Cache<T>::SCALED)
                for (int t = begin; t < size; t += W)
                    store(scores + t, load<F>(scores + t) * load<F>(s.scales[r / lane_rows][0] + t));
            if (masked) {
                const int token = r % lane_rows / heads;
                const int from = sees_from(token, chunk), end = sees_to(token, chunk, size);
                for (int t = begin; t < std::min(size, from); t++) scores[t] = -INFINITY;
                for (int t = std::max(begin, end); t < size; t++) scores[t] = -INFINITY;
            }
            F most = splat(sums.largest[r]);
            for (int t = begin; t < size; t += W) most = greater(load<F>(scores + t), most);
            s.fresh[r] = across(most, [](F a, F b) { return greater(a, b); });
        }
        for (int r = 0; r < rows; r += W) {
            const F before = load<F>(sums.largest + r), now = load<F>(s.fresh + r);
            store(s.factor + r, before == now ? splat(1.0f) : power_of_two(before - now));
            store(sums.largest + r, now);
        }
        for (int r = 0; r < rows; r++) {
            float *scores = s.scores + r * CHUNK, *out = sums.out + r * span;
            // nothing but -inf so far: no weight to any key, and 0 / 0 in the end if it stays so
            const float shift = s.fresh[r] == -INFINITY ? 0.0f : s.fresh[r], factor = s.factor[r];
            F total{};
            int t = begin;
            const float* scales = s.scales[r / lane_rows][1];
            for (; t + 2 * UNIT <= size; t += 2 * UNIT) weigh<2 * UNIT / W>(scores + t, scales + t, shift, total);
            if (t < size) weigh<UNIT / W>(scores + t, scales + t, shift, total);
            store(sums.total + r * W, fma(load<F>(sums.total + r * W), factor, total));
            for (int d = 0; factor != 1.0f && d < A; d += W) store(out + d, load<F>(out + d) * factor);
        }
    }

    // Values of `count` units, which every query sees.
    void add_whole(float* out, int lane, int first, int count, Ahead& ahead, const float* weights) const {
        Units values;
        for (int u = 0; u < count; u++) values.now[u] = values_at(lane, first + u * UNIT, u);
        look_ahead(values, count, ahead);
        if (!widens()) return add_units<true>(out, span, 0, lane_rows, weights, values.now, values.then, count, A, 0, UNIT);
        const float* floats[CHUNK / UNIT];
        for (int u = 0; u < count; u++) floats[u] = widen(values.now[u], u);
        add_units<true>(out, span, 0, lane_rows, weights, floats, values.then, count, A, 0, UNIT);
    }
    void add_partial(float* out, int lane, int at, const float* weights) const {
        const T* values = values_at(lane, at, 0);
        if (tokens > 1 && widen_part(values, at, 0)) {
            const float* floats = s.wide;
            return add_units(out, span, 0, lane_rows, weights, &floats, NONE, 1, A, 0, UNIT);
        }
        for (int token = 0; token < tokens; token++) {
            const int from = sees_from(token, at), end = sees_to(token, at, UNIT), r = token * heads;
            if (from < end) add_units(out, span, r, r + heads, weights, &values, NONE, 1, A, from, end);
        }
    }

    // Keys [at, stop) of one segment.
    void sum_segment(State& sums, int at, int stop) const {
        for (int chunk = at / CHUNK * CHUNK; chunk < stop; chunk += CHUNK) {
            const int first = std::max(chunk, at / UNIT * UNIT), last = std::min(stop, chunk + CHUNK);
            const int count = (last - first + UNIT - 1) / UNIT, begin = first - chunk, size = begin + count * UNIT;
            int from = first, end = first + count * UNIT;  // of the units that are seen whole
            while (from < end && !whole(from, UNIT)) from += UNIT;
            while (end > from && !whole(end - UNIT, UNIT)) end -= UNIT;
            if (Cache<T>::SCALED) scale_chunk(chunk, begin, size);
            for (int unit = first, next; unit < last; unit = next) {
                next = std::min(first + count * UNIT, unit + bite() * UNIT);
                Ahead ahead{&tile, next >= last, next < last ? next : first};
                for (int lane = 0; lane < lanes; lane++)
                    score(lane, unit, (next - unit) / UNIT, ahead, s.scores + lane * lane_rows * CHUNK + unit - chunk);
            }
            soften(sums, chunk, begin, size, from > first || end < first + count * UNIT);
            const auto each_lane = [&](int unit, const auto& run) {
                for (int lane = 0; lane < lanes; lane++)
                    run(sums.out + lane * lane_rows * span, lane, s.scores + lane * lane_rows * CHUNK + unit - chunk);
            };
            const auto partial = [&](int unit) {
                each_lane(unit, [&](float* out, int lane, const float* weights) { add_partial(out, lane, unit, weights); });
            };
            for (int unit = first; unit < from; unit += UNIT) partial(unit);
            for (int unit = from, next; unit < end; unit = next) {
                next = std::min(end, unit + bite() * UNIT);
                Ahead ahead = next < end ? Ahead{&tile, true, next} : after(chunk);
                each_lane(unit, [&](float* out, int lane, const float* weights) {
                    add_whole(out, lane, unit, (next - unit) / UNIT, ahead, weights);
                });
            }
            for (int unit = end; unit < last; unit += UNIT) partial(unit);
        }
    }

    void run(const float* q, size_t q_stride, float scale, float* y, size_t y_stride, int G) {
        begin(q, q_stride, G, scale);
        fetch(first_of(tile));
        s.fetched = nullptr;
        each_segment(y, y_stride, G, [this](State& sums, int at, int stop) {
            find_units();
            clear(sums);
            sum_segment(sums, at, stop);
        });
    }
};
