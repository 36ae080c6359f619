/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file stress_operation.h
 * \brief One operation of the stress test: drawn alike by all ranks, done, and checked against a
 *        closed form that no other operation shares.
 */
#ifndef TVM_IPC_TESTS_STRESS_OPERATION_H_
#define TVM_IPC_TESTS_STRESS_OPERATION_H_

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <type_traits>
#include <vector>

#include "collective_calls.h"
#include "core/teams.h"
#include "shm/collectives.h"

namespace tvm_ipc {

using Random = std::mt19937_64;

inline uint64_t Draw(Random& random, uint64_t below) { return random() % below; }

/*! \brief Lets another rank run at a point where it should not matter. */
inline void Jitter(Random& random) {
  const uint64_t draw = Draw(random, 256);
  if (draw < 32) sched_yield();
  if (draw == 32) usleep(static_cast<useconds_t>(Draw(random, 300)));
  if (draw == 33 && Draw(random, 8) == 0) usleep(3000);
}

/*!
 * \brief Memory of operations that an error ended. Peers that have not heard of the error may still
 *        read it, and another thread of the rank must not write it: it goes back to the arena when
 *        the session has recovered, for then all have heard of it.
 */
class Graveyard {
 public:
  static void Bury(uint32_t generation, std::shared_ptr<Arena> arena, size_t offset, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    graves.push_back({generation, std::move(arena), offset, bytes});
  }
  static void FreeOlderThan(uint32_t generation) {
    std::lock_guard<std::mutex> lock(mutex);
    auto old = std::partition(graves.begin(), graves.end(),
                              [&](const Grave& one) { return one.generation == generation; });
    for (auto one = old; one != graves.end(); ++one) one->arena->Free(one->offset, one->bytes);
    graves.erase(old, graves.end());
  }

