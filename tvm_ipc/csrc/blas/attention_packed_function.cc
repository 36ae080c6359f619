/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file attention_packed_function.cc
 * \brief Reads the arguments of attention and runs it on the thread pool that TVM's kernels use.
 */
#include "blas/attention_packed_function.h"

#include <cstdlib>

#include "blas/attention_multi_thread.h"
#include "blas/kernel_threads.h"
#include "blas/tensor_view.h"

namespace tvm_ipc {
namespace {

namespace ffi = tvm::ffi;

constexpr const char* kAttentionName = "tvm_ipc.blas.attention";
enum Causal : int64_t { kNotCausal, kTopLeft, kBottomRight };
constexpr int kFirstTensor = 8;

template <typename... Args>
[[noreturn]] void RefuseAttention(const Args&... args) {
  RefuseArgument(kAttentionName, args...);
}

/*! \brief A tensor of four dimensions whose last one is contiguous. */
View Tensor4(const char* what, const ffi::AnyView& tensor, int64_t axes) {
  View view(kAttentionName, what, tensor, axes);
  if (view.type == kFloat64) RefuseAttention(what, " is float64; attention takes other floats");
  if (view.ndim != 4) {
    RefuseAttention(what, " ", ShapeText(*view.tensor), " must have 4 dimensions");
  }
  if (view.stride[3] != 1 && view.shape[3] > 1) {
    RefuseAttention(what, " ", ShapeText(*view.tensor),
                    ": its axes are permuted so that the depth is not contiguous");
  }
  return view;
}

/*! \brief Set the strides of a bias that broadcasts to (batch, heads, queries, keys). */
void SetBias(const View& bias, const int64_t (&shape)[4], AttentionBatch* batch) {
  int64_t strides[4];
  for (int d = 0; d < 4; ++d) {
    const int from = d - (4 - bias.ndim);
    strides[d] = 0;
    if (from < 0 || bias.shape[from] == 1) continue;
    if (bias.shape[from] != shape[d]) {
      RefuseAttention("the bias ", ShapeText(*bias.tensor), " does not broadcast to (", shape[0],
                      ", ", shape[1], ", ", shape[2], ", ", shape[3], ")");
    }
    strides[d] = bias.stride[from];
  }
  batch->first.bias = bias.data;
  batch->each.bias_type = bias.type;
  batch->bias = {strides[0], strides[1] * batch->heads};
  batch->each.bias_head = strides[1];
  batch->each.bias_query = strides[2];
  batch->each.bias_key = strides[3];
}

}  // namespace

void CpuAttention(ffi::PackedArgs args, ffi::Any* result) {
  if (args.size() != kFirstTensor + 4 && args.size() != kFirstTensor + 5) {
    RefuseAttention("there are ", args.size(),
                    " arguments; needed are (query_axes, key_axes, value_axes, out_axes, scale, "
                    "softcap, causal, window, queries, keys, values, *bias, out)");
  }
  auto axes = [&](int index) { return args[index].cast<int64_t>(); };
  const View q = Tensor4("queries", args[kFirstTensor], axes(0));
  const View k = Tensor4("keys", args[kFirstTensor + 1], axes(1));
  const View v = Tensor4("values", args[kFirstTensor + 2], axes(2));
  const View out = Tensor4("out", args[args.size() - 1], axes(3));
  if (q.type != k.type || q.type != v.type) {
    RefuseAttention("queries, keys and values have different types");
  }
  const int64_t shape[4] = {q.shape[0], q.shape[1], q.shape[2], k.shape[2]};
  const int64_t groups = k.shape[1];
  if (k.shape[0] != shape[0] || v.shape[0] != shape[0] || v.shape[1] != groups ||
      v.shape[2] != shape[3] || k.shape[3] != q.shape[3] || out.shape[0] != shape[0] ||
      out.shape[1] != shape[1] || out.shape[2] != shape[2] || out.shape[3] != v.shape[3] ||
      (groups == 0 ? shape[1] != 0 : shape[1] % groups != 0)) {
    RefuseAttention("queries ", ShapeText(*q.tensor), ", keys ", ShapeText(*k.tensor), ", values ",
                    ShapeText(*v.tensor), " and out ", ShapeText(*out.tensor),
                    " do not fit together");
  }
  const int64_t causal = axes(6), window = axes(7);
  if (causal < kNotCausal || causal > kBottomRight) {
    RefuseAttention("causal is ", causal, "; it must be 0, 1 or 2");
  }
  if (window < 0 || (window > 0 && causal == kNotCausal)) {
    RefuseAttention("the window is ", window,
                    "; it must be 0 for none, or a number of keys of causal attention");
  }
  if (groups == 0) return;

  AttentionBatch batch{};
  batch.batches = shape[0];
  batch.groups = groups;
  batch.heads = shape[1] / groups;
  Attention& a = batch.each;
  a.type = q.type;
  a.bias_type = kFloat32;
  a.target_type = out.type;
  a.queries = shape[2];
  a.keys = shape[3];
  a.depth = q.shape[3];
  a.value_depth = v.shape[3];
  a.query_head = q.stride[1];
  a.query_stride = q.stride[2];
  a.key_stride = k.stride[2];
  a.value_stride = v.stride[2];
  a.target_head = out.stride[1];
  a.target_stride = out.stride[2];
  a.scale = static_cast<float>(args[4].cast<double>());
  a.softcap = static_cast<float>(args[5].cast<double>());
  a.causal = causal != kNotCausal;
  // TVM's kernels take the absolute value, too.
  a.offset = causal == kBottomRight ? std::abs(a.keys - a.queries) : 0;
  a.window = window;
  batch.first = {q.data, k.data, v.data, nullptr, const_cast<char*>(out.data)};
  batch.queries = {q.stride[0], q.stride[1] * batch.heads};
  batch.keys = {k.stride[0], k.stride[1]};
  batch.values = {v.stride[0], v.stride[1]};
  batch.target = {out.stride[0], out.stride[1] * batch.heads};
  if (args.size() == kFirstTensor + 5) {
    const View bias(kAttentionName, "the bias", args[kFirstTensor + 3], 0);
    if (bias.ndim > 4 || bias.type == kFloat64) {
      RefuseAttention("the bias ", ShapeText(*bias.tensor),
                      " must have at most 4 dimensions, and not be float64");
    }
    SetBias(bias, shape, &batch);
  }
  Attend(batch, kKernelThreads);
  *result = nullptr;
}

}  // namespace tvm_ipc
