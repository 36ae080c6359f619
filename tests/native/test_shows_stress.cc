/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_shows_stress.cc
 * \brief What ranks of several teams show, read and hide, under whatever sanitizer the build has.
 *
 *   test_shows_stress [--operations N] [--seed N]
 *
 * In a round all ranks draw the same shows and hides, in three teams, with collectives of the same
 * teams in between; which of what is shown a rank looks at, and how often, it draws alone. What was
 * hidden is written at once, and given to somebody else. A rank fails at any place, with tensors of
 * all ranks shown; the session recovers, and numbers begin anew. Works go on meanwhile, and so does
 * another thread of each rank, in a team of its own.
 */
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/works.h"
#include "expect.h"
#include "ranks.h"
#include "stress_operation.h"

namespace tvm_ipc {
namespace {

enum Action { kShow, kFail, kDrop, kDropped, kTooMany };

constexpr int kRanks = 4;
uint64_t operations = 2000;

std::vector<TeamId> TeamsOf(Rank& rank, uint32_t copy) {
  return {copy == 0 ? kWorld : TeamOf(rank.control(), {0, 1, 2, 3}, copy),
          copy == 0 ? kGroup : TeamOf(rank.control(), {3, 1, 0, 2}, copy),
          TeamOf(rank.control(), {2, 0, 3, 1}, copy)};
}

/*! \brief Memory of the arena that goes back when nobody holds it. */
std::shared_ptr<uint8_t> Allocate(Rank& rank, size_t bytes) {
  const std::shared_ptr<Heap>& heap = rank.endpoint().heap();
  return std::shared_ptr<uint8_t>(static_cast<uint8_t*>(heap->Allocate(bytes)),
                                  [heap, bytes](uint8_t* data) { heap->Free(data, bytes); });
}

/*! \brief Something shown, and what all members must find there. */
struct Open {
  Shown shown;
  std::shared_ptr<uint8_t> data;
  uint64_t salt;
  size_t count;
};

class Shower {
 public:
  Shower(Rank& rank, TeamId team, uint64_t seed)
      : rank_(rank), team_(team), members_(Members(rank, team)), own_(seed * 64 + rank.id()) {}

  void Show(Random& random) {
    const uint64_t salt = random();
    const size_t count = Draw(random, 8) == 0 ? Draw(random, 20000) : Draw(random, 300);
    const bool in_arena = Draw(own_, 4) != 0;
    std::shared_ptr<uint8_t> data =
        in_arena ? Allocate(rank_, count * sizeof(int32_t))
                 : std::shared_ptr<uint8_t>(new uint8_t[count * sizeof(int32_t) + 1],
                                            std::default_delete<uint8_t[]>());
    auto* elements = reinterpret_cast<int32_t*>(data.get());
    for (size_t i = 0; i < count; ++i) elements[i] = Element<int32_t>(salt, rank_.id(), i);
    const Buffer buffer{data.get(), count, ElementType{0, 32, 1}};
    Jitter(own_);
    Shown shown = rank_.endpoint().Show(buffer, team_, data);
    if (!in_arena) memset(data.get(), 0x5a, count * sizeof(int32_t));  // it was copied
    last_ = shown.number;
    open_.push_back({std::move(shown), std::move(data), salt, count});
  }

  /*! \brief Look at something that any of the members shows. */
  void Look() {
    if (open_.empty()) return;
    Open& one = open_[Draw(own_, open_.size())];
    Check(one, static_cast<int64_t>(Draw(own_, 20)) - 10);
  }

