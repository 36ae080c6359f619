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

}  // namespace

void AllReduceNormBy(const Call& call, const NormRun& run) {
  const char* const operation = Name(call.collective);
  const NormFn normalise = RequireNorm(operation, call.send.type, call.norm_out.type);
  const ReduceFn sum = RequireReduce(operation, call.send.type, ReduceKind::kSum);
  std::vector<float> weights;
  std::vector<float> biases;
  const NormRow row{call.weight.count, Widened(operation, call.weight, &weights),
                    call.bias.exists() ? Widened(operation, call.bias, &biases) : nullptr,
                    static_cast<float>(call.epsilon)};
  ResidualAndNorm sink(sum, call.residual, row, normalise, call.recv, call.norm_out);
  run(sum, sink);
}

void AllReduceRmsNorm(Team& team, const Call& call) {
  AllReduceNormBy(call, [&](ReduceFn sum, Sink& sink) {
    AllReduceInto(team, call.send, sum, team.Describe(call), sink);
  });
}

void AllReduceLayerNorm(Team& team, const Call& call) { AllReduceRmsNorm(team, call); }

}  // namespace tvm_ipc
