/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file nccl_values.h
 * \brief Numbers in device memory, and what collectives make of them. They are small, so that sums
 *        are exact in every type and in every order.
 */
#ifndef TVM_IPC_TESTS_NCCL_VALUES_H_
#define TVM_IPC_TESTS_NCCL_VALUES_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/communication_backend.h"
#include "core/rank_runtime_state.h"
#include "expect.h"
#include "reduce_reference.h"

namespace tvm_ipc {

/*! \brief The bits of a number as an element. */
inline uint64_t BitsOf(ElementType type, double number) {
  constexpr uint8_t kFloat = 2, kBFloat = 4;
  if (type.code != kFloat && type.code != kBFloat) {
    return static_cast<uint64_t>(static_cast<int64_t>(number));
  }
  if (type.bits == 64) return reference::As<uint64_t>(number);
  const auto narrow = static_cast<float>(number);
  if (type.bits == 32) return reference::As<uint32_t>(narrow);
  return reference::Round16(type, narrow);
}

/*! \brief What rank r has at i. Not 0, which products would hide in. */
inline double NumberOf(uint64_t seed, ElementType type, int rank, size_t i) {
  constexpr uint8_t kBool = 6;
  const auto number = static_cast<int>((seed * 31 + static_cast<size_t>(rank) * 7 + i * 5) % 4);
  if (type.code == kBool) return number == 0 ? 1 : 0;
  return number == 3 ? 2 : 1;
}

inline double Reduced(ReduceKind kind, ElementType type, const std::vector<double>& numbers) {
  constexpr uint8_t kBool = 6;
  double all = numbers[0];
  for (size_t k = 1; k < numbers.size(); ++k) {
    const double next = numbers[k];
    if (kind == ReduceKind::kProd) {
      all *= next;
    } else if (kind == ReduceKind::kMin) {
      all = std::min(all, next);
    } else if (kind == ReduceKind::kMax) {
      all = std::max(all, next);
    } else {
      all += next;
    }
  }
  if (kind == ReduceKind::kAvg) all /= static_cast<double>(numbers.size());
  return type.code == kBool ? all != 0 : all;
}

/*! \brief Memory of a rank's device between two guards, which the host can see here. */
class OnDevice {
 public:
  OnDevice(Rank& rank, ElementType type, size_t count)
      : heap_(rank.endpoint().heap()), bytes_(count * type.bytes() + 2 * kGuard) {
    memory_ = static_cast<uint8_t*>(heap_->Allocate(bytes_));
    memset(memory_, kPoison, bytes_);
    buffer_ = Buffer{memory_ + kGuard, count, type};
  }
  ~OnDevice() { heap_->Free(memory_, bytes_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  const Buffer& buffer() const { return buffer_; }
  operator const Buffer&() const { return buffer_; }  // NOLINT: it is one

  template <typename Number>
  OnDevice& Fill(const Number& number) {
    for (size_t i = 0; i < buffer_.count; ++i) Set(i, BitsOf(buffer_.type, number(i)));
    return *this;
  }
  /*! \brief Every element, and nothing around them, is as it should be. */
  template <typename Number>
  void Expect(const std::string& what, const Number& number) const {
    for (size_t i = 0; i < buffer_.count; ++i) {
      const uint64_t wanted = Cut(BitsOf(buffer_.type, number(i)));
      EXPECT(Get(i) == wanted, what, " of ", Name(buffer_.type), ": element ", i, " of ",
             buffer_.count, " has the bits ", Get(i), ", not ", wanted);
    }
    for (size_t i = 0; i < kGuard; ++i) {
      EXPECT(memory_[i] == kPoison && memory_[bytes_ - 1 - i] == kPoison, what, " of ",
             Name(buffer_.type), " wrote beyond its output");
    }
  }
  /*! \brief A part of it. */
  Buffer Slice(size_t at, size_t count) const {
    return Buffer{buffer_.begin() + at * buffer_.type.bytes(), count, buffer_.type};
  }

 private:
  static constexpr size_t kGuard = 256;
  static constexpr uint8_t kPoison = 0xa5;

  uint64_t Cut(uint64_t bits) const {
    return buffer_.type.bits == 64 ? bits : bits & ((uint64_t{1} << buffer_.type.bits) - 1);
  }
  uint64_t Get(size_t i) const {
    uint64_t bits = 0;
    memcpy(&bits, buffer_.begin() + i * buffer_.type.bytes(), buffer_.type.bytes());
    return bits;
  }
  void Set(size_t i, uint64_t bits) {
    memcpy(buffer_.begin() + i * buffer_.type.bytes(), &bits, buffer_.type.bytes());
  }

  std::shared_ptr<Heap> heap_;
  size_t bytes_;
  uint8_t* memory_;
  Buffer buffer_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_TESTS_NCCL_VALUES_H_
