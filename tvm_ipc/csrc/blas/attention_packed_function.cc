/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file attention_packed_function.cc
 * \brief Reads the arguments of attention, of one sequence per batch or of several that follow each
 *        other, and runs it on the threads of TVM's kernels.
 */
#include "blas/attention_packed_function.h"

#include <algorithm>
#include <cstdlib>

#include "blas/attention_multi_thread.h"
#include "blas/kernel_threads.h"
#include "blas/tensor_view.h"

namespace tvm_ipc {
namespace {

namespace ffi = tvm::ffi;

constexpr const char* kAttentionName = "tvm_ipc.blas.attention";
constexpr const char* kSequencesName = "tvm_ipc.blas.attention_of_sequences";
enum Causal : int64_t { kNotCausal, kTopLeft, kBottomRight };
constexpr int kReproducible = 8, kFirstTensor = 9;

/*! \brief The arguments of a call; `Refuse` reports wrong ones. */
struct AttentionArguments {
  const char* function;
  ffi::PackedArgs args;
  AttentionBatch batch{};
  /*! \brief (batch, heads, queries, keys) */
  int64_t shape[4] = {};
  int64_t causal = 0;

  template <typename... Args>
  [[noreturn]] void Refuse(const Args&... text) const {
    RefuseArgument(function, text...);
  }

  int64_t Integer(int index) const { return args[index].cast<int64_t>(); }
  View Tensor4(const char* what, int index, int64_t axes) const;
  void ReadTensors();
  void ReadMask();
  void ReadBias();
  /*! \brief Set the first token of a causal mask, after the numbers of queries and keys. */
  void SetOffset() {
    // TVM's kernels take the absolute value, too.
    Attention& a = batch.each;
    a.offset = causal == kBottomRight ? std::abs(a.keys - a.queries) : 0;
  }
};

/*! \brief A tensor of four dimensions whose last one is contiguous. */
View AttentionArguments::Tensor4(const char* what, int index, int64_t axes) const {
  View view(function, what, args[index], axes);
  if (view.type == kFloat64) Refuse(what, " is float64; attention takes other floats");
  if (view.ndim != 4) {
    Refuse(what, " ", ShapeText(*view.tensor), " must have 4 dimensions");
  }
  if (view.stride[3] != 1 && view.shape[3] > 1) {
    Refuse(what, " ", ShapeText(*view.tensor),
           ": its axes are permuted so that the depth is not contiguous");
  }
  return view;
}

void AttentionArguments::ReadTensors() {
  const View q = Tensor4("queries", kFirstTensor, Integer(0));
  const View k = Tensor4("keys", kFirstTensor + 1, Integer(1));
  const View v = Tensor4("values", kFirstTensor + 2, Integer(2));
  const View out = Tensor4("out", args.size() - 1, Integer(3));
  if (q.type != k.type || q.type != v.type) {
    Refuse("queries, keys and values have different types");
  }
  std::copy_n(q.shape, 3, shape);
  shape[3] = k.shape[2];
  const int64_t groups = k.shape[1];
  if (k.shape[0] != shape[0] || v.shape[0] != shape[0] || v.shape[1] != groups ||
      v.shape[2] != shape[3] || k.shape[3] != q.shape[3] || out.shape[0] != shape[0] ||
      out.shape[1] != shape[1] || out.shape[2] != shape[2] || out.shape[3] != v.shape[3] ||
      (groups == 0 ? shape[1] != 0 : shape[1] % groups != 0)) {
    Refuse("queries ", ShapeText(*q.tensor), ", keys ", ShapeText(*k.tensor), ", values ",
           ShapeText(*v.tensor), " and out ", ShapeText(*out.tensor), " do not fit together");
  }
  batch.batches = shape[0];
  batch.groups = groups;
  if (groups == 0) return;
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
  batch.first = {q.data, k.data, v.data, nullptr, const_cast<char*>(out.data)};
  batch.queries = {q.stride[0], q.stride[1] * batch.heads};
  batch.keys = {k.stride[0], k.stride[1]};
  batch.values = {v.stride[0], v.stride[1]};
  batch.target = {out.stride[0], out.stride[1] * batch.heads};
}

void AttentionArguments::ReadMask() {
  causal = Integer(6);
  const int64_t window = Integer(7);
  if (causal < kNotCausal || causal > kBottomRight) {
    Refuse("causal is ", causal, "; it must be 0, 1 or 2");
  }
  if (window < 0 || (window > 0 && causal == kNotCausal)) {
    Refuse("the window is ", window,
           "; it must be 0 for none, or a number of keys of causal attention");
  }
  batch.each.causal = causal != kNotCausal;
  batch.each.window = window;
  const int64_t reproducible = Integer(kReproducible);
  if (reproducible != 0 && reproducible != 1) {
    Refuse("reproducible is ", reproducible, "; it must be 0 or 1");
  }
  batch.each.reproducible = reproducible == 1;
  SetOffset();
}

/*! \brief Set the strides of a bias that broadcasts to `shape`. */
void AttentionArguments::ReadBias() {
  const View bias(function, "the bias", args[kFirstTensor + 3], 0);
  if (bias.ndim > 4 || bias.type == kFloat64) {
    Refuse("the bias ", ShapeText(*bias.tensor),
           " must have at most 4 dimensions, and not be float64");
  }
  int64_t strides[4];
  for (int d = 0; d < 4; ++d) {
    const int from = d - (4 - bias.ndim);
    strides[d] = 0;
    if (from < 0 || bias.shape[from] == 1) continue;
    if (bias.shape[from] != shape[d]) {
      Refuse("the bias ", ShapeText(*bias.tensor), " does not broadcast to (", shape[0], ", ",
             shape[1], ", ", shape[2], ", ", shape[3], ")");
    }
    strides[d] = bias.stride[from];
  }
  batch.first.bias = bias.data;
  batch.each.bias_type = bias.type;
  batch.bias = {strides[0], strides[1] * batch.heads};
  batch.each.bias_head = strides[1];
  batch.each.bias_query = strides[2];
  batch.each.bias_key = strides[3];
}

/*! \brief The first token of each sequence and the end of the last one, in a tensor of int32. */
struct Starts {
  const int32_t* data;
  int64_t count;

