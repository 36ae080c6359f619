/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file exposing_rank.h
 * \brief A rank that shows tensors to a team, looks at those of others, and hides them, at random,
 *        but alike on all ranks; every look compares all elements with a closed form.
 */
#ifndef TVM_IPC_TESTS_NATIVE_EXPOSING_RANK_H_
#define TVM_IPC_TESTS_NATIVE_EXPOSING_RANK_H_

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "expect.h"
#include "stress_operation.h"

namespace tvm_ipc {

/*! \brief Memory of the arena that goes back when nobody holds it. */
inline std::shared_ptr<uint8_t> Allocate(Rank& rank, size_t bytes) {
  const std::shared_ptr<Heap>& heap = rank.endpoint().heap();
  return std::shared_ptr<uint8_t>(static_cast<uint8_t*>(heap->Allocate(bytes)),
                                  [heap, bytes](uint8_t* data) { heap->Free(data, bytes); });
}

/*! \brief Something shown, and what all members must find there. */
struct Open {
  ExposedBuffer exposed;
  std::shared_ptr<uint8_t> data;
  uint64_t salt;
  size_t count;
};

class RandomExposer {
 public:
  /*! \param most Elements of the largest. */
  RandomExposer(Rank& rank, TeamId team, uint64_t seed, size_t most = 20000)
      : rank_(rank),
        team_(team),
        members_(rank.RanksOf(team)),
        most_(most),
        own_(seed * 64 + rank.id()) {}

  void Expose(Random& random) {
    const uint64_t salt = random();
    const size_t count = Draw(random, 8) == 0 ? Draw(random, most_) : Draw(random, 300);
    const bool in_arena = Draw(own_, 4) != 0;
    std::shared_ptr<uint8_t> data =
        in_arena ? Allocate(rank_, count * sizeof(int32_t))
                 : std::shared_ptr<uint8_t>(new uint8_t[count * sizeof(int32_t) + 1],
                                            std::default_delete<uint8_t[]>());
    auto* elements = reinterpret_cast<int32_t*>(data.get());
    for (size_t i = 0; i < count; ++i) elements[i] = Element<int32_t>(salt, rank_.id(), i);
    const Buffer buffer{data.get(), count, ElementType{0, 32, 1}};
    Jitter(own_);
    ExposedBuffer exposed = rank_.endpoint().Expose(buffer, team_, data);
    if (!in_arena) memset(data.get(), 0x5a, count * sizeof(int32_t));  // it was copied
    last_ = exposed.number;
    open_.push_back({std::move(exposed), std::move(data), salt, count});
  }

  /*! \brief Look at something that any of the members shows. */
  void Look() {
    if (open_.empty()) return;
    Open& one = open_[Draw(own_, open_.size())];
    Check(one, static_cast<int64_t>(Draw(own_, 20)) - 10);
  }

  /*! \brief Hide some of it, of which the memory is somebody else's then. */
  void Release(Random& random) {
    if (open_.empty()) return;
    const size_t count = 1 + Draw(random, open_.size());
    for (size_t i = 0; i < count; ++i) {  // as all members draw them
      std::swap(open_[i], open_[i + Draw(random, open_.size() - i)]);
    }
    std::vector<const ExposedBuffer*> hidden;
    for (size_t i = 0; i < count; ++i) hidden.push_back(&open_[i].exposed);
    if (Draw(own_, 2) == 0) std::reverse(hidden.begin(), hidden.end());
    Jitter(own_);
    rank_.endpoint().Release(team_, hidden);
    for (size_t i = 0; i < count; ++i) {
      Open& one = open_[i];
      memset(one.exposed.memory.data, 0x33, one.count * sizeof(int32_t));
      const ExposedBuffer old = one.exposed;
      const Error error = ErrorOf([&] { rank_.endpoint().PeerView(one.exposed, 1); });
      if (error.kind() == std::string(kind::kPeer)) throw error;  // a rank has failed
      EXPECT(Contains(error.what(), "was released before"), error.what());
    }
    open_.erase(open_.begin(), open_.begin() + static_cast<int64_t>(count));
  }

  /*! \brief Reduce what the members show, where all of them show something. */
  void Reduce(Random& random) {
    if (open_.empty()) return;
    Open& one = open_[Draw(random, open_.size())];
    std::vector<Buffer> parts;
    for (size_t k = 0; k < members_.size(); ++k) {
      Buffer part = one.exposed.memory;
      part.data = rank_.endpoint().PeerView(one.exposed, -static_cast<int64_t>(k)).data;
      parts.push_back(part);
    }
    std::vector<int32_t> out(one.count + 1);
    const Buffer recv{out.data(), one.count, ElementType{0, 32, 1}};
    rank_.endpoint().ReduceSlices(ReduceKind::kSum, team_, parts, recv);
    for (size_t i = 0; i < one.count; ++i) {
      EXPECT(out[i] == Reduced<int32_t>(ReduceKind::kSum, one.salt, members_, i), "element ", i,
             " of a sum");
    }
  }

  /*! \brief A collective of the same team, which has nothing to do with all that. */
  void Meet() {
    const ElementType type{0, 32, 1};
    int32_t mine = rank_.id();
    int32_t sum = -1;
    On(rank_).AllReduce({&mine, 1, type}, ReduceKind::kSum, team_, Strategy::kAuto, 0,
                        {&sum, 1, type});
    int32_t wanted = 0;
    for (int member : members_) wanted += member;
    EXPECT(sum == wanted, sum);
  }

  void Step(Random& random) {
    Jitter(own_);
    const uint64_t draw = Draw(random, 8);
    uint32_t oldest = last_;
    for (const Open& one : open_) oldest = std::min(oldest, one.exposed.number);
    if (last_ - oldest > 50) {  // its place will be needed
      ReleaseAll(random);
    } else if (open_.size() >= 24 || draw == 0) {
      Release(random);
    } else if (draw == 1) {
      Meet();
    } else if (draw == 2) {
      Reduce(random);
    } else {
      Expose(random);
    }
    for (uint64_t looks = Draw(own_, 4); looks > 0; --looks) Look();
  }

  void ReleaseAll(Random& random) {
    while (!open_.empty()) Release(random);
  }
  void DropAll() { open_.clear(); }
  /*! \brief How the rank sees what another one has shown and dropped. */
  void CheckAll() {
    for (Open& one : open_) {
      for (int64_t shift = 0; shift < static_cast<int64_t>(members_.size()); ++shift) {
        Check(one, shift);
      }
    }
  }

 private:
  void Check(Open& one, int64_t shift) {
    const auto size = static_cast<int64_t>(members_.size());
    const auto me = std::find(members_.begin(), members_.end(), rank_.id()) - members_.begin();
    const int whose = members_[((me + shift) % size + size) % size];
    const PeerMemory peer = rank_.endpoint().PeerView(one.exposed, shift);
    const auto* elements = static_cast<const int32_t*>(peer.data);
    for (size_t i = 0; i < one.count; ++i) {
      EXPECT(elements[i] == Element<int32_t>(one.salt, whose, i), "element ", i, " that rank ",
             whose, " shows to rank ", rank_.id());
    }
  }

  Rank& rank_;
  TeamId team_;
  std::vector<int> members_;
  const size_t most_;
  Random own_;
  uint32_t last_ = 0;
  std::vector<Open> open_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_TESTS_NATIVE_EXPOSING_RANK_H_