 private:
  struct Grave {
    uint32_t generation;
    std::shared_ptr<Arena> arena;
    size_t offset;
    size_t bytes;
  };
  static inline std::mutex mutex;
  static inline std::vector<Grave> graves;
};

/*! \brief Where a rank's memory is: in its arena, which peers read, or its own. */
class Block {
 public:
  Block(Rank& rank, bool in_arena, size_t bytes) : control_(rank.control()), bytes_(bytes) {
    if (in_arena) {
      Graveyard::FreeOlderThan(control_.generation.load());
      arena_ = rank.arena();
      offset_ = arena_->Allocate(bytes);
      data_ = rank.arena_base() + offset_;
    } else {
      own_.reset(new uint8_t[bytes + 1]);
      data_ = own_.get();
    }
  }
  ~Block() {
    if (arena_ == nullptr) return;
    if (std::uncaught_exceptions() == 0) {
      arena_->Free(offset_, bytes_);
    } else {
      Graveyard::Bury(control_.generation.load(), arena_, offset_, bytes_);
    }
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  uint8_t* data() const { return data_; }
  /*! \brief What nobody may see. */
  void Spoil(int value) { memset(data_, value, bytes_); }

 private:
  Control& control_;
  size_t bytes_;
  std::shared_ptr<Arena> arena_;
  size_t offset_ = 0;
  std::unique_ptr<uint8_t[]> own_;
  uint8_t* data_;
};

enum class OperationKind {
  kAllReduce,
  kAllGather,
  kBroadcast,
  kScatter,
  kGather,
  kExchange,
  kReduceScatter,
  kAllToAll,
  kReduce,
  kPermute,
  kAllReduceNorm,
  kRaggedAllToAll,
  kLast = kRaggedAllToAll  // up to here they are drawn
};
enum class BufferKind { kArena, kOwn, kMixed };

/*! \brief What all members of a team draw alike. */
struct Plan {
  OperationKind act;
  TeamId team;
  size_t count;
  ReduceKind kind;
  Strategy strategy;
  bool no_exit_barrier;
  BufferKind place;
  bool may_be_in_place;
  int distance;
  uint64_t salt;
};

/*! \brief Sizes on both sides of every choice that the collectives make, for 4-byte elements. */
inline size_t DrawCount(Random& random, size_t width) {
  constexpr size_t kBounds[] = {32 << 10, 64 << 10, kPacketBytes, kStageBytes};
  switch (Draw(random, 16)) {
    case 0:
      return 0;
    case 1:
      return 1 + Draw(random, 3);
    case 2:
    case 3:
    case 4:
      return kBounds[Draw(random, 4)] / width - 1 + Draw(random, 3);
    case 5:
      return Draw(random, 70000);
    case 6:
      return Draw(random, 32) == 0 ? kStageBytes / width * 3 + Draw(random, 99) : 300;
    default:
      return Draw(random, 3000);
  }
}

inline Plan DrawPlan(Random& random, TeamId team, size_t width) {
  Plan plan;
  plan.act = Draw(random, 16) < 9
                 ? OperationKind::kAllReduce
                 : static_cast<OperationKind>(
                       1 + Draw(random, static_cast<uint64_t>(OperationKind::kLast)));
  plan.team = team;
  plan.count = DrawCount(random, width);
  plan.kind = static_cast<ReduceKind>(Draw(random, kNumReduceKinds));
  plan.strategy = static_cast<Strategy>(Draw(random, 4));
  plan.no_exit_barrier = plan.act != OperationKind::kExchange && Draw(random, 4) == 0;
  plan.place = static_cast<BufferKind>(Draw(random, 3));
  plan.may_be_in_place = Draw(random, 4) == 0;
  plan.distance = static_cast<int>(Draw(random, 64));
  plan.salt = random();
  return plan;
}

/*! \brief Element i of what a rank shows: small, so that sums and averages are exact. */
template <typename T>
T Element(uint64_t salt, int rank, size_t i) {
  return static_cast<T>(((static_cast<uint32_t>(salt) + i * 2654435761u + rank * 40503u) >> 11) &
                        0x3f);
}

template <typename T>
T Reduced(ReduceKind kind, uint64_t salt, const std::vector<int>& ranks, size_t i) {
  // Products wrap like those of unsigned integers.
  using Wide = std::conditional_t<std::is_floating_point<T>::value, double, uint64_t>;
  Wide result = static_cast<Wide>(Element<T>(salt, ranks[0], i));
  for (size_t r = 1; r < ranks.size(); ++r) {
    const Wide next = static_cast<Wide>(Element<T>(salt, ranks[r], i));
    if (kind == ReduceKind::kSum || kind == ReduceKind::kTreeSum || kind == ReduceKind::kAvg)
      result += next;
    if (kind == ReduceKind::kProd) result *= next;
    if (kind == ReduceKind::kMin) result = std::min(result, next);
    if (kind == ReduceKind::kMax) result = std::max(result, next);
    if constexpr (!std::is_floating_point<T>::value) {
      if (kind == ReduceKind::kBand) result &= next;
      if (kind == ReduceKind::kBor) result |= next;
      if (kind == ReduceKind::kBxor) result ^= next;
    }
  }
  if (kind == ReduceKind::kAvg) return static_cast<T>(result) / static_cast<T>(ranks.size());
  return static_cast<T>(result);
}

/*! \brief The ranks of a team, in its order; a rank's own group. */
inline std::vector<int> Members(const Rank& rank, TeamId team) {
  if (const TeamRecord* record = FindTeam(rank.control(), team)) {
    return std::vector<int>(record->ranks, record->ranks + record->size);
  }
  std::vector<int> ranks(team == kWorld ? rank.num_ranks() : rank.group_size());
  std::iota(ranks.begin(), ranks.end(),
            team == kWorld ? 0 : rank.id() / ranks.size() * ranks.size());
  return ranks;
}

template <typename T>
class Operation {
 public:
  Operation(Rank& rank, const Plan& plan, Random& own)
      : rank_(rank),
        plan_(plan),
        own_(own),
        count_(plan.count),
        ranks_(Members(rank, plan.team)),
        size_(static_cast<int>(ranks_.size())),
        index_(static_cast<int>(std::find(ranks_.begin(), ranks_.end(), rank.id()) -
                                ranks_.begin())) {}

