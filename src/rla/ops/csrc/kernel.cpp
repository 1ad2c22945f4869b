// The kernels for one instruction set: compiled once for each, with RLA_ISA its name and the compiler flags to match.
// RLA_AMX: forward alone, for bfloat16, on AMX tiles. RLA_DOTS: the same by dot products of pairs.
#include "args.h"
#include "forward.h"
#if !defined(RLA_AMX) && !defined(RLA_DOTS)
#include "backward.h"
#include "step.h"
#endif

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

extern "C" {
int64_t JOIN(rla_forward_, RLA_ISA)(const Args* a) { return RLA_ISA::forward(*a), 0; }
#if defined(RLA_AMX)
int64_t JOIN(rla_check_, RLA_ISA)() { return RLA_ISA::amx_check(); }
#elif !defined(RLA_DOTS)
int64_t JOIN(rla_backward_, RLA_ISA)(const Args* a) { return RLA_ISA::backward(*a), 0; }
int64_t JOIN(rla_step_, RLA_ISA)(const Args* a) { return RLA_ISA::step(*a); }
int64_t JOIN(rla_panel_, RLA_ISA)() { return RLA_ISA::NR; }
int64_t JOIN(rla_chunk_, RLA_ISA)() { return RLA_ISA::C; }
#endif
}
