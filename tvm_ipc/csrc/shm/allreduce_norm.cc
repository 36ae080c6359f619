/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file allreduce_norm.cc
 * \brief All-reduce, the addition of a residual, and the norm of its rows, while they are in the
 *        cache.
 *
 * The data is moved by the algorithms of all-reduce. Each reduced piece, which need not consist of
 * whole rows, is added to the residual at once, and each row is normalised as soon as it is
 * complete. The kernels and their rounding are those of all-reduce, so the new residual is bitwise
 * that of an all-reduce and an addition.
 */
#include <algorithm>
#include <cstring>
#include <vector>

#include "shm/allreduce.h"
#include "shm/collectives.h"
#include "shm/find_norm_function.h"

namespace tvm_ipc {

namespace {

/*! \brief Return weights as float32, which the kernels need; convert them if necessary. */
const float* Widened(const char* operation, const Buffer& buffer, std::vector<float>* converted) {
  constexpr ElementType kFloat32{2, 32, 1};  // the code is DLPack's
  const WidenFn widen = RequireWiden(operation, buffer.type);
  if (buffer.type == kFloat32) return static_cast<const float*>(buffer.data);
  converted->resize(buffer.count);
  widen(converted->data(), buffer.data, buffer.count);
  return converted->data();
}

/*! \brief Bytes of the buffer for rounded sums of 16-bit floats, before the residual is added. */
constexpr size_t kSumBytes = 4 << 10;

class ResidualAndNorm final : public Sink {
 public:
  ResidualAndNorm(ReduceFn sum, const Buffer& residual, const NormRow& row, NormFn normalise,
                  const Buffer& residual_out, const Buffer& norm_out)
      : sum_(sum),
        residual_(residual),
        row_(row),
        normalise_(normalise),
        residual_out_(residual_out),
        norm_out_(norm_out) {}

  void Reduce(size_t at, const void* const* sources, int num_sources, size_t count) final {
    const void* here[kMaxRanks + 1];
    for (size_t done = 0; done < count;) {
      const size_t column = (at + done) % row_.count;
      const size_t part = std::min(count - done, row_.count - column);
      for (int i = 0; i < num_sources; ++i) here[i] = At(sources[i], done);
      Add(at + done, here, num_sources, part);
      done += part;
      if (column + part == row_.count) Normalise(at + done - row_.count);
    }
  }
  void Copy(size_t at, const void* reduced, size_t count) final { Reduce(at, &reduced, 1, count); }
  bool in_order() const final { return true; }

 private:
  size_t width() const { return residual_.type.bytes(); }
  const void* At(const void* elements, size_t at) const {
    return static_cast<const uint8_t*>(elements) + at * width();
  }

  /*! \brief Store the sum of the sources and the residual. `sources` has room for one more. */
  void Add(size_t at, const void** sources, int num_sources, size_t count) {
    uint8_t* out = residual_out_.begin() + at * width();
    const void* residual = At(residual_.data, at);
    if (num_sources == 1 || width() == sizeof(float)) {
      sources[num_sources] = residual;
      return sum_(out, sources, num_sources + 1, count, false);
    }
    alignas(kLine) uint8_t sum[kSumBytes];
    const size_t most = kSumBytes / width();
    const void* here[kMaxRanks];
    for (size_t done = 0; done < count; done += most) {
      const size_t part = std::min(most, count - done);
      for (int i = 0; i < num_sources; ++i) here[i] = At(sources[i], done);
      sum_(sum, here, num_sources, part, false);
      const void* both[] = {sum, At(residual, done)};
      sum_(out + done * width(), both, 2, part, false);
    }
  }

  /*! \brief Normalise the row that starts at `at`. */
  void Normalise(size_t at) {
    normalise_(norm_out_.begin() + at * norm_out_.type.bytes(),
               residual_out_.begin() + at * width(), row_);
  }