  /*! \brief Do it. Returns the input if peers may still read it. */
  std::unique_ptr<Block> Do() {
    switch (plan_.act) {
      case OperationKind::kAllReduce:
        return DoAllReduce();
      case OperationKind::kAllReduceNorm:
        // Elements that are no floats have no norm.
        if constexpr (std::is_same<T, float>::value) return DoAllReduceNorm();
        return DoAllReduce();
      case OperationKind::kAllToAll:
        return DoAllToAll();
      case OperationKind::kRaggedAllToAll:
        return DoRaggedAllToAll();
      case OperationKind::kReduce:
        return DoReduce();
      case OperationKind::kReduceScatter:
        return DoReduceScatter();
      case OperationKind::kAllGather:
      case OperationKind::kGather:
        return DoGather();
      case OperationKind::kBroadcast:
      case OperationKind::kScatter:
        return DoSpread();
      case OperationKind::kPermute:
        return DoPermute();
      case OperationKind::kExchange:
        return DoExchange();
    }
    return nullptr;
  }

 private:
  std::unique_ptr<Block> NewBlock(size_t elements) {
    const bool in_arena = plan_.place == BufferKind::kArena ||
                          (plan_.place == BufferKind::kMixed && Draw(own_, 2) == 0);
    auto block = std::make_unique<Block>(rank_, in_arena, (elements + 8) * sizeof(T));
    block->Spoil(0x55);
    return block;
  }
  /*! \brief Elements of a block, not always aligned to more than one of them. */
  Buffer Take(const Block& block, size_t elements) {
    constexpr ElementType type{std::is_floating_point<T>::value ? uint8_t{2} : uint8_t{0},
                               8 * sizeof(T), 1};
    return Buffer{reinterpret_cast<T*>(block.data()) + (plan_.salt & 7), elements, type};
  }
  static Buffer Slice(const Buffer& whole, size_t begin, size_t elements) {
    return Buffer{static_cast<T*>(whole.data) + begin, elements, whole.type};
  }
  void Fill(const Buffer& buffer, int exposed_by, size_t from = 0) {
    for (size_t i = 0; i < buffer.count; ++i) {
      static_cast<T*>(buffer.data)[i] = Element<T>(plan_.salt, exposed_by, from + i);
    }
    Jitter(own_);
  }
  template <typename Expected>
  void Check(const Buffer& buffer, const char* what, Expected expected) {
    Jitter(own_);
    const T* data = static_cast<const T*>(buffer.data);
    for (size_t i = 0; i < buffer.count; ++i) {
      if (data[i] == expected(i)) continue;
      Fail("WrongData", what, " of ", buffer.count, " elements, strategy ",
           static_cast<int>(plan_.strategy), ", no exit barrier ", plan_.no_exit_barrier,
           ": element ", i, " is ", +data[i], ", not ", +expected(i));
    }
  }

  /*! \brief The drawn one, unless floats have none or its results would not be exact: products. */
  ReduceKind Kind() const {
    const bool integers_only = plan_.kind == ReduceKind::kProd || IsBitwise(plan_.kind);
    return std::is_floating_point<T>::value && integers_only ? ReduceKind::kSum : plan_.kind;
  }

  uint8_t Flags() const { return plan_.no_exit_barrier ? kNoExitBarrier : 0; }

  std::unique_ptr<Block> DoAllReduce() {
    auto input = NewBlock(count_);
    auto output = NewBlock(count_);
    const Buffer send = Take(*input, count_);
    const bool in_place = plan_.may_be_in_place && Draw(own_, 2) == 0;
    const Buffer recv = in_place ? send : Take(*output, count_);
    const ReduceKind kind = Kind();
    Fill(send, rank_.id());
    On(rank_).AllReduce(send, kind, plan_.team, plan_.strategy, Flags(), recv);
    // Whoever returns may write its input at once: the exit barrier's promise.
    if (!plan_.no_exit_barrier && !in_place) input->Spoil(0xee);
    Check(recv, "allreduce", [&](size_t i) { return Reduced<T>(kind, plan_.salt, ranks_, i); });
    return plan_.no_exit_barrier ? std::move(input) : nullptr;
  }

