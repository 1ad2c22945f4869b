// The arguments of one call, as native.py packs them: every field is 8 bytes, in this order.
// Pointers that a call does not need, and inputs that were not given, are null. Strides are in elements.
#pragma once
#include <cstdint>

struct Args {
  const void *q, *k, *v, *dout;        // [B,T,H,K], [B,T,H,K], [B,T,HV,V], [B,T,HV,V]; last dimension contiguous
  void *o, *dq, *dk, *dv;              // contiguous
  const float *log_alpha, *beta, *gamma;  // [B,T,HV] contiguous
  const float *S0, *R0, *dS, *dR;      // [N,HV,V,K] contiguous: states lie by columns, here and below
  float *S, *R, *saved;                // final states [N,HV,V,K]; what backward needs, in the kernel's own layout (Task)
  float *pS, *pR;                      // [B,T,HV,V] contiguous: predictions that forward keeps for backward. dv may lie in pS, and
                                       // dk in pR: what backward writes for a token it writes after it has read the token's predictions
  float *dlog_alpha, *dbeta, *dgamma;  // [B,T,HV] contiguous
  float *dS0, *dR0;
  const int64_t *cu_seqlens;           // [N+1]
  int64_t B, T, H, HV, K, V, N;
  int64_t q_stride[3], k_stride[3], v_stride[3], dout_stride[3];  // of B, T, H
  int64_t dtype, delta, correction, gate_output, loss, qk_norm, threads;
  int64_t every, skip;  // where states are saved for backward: struct Segments
  double clip;
};

enum { F32 = 0, BF16 = 1, F16 = 2 };
enum { NONE = 0, TOKEN = 1, FITTED = 2 };
enum { L2 = 0, HUBER = 1, LOGCOSH = 2 };