  ReduceFn sum_;
  const Buffer& residual_;
  const NormRow& row_;
  NormFn normalise_;
  const Buffer& residual_out_;
  const Buffer& norm_out_;
};

struct Named {
  const char* name;
  const Buffer& buffer;
};

void RequireRows(const char* operation, const Buffer& send, const Norm& norm) {
  const size_t row = norm.weight.count;
  if (norm.bias != nullptr && norm.bias->count != row) {
    Fail(kind::kValue, operation, ": weight has ", row, " elements, bias has ", norm.bias->count,
         "; both must have those of a row");
  }
  if (row == 0 ? send.count != 0 : send.count % row != 0) {
    Fail(kind::kValue, operation, ": send has ", send.count, " elements, which are no rows of ",
         row, ", as many as weight has");
  }
}

void RequireApart(const char* operation, const Named& output, const Named& other) {
  if (!output.buffer.Overlaps(other.buffer)) return;
  Fail(kind::kValue, operation, ": ", output.name, " overlaps ", other.name,
       "; outputs must be apart from all else, but residual_out may be residual");
}

}  // namespace

void AllReduceNormBy(const Buffer& send, const Buffer& residual, const Norm& norm, uint8_t flags,
                     const Buffer& residual_out, const Buffer& norm_out, const NormRun& run) {
  const bool centred = norm.bias != nullptr;
  const char* const operation = centred ? "allreduce_layer_norm" : "allreduce_rms_norm";
  for (const Named& one : {Named{"residual", residual}, Named{"residual_out", residual_out}}) {
    if (one.buffer.type == send.type && one.buffer.count == send.count) continue;
    Fail(kind::kValue, operation, ": send has ", send.count, " x ", Name(send.type), ", ", one.name,
         " has ", one.buffer.count, " x ", Name(one.buffer.type), "; they must be equal");
  }
  if (norm_out.count != send.count) {
    Fail(kind::kValue, operation, ": send has ", send.count, " elements, norm_out has ",
         norm_out.count, "; they must have as many");
  }
  RequireRows(operation, send, norm);
  const NormFn normalise = RequireNorm(operation, send.type, norm_out.type);
  const ReduceFn sum = RequireReduce(operation, send.type, ReduceKind::kSum);
  for (const Named& input : {Named{"send", send}, Named{"weight", norm.weight},
                             Named{"bias", centred ? *norm.bias : norm.weight}}) {
    RequireApart(operation, {"residual_out", residual_out}, input);
    RequireApart(operation, {"norm_out", norm_out}, input);
  }
  RequireApart(operation, {"norm_out", norm_out}, {"residual", residual});
  RequireApart(operation, {"norm_out", norm_out}, {"residual_out", residual_out});
  if (residual_out.data != residual.data) {
    RequireApart(operation, {"residual_out", residual_out}, {"residual", residual});
  }
  std::vector<float> weights;
  std::vector<float> biases;
  const NormRow row{norm.weight.count, Widened(operation, norm.weight, &weights),
                    centred ? Widened(operation, *norm.bias, &biases) : nullptr,
                    static_cast<float>(norm.epsilon)};
  int64_t epsilon;
  memcpy(&epsilon, &norm.epsilon, sizeof(epsilon));
  Descriptor mine;
  mine.op = centred ? OpName("allreduce_layer") : OpName("allreduce_rms");
  mine.reduces = true;
  mine.flags = flags;
  mine.type = send.type;
  mine.count = send.count;
  mine.layout_hash = HashOf({static_cast<int64_t>(row.count), epsilon});
  ResidualAndNorm sink(sum, residual, row, normalise, residual_out, norm_out);
  run(sum, mine, sink);
}

void AllReduceNorm(Rank& rank, const Buffer& send, const Buffer& residual, const Norm& norm,
                   TeamId team_id, Strategy strategy, uint8_t flags, const Buffer& residual_out,
                   const Buffer& norm_out) {
  AllReduceNormBy(send, residual, norm, flags, residual_out, norm_out,
                  [&](ReduceFn sum, Descriptor mine, Sink& sink) {
                    Team team(rank, team_id);
                    mine.offset = rank.OffsetOf(send.data, send.bytes());
                    AllReduceInto(team, send, sum, strategy, mine, sink);
                  });
}

}  // namespace tvm_ipc
