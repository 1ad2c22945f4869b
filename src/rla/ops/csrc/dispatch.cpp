// The C interface of the library: picks the best instruction set of this machine, once.
// The environment variable RLA_NATIVE_ISA (portable, avx2, avx512) asks for a lesser one, for tests or to do without AMX.
//
// On top of avx512, forward of bfloat16 has instruction sets of its own. AMX serves it once rla_amx_start has been called: a
// virtual machine may promise AMX and kill the process that uses it, so native.py tries rla_amx_check in a child process
// before. Without AMX, dot products of pairs do on AMD's CPUs, where they have twice the rate of float32.
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#if defined(RLA_X86)
#include <cpuid.h>
#endif
#if defined(RLA_AMX) && !defined(RLA_AMX_MODEL)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "args.h"
#include "exchange.h"

#define DECLARE(isa)                       \
  extern "C" {                             \
  int64_t rla_forward_##isa(const Args*);    \
  int64_t rla_backward_##isa(const Args*);   \
  int64_t rla_step_##isa(const Args*);       \
  int64_t rla_panel_##isa();               \
  int64_t rla_chunk_##isa();               \
  }
#define ENTRY(isa) \
  { #isa, rla_forward_##isa, rla_backward_##isa, rla_step_##isa, rla_panel_##isa, rla_chunk_##isa }

DECLARE(portable)
#ifdef RLA_X86
DECLARE(avx2)
DECLARE(avx512)
#endif
extern "C" {
int64_t rla_forward_amx(const Args*);
int64_t rla_check_amx();
int64_t rla_forward_dots(const Args*);
}

namespace {

struct Isa {
  const char* name;
  int64_t (*forward)(const Args*);
  int64_t (*backward)(const Args*);
  int64_t (*step)(const Args*);
  int64_t (*panel)();
  int64_t (*chunk)();
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

// What the environment asks for, or null.
const char* asked_for() {
  const char* name = getenv("RLA_NATIVE_ISA");
  return name && *name ? name : nullptr;
}

const Isa& choose() {
  for (const Isa& isa : table)
    if (asked_for() && !strcmp(asked_for(), isa.name) && supported(isa.name)) return isa;
  for (const Isa& isa : table)
    if (supported(isa.name)) return isa;
  return table[sizeof(table) / sizeof(table[0]) - 1];
}

const Isa& isa() {
  static const Isa& chosen = choose();
  return chosen;
}

#ifdef RLA_X86
[[maybe_unused]] bool has_bf16() {  // AVX512_BF16
  unsigned a, b, c, d;
  return !strcmp(isa().name, "avx512") && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}
#endif

// Whether dot products of pairs serve forward of bfloat16 where AMX doesn't.
bool dots() {
#ifdef RLA_DOTS
  static const bool chosen = has_bf16() && (asked_for() ? !strcmp(asked_for(), "dots") : __builtin_cpu_is("amd"));
  return chosen;
#else
  return false;
#endif
}

// Why AMX cannot be tried; null if it can.
const char* amx_missing() {
#ifndef RLA_AMX
  return "the library was built without it";
#else
  if (asked_for() && strcmp(asked_for(), "amx")) return "RLA_NATIVE_ISA asks for another instruction set";
#ifndef RLA_AMX_MODEL
  unsigned a, b, c, d;
  if (!has_bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1))
    return "the CPU has none";  // AMX_BF16, AMX_TILE
#endif
  return nullptr;
#endif
}

#ifdef RLA_AMX
bool amx_started = false;

// Linux gives the tile registers to a process that asks for them. 0 if it does.
int64_t amx_permission() {
#ifdef RLA_AMX_MODEL
  return 0;
#else
  constexpr long request = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request, tile_data);
#endif
}
#endif

exchange::Python python;

}  // namespace

#define API extern "C" __attribute__((visibility("default")))

API int64_t rla_forward(const Args* a) {
#ifdef RLA_AMX
  if (a->dtype == BF16 && __atomic_load_n(&amx_started, __ATOMIC_RELAXED)) return rla_forward_amx(a);
#endif
#ifdef RLA_DOTS
  // The slope of a clip jumps: a rounding of what leads there to bfloat16 turns some gradients over, which the gain isn't worth.
  const bool delicate = a->saved && a->correction != NONE && a->loss == HUBER;
  if (a->dtype == BF16 && !delicate && dots()) return rla_forward_dots(a);
#endif
  return isa().forward(a);
}
API int64_t rla_backward(const Args* a) { return isa().backward(a); }
API int64_t rla_step(const Args* a) { return isa().step(a); }

// 1 if DLPack's version is not the one that exchange.h describes.
API int64_t rla_set_python(const exchange::Python* given) {
  python = *given;
  return python.api->major != 1;
}
API int64_t rla_plan_size() { return sizeof(exchange::Plan); }
// The definition of a function of Python's whose `self` is a Plan as bytes.
API const void* rla_plain_step() {
  using Function = void* (*)(void* self, void* const* arguments, ssize_t count);
  static const Function function = [](void* self, void* const* arguments, ssize_t count) -> void* {
    exchange::Plan plan;
    memcpy(&plan, python.PyBytes_AsString(self), sizeof plan);
    return exchange::plain_step(python, plan, arguments, count, isa().step);
  };
  static const struct {  // PyMethodDef
    const char* name;
    Function function;
    int flags;
    const char* doc;
  } definition = {"plain_step", function, 0x80, nullptr};  // METH_FASTCALL: arguments by position, as an array
  return &definition;
}

API int64_t rla_any_positive(const float* x, int64_t n) {
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) found |= x[i] > 0;
  return found;
}

API int64_t rla_panel() { return isa().panel(); }
API int64_t rla_chunk() { return isa().chunk(); }
API int64_t rla_args_size() { return sizeof(Args); }
API const char* rla_isa() { return isa().name; }
API const char* rla_stamp() { return RLA_STAMP; }

API int64_t rla_dots() { return dots(); }
API const char* rla_amx_missing() { return amx_missing(); }
#ifdef RLA_AMX
// 0 if the tiles compute what they should. Where they don't work at all, the process dies.
API int64_t rla_amx_check() { return amx_permission() || rla_check_amx(); }
// 0 if forward of bfloat16 uses AMX from now on.
API int64_t rla_amx_start() {
  if (amx_permission()) return 1;
  __atomic_store_n(&amx_started, true, __ATOMIC_RELAXED);
  return 0;
}
#endif
