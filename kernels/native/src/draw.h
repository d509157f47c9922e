// Draws a token from a row of logits: temperature, min-p, top-k, top-p, then Gumbel-max. The specification is
// services/worker/sampling/draw.py, with its noise: a pure function of (key, token), exact in double.
//
//     scaled = (logit - best) / temperature                                   the best is 0
//     token = argmax of scaled + noise(key, token) over the survivors, the lowest id of equals
#pragma once
#include "rowwise.h"
#include "select.h"

struct Cut {
    uint64_t key;
    double top_p, min_p;
    float temperature, best;  // best: the row's largest logit
    int32_t top_k;            // 0: all
    int32_t row;
};

INLINE uint64_t mixed(uint64_t x) {  // SplitMix64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}
// 53 random bits of a candidate; the fewer, the larger its noise.
INLINE uint64_t noise_bits(uint64_t key, int64_t id) { return mixed(key + uint64_t(id + 1) * 0x9E3779B97F4A7C15u) >> 11; }
INLINE double noise_of(uint64_t bits) { return -std::log(-std::log1p(-(double(bits) + 0.5) * 0x1p-53)); }

typedef double D __attribute__((vector_size(4 * W)));
typedef int64_t L __attribute__((vector_size(4 * W)));

// e^x for -50 < x <= 0 to the last bit or two, else 0: x = k ln 2 + r, and a Taylor polynomial of r.
INLINE D exp_of(D x) {
    const D shifted = x * 0x1.71547652b82fep0 + 0x1.8p52;  // k, in the last bits
    const D k = shifted - 0x1.8p52, r = (x - k * 0x1.62e42fefa3800p-1) - k * 0x1.ef35793c76730p-45;
    D p = r * (1 / 6227020800.0) + 1 / 479001600.0;
    p = p * r + 1 / 39916800.0;
    p = p * r + 1 / 3628800.0;
    p = p * r + 1 / 362880.0;
    p = p * r + 1 / 40320.0;
    p = p * r + 1 / 5040.0;
    p = p * r + 1 / 720.0;
    p = p * r + 1 / 120.0;
    p = p * r + 1 / 24.0;
    p = p * r + 1 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    const D power = (D)((L)p + ((L)shifted << 52));
    return x > -50 ? power : D{};
}

// The candidate with the largest sum so far.
struct Winner {
    double total = -INFINITY;
    int32_t id = 0;
    void meet(double sum, int32_t other) {
        if (sum > total || (sum == total && other < id)) total = sum, id = other;
    }
    // Bits above it belong to noise that takes nobody at `scaled` or below past the winner.
    uint64_t most_bits(double scaled) const {
        const double bound = -std::expm1(-std::exp(scaled - total)) * (1 + 1e-9) * 0x1p53 + 1;
        return bound < 0x1p53 ? uint64_t(bound) : ~uint64_t(0);
    }
};

struct Drawing {  // memory of one thread
    Selection selection;
    std::vector<float> scaled, values;
    std::vector<int32_t> ids;

    int32_t draw(const float* x, int V, const Cut& cut) {
        const bool cuts = cut.top_k > 0 || cut.top_p < 1 || cut.min_p > 0;
        return cuts ? among_likeliest(x, V, cut) : among_all(x, V, cut);
    }

  private:
    // Parts of the row are passed over but for the few tokens whose noise could win.
    static int32_t among_all(const float* x, int V, const Cut& cut) {
        constexpr int part = 256;
        Winner winner;
        const auto meet = [&](int id, uint64_t bits) {
            winner.meet(double((x[id] - cut.best) / cut.temperature) + noise_of(bits), id);
        };
        winner.id = largest_of_row(x, V).id;
        meet(winner.id, noise_bits(cut.key, winner.id));
        for (int at = 0; at < V; at += part) {
            const int end = std::min(V, at + part);
            const float most = largest_value(x + at, end - at);
            if (most == -INFINITY) continue;
            const double scaled = double((most - cut.best) / cut.temperature);
            uint64_t limit = winner.most_bits(scaled);
            for (int id = at; id < end; id++)
                if (const uint64_t bits = noise_bits(cut.key, id); bits <= limit) {
                    meet(id, bits);
                    limit = winner.most_bits(scaled);
                }
        }
        return winner.id;
    }

    // The likeliest few where they settle it, else more, else all.
    int32_t among_likeliest(const float* x, int V, const Cut& cut) {
        scaled.resize(V);
        for (int id = 0; id < V; id++) scaled[id] = (x[id] - cut.best) / cut.temperature;
        const int first = cut.top_k > 0 ? cut.top_k : V;
        const bool bounded = cut.top_k > 0 || cut.min_p > 0;  // what top_p is a part of: those that are left, or all
        const double low = std::log(cut.min_p), mass = cut.top_p < 1 && !bounded ? mass_of(V) : 0;
        for (int head = cut.top_k > 0 && cut.top_k <= 256 ? cut.top_k : 256;; head *= 16) {
            const int K = std::min(head, V);
            ids.resize(K), values.resize(K);
            selection.top(scaled.data(), V, K, ids.data(), values.data());
            int count = 0;
            while (count < std::min(K, first) && values[count] >= low) count++;
            const bool complete = count < K || first <= K || K == V;
            if (!complete && (bounded || cut.top_p >= 1)) continue;
            int kept = count;
            if (cut.top_p < 1) {
                double whole = mass, before = 0;
                if (bounded) {
                    whole = 0;
                    for (int at = 0; at < count; at++) whole += std::exp(double(values[at]));
                }
                for (kept = 0; kept < count && (kept == 0 || before < cut.top_p * whole); kept++)
                    before += std::exp(double(values[kept]));
                if (!complete && kept == K) continue;
            }
            Winner winner;
            winner.id = ids[0];
            for (int at = 0; at < std::max(1, kept); at++)
                winner.meet(double(values[at]) + noise_of(noise_bits(cut.key, ids[at])), ids[at]);
            return winner.id;
        }
    }

    // The sum of exp(scaled). What lies 50 below the best is less than half of the sum's last bit, all of it together.
    double mass_of(int V) const {
        constexpr int lanes = W / 2;
        D sums{};
        int id = 0;
        for (; id + lanes <= V; id += lanes) {
            D x;
            for (int lane = 0; lane < lanes; lane++) x[lane] = scaled[id + lane];
            sums += exp_of(x);
        }
        double mass = 0;
        for (; id < V; id++) mass += scaled[id] > -50 ? std::exp(double(scaled[id])) : 0;
        for (int lane = 0; lane < lanes; lane++) mass += sums[lane];
        return mass;
    }
};

// The logarithm of the sum of a row's exponentials: what turns logits into log probabilities.
static float log_sum_exp(const float* x, int V) {
    const float most = largest_value(x, V);
    double sum = 0;
    int at = 0;
    while (at + W <= V) {
        F part{};
        for (const int end = std::min(V, at + 1024); at + W <= end; at += W) part += exp_below_zero(load<F>(x + at) - most);
        for (int lane = 0; lane < W; lane++) sum += part[lane];
    }
    for (; at < V; at++) sum += std::exp(double(x[at]) - most);
    return float(double(most) + std::log(sum));
}

// 1 + the number of a row's values that are larger.
static int32_t rank_of(float value, const float* x, int V) {
    int32_t rank = 1;
    for (int at = 0; at < V; at++) rank += x[at] > value;
    return rank;
}
