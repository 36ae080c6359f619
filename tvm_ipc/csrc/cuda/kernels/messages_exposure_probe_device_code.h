/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file messages_exposure_probe_device_code.h
 * \brief Messages from one rank to another, exposed buffers, and the memory probe.
 *
 * A lane of a channel has two packet buffers. The sender numbers its packets m = 1, 2, ...
 *
 * - The sender waits until `taken` reaches m - 2 (acquire), fills data[m & 1], and writes the
 *   header with tag m (release).
 * - The receiver waits for the header with tag m (acquire), copies the data, and writes taken = m
 *   (release).
 *
 * Two buffers alone are not enough, because a message does not synchronize a team: the sender needs
 * the receiver's `taken` to reuse a buffer.
 */
#ifndef TVM_IPC_CUDA_KERNELS_MESSAGES_EXPOSURE_PROBE_DEVICE_CODE_H_
#define TVM_IPC_CUDA_KERNELS_MESSAGES_EXPOSURE_PROBE_DEVICE_CODE_H_

#include "cuda/kernels/data_movement_collectives_device_code.h"

namespace tvm_ipc {
namespace kernels {

/*! \brief Return whether number a is equal to b or later. Numbers wrap around. */
TVM_IPC_DEVICE bool Reached(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b) >= 0; }

struct ChannelState {
  uint32_t packet;
  uint32_t failed;
  uint32_t differs;
};

/*! \brief The packets of a message that go through this block's lane. */
class BlockChannel {
 public:
  TVM_IPC_DEVICE explicit BlockChannel(const MessageArgs& args) : args_(args) {
    const uint64_t part = DivideUp(DivideUp(args.bytes, 16), Blocks()) * 16;
    at_ = Least(args.bytes, Block() * part);
    end_ = Least(args.bytes, at_ + part);
  }

  /*! \brief Begin the message. Return false to all threads of the block after an error. */
  TVM_IPC_DEVICE bool Begin(const uint32_t& packets_done) {
    ChannelState& state = Shared<ChannelState>();
    if (Thread() == 0) {
      state.packet = packets_done;
      state.failed = LoadRelaxed(args_.guard.failed);
      state.differs = 0;
    }
    SyncThreads();
    packet_ = state.packet;
    return state.failed == 0;
  }
  /*! \brief Advance to the next packet; return false after the last one. An empty message has one
   *         packet. */
  TVM_IPC_DEVICE bool Next() {
    if (packets_ != 0) at_ += kPacketBytes;
    if (packets_ != 0 && at_ >= end_) return false;
    ++packets_;
    ++packet_;
    patience_ = Patience();
    return true;
  }
  TVM_IPC_DEVICE uint32_t packet() const { return packet_; }
  TVM_IPC_DEVICE uint64_t at() const { return at_; }
  TVM_IPC_DEVICE uint64_t bytes() const { return Least(end_ - at_, kPacketBytes); }

  TVM_IPC_DEVICE bool GivesUp(Phase phase) {
    failed_ = failed_ || patience_.Ends(args_.guard, {phase, args_.peer, packet_}, args_.header);
    return failed_;
  }
  /*! \brief Return whether the message has failed: the same value to all threads of the block. */
  TVM_IPC_DEVICE bool AnyFailed() {
    SyncThreads();
    ChannelState& state = Shared<ChannelState>();
    if (Thread() == 0) state.failed = LoadRelaxed(args_.guard.failed);
    SyncThreads();
    failed_ = state.failed != 0;
    return failed_;
  }

