// The C interface of the library: picks the best instruction set of this machine, once.
// The environment variable RLA_NATIVE_ISA (portable, avx2, avx512) asks for a lesser one, for tests.
#include <stdlib.h>
#include <string.h>

#include "args.h"

#define DECLARE(isa)                       \
  extern "C" {                             \
  int64_t rla_forward_##isa(const Args*);    \
  int64_t rla_backward_##isa(const Args*);   \
  int64_t rla_step_##isa(const Args*);       \
  int64_t rla_panel_##isa();               \
  int64_t rla_segment_##isa();             \
  }
#define ENTRY(isa) \
  { #isa, rla_forward_##isa, rla_backward_##isa, rla_step_##isa, rla_panel_##isa, rla_segment_##isa }

DECLARE(portable)
#ifdef RLA_X86
DECLARE(avx2)
DECLARE(avx512)
#endif

namespace {

struct Isa {
  const char* name;
  int64_t (*forward)(const Args*);
  int64_t (*backward)(const Args*);
  int64_t (*step)(const Args*);
  int64_t (*panel)();
  int64_t (*segment)();
};

const Isa table[] = {
#ifdef RLA_X86
    ENTRY(avx512), ENTRY(avx2),
#endif
    ENTRY(portable)};

bool supported(const char* name) {
#ifdef RLA_X86
  __builtin_cpu_init();
  if (!strcmp(name, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (!strcmp(name, "avx512"))
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
  return !strcmp(name, "portable");
}

const Isa& choose() {
  const char* wanted = getenv("RLA_NATIVE_ISA");
  for (const Isa& isa : table)
    if (wanted && !strcmp(wanted, isa.name) && supported(isa.name)) return isa;
  for (const Isa& isa : table)
    if (supported(isa.name)) return isa;
  return table[sizeof(table) / sizeof(table[0]) - 1];
}

const Isa& isa() {
  static const Isa& chosen = choose();
  return chosen;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API int64_t rla_forward(const Args* a) { return isa().forward(a); }
API int64_t rla_backward(const Args* a) { return isa().backward(a); }
API int64_t rla_step(const Args* a) { return isa().step(a); }
API int64_t rla_panel() { return isa().panel(); }
API int64_t rla_segment() { return isa().segment(); }
API int64_t rla_args_size() { return sizeof(Args); }
API const char* rla_isa() { return isa().name; }
API const char* rla_stamp() { return RLA_STAMP; }
