// What attention does in a step, cut into items.
//
// A group is a few tokens of one row and the query heads of one head of keys: they read the same keys. A tile is the
// item of a thread: groups, and the part of their keys [from, to) that it reads.
//
//     row 0   |== segment 0 ==|== segment 1 ==|= 2 =|      a group alone, whole: one tile from low to end
//     row 1   |== segment 0 ==|== segment 1 ==|== 2 ==|    rows whose blocks are the same: one tile of both groups
//     row 2   |==  the same ==|==  the same ==|= 2 =|      per segment, and one each for what is left
//
// Or groups of one row's few tokens and several heads of keys, which lie side by side in its blocks: a tile's lanes.
//
// Keys are summed within segments of 256 from position 0, and segments then in their order, whether one tile did them
// all or many did one each: a query's sums depend on its own row only. So where to cut is a question of time alone.
#pragma once
#include <vector>

#include "scores.h"

constexpr int SEGMENT = 256;  // keys; a multiple of CHUNK
constexpr int QUERIES = 48;   // of a tile, at most
constexpr int LANES = 4;      // heads of keys of a tile, at most
constexpr size_t SHARERS = 4;  // rows that read a segment together, at least

struct Rows {  // of a step
    int32_t count, width;      // width: blocks of a row in the table
    const int32_t* starts;     // [count + 1] in the flat axis
    const int32_t* contexts;   // tokens in the cache once the step is written
    const int32_t* blocks;     // [count, width]
};

struct Group {
    int32_t row, kv_head, first, count, head, heads;  // `count` tokens from `first` of the row, `heads` from `head`
    int32_t token, start;      // of its first query: place in the flat axis, position in the row
    int32_t low, end;          // keys that any of its queries sees
    int32_t left = 0, parts = 0;  // of a group that several tiles share: segments still to be stored, and all of them
    int64_t state = 0;         // where these lie
    const int32_t* blocks = nullptr;
    int queries() const { return count * heads; }
};

struct Tile {
    int32_t members, groups;  // `groups` of them from `members` on in the list of members
    int32_t from, to;         // keys
    int32_t lanes;            // 1: all groups read the same keys; else they are heads of keys of one row
};

class Plan {
  public:
    std::vector<Group> groups;
    std::vector<Tile> tiles;
    std::vector<int32_t> members;  // groups
    std::vector<float> states;     // of segments that have been summed: see `part`
    int window = 0;

    Group& group(const Tile& tile, int number) { return groups[members[tile.members + number]]; }
    // A segment of a group: per query A sums, W partial totals, the largest score.
    static int64_t query_state(int A) { return A + W + UNIT; }
    float* part(const Group& g, int segment, int query, int A) {
        return &states[g.state + (int64_t(segment - g.low / SEGMENT) * g.queries() + query) * query_state(A)];
    }

    void make(const Rows& rows, int P, int K, int G, int A, int threads) {
        groups.clear(), tiles.clear(), members.clear();
        shared_.assign(rows.count, 0);
        const int heads = std::min(G, QUERIES), most = std::max(1, QUERIES / G);
        for (int row = 0; row < rows.count; row++) {
            const int count = rows.starts[row + 1] - rows.starts[row], before = rows.contexts[row] - count;
            for (int first = 0; first < count; first += most)
                for (int kv_head = 0; kv_head < K; kv_head++)
                    for (int head = 0; head < G; head += heads) {
                        Group g;
                        g.row = row, g.kv_head = kv_head, g.first = first, g.head = head;
                        g.count = std::min(most, count - first), g.heads = std::min(heads, G - head);
                        g.token = rows.starts[row] + first;
                        g.start = before + first;
                        g.end = g.start + g.count;
                        g.low = window > 0 ? std::max(0, g.start - window + 1) : 0;
                        g.blocks = rows.blocks + int64_t(row) * rows.width;
                        groups.push_back(g);
                    }
        }
        if (window == 0 && heads == G) share(rows, P, most);
        cut(threads, A);
        place(A);
        const auto work = [this](const Tile& t) { return int64_t(t.to - t.from) * queries(t); };
        const auto less = [&](const Tile& a, const Tile& b) { return work(a) < work(b); };
        if (!std::is_sorted(tiles.begin(), tiles.end(), less)) std::stable_sort(tiles.begin(), tiles.end(), less);
    }

  private:
    struct Sharer {
        int32_t row, group;  // its first group: one per head of keys follows
    };

    int queries(const Tile& t) const {
        int sum = 0;
        for (int at = 0; at < t.groups; at++) sum += groups[members[t.members + at]].queries();
        return sum;
    }

