/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file collective_call.h
 * \brief One call of a collective, and the properties of collectives (core/collective_list.h).
 */
#ifndef TVM_IPC_CORE_COLLECTIVE_CALL_H_
#define TVM_IPC_CORE_COLLECTIVE_CALL_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <vector>

#include "core/collective_list.h"
#include "core/element_type_and_reduce_kind.h"
#include "core/shared_memory_layout.h"

namespace tvm_ipc {

/*! \brief Contiguous elements. */
struct Buffer {
  void* data = nullptr;
  size_t count = 0;
  ElementType type;

  /*! \brief Return whether there is a tensor; a default buffer stands for one that is not passed.
   */
  bool exists() const { return type.bits != 0; }
  size_t bytes() const { return count * type.bytes(); }
  uint8_t* begin() const { return static_cast<uint8_t*>(data); }
  bool Overlaps(const Buffer& other) const {
    return begin() < other.begin() + other.bytes() && other.begin() < begin() + bytes();
  }
};

/*! \brief A view of numbers that the caller owns. A list in braces lives until the end of the
 *         statement. */
class NumberView {
 public:
  NumberView() = default;
  NumberView(const int64_t* data, size_t size) : data_(data), size_(size) {}
  NumberView(const std::vector<int64_t>& numbers) : NumberView(numbers.data(), numbers.size()) {}
  NumberView(std::initializer_list<int64_t> numbers)
      : NumberView(numbers.begin(), numbers.size()) {}

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  int64_t operator[](size_t i) const { return data_[i]; }
  const int64_t* begin() const { return data_; }
  const int64_t* end() const { return data_ + size_; }

 private:
  const int64_t* data_ = nullptr;
  size_t size_ = 0;
};

/*! \brief The algorithm of an all-reduce. The values are upstream's. */
enum class Strategy : uint8_t { kDefault = 0, kOneShot = 1, kTwoShot = 2, kAuto = 3 };

/*! \brief A bit of a collective's flags: the caller promises that no exit barrier is needed. */
constexpr uint8_t kNoExitBarrier = 1;

/*! \brief The collectives of the list. */
enum class Collective : uint8_t {
#define TVM_IPC_ENUMERATOR(Name, ...) k##Name,
  TVM_IPC_COLLECTIVES(TVM_IPC_ENUMERATOR)
#undef TVM_IPC_ENUMERATOR
};

/*! \brief A collective and its arguments. Fields that it has no parameter for keep the defaults. */
struct Call {
  explicit Call(Collective collective) : collective(collective) {}

  Collective collective;
  uint8_t flags = 0;
  ReduceKind kind = ReduceKind::kSum;
  Strategy strategy = Strategy::kDefault;
  TeamId team = kWorld;
  /*! \brief A team index. */
  int root = 0;
  Buffer send;
  Buffer recv;
  /*!
   * \brief Numbers that are identical on all members.
   *
   * An all-to-all has its split sizes here: entry i * size + j is the number of elements that
   * member i sends to member j. It is empty if all are equal. A permute has an entry for each
   * member: the team index of the member it receives from, or -1 for none.
   */
  NumberView layout;
  /*! \brief Of an all-reduce with a norm, whose `recv` is residual + the sum of the sends. The
   *         length of a row is the number of weights. */
  Buffer residual, weight, bias, norm_out;
  double epsilon = 0;
  /*! \brief Of a ragged all-to-all, whose `send` has `rows` rows of `row` elements: the number of
   *         rows for each member, in memory of the backend's device (core/ragged_rows.h). */
  Buffer counts, recv_counts;
  size_t rows = 0, row = 0;
};

/*! \brief How the sizes of send and recv are related, and where they may overlap. */
enum class Relation : uint8_t {
  /*! \brief They have equal sizes, and may be the same memory. */
  kEqual,
  /*! \brief They have equal sizes, and must not overlap. */
  kEqualAndApart,
  /*! \brief Send has a slice for each member; recv may be the member's own one. */
  kSendIsLarger,
  /*! \brief Recv has a slice for each member; send may be the member's own one. */
  kRecvIsLarger,
  /*! \brief Send has a slice for each member and recv one of each, with sizes in `Call::layout`. */
  kSplits,
  /*! \brief Send has rows for each member and recv room for those of each, with their numbers in
   *         `Call::counts`. */
  kRagged,
  /*! \brief An all-reduce with a residual and a norm. */
  kNorm,
};

/*! \brief The properties of a collective that follow from its entry in the list. */
struct CollectiveTraits {
  const char* name;
  /*! \brief The name in descriptors, which have less room. */
  OpName op;
  Relation relation;
  bool reduces;
  bool has_strategy;
  bool has_sources;
  bool has_root;
  /*! \brief Whether only the root sends, so that the other members know only what they receive. */
  bool only_root_sends;
};
const CollectiveTraits& TraitsOf(Collective collective);

/*! \brief Find a collective by its name, or by Disco's; nothing if there is none. */
std::optional<Collective> FindCollective(std::string_view name);

inline const char* Name(Collective collective) { return TraitsOf(collective).name; }

/*!
 * \brief Return the descriptor of a call, which the members compare. It has no offset.
 * \param root The rank of the root.
 */
Descriptor DescriptorOf(const Call& call, int root);

/*!
 * \brief Return the number of bytes that a member of a team receives from others in a call that has
 *        run on a CPU.
 * \param index The member's index in the team.
 */
size_t BytesArriving(const Call& call, size_t size, size_t index);

/*! \brief Hash numbers that all members must agree on; 0 only if there are none. */
uint64_t HashOf(NumberView numbers);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_COLLECTIVE_CALL_H_