  /*! \brief Hide some of it, of which the memory is somebody else's then. */
  void Hide(Random& random) {
    if (open_.empty()) return;
    const size_t count = 1 + Draw(random, open_.size());
    for (size_t i = 0; i < count; ++i) {  // as all members draw them
      std::swap(open_[i], open_[i + Draw(random, open_.size() - i)]);
    }
    std::vector<const Shown*> hidden;
    for (size_t i = 0; i < count; ++i) hidden.push_back(&open_[i].shown);
    if (Draw(own_, 2) == 0) std::reverse(hidden.begin(), hidden.end());
    Jitter(own_);
    rank_.endpoint().Hide(team_, hidden);
    for (size_t i = 0; i < count; ++i) {
      Open& one = open_[i];
      memset(one.shown.memory.data, 0x33, one.count * sizeof(int32_t));
      const Shown old = one.shown;
      const Error error = ErrorOf([&] { rank_.endpoint().Peer(one.shown, 1); });
      if (error.kind() == std::string(kind::kPeer)) throw error;  // a rank has failed
      EXPECT(Contains(error.what(), "was hidden before"), error.what());
    }
    open_.erase(open_.begin(), open_.begin() + static_cast<int64_t>(count));
  }

  /*! \brief Reduce what the members show, where all of them show something. */
  void Reduce(Random& random) {
    if (open_.empty()) return;
    Open& one = open_[Draw(random, open_.size())];
    std::vector<Buffer> parts;
    for (size_t k = 0; k < members_.size(); ++k) {
      Buffer part = one.shown.memory;
      part.data = rank_.endpoint().Peer(one.shown, -static_cast<int64_t>(k)).data;
      parts.push_back(part);
    }
    std::vector<int32_t> out(one.count + 1);
    const Buffer recv{out.data(), one.count, ElementType{0, 32, 1}};
    rank_.endpoint().ReduceParts(ReduceKind::kSum, team_, parts, recv);
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
    rank_.endpoint().AllReduce({&mine, 1, type}, ReduceKind::kSum, team_, Strategy::kAuto, 0,
                               {&sum, 1, type});
    int32_t wanted = 0;
    for (int member : members_) wanted += member;
    EXPECT(sum == wanted, sum);
  }

  void Step(Random& random) {
    Jitter(own_);
    const uint64_t draw = Draw(random, 8);
    uint32_t oldest = last_;
    for (const Open& one : open_) oldest = std::min(oldest, one.shown.number);
    if (last_ - oldest > 50) {  // its place will be needed
      HideAll(random);
    } else if (open_.size() >= 24 || draw == 0) {
      Hide(random);
    } else if (draw == 1) {
      Meet();
    } else if (draw == 2) {
      Reduce(random);
    } else {
      Show(random);
    }
    for (uint64_t looks = Draw(own_, 4); looks > 0; --looks) Look();
  }

  void HideAll(Random& random) {
    while (!open_.empty()) Hide(random);
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
    const PeerMemory peer = rank_.endpoint().Peer(one.shown, shift);
    const auto* elements = static_cast<const int32_t*>(peer.data);
    for (size_t i = 0; i < one.count; ++i) {
      EXPECT(elements[i] == Element<int32_t>(one.salt, whose, i), "element ", i, " that rank ",
             whose, " shows to rank ", rank_.id());
    }
  }

