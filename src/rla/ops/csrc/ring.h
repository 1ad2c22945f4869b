// Where threads split a head's value columns they have in common what its chunks need before columns are touched: products of
// pairs, norms, gates. It is prepared once, in batches of chunks, by whoever needs a batch first and finds it unclaimed; who finds it
// claimed, and not ready, meanwhile prepares the next one. So the thread that is ahead does more of what is common, and the others
// catch up. Rows of q and k each thread loads for itself: to fetch them from another core, which may be far away, costs more.
#pragma once
#include <omp.h>
#include <sched.h>

#include "chunk.h"

namespace RLA_ISA {

struct Ring {  // of zeros at first
  static constexpr int64_t BATCH = 4, SLOTS = 4, AHEAD = 2, MOST_PARTS = 256 / NR;
  struct alignas(64) Number {  // on a line of its own
    int64_t value;
    int64_t get() const { return __atomic_load_n(&value, __ATOMIC_ACQUIRE); }
    void set(int64_t x) { __atomic_store_n(&value, x, __ATOMIC_RELEASE); }
  };

  Number ready[SLOTS];      // batch b is in slot b % SLOTS if that says b + 1
  Number done[MOST_PARTS];  // batches that a part of the columns is through with
  Number claimed;           // batches that are or are being prepared
  int64_t parts, count;     // of columns; groups of chunks in the sequence
  char* memory;             // SLOTS * BATCH times `size` bytes, for a group each
  size_t size;

  // group: a thread's own, of which only what is common is carved here.
  void carve(Arena& m, const Problem& p, int64_t parts_, int64_t count_, Chunk* group) {
    parts = parts_, count = count_, memory = (char*)m.floats(0);
    const size_t begin = m.used;
    for (int i = 0; i < GROUP; ++i) group[i].carve_common(m, p);
    size = m.used - begin;
    m.used = begin + SLOTS * BATCH * size;
  }

  // Group n, prepared, as a thread's own.
  void take(const Problem& p, const Task& task, Chunk* own, int64_t n) {
    const int64_t batch = n / BATCH;
    if (n % BATCH == 0) {
      if (claimed.get() < batch + AHEAD) prepare_next(p, task, own);
      while (ready[batch % SLOTS].get() != batch + 1)
        if (!prepare_next(p, task, own)) sched_yield();
    }
    point(p, own, n);
    join_group(p, task, own, n * GROUP * C);
  }
  void leave(int64_t n, int64_t part) {
    if ((n + 1) % BATCH == 0) done[part].set((n + 1) / BATCH);
  }

  void fetch(Fetch& f, int64_t n) const {
    if (n % BATCH || ready[n / BATCH % SLOTS].get() == n / BATCH + 1) f.add(place(n), size);
  }

 private:
  char* place(int64_t n) const { return memory + n % (SLOTS * BATCH) * size; }
  // What is common of a thread's own group is from now on that of group n.
  void point(const Problem& p, Chunk* own, int64_t n) const {
    Arena m{place(n), 0};
    for (int i = 0; i < GROUP; ++i) own[i].carve_common(m, p);
  }

  // False, with nothing done, if another thread has just claimed it, there is none, or its slot is in use.
  bool prepare_next(const Problem& p, const Task& task, Chunk* own) {
    int64_t batch = claimed.get();
    if (batch * BATCH >= count) return false;
    for (int64_t i = 0; i < parts; ++i)
      if (batch >= done[i].get() + SLOTS) return false;
    if (!__atomic_compare_exchange_n(&claimed.value, &batch, batch + 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return false;
    for (int64_t n = batch * BATCH; n < least(count, (batch + 1) * BATCH); ++n) {
      point(p, own, n);
      prepare_group(p, task, own, n * GROUP * C, p.a.saved);
    }
    ready[batch % SLOTS].set(batch + 1);
    return true;
  }
};

}  // namespace RLA_ISA
