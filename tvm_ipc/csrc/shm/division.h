/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file division.h
 * \brief How an all-to-all divides what its members send and receive.
 */
#ifndef TVM_IPC_SHM_DIVISION_H_
#define TVM_IPC_SHM_DIVISION_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/backend.h"

namespace tvm_ipc {

/*! \brief Which bytes the members of a team give each other; all of them know all. */
class Division {
 public:
  static constexpr size_t kWhole = std::numeric_limits<size_t>::max();

  Division(const Buffer& send, const Parts& parts, int size)
      : parts_(parts),
        size_(size),
        width_(send.type.bytes()),
        equal_(send.bytes() / static_cast<size_t>(size)) {}

  /*! \brief The bytes that one member gives to another. */
  size_t part(int from, int to) const {
    return parts_.empty() ? equal_ : static_cast<size_t>(parts_[from * size_ + to]) * width_;
  }
  /*! \brief The bytes of a piece of it, which begins at some byte of it. */
  size_t piece(int from, int to, size_t at, size_t most) const {
    const size_t bytes = part(from, to);
    return at < bytes ? std::min(bytes - at, most) : 0;
  }
  /*! \brief The bytes of the pieces that a member gives to those before another. */
  size_t before(int from, int to, size_t at = 0, size_t most = kWhole) const {
    if (parts_.empty()) return to * piece(from, 0, at, most);
    size_t bytes = 0;
    for (int j = 0; j < to; ++j) bytes += piece(from, j, at, most);
    return bytes;
  }
  /*! \brief Where in what a member receives the part of another begins. */
  size_t place(int from, int to) const {
    size_t bytes = 0;
    for (int i = 0; i < from; ++i) bytes += part(i, to);
    return bytes;
  }
  /*! \brief The most that a member sends in all. */
  size_t most_sent() const {
    size_t most = 0;
    for (int i = 0; i < size_; ++i) most = std::max(most, before(i, size_));
    return most;
  }
  /*! \brief The elements of all parts. */
  uint64_t elements() const {
    uint64_t sum = 0;
    for (int64_t part : parts_) sum += part;
    return sum;
  }
  /*! \brief The largest part that one member gives to another. */
  size_t longest() const {
    size_t longest = 0;
    for (int i = 0; i < size_; ++i) {
      for (int j = 0; j < size_; ++j) {
        if (i != j) longest = std::max(longest, part(i, j));
      }
    }
    return longest;
  }

 private:
  const Parts& parts_;
  int size_;
  size_t width_;
  size_t equal_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_DIVISION_H_
