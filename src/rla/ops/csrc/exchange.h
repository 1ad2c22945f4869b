// Tensors as Python holds them, read through DLPack's C exchange interface (torch.Tensor.__dlpack_c_exchange_api__). A step is
// so short that asking its tensors from Python what they are would take as long as a third of the work.
#pragma once
#include "args.h"

namespace exchange {

// DLTensor and DLPackExchangeAPI of dlpack.h, version 1.
struct View {
  char* data;
  int32_t device, device_index, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  const int64_t *shape, *strides;
  uint64_t offset;
};
struct Api {
  uint32_t major, minor;
  const Api* older;
  void *allocate, *own, *wrap;
  int (*view)(void* object, View*);  // not 0, with a Python error set, for what is no tensor with memory
  void* stream;
};
constexpr int32_t CPU = 1;
constexpr uint8_t FLOAT = 2, BFLOAT = 4;

// What Python gives once: the interface, its None, and how its interpreter lock is released and taken again.
struct Python {
  const Api* api;
  void* none;
  void* (*release)();
  void (*acquire)(void*);
};

inline int64_t dtype(const View& x) {
  if (x.lanes != 1) return -1;
  if (x.code == FLOAT && x.bits == 32) return F32;
  if (x.code == BFLOAT && x.bits == 16) return BF16;
  return x.code == FLOAT && x.bits == 16 ? F16 : -1;
}

// Whether `x` is a tensor on the CPU with this shape and, in dimensions longer than 1, these strides where they are not negative;
// then its address is in `to`.
template <class T, int N>
bool matches(const View& x, int64_t type, const int64_t (&shape)[N], const int64_t (&strides)[N], T*& to) {
  if (x.device != CPU || x.ndim != N || dtype(x) != type) return false;
  for (int i = 0; i < N; ++i)
    if (x.shape[i] != shape[i] || (shape[i] > 1 && strides[i] >= 0 && x.strides[i] != strides[i])) return false;
  to = reinterpret_cast<T*>(x.data + x.offset);
  return true;
}

// The tensors of a step, as Python objects.
struct Objects {
  void *q, *k, *v, *o, *log_alpha, *beta, *gamma, *S, *R;
};

// Completes `a`, which has the method, by what the tensors of a step say. False, perhaps with a Python error, if they are not such
// as the kernel takes as they are.
inline bool read_step(const Python& python, const Objects& objects, Args& a) {
  View q, k, v, x;
  const auto view = [&](void* object, View& to) { return python.api->view(object, &to) == 0; };
  if (!view(objects.q, q) || !view(objects.k, k) || !view(objects.v, v) || q.ndim != 4 || v.ndim != 4) return false;
  const int64_t B = q.shape[0], H = q.shape[2], K = q.shape[3], HV = v.shape[2], V = v.shape[3], type = dtype(q);
  if (type < 0 || B < 1 || H < 1 || HV < 1 || HV % H || K < 1 || K > 256 || V < 1 || V > 256) return false;
  a.B = a.N = B, a.T = 1, a.H = H, a.HV = HV, a.K = K, a.V = V, a.dtype = type;
  const int64_t key[] = {B, 1, H, K}, value[] = {B, 1, HV, V}, rows[] = {-1, -1, -1, 1}, dense[] = {HV * V, HV * V, V, 1};
  if (!matches(q, type, key, rows, a.q) || !matches(k, type, key, rows, a.k) || !matches(v, type, value, rows, a.v)) return false;
  for (int i = 0; i < 3; ++i) a.q_stride[i] = q.strides[i], a.k_stride[i] = k.strides[i], a.v_stride[i] = v.strides[i];
  const auto gate = [&](void* object, const float*& to) {
    const int64_t shape[] = {B, 1, HV}, strides[] = {HV, HV, 1};
    return object == python.none || (view(object, x) && matches(x, F32, shape, strides, to));
  };
  const auto state = [&](void* object, float*& to) {
    const int64_t shape[] = {B, HV, K, V}, strides[] = {HV * K * V, K * V, 1, K};  // by columns
    return object == python.none || (view(object, x) && matches(x, F32, shape, strides, to));
  };
  return view(objects.o, x) && matches(x, type, value, dense, a.o) && gate(objects.log_alpha, a.log_alpha) &&
         gate(objects.beta, a.beta) && gate(objects.gamma, a.gamma) && state(objects.S, a.S) && state(objects.R, a.R);
}

}  // namespace exchange
