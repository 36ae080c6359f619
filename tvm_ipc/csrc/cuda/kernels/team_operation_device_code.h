/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file team_operation_device_code.h
 * \brief The device side of a team operation, as run by one block of one member.
 */
#ifndef TVM_IPC_CUDA_KERNELS_TEAM_OPERATION_DEVICE_CODE_H_
#define TVM_IPC_CUDA_KERNELS_TEAM_OPERATION_DEVICE_CODE_H_

#include "cuda/kernels/wait.h"

namespace tvm_ipc {
namespace kernels {

TVM_IPC_DEVICE TaggedWord Tagged(uint32_t data, uint32_t tag) {
  return static_cast<uint64_t>(tag) << 32 | data;
}
TVM_IPC_DEVICE uint32_t Data(TaggedWord word) { return static_cast<uint32_t>(word); }
TVM_IPC_DEVICE bool Has(Pair pair, uint32_t tag) {
  return static_cast<uint32_t>(pair.low >> 32) == tag &&
         static_cast<uint32_t>(pair.high >> 32) == tag;
}

/*! \brief The index of the word `grid` in a header. */
constexpr uint32_t kGridWord = 8;

TVM_IPC_DEVICE uint32_t WordOf(const Header& header, uint32_t i) {
  return reinterpret_cast<const uint32_t*>(&header)[i];
}

/*! \brief State that the threads of a block share. */
struct BlockState {
  uint32_t epoch;
  uint32_t last;
  /*! \brief 1 + the index of a member whose header differs, or 0. */
  uint32_t differs;
  uint64_t input[kMaxMembers];
  uint64_t scratch[kMaxMembers];
};

/*! \brief Whether all members of the team must launch a kernel with the same blocks and threads. */
enum class Grid { kAny, kSame };

class TeamOperation {
 public:
  TVM_IPC_DEVICE TeamOperation(const TeamArgs& team, const Header& header, Grid grid)
      : team_(team), header_(header), grid_(grid == Grid::kSame ? Blocks() << 16 | Threads() : 0) {}

  /*! \brief Begin the operation. Return false to all threads of the block after an error: the
   *         kernel must then return. */
  TVM_IPC_DEVICE bool Begin() {
    BlockState& state = Shared<BlockState>();
    if (Thread() == 0) {
      state.epoch = LoadRelaxed(&own().failed) != 0 ? 0 : NextEpoch(own().epoch);
      state.differs = 0;
    }
    SyncThreads();
    epoch_ = state.epoch;
    return epoch_ != 0;
  }

  TVM_IPC_DEVICE int size() const { return team_.size; }
  TVM_IPC_DEVICE int place() const { return team_.place; }
  TVM_IPC_DEVICE uint32_t epoch() const { return epoch_; }
  /*! \brief Return the member whose index is `shift` after this member's, modulo the size. */
  TVM_IPC_DEVICE int After(int shift) const {
    const int place = team_.place + shift;
    return place < team_.size ? place : place - team_.size;
  }
  /*! \brief Return the staging buffer of a member for this epoch. */
  TVM_IPC_DEVICE uint8_t* stage(int member) const {
    return team_.team_slot[member]->stage[epoch_ & 1];
  }
  TVM_IPC_DEVICE uint8_t* stage() const { return stage(team_.place); }

  // If there are several blocks, the first one exchanges headers and the others compute without
  // waiting for it. A single block does both.

  TVM_IPC_DEVICE bool talks() const { return Block() == 0; }
  TVM_IPC_DEVICE bool computes() const { return Blocks() == 1 || Block() != 0; }
  /*! \brief Return the index of this thread among all threads that compute. */
  TVM_IPC_DEVICE uint64_t worker() const {
    return static_cast<uint64_t>(Block() - (Blocks() > 1)) * Threads() + Thread();
  }
  /*! \brief Return the number of threads that compute. */
  TVM_IPC_DEVICE uint64_t workers() const {
    return static_cast<uint64_t>(Blocks() - (Blocks() > 1)) * Threads();
  }

  /*!
   * \brief Send this member's header to all members.
   * \tparam kPublishesInput Whether to release the header, so that members that acquire it can read
   *         memory this member wrote before.
   */
  template <bool kPublishesInput>
  TVM_IPC_DEVICE void Tell() const {
    constexpr uint32_t kPairs = kHeaderWords / 2;
#pragma unroll 1
    for (uint32_t item = Thread(); item < kPairs * team_.size; item += Threads()) {
      const uint32_t member = item / kPairs;
      const uint32_t at = item % kPairs * 2;
      if (member == static_cast<uint32_t>(team_.place)) continue;
      const Pair pair{Tagged(Word(at), epoch_), Tagged(Word(at + 1), epoch_)};
      void* to = &team_.team_slot[member]->headers[epoch_ & 1][team_.place][at];
      if (kPublishesInput) {
        StorePairRelease(to, pair);
      } else {
        StorePair(to, pair);
      }
    }
  }

