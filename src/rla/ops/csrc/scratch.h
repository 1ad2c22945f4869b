// Memory of the kernels' own: arenas to carve it up, one for each thread that outlives a call, and huge pages.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace RLA_ISA {

// Memory handed out in 64-byte lines. A first pass with base = null only adds up the size.
struct Arena {
  char* base = nullptr;
  size_t used = 0;
  float* floats(int64_t n) {
    float* p = base ? (float*)(base + used) : nullptr;
    used += ((size_t)n * 4 + 63) / 64 * 64;
    return p;
  }
  uint16_t* halves(int64_t n) { return (uint16_t*)floats((n + 1) / 2); }
};

constexpr size_t HUGE_PAGE = 2 << 20;

// Ask for huge pages under memory that is about to be written for the first time: the faults of small ones cost as
// much as a tenth of a forward.
inline void advise(const void* p, size_t bytes) {
#if defined(__linux__)
  size_t from = ((size_t)p + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE, to = ((size_t)p + bytes) / HUGE_PAGE * HUGE_PAGE;
  if (p && from < to) madvise((void*)from, to - from, MADV_HUGEPAGE);
#else
  (void)p, (void)bytes;
#endif
}

// Memory of a thread that outlives the call: fresh pages cost more than a short call's arithmetic.
struct Scratch {
  char* memory = nullptr;
  size_t size = 0;
  ~Scratch() { free(memory); }
  char* get(size_t bytes) {
    if (bytes > size) {
      free(memory);
      const size_t page = bytes < HUGE_PAGE / 2 ? 4096 : HUGE_PAGE;
      size = (bytes + page - 1) / page * page;
      memory = (char*)aligned_alloc(page, size);
      if (!memory) abort();
      advise(memory, size);
    }
    return memory;
  }
};
inline thread_local Scratch scratch_own, scratch_shared;

}  // namespace RLA_ISA
