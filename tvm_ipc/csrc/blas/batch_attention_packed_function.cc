/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file batch_attention_packed_function.cc
 * \brief Attention of one token of each request of a batch, whose keys and values are in tensors of
 *        its own. Threads take some heads of the keys of a request at a time.
 */
#include "blas/batch_attention_packed_function.h"

#include <tvm/ffi/container/array.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "blas/attention_multi_thread.h"
#include "blas/kernel_threads.h"
#include "blas/scratch_memory.h"
#include "blas/select_instruction_set.h"
#include "blas/tensor_view.h"

namespace tvm_ipc {
namespace {

namespace ffi = tvm::ffi;

constexpr const char* kBatchAttentionName = "tvm_ipc.blas.batch_attention";
constexpr int kPositions = 4, kCaches = 5, kQueries = 6, kMaskArgument = 9;
thread_local Scratch batch_scratch, batch_states;

template <typename... Args>
[[noreturn]] void RefuseBatch(const Args&... args) {
  RefuseArgument(kBatchAttentionName, args...);
}

/*! \brief The tokens of a batch: (batch, heads, depth), whatever the position of the axis 1. */
struct Tokens : View {
  int64_t heads, depth;
  Tokens(const char* what, const ffi::AnyView& tensor)
      : View(kBatchAttentionName, what, tensor, 0) {
    if (type == kFloat64) RefuseBatch(what, " is float64; attention takes other floats");
    if (ndim != 4 || (this->shape[1] != 1 && this->shape[2] != 1)) {
      RefuseBatch(what, " ", ShapeText(*this->tensor),
                  " must have 4 dimensions, and one token of each request");
    }
    heads = this->shape[1] * this->shape[2];
    depth = this->shape[3];
  }
  char* At(int64_t row, int64_t head) const {
    return const_cast<char*>(data) + (row * heads + head) * depth * SizeOf(type);
  }
};

/*! \brief One request: the tokens before, its keys and values, and its mask, if there is one. */
struct RequestRow {
  int64_t past;
  char *keys, *values;
  const char* mask = nullptr;
  std::vector<BiasRange> ranges = {};
};

char* CacheOf(const ffi::Array<ffi::Any>& caches, int64_t index, const Tokens& tokens, int64_t past,
              int64_t row) {
  if (index < 0 || index >= static_cast<int64_t>(caches.size())) {
    RefuseBatch("request ", row, " has ", caches.size(), " caches; there is no number ", index);
  }
  const View cache(kBatchAttentionName, "a cache", caches[index], 0);
  if (cache.type != tokens.type || cache.ndim != 3 || cache.shape[1] != tokens.heads ||
      cache.shape[2] != tokens.depth) {
    RefuseBatch("cache ", index, " of request ", row, " ", ShapeText(*cache.tensor),
                " does not have the type, heads and depth of the new ", tokens.what, " ",
                ShapeText(*tokens.tensor));
  }
  if (past < 0 || past >= cache.shape[0]) {
    RefuseBatch("the position of request ", row, " is ", past, ", but its caches have room for ",
                cache.shape[0], " tokens");
  }
  return const_cast<char*>(cache.data);
}

struct BatchJob {
  const AttentionKernels& kernels;
  const RequestRow* rows;
  Attention each;
  Tokens q, k, v, out;
  int64_t groups;  // heads of keys of a unit
  int64_t tasks;
  int64_t units_of_row = (k.heads + groups - 1) / groups;
  int64_t units = q.shape[0] * units_of_row;

  AttentionHead HeadOf(int64_t row, int64_t group) const {
    const RequestRow& request = rows[row];
    const int64_t size = SizeOf(each.type), first = group * (q.heads / k.heads);
    return {q.At(row, first),
            request.keys + group * each.depth * size,
            request.values + group * each.value_depth * size,
            request.mask,
            out.At(row, first),
            request.ranges.data()};
  }

