// Where threads split a head's value columns they have in common what its chunks need before columns are touched: products of
// pairs, norms, gates. Each group of chunks is prepared once, by whoever needs it first and finds it unclaimed; who finds it
// claimed, and not ready, meanwhile prepares the next one. So the thread that is ahead does more of what is common, and the others
// catch up. Rows of q and k each thread loads for itself, once: to fetch them from another core, which may be far away, costs more.
#pragma once
#include <omp.h>
#include <sched.h>

#include "chunk.h"

namespace RLA_ISA {

struct Ring {  // of zeros at first
  static constexpr int64_t SLOTS = 8, AHEAD = 4, MOST_PARTS = 256 / NR;
  typedef Chunk Group[GROUP];
  struct alignas(64) Number {  // on a line of its own
    int64_t value;
    int64_t get() const { return __atomic_load_n(&value, __ATOMIC_ACQUIRE); }
    void set(int64_t x) { __atomic_store_n(&value, x, __ATOMIC_RELEASE); }
  };

  Number ready[SLOTS];      // group n is in slot n % SLOTS if that says n + 1
  Number done[MOST_PARTS];  // groups that a part of the columns is through with
  Number claimed;           // groups that are or are being prepared
  int64_t parts, count;     // of columns; groups in the sequence
  char* memory;             // SLOTS times `size` bytes
  size_t size;

  void carve(Arena& m, const Problem& p, int64_t parts_, int64_t count_) {
    parts = parts_, count = count_, memory = (char*)m.floats(0), size = 0;
    Group group;
    size = carve_common(p, group, 0);
    m.used += SLOTS * size;
  }
  // A thread's own groups, one for each slot, which have what is common in the ring.
  void carve_own(Arena& m, const Problem& p, Group* own) const {
    for (int64_t slot = 0; slot < SLOTS; ++slot) {
      for (int i = 0; i < GROUP; ++i) own[slot][i].carve_own(m, p, false, i ? own[slot] + i - 1 : nullptr);
      carve_common(p, own[slot], slot);
      own[slot]->t = -1;  // of no token yet
    }
  }

  // Group n of a thread's own, prepared.
  const Chunk* take(const Problem& p, const Task& task, Group* own, int64_t n) {
    Chunk* group = own[n % SLOTS];
    if (claimed.get() < n + AHEAD) prepare_next(p, task, own);
    while (ready[n % SLOTS].get() != n + 1)
      if (!prepare_next(p, task, own)) sched_yield();
    if (group->t != n * GROUP * C) join_group(p, task, group, n * GROUP * C);  // else this thread has prepared it
    return group;
  }
  void leave(int64_t n, int64_t part) { done[part].set(n + 1); }

  void fetch(Fetch& f, int64_t n) const {
    if (ready[n % SLOTS].get() == n + 1) f.add(memory + n % SLOTS * size, size);
  }

 private:
  size_t carve_common(const Problem& p, Chunk* group, int64_t slot) const {
    Arena m{memory ? memory + slot * size : nullptr, 0};
    for (int i = 0; i < GROUP; ++i) {
      group[i].before = i ? group + i - 1 : nullptr;
      group[i].carve_common(m, p);
    }
    return m.used;
  }

  // False, with nothing done, if another thread has just claimed it, there is none, or its slot is in use.
  bool prepare_next(const Problem& p, const Task& task, Group* own) {
    int64_t n = claimed.get();
    if (n >= count) return false;
    for (int64_t i = 0; i < parts; ++i)
      if (n >= done[i].get() + SLOTS) return false;
    if (!__atomic_compare_exchange_n(&claimed.value, &n, n + 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return false;
    prepare_group(p, task, own[n % SLOTS], n * GROUP * C, p.a.saved);
    ready[n % SLOTS].set(n + 1);
    return true;
  }
};

}  // namespace RLA_ISA