  /*! \brief Rows of 1 to 2000 elements, normalised with a weight of 1. */
  std::unique_ptr<Block> DoAllReduceNorm() {
    constexpr size_t kRows[] = {1, 7, 64, 2000};
    const size_t row = kRows[plan_.distance % 4];
    const size_t count = count_ / row * row;
    const bool centred = plan_.distance % 8 < 4;
    auto input = NewBlock(count);
    auto output = NewBlock(count);
    auto norms = NewBlock(count);
    const Buffer send = Take(*input, count);
    const Buffer out = Take(*output, count);
    const Buffer norm_out = Take(*norms, count);
    std::vector<T> residual(count + 1);
    std::vector<T> ones(row, 1), zeros(row, 0);
    const Buffer old{plan_.may_be_in_place ? out.data : residual.data(), count, send.type};
    const Buffer weight{ones.data(), row, send.type};
    const Buffer bias{zeros.data(), row, send.type};
    Fill(send, rank_.id());
    Fill(old, 99);
    On(rank_).AllReduceNorm(send, old, {weight, centred ? &bias : nullptr, 1.0}, plan_.team,
                            plan_.strategy, Flags(), out, norm_out);
    if (!plan_.no_exit_barrier) input->Spoil(0xee);
    const T* sums = static_cast<const T*>(out.data);
    Check(out, "allreduce_norm", [&](size_t i) {
      return Reduced<T>(ReduceKind::kSum, plan_.salt, ranks_, i) + Element<T>(plan_.salt, 99, i);
    });
    for (size_t at = 0; at < count; at += row) {
      double mean = 0;
      double squares = 0;
      for (size_t i = 0; i < row; ++i) mean += centred ? sums[at + i] / double(row) : 0;
      for (size_t i = 0; i < row; ++i) squares += (sums[at + i] - mean) * (sums[at + i] - mean);
      const double scale = 1 / std::sqrt(squares / row + 1);
      const T* norm = static_cast<const T*>(norm_out.data) + at;
      for (size_t i = 0; i < row; ++i) {
        const double wanted = (sums[at + i] - mean) * scale;
        if (std::abs(norm[i] - wanted) <= 1e-4 * (1 + std::abs(wanted))) continue;
        Fail("WrongData", "norm of a row of ", row, " at ", at, ": element ", i, " is ", norm[i],
             ", not ", wanted);
      }
    }
    return plan_.no_exit_barrier ? std::move(input) : nullptr;
  }

  std::unique_ptr<Block> DoReduceScatter() {
    const size_t part = count_ / size_;
    auto input = NewBlock(part * size_);
    auto output = NewBlock(part);
    const Buffer send = Take(*input, part * size_);
    const bool in_place = plan_.may_be_in_place && Draw(own_, 2) == 0;
    const Buffer recv = in_place ? Slice(send, index_ * part, part) : Take(*output, part);
    Fill(send, rank_.id());
    On(rank_).ReduceScatter(send, Kind(), plan_.team, Flags(), recv);
    if (!plan_.no_exit_barrier && !in_place) input->Spoil(0xee);
    Check(recv, "reduce_scatter",
          [&](size_t i) { return Reduced<T>(Kind(), plan_.salt, ranks_, index_ * part + i); });
    return plan_.no_exit_barrier ? std::move(input) : nullptr;
  }

  std::unique_ptr<Block> DoReduce() {
    auto input = NewBlock(count_);
    auto output = NewBlock(count_);
    const Buffer send = Take(*input, count_);
    const int root = plan_.distance % size_;
    const bool in_place = index_ == root && plan_.may_be_in_place;
    const Buffer recv = in_place ? send : Take(*output, count_);
    Fill(send, rank_.id());
    On(rank_).Reduce(send, Kind(), root, plan_.team, Flags(), index_ == root ? &recv : nullptr);
    if (!plan_.no_exit_barrier && !in_place) input->Spoil(0xee);
    if (index_ == root) {
      Check(recv, "reduce", [&](size_t i) { return Reduced<T>(Kind(), plan_.salt, ranks_, i); });
    }
    return plan_.no_exit_barrier ? std::move(input) : nullptr;
  }

