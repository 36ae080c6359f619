/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file internode_operation.h
 * \brief A random collective of ranks on several nodes, and what must come out: a function of a
 *        seed, which all ranks have.
 */
#ifndef TVM_IPC_TESTS_NATIVE_INTERNODE_OPERATION_H_
#define TVM_IPC_TESTS_NATIVE_INTERNODE_OPERATION_H_

#include <algorithm>
#include <cstring>
#include <exception>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/collective_step_barrier.h"
#include "core/rank_runtime_state.h"
#include "expect.h"
#include "partial_reference.h"
#include "shm/find_norm_function.h"
#include "shm/select_kernels_by_instruction_set.h"

namespace tvm_ipc {

class InternodeOperation {
 public:
  InternodeOperation(Rank& rank, uint64_t seed) : rank_(rank), seed_(seed), random_(seed * 77 + 5) {
    static const ElementType types[] = {{2, 16}, {4, 16}, {2, 32}, {2, 64}, {0, 8},
                                        {1, 8},  {0, 16}, {1, 16}, {0, 32}, {1, 32},
                                        {0, 64}, {1, 64}, {6, 8}};
    static const size_t counts[] = {0, 1, 3, 100, 4000, 5003, 20000, 70001, 200003};
    act_ = Draw(kActs);
    type_ = types[Draw(13)];
    kind_ = static_cast<ReduceKind>(Draw(kNumReduceKinds));
    if (FindReduce(type_, kind_) == nullptr) kind_ = ReduceKind::kSum;
    count_ = counts[Draw(9)];
    // The world, the teams of the test, and now and then a group.
    team_ = Draw(3) == 0 ? kWorld : static_cast<TeamId>(Draw(5));
    if (team_ >= kFirstTeam && !IsIn(team_)) team_ = static_cast<TeamId>(kFirstTeam + 99);
    in_place_ = Draw(3) == 0;
    in_arena_ = Draw(2) == 0;
    root_draw_ = Draw(64);
    if (team_ == kFirstTeam + 99) return;
    ranks_ = rank.RanksOf(team_);
    n_ = static_cast<int>(ranks_.size());
    me_ = static_cast<int>(std::find(ranks_.begin(), ranks_.end(), rank.id()) - ranks_.begin());
    root_ = static_cast<int>(root_draw_) % n_;
  }

  /*! \brief A sum of ones in the world. */
  void Sum(size_t count) const {
    std::vector<float> ones(count, 1);
    const Buffer buffer{ones.data(), count, {2, 32, 1}};
    On(rank_).AllReduce(buffer, ReduceKind::kSum, kWorld, Strategy::kAuto, 0, buffer);
    for (float one : ones) EXPECT(one == static_cast<float>(rank_.num_ranks()));
  }

  void Run() const {
    if (ranks_.empty()) return;  // in none of the team
    switch (act_) {
      case 0:
      case 1:
        return AllReduce();
      case 2:
        return Reduce();
      case 3:
        return ReduceScatter();
      case 4:
        return AllGather();
      case 5:
        return Broadcast();
      case 6:
        return Scatter();
      case 7:
        return Gather();
      case 8:
        return AllToAll();
      case 9:
        return Permute();
      case 10:
        return WakeEngine();
      default:
        return AllReduceNorm();
    }
  }

 private:
  static constexpr size_t kActs = 12;

  uint64_t Draw(uint64_t most) { return (random_() >> 8) % most; }

  bool IsIn(TeamId team) const {
    const std::vector<int> ranks = rank_.RanksOf(team);
    return std::find(ranks.begin(), ranks.end(), rank_.id()) != ranks.end();
  }

  size_t width() const { return type_.bytes(); }
  Endpoint& endpoint() const { return rank_.endpoint(); }

  /*! \brief The bits of an element that a member sends. */
  uint64_t Element(int place, size_t i) const {
    uint64_t x = (seed_ * 1000003 + static_cast<uint64_t>(ranks_[place])) * 2654435761u + i;
    x = (x ^ x >> 31) * 0x9e3779b97f4a7c15u;
    x ^= x >> 29;
    if (type_.code == reference::kBool) return x & 1;
    const uint64_t all = type_.bits == 64 ? ~0ull : (1ull << type_.bits) - 1;
    if (!reference::IsFloating(type_) || x % 16 == 0) return (x >> 8) & all;
    const int mantissa = reference::Mantissa(type_);
    const uint64_t one = reference::Infinity(type_) / 2 >> mantissa << mantissa;
    return (x & reference::SignBit(type_)) | (one + ((x >> 8) & ((4ull << mantissa) - 1)));
  }