  /*! \brief Append keys and values, and attend with the queries that share them. */
  void RunUnit(int64_t unit) const {
    const int64_t row = unit / units_of_row, begin = unit % units_of_row * groups;
    const int64_t end = std::min(begin + groups, k.heads), size = SizeOf(each.type);
    const RequestRow& request = rows[row];
    Attention a = each;
    a.keys = request.past + 1;
    std::memcpy(request.keys + (request.past * a.key_stride + begin * a.depth) * size,
                k.At(row, begin), (end - begin) * a.depth * size);
    std::memcpy(request.values + (request.past * a.value_stride + begin * a.value_depth) * size,
                v.At(row, begin), (end - begin) * a.value_depth * size);
    std::vector<AttentionHead> heads;
    for (int64_t group = begin; group < end; ++group) heads.push_back(HeadOf(row, group));
    // The other tasks take the units in between, in all probability.
    const int64_t later = unit + tasks;
    AttentionHead next_head{};
    if (later < units) next_head = HeadOf(later / units_of_row, later % units_of_row * groups);
    const int64_t number = end - begin, shared = q.heads / k.heads;
    const int64_t state_size = kernels.StateSize(a, std::min(kernels.lanes, shared));
    float* const scratch = batch_scratch.Floats(kernels.GroupsScratchSize(a, number));
    float* const states = batch_states.Floats(number * state_size);
    for (int64_t first = 0; first < shared; first += kernels.lanes) {
      const int64_t count = std::min(kernels.lanes, shared - first);
      kernels.attend_groups(a, heads.data(), number, later < units ? &next_head : nullptr, first,
                            count, 0, a.keys, scratch, states);
      for (int64_t group = 0; group < number; ++group) {
        kernels.store(a, heads[group], first, count, scratch, states + group * state_size);
      }
    }
  }
};

}  // namespace

void CpuBatchAttention(ffi::PackedArgs args, ffi::Any* result) {
  if (args.size() != kMaskArgument + 1 && args.size() != kMaskArgument + 2) {
    RefuseBatch("there are ", args.size(),
                " arguments; needed are (key_cache, value_cache, scale, softcap, positions, "
                "caches, queries, keys, values, *mask, out)");
  }
  const Tokens q("queries", args[kQueries]), k("keys", args[kQueries + 1]);
  const Tokens v("values", args[kQueries + 2]), out("out", args[args.size() - 1]);
  const int64_t batch = q.shape[0];
  if (k.type != q.type || v.type != q.type) {
    RefuseBatch("queries, keys and values have different types");
  }
  if (k.shape[0] != batch || v.shape[0] != batch || out.shape[0] != batch || v.heads != k.heads ||
      out.heads != q.heads || k.depth != q.depth || out.depth != v.depth || k.heads == 0 ||
      q.heads % k.heads != 0) {
    RefuseBatch("queries ", ShapeText(*q.tensor), ", keys ", ShapeText(*k.tensor), ", values ",
                ShapeText(*v.tensor), " and out ", ShapeText(*out.tensor), " do not fit together");
  }
  const auto positions = args[kPositions].try_cast<DLTensor*>();
  if (!positions.has_value() || (*positions)->ndim != 2 || (*positions)->shape[0] != batch ||
      (*positions)->shape[1] != 1 || (*positions)->dtype.code != kDLInt ||
      (*positions)->dtype.bits != 64) {
    RefuseBatch("positions must be a tensor of shape (", batch, ", 1) of int64");
  }
  const auto* past = reinterpret_cast<const int64_t*>(static_cast<const char*>((*positions)->data) +
                                                      (*positions)->byte_offset);
  const auto caches = args[kCaches].try_cast<ffi::Array<ffi::Array<ffi::Any>>>();
  if (!caches.has_value() || static_cast<int64_t>(caches->size()) != batch) {
    RefuseBatch("caches must have the caches of each of ", batch, " requests");
  }
  const auto key_cache = args[0].cast<int64_t>(), value_cache = args[1].cast<int64_t>();
  std::vector<RequestRow> rows(batch);
  int64_t total = 0, longest = 0;
  for (int64_t row = 0; row < batch; ++row) {
    const ffi::Array<ffi::Any> own = (*caches)[row];
    rows[row] = {past[row], CacheOf(own, key_cache, k, past[row], row),
                 CacheOf(own, value_cache, v, past[row], row)};
    total += past[row] + 1;
    longest = std::max(longest, past[row] + 1);
  }
  Attention a{};
  a.type = q.type;
  a.bias_type = kFloat32;
  a.target_type = out.type;
  a.queries = 1;
  a.depth = q.depth;
  a.value_depth = v.depth;
  a.query_head = a.query_stride = q.depth;
  a.target_head = a.target_stride = v.depth;
  a.key_stride = k.heads * k.depth;
  a.value_stride = v.heads * v.depth;
  a.scale = static_cast<float>(args[2].cast<double>());
  a.softcap = static_cast<float>(args[3].cast<double>());
  const AttentionKernels& kernels = CurrentAttention(a.type);
  if (args.size() == kMaskArgument + 2) {
    const View view(kBatchAttentionName, "the mask", args[kMaskArgument], 0);
    if (view.type == kFloat64 || view.ndim != 4 || (view.shape[0] != batch && view.shape[0] != 1) ||
        view.shape[1] != 1 || view.shape[2] != 1 || view.shape[3] < longest) {
      RefuseBatch("the mask ", ShapeText(*view.tensor), " must be (", batch, " or 1, 1, 1, ",
                  longest, " or more), and not float64");
    }
    a.bias_type = view.type;
    a.bias_key = 1;
    const int64_t next_row = view.shape[0] == 1 ? 0 : view.stride[0] * SizeOf(view.type);
    for (int64_t row = 0; row < batch; ++row) {
      rows[row].mask = view.data + row * next_row;
      a.keys = rows[row].past + 1;
      rows[row].ranges.resize((a.keys + kAttentionKeys - 1) / kAttentionKeys);
      kernels.classify(a, rows[row].mask, rows[row].ranges.data());
    }
  }
  const double work = static_cast<double>(total) * q.heads * (a.depth + a.value_depth);
  const int tasks = AttentionTasks(work, kKernelThreads);
  // Units of many heads read memory faster, and those of few occupy more threads.
  const int64_t shares = tasks == 1 ? 1 : (4 * tasks + batch - 1) / batch;
  const int64_t groups = std::clamp<int64_t>(k.heads / shares, 1, kernels.most_groups);
  BatchJob job{kernels, rows.data(), a, q, k, v, out, groups, tasks};
  RunUnits(kKernelThreads, static_cast<int>(std::min<int64_t>(tasks, job.units)), job.units, &job);
  *result = nullptr;
}

}  // namespace tvm_ipc
