// Where threads split a head's value columns they have its chunks in common. Each group of chunks is prepared once, by whoever
// needs it first and finds it unclaimed; who finds it claimed, and not ready, meanwhile prepares the next one. So the thread that
// is ahead does more of what is common, and the others catch up.
#pragma once
#include <omp.h>
#include <sched.h>

#include "chunk.h"

namespace RLA_ISA {

struct Ring {  // of zeros at first
  static constexpr int64_t SLOTS = 8, AHEAD = 3, MOST_PARTS = 256 / NR;
  struct alignas(64) Number {  // on a line of its own
    int64_t value;
    int64_t get() const { return __atomic_load_n(&value, __ATOMIC_ACQUIRE); }
    void set(int64_t x) { __atomic_store_n(&value, x, __ATOMIC_RELEASE); }
  };

  Chunk groups[SLOTS][GROUP];
  Number ready[SLOTS];      // group n is in slot n % SLOTS if that says n + 1
  Number done[MOST_PARTS];  // groups that a part of the columns is through with
  Number claimed;           // groups that are or are being prepared
  int64_t parts, count;     // of columns; groups of the sequence

  void carve(Arena& m, const Problem& p, int64_t parts_, int64_t count_) {
    for (Chunk(&group)[GROUP] : groups)
      for (int i = 0; i < GROUP; ++i) group[i].carve(m, p, false, i ? group + i - 1 : nullptr);
    parts = parts_, count = count_;
  }

  // Group n, prepared.
  const Chunk* take(const Problem& p, const Task& task, int64_t n) {
    if (claimed.get() < n + AHEAD) prepare_next(p, task);
    while (ready[n % SLOTS].get() != n + 1)
      if (!prepare_next(p, task)) sched_yield();
    return groups[n % SLOTS];
  }
  void leave(int64_t n, int64_t part) { done[part].set(n + 1); }

  void fetch(Fetch& f, int64_t n) const {
    if (ready[n % SLOTS].get() != n + 1) return;
    for (const Chunk& ch : groups[n % SLOTS]) f.add(ch.begin, (ch.end - ch.begin) * 4);
  }

  // False, with nothing done, if another thread has just claimed it, there is none, or its slot is in use.
  bool prepare_next(const Problem& p, const Task& task) {
    int64_t n = claimed.get();
    if (n == count) return false;
    for (int64_t i = 0; i < parts; ++i)
      if (n >= done[i].get() + SLOTS) return false;
    if (!__atomic_compare_exchange_n(&claimed.value, &n, n + 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return false;
    prepare_group(p, task, groups[n % SLOTS], n * GROUP * C, p.a.saved);
    for (Chunk& ch : groups[n % SLOTS]) ch.turned = false;  // k is there for other threads; kT they would have to fetch too
    ready[n % SLOTS].set(n + 1);
    return true;
  }
};

}  // namespace RLA_ISA
