// What this machine can do at best: bytes read and multiply-adds a second, of all threads together.
//
// Built by tests/bench/floors.py for the machine that it runs on. Each figure is that of the best of some windows,
// in which every thread does the same work at the same time.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>
#include <sys/mman.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int W = 16;
#else
constexpr int W = 8;
#endif
typedef float F __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
constexpr int CHAINS = 12;  // independent sums: enough for two units with a latency of five, within 16 registers

template <class Work>
static double best_seconds(int threads, int windows, const Work& work) {
    double best = 1e30;
    for (int window = 0; window < windows; window++) {
        std::atomic<int> ready{0};
        std::atomic<bool> go{false};
        std::vector<std::thread> all;
        for (int t = 0; t < threads; t++)
            all.emplace_back([&, t] {
                ready++;
                while (!go) {}
                work(t);
            });
        while (ready < threads) {}
        auto begin = std::chrono::steady_clock::now();
        go = true;
        for (auto& thread : all) thread.join();
        std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        best = std::min(best, took.count());
    }
    return best;
}

// The compiler may no longer know what v is: neither leave out what makes it, nor reuse what was made of it.
template <class V>
static inline __attribute__((always_inline)) void keep(V& v) {
#if defined(__AVX2__)
    asm volatile("" : "+v"(v));
#else
    asm volatile("" : "+m"(v));
#endif
}

extern "C" double bytes_per_s(int64_t bytes, int threads, int windows) {
    constexpr int64_t LINE = 4 * sizeof(I), PAGE = 2 << 20;
    int64_t each = (bytes / threads + PAGE - 1) / PAGE * PAGE;
    void* memory = std::aligned_alloc(PAGE, each * threads);
    if (!memory) return 0;
    madvise(memory, each * threads, MADV_HUGEPAGE);
    std::memset(memory, 1, each * threads);
    double seconds = best_seconds(threads, windows, [&](int t) {
        const char* from = (const char*)memory + t * each;
        I sums[4] = {};
        for (int64_t at = 0; at < each; at += LINE)
            for (int i = 0; i < 4; i++) sums[i] += ((const I*)(from + at))[i];
        for (I& sum : sums) keep(sum);
    });
    std::free(memory);
    return double(each * threads) / seconds;
}

extern "C" double float_products_per_s(int64_t times, int threads, int windows) {
    double seconds = best_seconds(threads, windows, [&](int) {
        F sums[CHAINS] = {}, a = F{} + 0.999f, b = F{} + 1e-3f;
        keep(a), keep(b);
        for (int64_t i = 0; i < times; i++)
#pragma GCC unroll 16
            for (int c = 0; c < CHAINS; c++) {
                keep(sums[c]);  // equal sums would be computed once
                sums[c] = sums[c] * a + b;
            }
#pragma GCC unroll 16
        for (int c = 0; c < CHAINS; c++) keep(sums[c]);
    });
    return double(times) * threads * CHAINS * W / seconds;
}

// Products of bytes, added in 32 bits where one instruction does it, else in 16. 0 where there is none for either.
extern "C" double byte_products_per_s(int64_t times, int threads, int windows) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__AVX2__)
    constexpr int LANES = sizeof(I);
    double seconds = best_seconds(threads, windows, [&](int) {
        I sums[CHAINS] = {}, a = I{} + 0x01010101, b = a;
        keep(a), keep(b);
        for (int64_t i = 0; i < times; i++)
#pragma GCC unroll 16
            for (int c = 0; c < CHAINS; c++) {
                keep(a), keep(sums[c]);
#if defined(__AVX512VNNI__)
                sums[c] = (I)_mm512_dpbusd_epi32((__m512i)sums[c], (__m512i)a, (__m512i)b);
#elif defined(__AVXVNNI__)
                sums[c] = (I)_mm256_dpbusd_avx_epi32((__m256i)sums[c], (__m256i)a, (__m256i)b);
#elif defined(__AVX512BW__)
                sums[c] = (I)_mm512_add_epi16((__m512i)sums[c], _mm512_maddubs_epi16((__m512i)a, (__m512i)b));
#else
                sums[c] = (I)_mm256_add_epi16((__m256i)sums[c], _mm256_maddubs_epi16((__m256i)a, (__m256i)b));
#endif
            }
#pragma GCC unroll 16
        for (int c = 0; c < CHAINS; c++) keep(sums[c]);
    });
    return double(times) * threads * CHAINS * LANES / seconds;
#else
    (void)times, (void)threads, (void)windows;
    return 0;
#endif
}