  std::unique_ptr<Block> DoAllToAll() {
    const size_t part = count_ / size_;
    SplitCounts parts;
    if (plan_.may_be_in_place) {  // no all-to-all is; here it says that the parts differ
      Random drawn(plan_.salt);
      for (int i = 0; i < size_ * size_; ++i) {
        parts.push_back(Draw(drawn, 4) == 0 ? 0 : Draw(drawn, 2 * part + 1));
      }
    }
    auto elements = [&](int from, int to) {
      return parts.empty() ? part : static_cast<size_t>(parts[from * size_ + to]);
    };
    size_t given = 0;
    size_t taken = 0;
    std::vector<T> wanted;
    for (int i = 0; i < size_; ++i) {
      given += elements(index_, i);
      taken += elements(i, index_);
      size_t before = 0;
      for (int j = 0; j < index_; ++j) before += elements(i, j);
      for (size_t k = 0; k < elements(i, index_); ++k) {
        wanted.push_back(Element<T>(plan_.salt, ranks_[i], before + k));
      }
    }
    auto input = NewBlock(given);
    auto output = NewBlock(taken);
    const Buffer recv = Take(*output, taken);
    const Buffer send = Take(*input, given);
    Fill(send, rank_.id());
    On(rank_).AllToAll(send, parts, plan_.team, Flags(), recv);
    if (!plan_.no_exit_barrier) input->Spoil(0xee);
    Check(recv, "all_to_all", [&](size_t i) { return wanted[i]; });
    return plan_.no_exit_barrier ? std::move(input) : nullptr;
  }

  /*! \brief Rows of 1 to 100 elements, in one or two groups for each receiver. */
  std::unique_ptr<Block> DoRaggedAllToAll() {
    constexpr size_t kRows[] = {1, 3, 64, 100};
    const size_t row = kRows[plan_.distance % 4];
    const auto groups = static_cast<int>(1 + plan_.salt % 2);
    const int numbers = size_ * groups;
    const size_t part = count_ / row / numbers;
    Random drawn(plan_.salt);
    std::vector<int64_t> all;
    for (int i = 0; i < size_ * numbers; ++i) {
      all.push_back(Draw(drawn, 3) == 0 ? 0 : static_cast<int64_t>(Draw(drawn, part + 1)));
    }
    auto rows = [&](int from, int to) {
      int64_t sum = 0;
      for (int i = 0; i < groups; ++i) sum += all[from * numbers + to * groups + i];
      return static_cast<size_t>(sum);
    };
    size_t given = 0;
    size_t taken = 0;
    std::vector<T> wanted;
    std::vector<int64_t> from_each;
    for (int i = 0; i < size_; ++i) {
      given += rows(index_, i);
      taken += rows(i, index_);
      size_t before = 0;
      for (int j = 0; j < index_; ++j) before += rows(i, j);
      for (size_t k = 0; k < rows(i, index_) * row; ++k) {
        wanted.push_back(Element<T>(plan_.salt, ranks_[i], before * row + k));
      }
      for (int k = 0; k < groups; ++k) from_each.push_back(all[i * numbers + index_ * groups + k]);
    }
    const size_t spare = plan_.may_be_in_place ? 5 : 0;
    auto input = NewBlock((given + spare) * row);
    auto output = NewBlock((taken + spare) * row);
    const Buffer recv = Take(*output, (taken + spare) * row);
    const Buffer send = Take(*input, (given + spare) * row);
    Fill(send, rank_.id());
    std::vector<int64_t> received(numbers);
    constexpr ElementType kNumber{0, 64, 1};
    const Buffer counts{all.data() + index_ * numbers, static_cast<size_t>(numbers), kNumber};
    const Buffer recv_counts{received.data(), received.size(), kNumber};
    On(rank_).RaggedAllToAll(send, row, counts, plan_.team, Flags(), recv, recv_counts);
    if (!plan_.no_exit_barrier) input->Spoil(0xee);
    Check(Slice(recv, 0, wanted.size()), "ragged_all_to_all", [&](size_t i) { return wanted[i]; });
    if (received != from_each) Fail("WrongData", "counts of a ragged_all_to_all");
    return plan_.no_exit_barrier ? std::move(input) : nullptr;
  }

