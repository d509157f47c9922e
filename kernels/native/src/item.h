// What attention does with a tile whatever its cache: whose queries see what, its segments, and what becomes of their sums.
#pragma once
#include "sums.h"

struct Item {
    Plan& plan;
    const Tile& tile;
    Scratch& s;
    const int A, span = A + 16;  // span: from a query to the next
    const Group& group = plan.group(tile, 0);
    const int window = plan.window, tokens = group.count, heads = group.heads;
    const int lanes = tile.lanes;             // heads of keys side by side: queries of the first come first
    const int start = group.start;            // position of the first query
    const bool shared = tile.groups > lanes;  // then every query sees every key
    const int low = std::max(group.low, tile.from), to = tile.to;
    int rows = 0, lane_rows = 0;  // of all lanes, and of each
    int segment = 0;              // where the present one begins

    Item(Plan& plan, const Tile& tile, Scratch& s, int A) : plan(plan), tile(tile), s(s), A(A) {
        for (int at = 0; at < tile.groups; at++) rows += plan.group(tile, at).queries();
        lane_rows = rows / lanes;
    }

    // Keys that a token of the group sees, counted from `base`, at most `size`.
    int sees_from(int token, int base) const { return window > 0 ? std::max(0, start + token - window + 1 - base) : 0; }
    int sees_to(int token, int base, int size) const {
        return shared ? size : std::min(size, start + token + 1 - base);
    }
    // Whether every query sees all of so many keys.
    bool whole(int at, int size) const { return sees_from(tokens - 1, at) == 0 && sees_to(0, at, size) == size; }

    // run(flat token, query head) for every query, in the order of the tile's rows.
    template <class Run>
    void each_query(const Group& g, int G, const Run& run) const {
        for (int token = 0; token < g.count; token++)
            for (int head = 0; head < g.heads; head++) run(g.token + token, g.kv_head * G + g.head + head);
    }
    // run(row, flat token, query head) for all of the tile's rows.
    template <class Run>
    void each_row(int G, const Run& run) const {
        int row = 0;
        for (int at = 0; at < tile.groups; at++)
            each_query(plan.group(tile, at), G, [&](int token, int head) { run(row++, token, head); });
    }
    const Group& of_lane(int lane) const { return plan.group(tile, lane); }

    static void give(float* to, const float* out, const float* total, int A) {
        const float inverse = 1.0f / sum(load<F>(total));
        for (int d = 0; d < A; d += W) store(to + d, load<F>(out + d) * inverse);
    }

    Sums part(const Group& g, int segment, int query) const {
        float* at = plan.part(g, segment, query, A);
        return {at, at + A, at + A + W};
    }
    // The sums of a segment, for whoever comes last.
    void keep(const State& sums, int segment) const {
        for (int at = 0, r = 0; at < tile.groups; at++) {
            const Group& g = plan.group(tile, at);
            for (int query = 0; query < g.queries(); query++, r++) {
                const Sums to = part(g, segment, query);
                std::memcpy(to.out, sums.out + r * span, sizeof(float) * A);
                store(to.total, load<F>(sums.total + r * W));
                *to.largest = sums.largest[r];
            }
        }
    }
    // Folds the segments of groups whose last one this tile did.
    void join(int segments, float* y, size_t stride, int G) const {
        for (int at = 0; at < tile.groups; at++) {
            Group& g = plan.group(tile, at);
            if (__atomic_sub_fetch(&g.left, segments, __ATOMIC_ACQ_REL)) continue;
            g.left = g.parts;  // for the next layer
            int query = 0;
            each_query(g, G, [&](int token, int head) {
                const Sums sums = part(g, g.low / SEGMENT, query);
                for (int at = 1; at < g.parts; at++) fold(sums, part(g, g.low / SEGMENT + at, query), A);
                give(y + size_t(token) * stride + size_t(head) * A, sums.out, sums.total, A);
                query++;
            });
        }
    }

    // Everything: sum_segment(sums, at, stop) sums the keys [at, stop) of one segment.
    template <class SumSegment>
    void each_segment(float* y, size_t y_stride, int G, const SumSegment& sum_segment) {
        State *now = &s.states[0], *all = &s.states[1];
        for (int at = low; at < to;) {
            const int stop = std::min(to, (at / SEGMENT + 1) * SEGMENT);
            segment = at / SEGMENT * SEGMENT;
            sum_segment(*now, at, stop);
            if (group.parts) keep(*now, at / SEGMENT);
            else if (at == low) std::swap(now, all);
            else
                for (int r = 0; r < rows; r++) fold(all->of(r, span), now->of(r, span), A);
            at = stop;
        }
        if (group.parts) return join((to - 1) / SEGMENT - low / SEGMENT + 1, y, y_stride, G);
        each_row(G, [&](int row, int token, int head) {
            give(y + size_t(token) * y_stride + size_t(head) * A, all->out + row * span, all->total + row * W, A);
        });
    }
};
