/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file point_to_point_waits_and_errors.h
 * \brief Checks and errors of point-to-point messages, shared by all backends.
 */
#ifndef TVM_IPC_CORE_POINT_TO_POINT_WAITS_AND_ERRORS_H_
#define TVM_IPC_CORE_POINT_TO_POINT_WAITS_AND_ERRORS_H_

#include <atomic>
#include <cstdint>

#include "core/communication_backend.h"
#include "core/rank_runtime_state.h"
#include "core/shared_memory_layout.h"

namespace tvm_ipc {

/*! \brief Throw unless `peer` is another rank of the session. */
void CheckPeer(const Rank& rank, const char* op, int peer);
/*! \brief Return the descriptor of a message, which both ends compare. */
Descriptor DescribeMessage(const Buffer& buffer);
/*! \brief Throw the error of an end that has waited too long for the other one. */
[[noreturn]] void FailLateMessage(const Rank& rank, const Descriptor& mine, const char* verb,
                                  int peer);
/*! \brief Throw the error of a receiver whose sender has sent a different message. */
[[noreturn]] void FailMessage(const Rank& rank, int sender, const Descriptor& theirs,
                              const Descriptor& mine);

/*!
 * \brief One end of a message between ranks of this node. Both ends number its packets m = 1, 2,
 *        ...; packet m uses slot m & 1, and may be written once packet m - 2 was taken.
 */
class MessageEnd {
 public:
  MessageEnd(Rank& rank, const Link& link, const Buffer& buffer, int peer)
      : rank_(rank),
        channel_(link.channel),
        packet_(link.packet),
        mine_(DescribeMessage(buffer)),
        peer_(peer) {}

  /*! \brief Return the number of the current packet. */
  uint32_t packet() const { return packet_; }

  /*! \brief Begin the next packet to send: wait until its slot may be written. */
  void AwaitSlot() { AwaitTaken(++packet_ - 2); }
  /*! \brief Publish it. `offset` is that of the whole message in this rank's segment. */
  void PublishPacket(int64_t offset = -1);
  /*! \brief Wait until the receiver has taken it. */
  void AwaitTaken() { AwaitTaken(packet_); }

  /*! \brief Wait for the next packet to receive; return its descriptor. Throw if the sender has
   *         sent a different message. */
  Descriptor AwaitPacket();
  /*! \brief Publish that it was taken. */
  void PublishTaken();

 private:
  void AwaitTaken(uint32_t packet);
  void Await(const std::atomic<uint32_t>& word, uint32_t packet, std::atomic<uint32_t>& sleepers,
             const char* verb);

  Rank& rank_;
  Channel& channel_;
  uint32_t& packet_;
  const Descriptor mine_;
  const int peer_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_POINT_TO_POINT_WAITS_AND_ERRORS_H_