  std::unique_ptr<Block> DoGather() {
    const int root = plan_.distance % size_;
    const bool receives = plan_.act == OperationKind::kAllGather || index_ == root;
    const size_t part = count_ / size_;
    auto input = NewBlock(part);
    auto output = NewBlock(part * size_);
    const Buffer recv = Take(*output, part * size_);
    const bool in_place = receives && plan_.may_be_in_place;
    const Buffer send = in_place ? Slice(recv, index_ * part, part) : Take(*input, part);
    Fill(send, rank_.id());
    if (plan_.act == OperationKind::kAllGather) {
      On(rank_).AllGather(send, plan_.team, Flags(), recv);
    } else {
      On(rank_).Gather(send, root, plan_.team, Flags(), receives ? &recv : nullptr);
    }
    if (!plan_.no_exit_barrier) input->Spoil(0xee);
    if (receives) {
      Check(recv, "gather",
            [&](size_t i) { return Element<T>(plan_.salt, ranks_[i / part], i % part); });
    }
    if (plan_.no_exit_barrier) return in_place ? std::move(output) : std::move(input);
    output->Spoil(0xee);
    return nullptr;
  }

  std::unique_ptr<Block> DoSpread() {
    const bool scatter = plan_.act == OperationKind::kScatter;
    const size_t part = scatter ? count_ / size_ : count_;
    const int from = plan_.distance % size_;
    const bool root = index_ == from;
    const size_t whole = scatter ? part * size_ : part;
    auto input = NewBlock(root ? whole : 0);
    auto output = NewBlock(part);
    const Buffer send = Take(*input, whole);
    const bool in_place = root && plan_.may_be_in_place;
    const Buffer recv =
        in_place ? Slice(send, scatter ? index_ * part : 0, part) : Take(*output, part);
    if (root) Fill(send, rank_.id());
    if (scatter) {
      On(rank_).Scatter(root ? &send : nullptr, from, plan_.team, Flags(), recv);
    } else {
      On(rank_).Broadcast(root ? &send : nullptr, from, plan_.team, Flags(), recv);
    }
    if (!in_place && !plan_.no_exit_barrier) input->Spoil(0xee);
    const size_t begin = scatter ? index_ * part : 0;
    Check(recv, scatter ? "scatter" : "broadcast",
          [&](size_t i) { return Element<T>(plan_.salt, ranks_[from], begin + i); });
    if (plan_.no_exit_barrier) return input;
    input->Spoil(0xee);
    return nullptr;
  }

  std::unique_ptr<Block> DoPermute() {
    Random drawn(plan_.salt);
    Sources sources;
    for (int i = 0; i < size_; ++i) {
      sources.push_back(static_cast<int64_t>(Draw(drawn, size_ + 1)) - 1);
    }
    sources[0] = (sources[0] + 1 + plan_.distance) % (size_ + 1) - 1;  // another one by distance
    auto input = NewBlock(count_);
    auto output = NewBlock(count_);
    const Buffer send = Take(*input, count_);
    const Buffer recv = Take(*output, count_);
    Fill(send, rank_.id());
    On(rank_).Permute(send, sources, plan_.team, Flags(), recv);
    if (!plan_.no_exit_barrier) input->Spoil(0xee);
    const int64_t from = sources[index_];
    Check(recv, "permute",
          [&](size_t i) { return from < 0 ? T(0) : Element<T>(plan_.salt, ranks_[from], i); });
    return plan_.no_exit_barrier ? std::move(input) : nullptr;
  }

  std::unique_ptr<Block> DoExchange() {
    if (size_ == 1) return nullptr;
    const int distance = 1 + plan_.distance % (size_ - 1);
    const int to = ranks_[(index_ + distance) % size_];
    const int from = ranks_[(index_ + size_ - distance) % size_];
    auto input = NewBlock(count_);
    auto output = NewBlock(count_);
    const Buffer send = Take(*input, count_);
    const Buffer recv = Take(*output, count_);
    Fill(send, rank_.id());
    // A sender may wait for its receiver; in every ring somebody receives first.
    if (rank_.id() < to) rank_.endpoint().Send(send, to);
    rank_.endpoint().Receive(recv, from);
    if (rank_.id() > to) rank_.endpoint().Send(send, to);
    input->Spoil(0xee);
    Check(recv, "exchange", [&](size_t i) { return Element<T>(plan_.salt, from, i); });
    return nullptr;
  }

  Rank& rank_;
  const Plan& plan_;
  Random& own_;
  size_t count_;
  std::vector<int> ranks_;
  int size_;
  int index_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_TESTS_STRESS_OPERATION_H_
