// A step as a function of the Python interpreter's own: it gets Python objects, looks at their types, and reads the tensors through
// DLPack's C exchange interface (torch.Tensor.__dlpack_c_exchange_api__). A step is so short that to do this in Python would take
// as long as a third of the work, and more where the states push Python's own memory out of the cache. The library is built
// without Python: native.py hands over the functions of the interpreter that are called here, all of its stable interface.
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

// What Python gives once, each field 8 bytes: DLPack's interface, objects, and functions of the interpreter.
struct Python {
  const Api* api;
  void *none, *tensor, *value_error, *positive, *empty_like, *get_num_threads;  // positive: what is said of log_alpha > 0
  void* (*PyEval_SaveThread)();
  void (*PyEval_RestoreThread)(void*);
  void* (*PyObject_CallFunctionObjArgs)(void*, ...);
  void* (*PyObject_Type)(void*);
  void (*Py_IncRef)(void*);
  void (*Py_DecRef)(void*);
  long (*PyLong_AsLong)(void*);
  char* (*PyBytes_AsString)(void*);
  void (*PyErr_Clear)();
  void (*PyErr_SetObject)(void*, void*);

  bool is_tensor(void* object) const {  // and of no subclass
    void* type = PyObject_Type(object);
    Py_DecRef(type);
    return type == tensor;
  }
  void* new_none() const { return Py_IncRef(none), none; }
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
  void *q, *k, *v, *log_alpha, *beta, *gamma, *S, *R, *o;
};

// Of plain steps of one method.
struct Plan {
  Args args;  // those that don't come from the tensors
  int64_t log_alpha, beta, gamma, R, tied;  // which the method may be given, whether it has an R, whether gamma is beta
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

// A new reference to the output, the step done; to None, with nothing done, if the arguments q, k, v, log_alpha, beta, gamma, S, R are
// not such as the kernel takes as they are; null with an error set. Others may run Python while the kernel runs.
inline void* plain_step(const Python& python, const Plan& plan, void* const* x, int64_t count, int64_t (*step)(const Args*)) {
  if (count != 8) return python.new_none();
  Objects objects = {x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], nullptr};
  const auto absent_or = [&](void* object, int64_t allowed) {
    return object == python.none || (allowed && python.is_tensor(object));
  };
  const bool tensors = python.is_tensor(objects.q) && python.is_tensor(objects.k) && python.is_tensor(objects.v) &&
                       python.is_tensor(objects.S) && (plan.R ? python.is_tensor(objects.R) : objects.R == python.none);
  if (!tensors || !absent_or(objects.log_alpha, plan.log_alpha) || !absent_or(objects.beta, plan.beta) ||
      !absent_or(objects.gamma, plan.gamma))
    return python.new_none();
  if (plan.tied) objects.gamma = objects.beta;
  void* threads = python.PyObject_CallFunctionObjArgs(python.get_num_threads, nullptr);
  if (!threads) return nullptr;
  Args a = plan.args;
  a.threads = python.PyLong_AsLong(threads);
  python.Py_DecRef(threads);
  objects.o = python.PyObject_CallFunctionObjArgs(python.empty_like, objects.v, nullptr);
  if (!objects.o) return nullptr;
  const auto give_up = [&](void* result) -> void* { return python.Py_DecRef(objects.o), result; };
  if (!python.is_tensor(objects.o)) return give_up(python.new_none());  // in a mode that makes others
  if (!read_step(python, objects, a)) return python.PyErr_Clear(), give_up(python.new_none());
  void* thread = python.PyEval_SaveThread();
  const int64_t refused = step(&a);
  python.PyEval_RestoreThread(thread);
  if (refused) return python.PyErr_SetObject(python.value_error, python.positive), give_up(nullptr);
  return objects.o;
}

}  // namespace exchange
