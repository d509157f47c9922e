// Attention over paged keys and values: decode and chunked prefill in one kernel.
//
// A block of the cache holds P tokens of every layer, as halves or floats. Per layer and key/value head of A values:
//
//     keys     units of U tokens   [P / U, A, U]   so that a vector holds one value of several keys
//     values                       [P, A]
//
// U = 16 where P is a multiple of it, else 1. An item is one head of keys and queries that read it: a few tokens
// of one row times the query heads of the group. Keys are visited in chunks of 64 from position 0, with the
// online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022), so a token's sums have one order whatever
// else is in the batch. A value is read for the tokens that see it only: a NaN reaches none before it.
#pragma once
#include "rowwise.h"

constexpr int CHUNK = 64;   // keys between two corrections of the softmax
constexpr int UNIT = 16;    // keys that are read at once
constexpr int QUERIES = 24; // rows of a tile, at most
constexpr int MOST_HEAD = 256;

template <class T>
struct Cache {
    T* keys;  // of one layer
    T* values;
    int32_t P, U, K, A;  // tokens per block, tokens per unit, heads, head size
    int64_t head_size() const { return int64_t(P) * A; }
    T* key_unit(int64_t block, int head, int offset) const {
        return keys + (block * K + head) * head_size() + int64_t(offset / U) * U * A;
    }
    T* value_rows(int64_t block, int head, int offset) const {
        return values + (block * K + head) * head_size() + int64_t(offset) * A;
    }
};

INLINE F wide(const uint16_t* at) { return from_half(at); }
INLINE F wide(const float* at) { return load<F>(at); }
INLINE void narrow(uint16_t* to, F v) { to_half(to, v); }
INLINE void narrow(float* to, F v) { store(to, v); }

template <class T>
static void write_kv(const Cache<T>& cache, int64_t slot, int head, const float* k, const float* v) {
    const int64_t block = slot / cache.P;
    const int offset = int(slot % cache.P), U = cache.U;
    T* keys = cache.key_unit(block, head, offset) + offset % U;
    T* values = cache.value_rows(block, head, offset);
    for (int d = 0; d < cache.A; d += W) {
        T key[W];
        narrow(key, load<F>(k + d));
        UNROLL
        for (int i = 0; i < W; i++) keys[(d + i) * U] = key[i];
        narrow(values + d, load<F>(v + d));
    }
}

struct Row {  // one request's tokens in this step
    int32_t first, count;     // in the flat axis
    int32_t context;          // tokens in the cache once this step is written
    const int32_t* blocks;
};

struct Tile {  // of queries: `count` tokens from `first` of a row, `heads` query heads from `head` of a key head
    int32_t row, kv_head, first, count, head, heads;
};

struct Scratch {  // of one thread
    // a query's row is 16 floats longer than a head: rows that lie a power of two apart fight for the same cache lines
    alignas(64) float q[QUERIES * (MOST_HEAD + 16)];
    alignas(64) float out[QUERIES * (MOST_HEAD + 16)];
    alignas(64) float scores[QUERIES * CHUNK];
    alignas(64) float wide[CHUNK * MOST_HEAD];      // keys or values as floats
    alignas(64) float gathered[CHUNK * MOST_HEAD];  // units gathered from small blocks
    float largest[QUERIES], total[QUERIES];
};

// scores[r, 0..16) = q[r] . keys, for M rows; keys [A, 16].
template <int M, class T>
INLINE void score_rows(const float* q, int stride, const T* keys, int A, float* scores) {
    constexpr int V = UNIT / W;
    F acc[M][V];
    UNROLL
    for (int r = 0; r < M; r++)
        UNROLL
        for (int v = 0; v < V; v++) acc[r][v] = F{};
    for (int d = 0; d < A; d++) {
        F k[V];
        UNROLL
        for (int v = 0; v < V; v++) k[v] = wide(keys + d * UNIT + v * W);
        UNROLL
        for (int r = 0; r < M; r++)
            UNROLL
            for (int v = 0; v < V; v++) acc[r][v] = fma(k[v], q[r * stride + d], acc[r][v]);
    }
    UNROLL
    for (int r = 0; r < M; r++)
        UNROLL
        for (int v = 0; v < V; v++) store(scores + r * CHUNK + v * W, acc[r][v]);
}

// out[r] += sum over keys [from, to) of every unit of weights[r, t] * values[t], for M rows and V vectors of columns.
// Accumulators stay in registers over all units.
template <int M, int V, class T>
INLINE void add_columns(
    float* out, int stride, const float* weights, const T* const* units, int count, int column, int A, int from, int to
) {
    F acc[M][V];
    UNROLL
    for (int r = 0; r < M; r++)
        UNROLL
        for (int v = 0; v < V; v++) acc[r][v] = load<F>(out + r * stride + column + v * W);
    for (int u = 0; u < count; u++, weights += UNIT) {
        const T* values = units[u] + column;
#pragma GCC unroll 2
        for (int t = from; t < to; t++) {
            F x[V];
            UNROLL
            for (int v = 0; v < V; v++) x[v] = wide(values + t * A + v * W);
            UNROLL
            for (int r = 0; r < M; r++)
                UNROLL
                for (int v = 0; v < V; v++) acc[r][v] = fma(x[v], weights[r * CHUNK + t], acc[r][v]);
        }
    }
    UNROLL
    for (int r = 0; r < M; r++)
        UNROLL
        for (int v = 0; v < V; v++) store(out + r * stride + column + v * W, acc[r][v]);
}