  Starts(const char* what, const AttentionArguments& call, int index, int64_t tokens) {
    const auto tensor = call.args[index].try_cast<DLTensor*>();
    if (!tensor.has_value() || (*tensor)->ndim != 1 || (*tensor)->shape[0] < 1 ||
        (*tensor)->dtype.code != kDLInt || (*tensor)->dtype.bits != 32 ||
        (*tensor)->device.device_type != kDLCPU) {
      call.Refuse(what, " must be a tensor of int32 on the CPU, with one dimension");
    }
    count = (*tensor)->shape[0];
    data = reinterpret_cast<const int32_t*>(static_cast<const char*>((*tensor)->data) +
                                            (*tensor)->byte_offset);
    for (int64_t i = 0; i < count; ++i) {
      if (data[i] < (i == 0 ? 0 : data[i - 1])) {
        call.Refuse(what, "[", i, "] is ", data[i], "; sequences begin at 0 and follow each other");
      }
    }
    if (data[0] != 0 || data[count - 1] != tokens) {
      call.Refuse(what, " is from ", data[0], " to ", data[count - 1], "; it must be from 0 to ",
                  tokens, ", the number of tokens");
    }
  }
};

}  // namespace

void CpuAttention(ffi::PackedArgs args, ffi::Any* result) {
  AttentionArguments call{kAttentionName, args};
  if (args.size() != kFirstTensor + 4 && args.size() != kFirstTensor + 5) {
    call.Refuse("there are ", args.size(),
                " arguments; needed are (query_axes, key_axes, value_axes, out_axes, scale, "
                "softcap, causal, window, reproducible, queries, keys, values, *bias, out)");
  }
  call.ReadTensors();
  call.ReadMask();
  *result = nullptr;
  if (call.batch.groups == 0) return;
  if (args.size() == kFirstTensor + 5) call.ReadBias();
  Attend(call.batch, kKernelThreads);
}

void CpuAttentionOfSequences(ffi::PackedArgs args, ffi::Any* result) {
  AttentionArguments call{kSequencesName, args};
  if (args.size() != kFirstTensor + 6) {
    call.Refuse("there are ", args.size(),
                " arguments; needed are (query_axes, key_axes, value_axes, out_axes, scale, "
                "softcap, causal, window, reproducible, queries, keys, values, query_starts, "
                "key_starts, out)");
  }
  call.ReadTensors();
  call.ReadMask();
  *result = nullptr;
  if (call.shape[0] != 1) call.Refuse("the batch is ", call.shape[0], "; it must be 1");
  const Starts queries("query_starts", call, kFirstTensor + 3, call.shape[2]);
  const Starts keys("key_starts", call, kFirstTensor + 4, call.shape[3]);
  if (queries.count != keys.count) {
    call.Refuse("query_starts has ", queries.count, " elements, and key_starts ", keys.count);
  }
  if (call.batch.groups == 0) return;
  Attention& a = call.batch.each;
  const AttentionHead first = call.batch.first;
  const int64_t size = SizeOf(a.type);
  for (int64_t i = 0; i + 1 < queries.count; ++i) {
    a.queries = queries.data[i + 1] - queries.data[i];
    a.keys = keys.data[i + 1] - keys.data[i];
    call.SetOffset();
    call.batch.first.queries = first.queries + queries.data[i] * a.query_stride * size;
    call.batch.first.keys = first.keys + keys.data[i] * a.key_stride * size;
    call.batch.first.values = first.values + keys.data[i] * a.value_stride * size;
    call.batch.first.target =
        first.target + queries.data[i] * a.target_stride * SizeOf(a.target_type);
    Attend(call.batch, kKernelThreads);
  }
}

}  // namespace tvm_ipc