  Rank& rank_;
  TeamId team_;
  std::vector<int> members_;
  Random own_;
  uint32_t last_ = 0;
  std::vector<Open> open_;
};

/*! \brief One thread of a rank, in teams of its own. */
void ShowAndHide(Rank& rank, uint64_t seed, uint32_t copy, uint64_t count, uint64_t fails_at) {
  Random random(seed + copy);
  std::vector<std::unique_ptr<Shower>> showers;
  for (TeamId team : TeamsOf(rank, copy)) {
    // The members of each group draw what they do alone; it is the same for all.
    showers.push_back(std::make_unique<Shower>(rank, team, seed + 100 * copy));
  }
  for (uint64_t i = 0; i < count; ++i) {
    if (i == fails_at) Fail(kind::kValue, "rank ", rank.id(), " was told to fail");
    showers[Draw(random, showers.size())]->Step(random);
  }
  for (auto& shower : showers) shower->HideAll(random);
}

/*! \brief The others read what one of them has dropped, until it fails. */
void Drop(Rank& rank, const Order& order) {
  Random random(order.seed);
  Shower shower(rank, kWorld, order.seed);
  for (int i = 0; i < 8; ++i) shower.Show(random);
  shower.Meet();
  const bool drops = rank.id() == 0;
  if (drops) {
    shower.DropAll();
    for (int i = 0; i < 50; ++i) {  // what it gets now is nothing that others look at
      const size_t bytes = 1000 * i;
      memset(Allocate(rank, bytes).get(), 0x44, bytes);
    }
  } else {
    shower.CheckAll();
  }
  shower.Meet();
  Fail(kind::kValue, "told to fail");
}

/*! \brief As many as there may be can be shown after a recovery, and one more is refused. */
void TooMany(Rank& rank, const Order& order) {
  Random random(order.seed);
  Shower shower(rank, kGroup, order.seed);
  for (uint32_t i = 0; i < kMaxShown; ++i) shower.Show(random);
  if (order.action == kDropped) return shower.HideAll(random);
  shower.Show(random);
}

void Serve(Rank& rank, const Order& order) {
  if (order.action == kDrop) return Drop(rank, order);
  if (order.action == kDropped || order.action == kTooMany) return TooMany(rank, order);
  Random random(order.seed);
  const uint64_t fails_at = order.action == kFail ? random() % 100 : ~uint64_t{0};
  const bool is_told = rank.id() == static_cast<int>(random() % kRanks);
  const bool second = random() % 2 == 0;  // in which of the threads it fails
  const std::shared_ptr<Rank> shared = ShareCurrentRank();
  auto fails = [&](bool in_second) { return is_told && second == in_second ? fails_at : ~0ull; };
  std::string error;
  std::thread other([&] {
    ActFor(shared);
    try {
      ShowAndHide(rank, order.seed, 7, operations / 2, fails(true));
    } catch (const Error& caught) {
      error = caught.kind();
      rank.FailSession();
    }
    StopActing();
  });
  int32_t number = 0;
  std::shared_ptr<Work> work;
  try {
    work = rank.works().Post("a work", [&rank, &number] {
      number = rank.id() + 1;
      return true;
    });
    ShowAndHide(rank, order.seed, 0, operations, fails(false));
  } catch (const Error&) {
    rank.FailSession();
    other.join();
    if (error == kind::kValue) Fail(kind::kValue, "its other thread was told to fail");
    throw;
  }
  other.join();
  if (!error.empty()) Fail(error == kind::kValue ? kind::kValue : kind::kPeer, "its other thread");
  work->Wait();
  EXPECT(number == rank.id() + 1, number);
}

void Run(uint64_t seed) {
  HubOptions options;
  options.num_ranks = kRanks;
  options.arena_bytes = 64 << 20;
  options.timeout_seconds = 40;
  options.instruction_set = "auto";
  Ranks ranks(Ranks::Kind::kThreads, options, 2, Serve);
  Expect(ranks, kShow, seed, "");
  for (int i = 0; i < 6; ++i) {
    Expect(ranks, kFail, seed + 10 * i, kind::kValue);
    Expect(ranks, kDropped, seed, "");
    Expect(ranks, kDrop, seed + i, kind::kValue);
    Expect(ranks, kTooMany, seed, kind::kRuntime);
  }
  Expect(ranks, kShow, seed + 1, "");
}

}  // namespace
}  // namespace tvm_ipc

int main(int argc, char** argv) {
  uint64_t seed = 1;
  for (int i = 1; i + 1 < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--operations") tvm_ipc::operations = std::stoull(argv[++i]);
    if (option == "--seed") seed = std::stoull(argv[++i]);
  }
  tvm_ipc::Run(seed);
  std::printf("%d ranks, %llu operations of each\npassed\n", tvm_ipc::kRanks,
              static_cast<unsigned long long>(tvm_ipc::operations));
  return 0;
}