constexpr int TALL = VECTORS ? 6 : 3;  // rows whose accumulators fit the registers

// `run` for all rows: as many at once as there are registers for. run(M, r): M a constant.
template <class Run>
INLINE void in_rows(int r, int end, const Run& run) {
    for (; r + TALL <= end; r += TALL) run(std::integral_constant<int, TALL>(), r);
    switch (end - r) {
#if VECTORS
        case 5: run(std::integral_constant<int, 3>(), r), r += 3; [[fallthrough]];
        case 2: return run(std::integral_constant<int, 2>(), r);
        case 4: return run(std::integral_constant<int, 4>(), r);
        case 3: return run(std::integral_constant<int, 3>(), r);
#else
        case 2: return run(std::integral_constant<int, 2>(), r);
#endif
        case 1: return run(std::integral_constant<int, 1>(), r);
    }
}

template <class T>
static void score_unit(const Scratch& s, int stride, int rows, const T* keys, int A, float* scores) {
    in_rows(0, rows, [&](auto m, int r) {
        score_rows<decltype(m)::value>(s.q + r * stride, stride, keys, A, scores + r * CHUNK);
    });
}

// Rows [first, end) of the tile see keys [from, to) of every unit.
template <class T>
static void value_units(
    Scratch& s, int stride, int first, int end, const T* const* units, int count, int A, const float* weights, int from, int to
) {
    int column = 0;
    for (; column + 2 * W <= A; column += 2 * W)
        in_rows(first, end, [&](auto m, int r) {
            add_columns<decltype(m)::value, 2>(s.out + r * stride, stride, weights + r * CHUNK, units, count, column, A, from, to);
        });
    for (; column < A; column += W)
        in_rows(first, end, [&](auto m, int r) {
            add_columns<decltype(m)::value, 1>(s.out + r * stride, stride, weights + r * CHUNK, units, count, column, A, from, to);
        });
}

// One tile at work.
template <class T>
struct Attention {
    const Cache<T>& cache;
    const Row& row;
    const Tile& tile;
    int window;
    Scratch& s;
    const int A = cache.A, span = A + 16, rows = tile.count * tile.heads;  // span: from a query to the next
    const int start = row.context - row.count + tile.first;             // position of the first query
    const int end = start + tile.count;                                 // keys that any of them sees
    const int low = window > 0 ? std::max(0, start - window + 1) : 0;   // blocks below may be gone

    // Keys [from, to) that a token of the tile sees, counted from `base`, at most `size`.
    int sees_from(int token, int base) const { return window > 0 ? std::max(0, start + token - window + 1 - base) : 0; }
    int sees_to(int token, int base, int size) const { return std::min(size, start + token + 1 - base); }

    // The 16 keys from `position` on, [A, 16]; where they do not lie so in the cache they are gathered.
    const T* keys_at(int position) const {
        if (cache.U == UNIT) return cache.key_unit(row.blocks[position / cache.P], tile.kv_head, position % cache.P);
        T* into = (T*)s.gathered;
        for (int t = std::max(0, low - position); t < UNIT && position + t < end; t++) {
            const int at = position + t;
            const T* key = cache.key_unit(row.blocks[at / cache.P], tile.kv_head, at % cache.P);
            for (int d = 0; d < A; d++) into[d * UNIT + t] = key[d];
        }
        return into;
    }
    // The values, [16, A]; `unit` of a chunk.
    const T* values_at(int position, int unit) const {
        if (cache.U == UNIT) return cache.value_rows(row.blocks[position / cache.P], tile.kv_head, position % cache.P);
        T* into = (T*)s.gathered + unit * UNIT * A;
        for (int t = std::max(0, low - position); t < UNIT && position + t < end; t++) {
            const int at = position + t;
            std::memcpy(into + t * A, cache.value_rows(row.blocks[at / cache.P], tile.kv_head, at % cache.P), sizeof(T) * A);
        }
        return into;
    }

    // What will be read soon: a block may lie anywhere, so the processor cannot guess it.
    void fetch(int position) const {
        if (cache.U != UNIT) return;
        const int64_t block = row.blocks[position / cache.P];
        const char* keys = (const char*)cache.key_unit(block, tile.kv_head, position % cache.P);
        const char* values = (const char*)cache.value_rows(block, tile.kv_head, position % cache.P);
        for (size_t at = 0; at < sizeof(T) * UNIT * A; at += 64) {
            __builtin_prefetch(keys + at);
            __builtin_prefetch(values + at);
        }
    }

    bool widens() const { return sizeof(T) == 2 && rows > 4; }  // as many rows read it: floats are made once
    const float* widen(const T* unit, int number) const {
        float* into = s.wide + number * UNIT * A;
        for (int i = 0; i < UNIT * A; i += W) store(into + i, wide(unit + i));
        return into;
    }