  /*! \brief Elements from `first` on that a member sends. */
  std::vector<uint8_t> Sent(int place, size_t first, size_t count) const {
    std::vector<uint8_t> bytes(count * width());
    for (size_t i = 0; i < count; ++i) {
      const uint64_t bits = Element(place, first + i);
      memcpy(bytes.data() + i * width(), &bits, width());
    }
    return bytes;
  }

  /*! \brief Memory of this rank, in its arena or elsewhere. */
  class Memory {
   public:
    Memory(const InternodeOperation& op, size_t count) : op_(op), count_(count) {
      const size_t bytes = std::max<size_t>(1, count * op.width());
      if (op.in_arena_ && bytes < (64 << 10)) {
        data_ = static_cast<uint8_t*>(op.rank_.endpoint().heap()->Allocate(bytes));
        bytes_ = bytes;
      } else {
        own_.resize(bytes);
        data_ = own_.data();
      }
      memset(data_, 0x5a, bytes);
    }
    ~Memory() {
      // After an error peers may still read it.
      if (bytes_ == 0 || std::uncaught_exceptions() != 0) return;
      op_.rank_.endpoint().heap()->Free(data_, bytes_);
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    Buffer buffer() const { return {data_, count_, op_.type_}; }
    Buffer part(size_t first, size_t count) const {
      return {data_ + first * op_.width(), count, op_.type_};
    }
    void Fill(const std::vector<uint8_t>& bytes, size_t first = 0) const {
      if (!bytes.empty()) memcpy(data_ + first * op_.width(), bytes.data(), bytes.size());
    }

   private:
    const InternodeOperation& op_;
    size_t count_;
    std::vector<uint8_t> own_;
    uint8_t* data_;
    size_t bytes_ = 0;
  };

  void ExpectBytes(const Buffer& found, const std::vector<uint8_t>& expected,
                   const char* what) const {
    EXPECT(found.bytes() == expected.size());
    const auto* at = found.begin();
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT(at[i] == expected[i], what, " of ", found.count, " x ", Name(type_), " in team ",
             team_, " with seed ", seed_, ": byte ", i);
    }
  }

