// A few threads that run the same list of phases.
//
// A phase is a number of items that may run in any order and side by side; phase p + 1 begins when all
// items of phase p are done. Threads take items as they come, so none waits for a thread that the system
// has put aside, unless that thread holds items. Whoever comes late finds nothing left and goes on.
//
//     todo[p]   epoch | items not yet taken      a thread takes some by compare-and-swap, fewer as they run out
//     left[p]   epoch | items not yet done       0: the phase is over
//
// A thread that waits for a phase to end fetches memory that later ones read, as `Fetched` says: the memory's
// bandwidth is what a short run is bound by.
//
// The epoch counts runs. A late thread sees that its run is over by it, and touches nothing.
//
// Between runs the helpers spin for a bounded time and then sleep in a futex: an idle pool costs nothing.
#pragma once
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "vec.h"

INLINE void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

static inline uint64_t now() {  // nanoseconds
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return uint64_t(time.tv_sec) * 1000000000u + uint64_t(time.tv_nsec);
}

struct Fetched {
    const uint8_t* from;  // null: nothing
    size_t bytes;
};

struct PhaseOfPool {
    uint32_t items;
    uint32_t most;    // items that a thread takes at once, at most
    Fetched fetched;  // by threads that wait for its end
};

class Pool {
  public:
    static constexpr size_t MOST_PHASES = 16384;  // a late helper may read the counters at any time: they never move

    // `spins`: turns of waiting between runs before a helper sleeps; one turn takes some 20 to 50 ns.
    Pool(int threads, int spins) : spins_(spins) {
        for (int at = 1; at < threads; at++) helpers_.emplace_back([this, at] { help(at); });
    }
    ~Pool() {
        stopping_ = true;
        epoch_.fetch_add(1);
        wake();
        for (auto& helper : helpers_) helper.join();
    }
    int threads() const { return 1 + int(helpers_.size()); }

    std::atomic<uint64_t> spent{0};  // nanoseconds of calls, kept by who makes them

