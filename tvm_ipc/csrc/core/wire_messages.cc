/* SPDX-License-Identifier: Apache-2.0 */
/*! \file wire_messages.cc */
#include "core/wire_messages.h"

#include <cstring>

#include "core/error.h"
#include "core/group.h"

namespace tvm_ipc {

Messages::Messages(RankWire& wire, const Layout& layout, const Meeting& here,
                   const Descriptor& mine, size_t buffers)
    : wire_(wire),
      layout_(layout),
      here_(here),
      mine_(mine),
      use_(wire, here.generation(), &here, mine, buffers, buffers) {}

WireTicket Messages::Send(int to, WirePhase phase, int64_t number, size_t buffer, size_t at,
                          size_t bytes) {
  Descriptor head = mine_;
  head.offset = number;
  memcpy(use_.buffer(buffer) + at, &head, sizeof(head));
  return use_.Send(control().NodeOf(to), WireTag(layout_.team, wire_.rank().id(), to, phase),
                   buffer, at, kMessageHead + bytes);
}

Messages::Coming Messages::Receive(int from, WirePhase phase, size_t buffer) {
  const int32_t tag = WireTag(layout_.team, from, wire_.rank().id(), phase);
  return {use_.Receive(control().NodeOf(from), tag, buffer), buffer, from};
}

const uint8_t* Messages::Take(const Coming& coming, int64_t number, size_t bytes) {
  const size_t came = use_.Await(coming.ticket);
  auto place = [&](int rank) {
    return Text("rank ", rank, " of ", DescribeNode(control(), control().NodeOf(rank)));
  };
  Descriptor theirs;
  if (came >= sizeof(theirs)) memcpy(&theirs, use_.buffer(coming.buffer), sizeof(theirs));
  if (came < sizeof(theirs) || !theirs.Agrees(mine_)) {
    Fail(kind::kMismatch, "the nodes disagree", here_.Where(), ": ", place(wire_.rank().id()),
         " called ", Describe(mine_), "; ", place(coming.from),
         came < sizeof(theirs) ? " sent something else" : Text(" called ", Describe(theirs)));
  }
  if (theirs.offset != number || came != kMessageHead + bytes) {
    Fail(kind::kRuntime, Describe(mine_), here_.Where(), ": ", place(coming.from), " sent ", came,
         " bytes as message ", theirs.offset, ", and message ", number, " of ",
         kMessageHead + bytes, " bytes was to come; nodes must have one version of this library");
  }
  return Body(coming.buffer);
}

}  // namespace tvm_ipc
