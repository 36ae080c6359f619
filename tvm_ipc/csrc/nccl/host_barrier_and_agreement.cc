/* SPDX-License-Identifier: Apache-2.0 */
/*! \file host_barrier_and_agreement.cc */
#include "nccl/host_barrier_and_agreement.h"

#include <cstring>
#include <random>

#include "core/collective_step_barrier.h"
#include "core/send_receive_internode_messages.h"

namespace tvm_ipc::nccl {

namespace {

/*! \brief Return a random number that identifies this process among those of all machines. */
uint64_t ThisProcess() {
  static const uint64_t number = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  return number;
}

}  // namespace

void Gathering::Enter(const Descriptor& mine) {
  guard_.barrier.Enter(mine);
  if (!layout_.is_internode()) return;
  if (leads()) AllGatherOverNodes(mine, Said());
  EnterAfterOthers(mine);
}

Agreed Gathering::Agree(Descriptor mine, uint32_t has, uint64_t number) {
  TeamBarrier& here = guard_.barrier;
  mine.in_place = has;
  mine.offset = static_cast<int64_t>(number);
  here.Enter(mine);
  const Control& control = rank_.control();
  Agreed agreed{has != 0, 0, false};
  for (int i = 0; i < here.size(); ++i) {
    agreed.same = agreed.same && here.exposed(i).in_place == has;
    agreed.sum += static_cast<uint64_t>(here.exposed(i).offset);
    // Every member has published its process id before the barrier.
    for (int j = 0; j < i; ++j) {
      agreed.threads = agreed.threads || control.ranks[here.rank(i)].pid.load() ==
                                             control.ranks[here.rank(j)].pid.load();
    }
  }
  if (!layout_.is_internode()) return agreed;
  if (leads()) {
    const std::vector<Said> all = AllGatherOverNodes(
        mine, {agreed.sum, ThisProcess(), agreed.same ? has : 0, agreed.threads, {}});
    agreed.sum = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      agreed.same = agreed.same && all[i].has == has;
      agreed.sum += all[i].sum;
      agreed.threads = agreed.threads || all[i].threads != 0;
      for (size_t j = 0; j < i; ++j) {
        agreed.threads = agreed.threads || all[i].process == all[j].process;
      }
    }
    mine.in_place = (agreed.same ? 1u : 0u) | (agreed.threads ? 2u : 0u);
    mine.offset = static_cast<int64_t>(agreed.sum);
  }
  EnterAfterOthers(mine);
  const Descriptor& verdict = here.exposed(0);
  return {(verdict.in_place & 1) != 0, static_cast<uint64_t>(verdict.offset),
          (verdict.in_place & 2) != 0};
}

UniqueId Gathering::Tell(const Descriptor& mine, const UniqueId& id) {
  TeamBarrier& here = guard_.barrier;
  const size_t place = static_cast<size_t>(here.slot_index(0)) * sizeof(UniqueId);
  uint8_t* said = rank_.segments()->base(here.rank(0)) + place;
  if (index() == 0) memcpy(said, &id, sizeof(id));
  here.Enter(mine);
  UniqueId told;
  if (layout_.is_internode()) {
    if (leads()) {
      Said own;
      own.id = id;
      told = AllGatherOverNodes(mine, own)[static_cast<size_t>(layout_.node_of[0])].id;
      memcpy(said, &told, sizeof(told));
    }
    EnterAfterOthers(mine);
  }
  memcpy(&told, said, sizeof(told));
  return told;
}

std::vector<Gathering::Said> Gathering::AllGatherOverNodes(const Descriptor& mine,
                                                           const Said& own) {
  static_assert(sizeof(Said) <= kMessageBytes, "one message");
  const int nodes = static_cast<int>(layout_.nodes.size());
  const size_t others = static_cast<size_t>(nodes - 1);
  const int64_t number = guard_.barrier.step();
  Messages messages(*ring_, layout_, guard_.barrier, mine, 2 * others);
  auto node_of = [&](size_t i) { return (layout_.here + 1 + static_cast<int>(i)) % nodes; };
  std::vector<Messages::Incoming> incoming;
  std::vector<RingTicket> sent;
  for (size_t i = 0; i < others; ++i) {
    const int first = layout_.RankOn(node_of(i), 0);
    incoming.push_back(messages.Receive(first, kFirstPhase, i));
    memcpy(messages.Body(others + i), &own, sizeof(own));
    sent.push_back(messages.Send(first, kFirstPhase, number, others + i, 0, sizeof(own)));
  }
  messages.WakeEngine();
  std::vector<Said> all(static_cast<size_t>(nodes));
  all[static_cast<size_t>(layout_.here)] = own;
  for (size_t i = 0; i < others; ++i) {
    memcpy(&all[static_cast<size_t>(node_of(i))], messages.Take(incoming[i], number, sizeof(own)),
           sizeof(own));
  }
  for (const RingTicket& ticket : sent) messages.Await(ticket);
  return all;
}

}  // namespace tvm_ipc::nccl