 private:
  const MessageArgs& args_;
  uint64_t at_;
  uint64_t end_;
  uint32_t packet_ = 0;
  uint32_t packets_ = 0;
  bool failed_ = false;
  Patience patience_;
};

TVM_IPC_DEVICE void Send(const MessageArgs& args) {
  SendQueue::PerBlock& out = args.send_queue->lanes[Block()];
  ReceiveQueue::PerBlock& in = args.receive_queue->lanes[Block()];
  BlockChannel channel(args);
  if (!channel.Begin(out.packet)) return;
  while (channel.Next()) {
    if (Thread() == 0) {
      while (!Reached(LoadAcquire(&out.taken), channel.packet() - 2) &&
             !channel.GivesUp(kForCredit)) {
        continue;
      }
    }
    if (channel.AnyFailed()) return;
    const uint32_t slot = channel.packet() & 1;
    Copy(in.data[slot], static_cast<const uint8_t*>(args.send) + channel.at(), channel.bytes(),
         OfBlock());
    SyncThreads();
    for (uint32_t i = Thread() * 2; i < kHeaderWords; i += Threads() * 2) {
      StorePairRelease(&in.headers[slot][i],
                       {Tagged(WordOf(args.header, i), channel.packet()),
                        Tagged(WordOf(args.header, i + 1), channel.packet())});
    }
  }
  if (Thread() == 0) out.packet = channel.packet();
}

/*! \brief Report that the sender's header differs. */
TVM_IPC_DEVICE void DisagreeWithSender(const MessageArgs& args, const TaggedWord* header,
                                       uint32_t packet) {
  ErrorRecord* record = args.guard.error;
  if (!BeginRecord(args.guard, {kForMessage, args.peer, packet}, args.header)) return;
  for (int i = 0; i < kHeaderWords; ++i) {
    reinterpret_cast<uint32_t*>(&record->theirs)[i] = Data(LoadWord(&header[i]));
  }
  StoreRelease(&record->code, kMismatch);
}

TVM_IPC_DEVICE void Receive(const MessageArgs& args) {
  SendQueue::PerBlock& out = args.send_queue->lanes[Block()];
  ReceiveQueue::PerBlock& in = args.receive_queue->lanes[Block()];
  ChannelState& state = Shared<ChannelState>();
  BlockChannel channel(args);
  if (!channel.Begin(in.packet)) return;
  while (channel.Next()) {
    const uint32_t slot = channel.packet() & 1;
    for (uint32_t i = Thread() * 2; i < kHeaderWords; i += Threads() * 2) {
      Pair pair = LoadPairAcquire(&in.headers[slot][i]);
      while (!Has(pair, channel.packet()) && !channel.GivesUp(kForMessage)) {
        pair = LoadPairAcquire(&in.headers[slot][i]);
      }
      if (i < kComparedWords && Has(pair, channel.packet()) &&
          (Data(pair.low) != WordOf(args.header, i) ||
           Data(pair.high) != WordOf(args.header, i + 1))) {
        StoreRelaxed(&state.differs, 1);
      }
    }
    SyncThreads();
    if (Thread() == 0 && LoadRelaxed(&state.differs) != 0) {
      DisagreeWithSender(args, in.headers[slot], channel.packet());
    }
    if (channel.AnyFailed()) return;
    Copy(static_cast<uint8_t*>(args.recv) + channel.at(), in.data[slot], channel.bytes(),
         OfBlock());
    SyncThreads();
    if (Thread() == 0) StoreRelease(&out.taken, channel.packet());
  }
  if (Thread() == 0) in.packet = channel.packet();
}

/*! \brief Send the number to the members. Members that have received it can read this rank's
 *         earlier writes. */
TVM_IPC_DEVICE void Expose(const ExposeArgs& args) {
  const TeamArgs& team = args.team;
  if (Block() != 0 || LoadRelaxed(team.guard.failed) != 0) return;
  for (int member = Thread(); member < team.size; member += Threads()) {
    StoreRelease(&team.team_slot[member]->exposed[team.place], args.number);
  }
}

TVM_IPC_DEVICE void Await(const ExposeArgs& args) {
  const TeamArgs& team = args.team;
  if (Block() != 0 || Thread() != 0) return;
  const uint32_t* exposed = &team.team_slot[team.place]->exposed[args.member];
  Patience patience;
  while (!Reached(LoadAcquire(exposed), args.number) &&
         !patience.Ends(team.guard, {kForExposed, args.member, args.number}, args.header)) {
    continue;
  }
}

TVM_IPC_DEVICE uint64_t PatternWord(uint64_t seed, uint64_t i) {
  const uint64_t mixed = (seed + i) * 0x9e3779b97f4a7c15u;
  return (mixed ^ (mixed >> 29)) * 0xbf58476d1ce4e5b9u;
}

TVM_IPC_DEVICE void WritePattern(const PatternArgs& args) {
  const Share share = OfGrid();
  for (uint64_t i = share.worker; i < args.words; i += share.workers) {
    StoreWord(args.memory + i, PatternWord(args.seed, i));
  }
}

TVM_IPC_DEVICE void CheckPattern(const PatternArgs& args) {
  const Share share = OfGrid();
  uint32_t wrong = 0;
  for (uint64_t i = share.worker; i < args.words; i += share.workers) {
    wrong += LoadWord(args.memory + i) != PatternWord(args.seed, i);
  }
  if (wrong != 0) AddHere(args.wrong, wrong);
}

}  // namespace kernels
}  // namespace tvm_ipc
#endif  // TVM_IPC_CUDA_KERNELS_MESSAGES_EXPOSURE_PROBE_DEVICE_CODE_H_
