/* SPDX-License-Identifier: Apache-2.0 */
/*! \file across.cc */
#include "mpi/across.h"

#include <cstring>

#include "core/error.h"
#include "core/meeting.h"

namespace tvm_ipc {

Messages::Messages(RankWire& wire, Across& across, const Descriptor& mine, size_t buffers)
    : across_(across),
      mine_(mine),
      use_(wire, across.meeting().generation(), &across.meeting(), mine, buffers, buffers) {}

WireTicket Messages::Send(int to, WirePhase phase, int64_t number, size_t buffer, size_t at,
                          size_t bytes) {
  Descriptor head = mine_;
  head.offset = number;
  memcpy(use_.buffer(buffer) + at, &head, sizeof(head));
  return use_.Send(NodeOf(to), WireTag(across_.layout().team, across_.rank().id(), to, phase),
                   buffer, at, kMessageHead + bytes);
}

Messages::Coming Messages::Receive(int from, WirePhase phase, size_t buffer) {
  const int32_t tag = WireTag(across_.layout().team, from, across_.rank().id(), phase);
  return {use_.Receive(NodeOf(from), tag, buffer), buffer, from};
}

const uint8_t* Messages::Take(const Coming& coming, int64_t number, size_t bytes) {
  const size_t came = use_.Await(coming.ticket);
  const Control& control = across_.rank().control();
  auto place = [&](int rank) {
    return Text("rank ", rank, " of ", DescribeNode(control, control.NodeOf(rank)));
  };
  Descriptor theirs;
  if (came >= sizeof(theirs)) memcpy(&theirs, use_.buffer(coming.buffer), sizeof(theirs));
  if (came < sizeof(theirs) || !theirs.Agrees(mine_)) {
    Fail(kind::kMismatch, "the nodes disagree", across_.meeting().Where(), ": ",
         place(across_.rank().id()), " called ", Describe(mine_), "; ", place(coming.from),
         came < sizeof(theirs) ? " sent something else" : Text(" called ", Describe(theirs)));
  }
  if (theirs.offset != number || came != kMessageHead + bytes) {
    Fail(kind::kRuntime, Describe(mine_), across_.meeting().Where(), ": ", place(coming.from),
         " sent ", came, " bytes as message ", theirs.offset, ", and message ", number, " of ",
         kMessageHead + bytes, " bytes was to come; nodes must have one version of this library");
  }
  return Body(coming.buffer);
}

}  // namespace tvm_ipc