    void begin(const float* q, size_t stride, int G, float scale) {
        for (int r = 0; r < rows; r++) {
            const int token = r / tile.heads, head = tile.kv_head * G + tile.head + r % tile.heads;
            const float* from = q + size_t(row.first + tile.first + token) * stride + size_t(head) * A;
            for (int d = 0; d < A; d++) s.q[r * span + d] = from[d] * scale;
            std::memset(s.out + r * span, 0, sizeof(float) * A);
            s.largest[r] = -INFINITY;
            s.total[r] = 0;
        }
    }

    // Scores of a chunk become weights, `size` of them in whole units; what was summed before is brought to the new
    // largest score.
    void soften(int r, int chunk, int size) {
        const int token = r / tile.heads, from = std::min(size, sees_from(token, chunk)), to = sees_to(token, chunk, size);
        float* scores = s.scores + r * CHUNK;
        for (int t = 0; t < from; t++) scores[t] = -INFINITY;
        for (int t = std::max(0, to); t < size; t++) scores[t] = -INFINITY;
        F most = splat(s.largest[r]);
        for (int t = 0; t < size; t += W) {
            const F x = load<F>(scores + t);
            most = x > most ? x : most;
        }
        const float largest = across(most, [](F a, F b) { return a > b ? a : b; });
        // nothing but -inf so far: no weight to any key, and 0 / 0 in the end if it stays so
        const float shift = largest == -INFINITY ? 0.0f : largest;
        F total{};
        for (int t = 0; t < size; t += W) {
            const F e = exp_below_zero(load<F>(scores + t) - shift);
            store(scores + t, e);
            total += e;
        }
        const float before = s.largest[r] == -INFINITY ? 0.0f : s.largest[r] == largest ? 1.0f : std::exp(s.largest[r] - largest);
        s.total[r] = s.total[r] * before + sum(total);
        s.largest[r] = largest;
        if (before != 1.0f)
            for (int d = 0; d < A; d += W) store(s.out + r * span + d, load<F>(s.out + r * span + d) * before);
    }

    // Whether every token of the tile sees all of a unit.
    bool whole(int at) const { return sees_from(tile.count - 1, at) == 0 && sees_to(0, at, UNIT) == UNIT; }

    void add_whole(int at, int end_at, const float* weights) {
        const T* units[CHUNK / UNIT];
        const float* floats[CHUNK / UNIT];
        int count = 0;
        for (; at < end_at; at += UNIT, count++) {
            units[count] = values_at(at, count);
            if (widens()) floats[count] = widen(units[count], count);
        }
        if (widens()) value_units(s, span, 0, rows, floats, count, A, weights, 0, UNIT);
        else value_units(s, span, 0, rows, units, count, A, weights, 0, UNIT);
    }
    void add_partial(int at, const float* weights) {
        const T* values = values_at(at, 0);
        for (int token = 0; token < tile.count; token++) {
            const int from = sees_from(token, at), to = sees_to(token, at, UNIT), r = token * tile.heads;
            if (from < to) value_units(s, span, r, r + tile.heads, &values, 1, A, weights, from, to);
        }
    }
    // Values of positions [at, last) of a chunk, in their order.
    void add(int chunk, int at, int last) {
        for (; at < last && !whole(at); at += UNIT) add_partial(at, s.scores + (at - chunk));
        const int first = at;
        while (at < last && whole(at)) at += UNIT;
        if (first < at) add_whole(first, at, s.scores + (first - chunk));
        for (; at < last; at += UNIT) add_partial(at, s.scores + (at - chunk));
    }

    void run() {
        for (int at = low / UNIT * UNIT; at < std::min(end, low + CHUNK); at += UNIT) fetch(at);
        for (int chunk = low / CHUNK * CHUNK; chunk < end; chunk += CHUNK) {
            const int first = std::max(chunk, low / UNIT * UNIT), last = std::min(end, chunk + CHUNK);
            for (int at = first; at < last; at += UNIT) {
                if (at + CHUNK < end) fetch(at + CHUNK);
                const T* keys = keys_at(at);
                if (widens()) score_unit(s, span, rows, widen(keys, 0), A, s.scores + (at - chunk));
                else score_unit(s, span, rows, keys, A, s.scores + (at - chunk));
            }
            const int size = (last - chunk + UNIT - 1) / UNIT * UNIT;
            for (int r = 0; r < rows; r++) soften(r, chunk, size);
            add(chunk, first, last);
        }
    }

    void finish(float* out, size_t stride, int G) const {
        for (int r = 0; r < rows; r++) {
            const int token = r / tile.heads, head = tile.kv_head * G + tile.head + r % tile.heads;
            float* to = out + size_t(row.first + tile.first + token) * stride + size_t(head) * A;
            const float inverse = 1.0f / s.total[r];
            for (int d = 0; d < A; d++) to[d] = s.out[r * span + d] * inverse;
        }
    }
};

// The queries of a tile that fit it: tokens of a row times heads of a group.
INLINE int tile_heads(int G) { return std::min(G, QUERIES); }
INLINE int tile_tokens(int G) { return std::max(1, QUERIES / G); }
