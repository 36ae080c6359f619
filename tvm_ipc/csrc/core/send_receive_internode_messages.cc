/* SPDX-License-Identifier: Apache-2.0 */
/*! \file send_receive_internode_messages.cc */
#include "core/send_receive_internode_messages.h"

#include <cstring>

#include "core/error.h"
#include "core/rank_runtime_state.h"

namespace tvm_ipc {

Messages::Messages(InternodeRing& ring, const NodeLayout& layout, const TeamBarrier& here,
                   const Descriptor& mine, size_t buffers)
    : ring_(ring),
      layout_(layout),
      here_(here),
      mine_(mine),
      use_(ring, here.generation(), &here, mine, buffers, buffers) {}

RingTicket Messages::Send(int to, RingPhase phase, int64_t number, size_t buffer, size_t at,
                          size_t bytes) {
  Descriptor head = mine_;
  head.offset = number;
  memcpy(use_.buffer(buffer) + at, &head, sizeof(head));
  return use_.Send(control().NodeOf(to), RingTag(layout_.team, ring_.rank().id(), to, phase),
                   buffer, at, kMessageHead + bytes);
}

Messages::Incoming Messages::Receive(int from, RingPhase phase, size_t buffer) {
  const int32_t tag = RingTag(layout_.team, from, ring_.rank().id(), phase);
  return {use_.Receive(control().NodeOf(from), tag, buffer), buffer, from};
}

const uint8_t* Messages::Take(const Incoming& incoming, int64_t number, size_t bytes) {
  const size_t received_bytes = use_.Await(incoming.ticket);
  auto describe_rank = [&](int rank) {
    return Text("rank ", rank, " of ", DescribeNode(control(), control().NodeOf(rank)));
  };
  Descriptor theirs;
  if (received_bytes >= sizeof(theirs))
    memcpy(&theirs, use_.buffer(incoming.buffer), sizeof(theirs));
  if (received_bytes < sizeof(theirs) || !theirs.Agrees(mine_)) {
    Fail(kind::kMismatch, "the nodes disagree", here_.Where(), ": ",
         describe_rank(ring_.rank().id()), " called ", Describe(mine_), "; ",
         describe_rank(incoming.from),
         received_bytes < sizeof(theirs) ? " sent something else"
                                         : Text(" called ", Describe(theirs)));
  }
  if (theirs.offset != number || received_bytes != kMessageHead + bytes) {
    Fail(kind::kRuntime, Describe(mine_), here_.Where(), ": ", describe_rank(incoming.from),
         " sent ", received_bytes, " bytes as message ", theirs.offset, ", and message ", number,
         " of ", kMessageHead + bytes,
         " bytes was expected; all nodes must have the same version of this library");
  }
  return Body(incoming.buffer);
}

}  // namespace tvm_ipc
