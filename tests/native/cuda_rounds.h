/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file cuda_rounds.h
 * \brief What ranks on devices do in a round that ends well. Integers tell who gave what.
 */
#ifndef TVM_IPC_TESTS_CUDA_ROUNDS_H_
#define TVM_IPC_TESTS_CUDA_ROUNDS_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/communication_backend.h"
#include "core/current_stream_hooks.h"
#include "core/rank_runtime_state.h"
#include "driver/device_properties_and_context.h"

namespace tvm_ipc {

constexpr ElementType kInt32{0, 32, 1};

/*! \brief Memory of a rank's device: of its arena, or its own. */
class OnDevice {
 public:
  OnDevice(Rank& rank, size_t count, bool in_arena, ElementType type = kInt32)
      : rank_(rank), heap_(in_arena ? rank.endpoint().heap() : nullptr) {
    buffer.count = count;
    buffer.type = type;
    if (heap_ != nullptr) {
      buffer.data = heap_->Allocate(buffer.bytes());
    } else {
      memory_ = cuda::Device::Open(rank.options().device);
      const cuda::Here here(*memory_);
      cuda::Address address = 0;
      cuda::TheDriver().cuMemAlloc_v2("a test", &address, std::max<size_t>(buffer.bytes(), 1));
      buffer.data = reinterpret_cast<void*>(address);
    }
    Put(std::vector<int32_t>(count, -77));
  }
  OnDevice(Rank& rank, const std::vector<int32_t>& values, bool in_arena)
      : OnDevice(rank, values.size(), in_arena) {
    Put(values);
  }
  ~OnDevice() {
    try {
      rank_.endpoint().Synchronise();
    } catch (const Error&) {
      // A test of errors has heard of it.
    }
    if (heap_ != nullptr) {
      heap_->Free(buffer.data, buffer.bytes());
    } else {
      const cuda::Here here(*memory_);
      cuda::TheDriver().cuMemFree_v2.Try(reinterpret_cast<cuda::Address>(buffer.data));
    }
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  void Put(const std::vector<int32_t>& values) {
    Copy(buffer.data, values.data());
    rank_.endpoint().Synchronise();
  }
  std::vector<int32_t> Get() {
    rank_.endpoint().Synchronise();
    std::vector<int32_t> values(buffer.count);
    Copy(values.data(), buffer.data);
    rank_.endpoint().Synchronise();
    return values;
  }

  Buffer buffer;

 private:
  void Copy(void* to, const void* from) {
    const auto device = cuda::Device::Open(rank_.options().device);
    const cuda::Here here(*device);
    if (buffer.bytes() == 0) return;
    cuda::TheDriver().cuMemcpyAsync(
        "a test", reinterpret_cast<cuda::Address>(to), reinterpret_cast<cuda::Address>(from),
        buffer.bytes(),
        static_cast<cuda::Stream>(ProgramStreams().current(2, rank_.options().device)));
  }

  Rank& rank_;
  std::shared_ptr<Heap> heap_;
  std::shared_ptr<cuda::Device> memory_;
};

std::vector<int32_t> Values(int rank, size_t count, size_t from = 0);
std::vector<int32_t> Sums(const std::vector<int>& ranks, size_t count, size_t from = 0);

/*! \brief All collectives of a team, whose ranks are given, with inputs of `count` elements. */
void DoAll(Rank& rank, TeamId team, const std::vector<int>& ranks, size_t count, bool in_arena);
void DoMessages(Rank& rank, size_t count, bool in_arena);
void DoNorm(Rank& rank);

}  // namespace tvm_ipc
#endif  // TVM_IPC_TESTS_CUDA_ROUNDS_H_