    // Tiles for segments that several rows with few queries share. A row is in `shared_` with the keys that these do.
    // From four rows on it wins (SmolLM2-135M, 1,024 shared tokens of 1,153: 8 to 17 % less CPU time for 4 to 32 rows, as
    // more rows are multiplied by one conversion of keys; 2 rows were as fast alone): memory is read once in any case, as
    // heads of keys lie in the cache meanwhile.
    void share(const Rows& rows, int P, int most) {
        sharers_.clear();
        for (size_t at = 0; at < groups.size(); at++) {
            const Group& g = groups[at];
            const int count = rows.starts[g.row + 1] - rows.starts[g.row];
            const bool few = count <= std::max(1, most / 2);
            if (few && g.kv_head == 0 && g.start >= SEGMENT) sharers_.push_back({g.row, int32_t(at)});
        }
        for (int segment = 0; sharers_.size() >= SHARERS; segment++) {
            const int first = segment * SEGMENT / P, end = ((segment + 1) * SEGMENT + P - 1) / P;
            const auto blocks = [&](const Sharer& s) { return rows.blocks + int64_t(s.row) * rows.width + first; };
            const auto same = [&](const Sharer& a, const Sharer& b) {
                return shared_[a.row] == shared_[b.row] && std::equal(blocks(a), blocks(a) + (end - first), blocks(b));
            };
            const auto before = [&](const Sharer& a, const Sharer& b) { return *blocks(a) < *blocks(b); };
            std::stable_sort(sharers_.begin(), sharers_.end(), before);
            size_t kept = 0;
            for (size_t at = 0, next; at < sharers_.size(); at = next) {
                for (next = at + 1; next < sharers_.size() && same(sharers_[at], sharers_[next]);) next++;
                if (next - at < SHARERS) continue;
                share_segment(at, next, segment);
                for (; at < next; at++) {
                    const Sharer sharer = sharers_[at];
                    shared_[sharer.row] = (segment + 1) * SEGMENT;
                    if (groups[sharer.group].start >= (segment + 2) * SEGMENT) sharers_[kept++] = sharer;
                }
            }
            sharers_.resize(kept);
        }
    }

    void share_segment(size_t first, size_t end, int segment) {
        const int K = heads_of_keys(sharers_[first].group);
        for (int kv_head = 0; kv_head < K; kv_head++)
            for (size_t at = first; at < end;) {
                Tile tile{int32_t(members.size()), 0, segment * SEGMENT, (segment + 1) * SEGMENT, 1};
                for (int full = 0; at < end; at++, tile.groups++) {
                    const int32_t group = sharers_[at].group + kv_head;
                    full += groups[group].queries();
                    if (full > QUERIES) break;
                    members.push_back(group);
                }
                tiles.push_back(tile);
            }
    }

    int heads_of_keys(int group) const {
        int K = 1;
        while (size_t(group + K) < groups.size() && groups[group + K].kv_head == K) K++;
        return K;
    }

    // Every group's keys that are not shared: one tile, or several where there are too few for all threads to be busy.
    void cut(int threads, int A) {
        int64_t segments = 0;
        for (const Group& g : groups) segments += (g.end - g.low) / SEGMENT + 1;
        const bool few = tiles.size() + groups.size() < size_t(4 * threads) && threads > 1;
        const int64_t piece = few ? std::max<int64_t>(1, segments / (16 * threads)) : INT32_MAX / SEGMENT - 1;
        for (size_t at = 0; at < groups.size();) {
            // where pieces are still many, heads are not what makes threads busy
            const int lanes = few && segments / piece < 4 * LANES * threads ? 1 : lanes_at(at, few ? 1 : threads, A);
            const Group& first = groups[at];
            const bool alone = shared_[first.row] == 0 && (first.end - 1) / SEGMENT - first.low / SEGMENT < piece;
            const int parts = alone ? 0 : (first.end - 1) / SEGMENT - first.low / SEGMENT + 1;
            for (int lane = 0; lane < lanes; lane++) groups[at + lane].parts = groups[at + lane].left = parts;
            for (int from = std::max(first.low, shared_[first.row]); from < first.end;) {
                const int to = int(std::min<int64_t>(first.end, (from / SEGMENT + piece) * SEGMENT));
                tiles.push_back({int32_t(members.size()), lanes, from, to, lanes});
                for (int lane = 0; lane < lanes; lane++) members.push_back(int32_t(at) + lane);
                from = to;
            }
            at += lanes;
        }
    }

    // Groups from `at` on that one tile takes: heads of keys of the same queries. A block has them side by side, and
    // memory is faster in larger pieces; but two units must stay in the first cache. The last ones are left alone, so
    // that threads end together.
    int lanes_at(size_t at, int threads, int A) const {
        const Group& g = groups[at];
        const int most = std::min({LANES, MOST_HEAD / A, QUERIES / g.queries()});
        int lanes = 1;
        while (lanes < most && at + lanes < groups.size()) {
            const Group& other = groups[at + lanes];
            const bool same = other.row == g.row && other.first == g.first;
            if (!same || other.kv_head != g.kv_head + lanes || other.heads != g.heads) break;
            lanes++;
        }
        return groups.size() - at > size_t(lanes) * size_t(threads / 2) ? lanes : 1;
    }

    void place(int A) {
        int64_t floats = 0;
        for (Group& g : groups) {
            g.state = floats;
            floats += int64_t(g.parts) * g.queries() * query_state(A);
        }
        if (int64_t(states.size()) < floats) states.resize(floats);
    }

    std::vector<int32_t> shared_;
    std::vector<Sharer> sharers_;
};