    // Runs work(phase, item, thread) for all items of at most MOST_PHASES phases.
    // times[p], where asked for, receives the seconds that phase p took: from the end of the one before to the last
    // thread's end. One caller at a time.
    template <class Work>
    void run(const std::vector<PhaseOfPool>& phases, const Work& work, double* times = nullptr) {
        const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
        for (size_t p = 0; p < phases.size(); p++) {
            most_[p].store(phases[p].most, std::memory_order_relaxed);
            from_[p].store(phases[p].fetched.from, std::memory_order_relaxed);
            bytes_[p].store(phases[p].fetched.bytes, std::memory_order_relaxed);
            todo_[p].store(pack(epoch, phases[p].items), std::memory_order_relaxed);
            left_[p].store(pack(epoch, phases[p].items), std::memory_order_relaxed);
        }
        phases_.store(uint32_t(phases.size()), std::memory_order_relaxed);
        timed_.store(times != nullptr, std::memory_order_relaxed);
        if (times && !ends_) ends_.reset(new Counter[MOST_PHASES]());
        for (size_t p = 0; times && p < phases.size(); p++) ends_[p].store(0, std::memory_order_relaxed);
        uint64_t before = times ? now() : 0;
        context_ = &work;
        call_ = [](const void* context, uint32_t phase, uint32_t item, int thread) {
            (*static_cast<const Work*>(context))(phase, item, thread);
        };
        epoch_.store(epoch, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) > 0) wake();
        take_part(epoch, 0);
        for (size_t p = 0; times && p < phases.size(); p++) {
            const uint64_t end = std::max(before, ends_[p].load(std::memory_order_relaxed));
            times[p] = 1e-9 * double(end - before);
            before = end;
        }
    }

  private:
    typedef std::atomic<uint64_t> Counter;
    static uint64_t pack(uint32_t epoch, uint32_t items) { return uint64_t(epoch) << 32 | items; }

    void take_part(uint32_t epoch, int thread) {
        const uint32_t phases = phases_.load(std::memory_order_relaxed), share = 2 * uint32_t(threads());
        Fetching fetching{};
        for (uint32_t p = 0; p < phases; p++) {
            for (;;) {
                uint64_t seen = todo_[p].load(std::memory_order_acquire);
                if (uint32_t(seen >> 32) != epoch) return;
                const uint32_t items = uint32_t(seen);
                if (items == 0) break;
                const uint32_t most = most_[p].load(std::memory_order_relaxed);
                const uint32_t taken = std::max<uint32_t>(1, std::min(most, items / share));
                if (!todo_[p].compare_exchange_weak(seen, seen - taken, std::memory_order_acq_rel)) continue;
                for (uint32_t at = 1; at <= taken; at++) call_(context_, p, items - at, thread);
                if (timed_.load(std::memory_order_relaxed)) note_end(p);
                left_[p].fetch_sub(taken, std::memory_order_acq_rel);
            }
            if (!wait(p, epoch, fetching)) return;
        }
    }

    // Whoever ends last is right, whichever thread it is: the first may have been put aside.
    void note_end(uint32_t p) {
        const uint64_t end = now();
        uint64_t known = ends_[p].load(std::memory_order_relaxed);
        while (known < end && !ends_[p].compare_exchange_weak(known, end, std::memory_order_relaxed)) {
        }
    }

    struct Fetching {  // of one thread
        const uint8_t *from, *at;
    };

    // Until phase p is over; false: the run is. What is fetched may be gone by then: that does no harm.
    bool wait(uint32_t p, uint32_t epoch, Fetching& fetching) const {
        for (int turn = 0;; turn++) {
            const uint64_t seen = left_[p].load(std::memory_order_acquire);
            if (uint32_t(seen >> 32) != epoch) return false;
            if (uint32_t(seen) == 0) return true;
            const uint8_t* from = from_[p].load(std::memory_order_relaxed);
            if (from != fetching.from) fetching = {from, from};
            if (from && size_t(fetching.at - from) < bytes_[p].load(std::memory_order_relaxed)) {
                for (int line = 0; line < 4; line++, fetching.at += LINE) fetch(fetching.at);
            } else if (turn < 4000) {
                relax();
            } else {
                sched_yield();
            }
        }
    }

    void help(int thread) {
        uint32_t seen = 0;
        for (;;) {
            uint32_t epoch;
            for (int turn = 0; (epoch = epoch_.load(std::memory_order_acquire)) == seen; turn++) {
                if (turn < spins_) {
                    relax();
                } else {
                    sleepers_.fetch_add(1, std::memory_order_seq_cst);
                    syscall(SYS_futex, &epoch_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
                    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
                }
            }
            if (stopping_) return;
            take_part(epoch, thread);
            seen = epoch;
        }
    }

    void wake() { syscall(SYS_futex, &epoch_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

    const int spins_;
    std::atomic<uint32_t> epoch_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false}, timed_{false};
    const std::unique_ptr<Counter[]> todo_{new Counter[MOST_PHASES]()}, left_{new Counter[MOST_PHASES]()};
    const std::unique_ptr<std::atomic<uint32_t>[]> most_{new std::atomic<uint32_t>[MOST_PHASES]()};
    const std::unique_ptr<std::atomic<const uint8_t*>[]> from_{new std::atomic<const uint8_t*>[MOST_PHASES]()};
    const std::unique_ptr<std::atomic<size_t>[]> bytes_{new std::atomic<size_t>[MOST_PHASES]()};
    std::unique_ptr<Counter[]> ends_;
    std::atomic<uint32_t> phases_{0};
    const void* context_ = nullptr;
    void (*call_)(const void*, uint32_t, uint32_t, int) = nullptr;
    std::vector<std::thread> helpers_;  // last: they use all of the above
};
