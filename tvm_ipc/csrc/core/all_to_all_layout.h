/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file all_to_all_layout.h
 * \brief The layout of the inputs and outputs of an all-to-all.
 */
#ifndef TVM_IPC_CORE_ALL_TO_ALL_LAYOUT_H_
#define TVM_IPC_CORE_ALL_TO_ALL_LAYOUT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/collective_call.h"

namespace tvm_ipc {

/*! \brief The bytes that each member of a team sends to each other member, known to all. */
class Division {
 public:
  static constexpr size_t kWhole = std::numeric_limits<size_t>::max();

  /*! \param parts The split sizes (`Call::layout`). */
  Division(const Buffer& send, const NumberView& parts, int size)
      : parts_(parts),
        size_(size),
        width_(send.type.bytes()),
        equal_(send.bytes() / static_cast<size_t>(size)) {}

  /*! \brief Return the number of bytes that one member sends to another. */
  size_t part(int from, int to) const {
    return parts_.empty() ? equal_ : static_cast<size_t>(parts_[from * size_ + to]) * width_;
  }
  /*! \brief Return the size of the piece of these bytes that begins at `at`, at most `most`. */
  size_t piece(int from, int to, size_t at, size_t most) const {
    const size_t bytes = part(from, to);
    return at < bytes ? std::min(bytes - at, most) : 0;
  }
  /*! \brief Return the total size of the pieces that `from` sends to the members before `to`. */
  size_t before(int from, int to, size_t at = 0, size_t most = kWhole) const {
    if (parts_.empty()) return to * piece(from, 0, at, most);
    size_t bytes = 0;
    for (int j = 0; j < to; ++j) bytes += piece(from, j, at, most);
    return bytes;
  }
  /*! \brief Return the offset in the output of `to` of the bytes from `from`. */
  size_t recv_offset(int from, int to) const {
    size_t bytes = 0;
    for (int i = 0; i < from; ++i) bytes += part(i, to);
    return bytes;
  }
  /*! \brief Return the largest number of bytes that any member sends in total. */
  size_t most_sent() const {
    size_t most = 0;
    for (int i = 0; i < size_; ++i) most = std::max(most, before(i, size_));
    return most;
  }
  /*! \brief Return the largest number of bytes that one member sends to another. */
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
  const NumberView parts_;
  int size_;
  size_t width_;
  size_t equal_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_ALL_TO_ALL_LAYOUT_H_