  /*!
   * \brief Wait for the headers of all members. Return false to all threads of the block if a
   *        header differs or does not arrive.
   * \tparam kReadsInputs Whether to acquire the headers, so that the members' inputs can be read
   *         afterwards; `input` and `scratch` return their offsets.
   */
  template <bool kReadsInputs>
  TVM_IPC_DEVICE bool Hear() {
    constexpr uint32_t kPairs = kHeaderWords / 2;
    BlockState& state = Shared<BlockState>();
#pragma unroll 1
    for (uint32_t item = Thread(); item < kPairs * team_.size; item += Threads()) {
      const uint32_t member = item / kPairs;
      const uint32_t at = item % kPairs * 2;
      Pair pair{Tagged(Word(at), epoch_), Tagged(Word(at + 1), epoch_)};
      const void* from = &own().headers[epoch_ & 1][member][at];
      while (member != static_cast<uint32_t>(team_.place)) {
        pair = kReadsInputs ? LoadPairAcquire(from) : LoadPair(from);
        if (Has(pair, epoch_) || GivesUp(kForHeader, member)) break;
      }
      if (failed_) break;
      const uint32_t low = Data(pair.low), high = Data(pair.high);
      if (at < kComparedWords && (low != Word(at) || high != Word(at + 1))) {
        StoreRelaxed(&state.differs, member + 1);
      }
      const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
      if (at == kComparedWords) state.input[member] = both;
      if (at == kComparedWords + 2) state.scratch[member] = both;
    }
    SyncThreads();
    if (state.differs != 0 && Thread() == 0) Disagree(state.differs - 1);
    return !AnyFailed();
  }
  TVM_IPC_DEVICE uint64_t input(int member) const { return Shared<BlockState>().input[member]; }
  TVM_IPC_DEVICE uint64_t scratch(int member) const { return Shared<BlockState>().scratch[member]; }

  /*!
   * \brief Synchronize with the blocks of the same index of all members. After it, their earlier
   *        writes can be read. Return false to all threads of the block if a flag does not arrive.
   * \param hears Whether this block waits for the others. If false, it only sets its flags, for
   *        which the others may wait.
   */
  TVM_IPC_DEVICE bool Barrier(Phase phase, bool hears = true) {
    const int which = phase == kForEnd;
    SyncThreads();
#pragma unroll 1
    for (int member = Thread(); member < team_.size; member += Threads()) {
      uint32_t* flag = &team_.team_slot[member]->flags[which][Block()][team_.place];
      if (member != team_.place) StoreRelease(flag, epoch_);
    }
#pragma unroll 1
    for (int member = Thread(); member < team_.size && hears; member += Threads()) {
      if (member == team_.place) continue;
      const uint32_t* flag = &own().flags[which][Block()][member];
      while (LoadAcquire(flag) != epoch_ && !GivesUp(phase, member)) continue;
    }
    SyncThreads();
    return !AnyFailed();
  }

  /*! \brief Return whether this thread must stop waiting; call it between two polls. Once it has
   *         returned true, the thread must not wait again. */
  TVM_IPC_DEVICE bool GivesUp(Phase phase, int member) {
    failed_ = failed_ || patience_.Ends(team_.guard, {phase, member, epoch_}, header_);
    return failed_;
  }
  TVM_IPC_DEVICE bool failed() const { return failed_; }

  /*! \brief End this block. The last block to end finishes the operation. */
  TVM_IPC_DEVICE void End() {
    SyncThreads();
    BlockState& state = Shared<BlockState>();
    if (Thread() == 0) {
      state.last = LoadRelaxed(&own().failed) == 0 && AddHere(&own().arrived, 1) == Blocks() - 1;
    }
    SyncThreads();
    if (state.last == 0) return;
    if (epoch_ % kClearEvery < 2) Clear();
    if (Thread() != 0) return;
    own().arrived = 0;
    own().epoch = epoch_;
  }

 private:
  /*! \brief How often stale words are cleared. Epochs wrap around, and a word left over from the
   *         previous round must not pass for a new one. */
  static constexpr uint32_t kClearEvery = 1 << 30;

  TVM_IPC_DEVICE TeamSlotMemory& own() const { return *team_.team_slot[team_.place]; }
  TVM_IPC_DEVICE uint32_t Word(uint32_t i) const {
    return i == kGridWord ? grid_ : WordOf(header_, i);
  }

  /*! \brief Return whether the team slot has failed: the same value to all threads of the block. */
  TVM_IPC_DEVICE bool AnyFailed() {
    BlockState& state = Shared<BlockState>();
    if (Thread() == 0) state.last = LoadRelaxed(&own().failed);
    SyncThreads();
    failed_ = state.last != 0;
    SyncThreads();
    return failed_;
  }

  TVM_IPC_DEVICE void Disagree(int member) {
    const Guard& guard = team_.guard;
    if (!BeginRecord(guard, {kForHeader, member, epoch_}, header_)) return;
    guard.error->mine.grid = grid_;
#pragma unroll 1
    for (int i = 0; i < kHeaderWords; ++i) {
      reinterpret_cast<uint32_t*>(&guard.error->theirs)[i] =
          Data(LoadWord(&own().headers[epoch_ & 1][member][i]));
    }
    StoreRelease(&guard.error->code, kMismatch);
  }

  /*! \brief Clear the flags and the buffers of this epoch. Peers do not write into them again
   *         before they have received this member's header of the next epoch. */
  TVM_IPC_DEVICE void Clear() {
    TeamSlotMemory& team_slot = own();
    const uint32_t slot = epoch_ & 1;
    const auto clear = [](void* memory, uint64_t bytes) {
#pragma unroll 1
      for (uint64_t at = Thread() * 16; at < bytes; at += Threads() * 16) {
        StorePair(static_cast<uint8_t*>(memory) + at, Pair{0, 0});
      }
    };
    clear(team_slot.headers[slot], sizeof(team_slot.headers[slot]));
    clear(team_slot.flags, sizeof(team_slot.flags));
    clear(team_slot.stage[slot], sizeof(team_slot.stage[slot]));
  }

  const TeamArgs& team_;
  const Header& header_;
  uint32_t grid_;
  uint32_t epoch_ = 0;
  bool failed_ = false;
  Patience patience_;
};

}  // namespace kernels
}  // namespace tvm_ipc
#endif  // TVM_IPC_CUDA_KERNELS_TEAM_OPERATION_DEVICE_CODE_H_