  /*! \brief Elements of the reduction from `first` on; of many, some. */
  void ExpectReduced(const Buffer& found, size_t first, const char* what) const {
    std::vector<int> order(ranks_.size()), groups;
    std::iota(order.begin(), order.end(), 0);
    const Control& control = rank_.control();
    const bool tree = kind_ == ReduceKind::kTreeSum;  // which is the same on any nodes
    if (!rank_.options().flat && !tree) {
      auto node = [&](int place) { return control.NodeOf(ranks_[place]); };
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return node(a) < node(b); });
      for (size_t i = 0; i < order.size(); ++i) {
        const bool same = i > 0 && node(order[i]) == node(order[i - 1]);
        if (same) {
          ++groups.back();
        } else {
          groups.push_back(1);
        }
      }
    } else {
      groups = {n_};
    }
    const size_t step = found.count <= 5003 ? 1 : 37;
    std::vector<uint64_t> x(ranks_.size());
    for (size_t i = 0; i<found.count; i += i + 100> found.count ? 1 : step) {
      for (size_t k = 0; k < order.size(); ++k) x[k] = Element(order[k], first + i);
      const uint64_t expected = groups.size() == 1
                                    ? reference::Reduce(type_, kind_, x.data(), n_)
                                    : reference::ReduceInGroups(type_, kind_, x.data(), groups);
      uint64_t bits = 0;
      memcpy(&bits, found.begin() + i * width(), width());
      // An invalid operation on one node hides a NaN of a later one, so the payload may differ.
      if (tree && reference::IsFloating(type_) && reference::IsNan(type_, expected)) {
        EXPECT(reference::IsNan(type_, bits), what, " of a NaN is ", bits);
        continue;
      }
      EXPECT(bits == expected, what, "(", Name(kind_), ") of ", count_, " x ", Name(type_),
             " in team ", team_, " with seed ", seed_, ": element ", first + i, " is ", bits,
             ", not ", expected);
    }
  }

  void AllReduce() const {
    const Memory send(*this, count_), other(*this, count_);
    const Memory& recv = in_place_ ? send : other;
    send.Fill(Sent(me_, 0, count_));
    On(endpoint())
        .AllReduce(send.buffer(), kind_, team_, static_cast<Strategy>(seed_ % 4), 0, recv.buffer());
    ExpectReduced(recv.buffer(), 0, "allreduce");
  }

  void Reduce() const {
    const Memory send(*this, count_), other(*this, count_);
    const Memory& recv = in_place_ ? send : other;
    send.Fill(Sent(me_, 0, count_));
    const Buffer result = recv.buffer();
    On(endpoint()).Reduce(send.buffer(), kind_, root_, team_, 0, me_ == root_ ? &result : nullptr);
    if (me_ == root_) ExpectReduced(result, 0, "reduce");
  }

  void ReduceScatter() const {
    const size_t part = count_ / static_cast<size_t>(n_), mine = static_cast<size_t>(me_) * part;
    const Memory send(*this, part * static_cast<size_t>(n_)), other(*this, part);
    const Buffer recv = in_place_ ? send.part(mine, part) : other.buffer();
    send.Fill(Sent(me_, 0, part * static_cast<size_t>(n_)));
    On(endpoint()).ReduceScatter(send.buffer(), kind_, team_, 0, recv);
    ExpectReduced(recv, mine, "reduce_scatter");
  }

  void AllGather() const {
    const size_t part = count_ / 3, mine = static_cast<size_t>(me_) * part;
    const Memory other(*this, part), recv(*this, part * static_cast<size_t>(n_));
    const Buffer send = in_place_ ? recv.part(mine, part) : other.buffer();
    (in_place_ ? recv : other).Fill(Sent(me_, 0, part), in_place_ ? mine : 0);
    On(endpoint()).AllGather(send, team_, 0, recv.buffer());
    for (int i = 0; i < n_; ++i) {
      ExpectBytes(recv.part(static_cast<size_t>(i) * part, part), Sent(i, 0, part), "allgather");
    }
  }

  void Broadcast() const {
    const Memory send(*this, count_), other(*this, count_);
    const Memory& recv = in_place_ ? send : other;
    if (me_ == root_) send.Fill(Sent(me_, 0, count_));
    const Buffer source = send.buffer();
    On(endpoint()).Broadcast(me_ == root_ ? &source : nullptr, root_, team_, 0, recv.buffer());
    ExpectBytes(recv.buffer(), Sent(root_, 0, count_), "broadcast");
  }

  void Scatter() const {
    const size_t part = count_ / 3, mine = static_cast<size_t>(me_) * part;
    const Memory send(*this, part * static_cast<size_t>(n_)), other(*this, part);
    if (me_ == root_) send.Fill(Sent(me_, 0, part * static_cast<size_t>(n_)));
    const Buffer source = send.buffer();
    const Buffer recv = in_place_ ? send.part(mine, part) : other.buffer();
    On(endpoint()).Scatter(me_ == root_ ? &source : nullptr, root_, team_, 0, recv);
    ExpectBytes(recv, Sent(root_, mine, part), "scatter");
  }

  void Gather() const {
    const size_t part = count_ / 3;
    const Memory send(*this, part), recv(*this, part * static_cast<size_t>(n_));
    send.Fill(Sent(me_, 0, part));
    const Buffer result = recv.buffer();
    On(endpoint()).Gather(send.buffer(), root_, team_, 0, me_ == root_ ? &result : nullptr);
    for (int i = 0; me_ == root_ && i < n_; ++i) {
      ExpectBytes(recv.part(static_cast<size_t>(i) * part, part), Sent(i, 0, part), "gather");
    }
  }

  void AllToAll() const {
    const auto n = static_cast<size_t>(n_);
    SplitCounts parts;
    const size_t equal = count_ / 4;
    auto part = [&](size_t i, size_t j) {
      return in_place_ ? (equal * (1 + (i * 3 + j) % 4) / 3) * ((i + j + seed_) % 5 != 0) : equal;
    };
    for (size_t i = 0; in_place_ && i < n * n; ++i) {
      parts.push_back(static_cast<int64_t>(part(i / n, i % n)));
    }
    auto before = [&](size_t i, size_t end) {
      size_t sum = 0;
      for (size_t j = 0; j < end; ++j) sum += part(i, j);
      return sum;
    };
    const auto me = static_cast<size_t>(me_);
    size_t taken = 0;
    for (size_t i = 0; i < n; ++i) taken += part(i, me);
    const Memory send(*this, before(me, n)), recv(*this, taken);
    send.Fill(Sent(me_, 0, before(me, n)));
    On(endpoint()).AllToAll(send.buffer(), parts, team_, 0, recv.buffer());
    size_t at = 0;
    for (size_t i = 0; i < n; ++i) {
      ExpectBytes(recv.part(at, part(i, me)), Sent(static_cast<int>(i), before(i, me), part(i, me)),
                  "all_to_all");
      at += part(i, me);
    }
  }

  void Permute() const {
    Sources sources;
    std::minstd_rand random(static_cast<uint32_t>(seed_ + 1));
    for (int i = 0; i < n_; ++i) {
      sources.push_back(static_cast<int64_t>(random() % static_cast<uint32_t>(n_ + 1)) - 1);
    }
    const Memory send(*this, count_), recv(*this, count_);
    send.Fill(Sent(me_, 0, count_));
    On(endpoint()).Permute(send.buffer(), sources, team_, 0, recv.buffer());
    const int64_t source = sources[me_];
    ExpectBytes(recv.buffer(),
                source < 0 ? std::vector<uint8_t>(count_ * width())
                           : Sent(static_cast<int>(source), 0, count_),
                "permute");
  }

  /*! \brief All send to the next one first, which only small messages may; or some receive first.
   */
  void WakeEngine() const {
    if (n_ == 1) return;
    const Memory send(*this, count_), recv(*this, count_);
    send.Fill(Sent(me_, 0, count_));
    const int before = (me_ + n_ - 1) % n_;
    const bool first = count_ * width() <= 2 * kPacketBytes || me_ % 2 == 0;
    for (int i = 0; i < 2; ++i) {
      if ((i == 0) == first) {
        endpoint().Send(send.buffer(), ranks_[(me_ + 1) % n_]);
      } else {
        endpoint().Receive(recv.buffer(), ranks_[before]);
      }
    }
    ExpectBytes(recv.buffer(), Sent(before, 0, count_), "receive");
  }

  void AllReduceNorm() const {
    const ElementType type =
        type_.code == 4 || type_.bits == 16 ? ElementType{4, 16, 1} : ElementType{2, 32, 1};
    InternodeOperation as(*this);
    as.type_ = type;
    as.kind_ = ReduceKind::kSum;
    as.in_arena_ = false;
    const size_t row = 1 + seed_ % 700, count = count_ / row * row;
    const Memory send(as, count), residual(as, count), sum(as, count), out(as, count),
        norm(as, count), weight(as, row), expected(as, count), normal(as, row);
    send.Fill(as.Sent(me_, 0, count));
    residual.Fill(as.Sent(0, 1 << 20, count));
    weight.Fill(as.Sent(0, 1 << 21, row));
    const Norm how{weight.buffer(), nullptr, 1e-5};
    On(endpoint())
        .AllReduceNorm(send.buffer(), residual.buffer(), how, team_, Strategy::kAuto, 0,
                       out.buffer(), norm.buffer());
    On(endpoint())
        .AllReduce(send.buffer(), ReduceKind::kSum, team_, Strategy::kAuto, 0, sum.buffer());
    const void* both[] = {sum.buffer().data, residual.buffer().data};
    const bool inside = n_ > 1 && type.bits == 32 && AllHere();
    RequireReduce("test", type, ReduceKind::kSum)(expected.buffer().data, both, 2, count, false);
    if (inside) return;  // there the residual is one more source of one sum, of floats
    const Buffer bits = expected.buffer();
    as.ExpectBytes(out.buffer(), {bits.begin(), bits.begin() + bits.bytes()}, "allreduce_norm");
    std::vector<float> wide(row);
    RequireWiden("test", type)(wide.data(), weight.buffer().data, row);
    const NormRow line{row, wide.data(), nullptr, 1e-5f};
    for (size_t at = 0; at < count; at += row) {
      RequireNorm("test", type, type)(normal.buffer().data, out.part(at, row).data, line);
      const Buffer one = normal.buffer();
      as.ExpectBytes(norm.part(at, row), {one.begin(), one.begin() + one.bytes()}, "norm");
    }
  }

  bool AllHere() const {
    return std::all_of(ranks_.begin(), ranks_.end(),
                       [&](int one) { return rank_.control().IsHere(one); });
  }

  Rank& rank_;
  const uint64_t seed_;
  std::mt19937_64 random_;
  uint64_t act_ = 0;
  ElementType type_;
  ReduceKind kind_ = ReduceKind::kSum;
  size_t count_ = 0;
  TeamId team_ = kWorld;
  bool in_place_ = false, in_arena_ = false;
  uint64_t root_draw_ = 0;
  std::vector<int> ranks_;
  int n_ = 0, me_ = 0, root_ = 0;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_TESTS_NATIVE_INTERNODE_OPERATION_H_
