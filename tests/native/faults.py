# SPDX-License-Identifier: Apache-2.0
"""Makes one small fault at a time in a copy of the native core, and says whether a test notices.

    python tests/native/faults.py FOLDER [--only WORD] [--list]

builds tests/native in FOLDER as it is, then once more for each fault, with ThreadSanitizer where
the fault is a missing order. `FAULTS` holds the text that a fault replaces, so a change to the core
may have to be made there, too: a text that is not found once is reported. This takes long, less
with ccache, and is no part of .ci/run. It ends with 1 if a fault goes unnoticed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PLAIN, THREAD, ADDRESS = "", "thread", "address,undefined"


@dataclass(frozen=True)
class Fault:
    """What is wrong, where, and which test should notice; `sanitizer` is what it is built with."""

    what: str
    file: str
    text: str
    wrong: str
    test: str
    sanitizer: str = PLAIN


STRESS = "collectives_stress"
FAULTS = [
    # ---- shows
    Fault(
        "what is shown is announced before it is there",
        "core/exposed_buffers.cc",
        "  own.memory[entry] = memory;\n",
        "  Publish(own.last, number, own.sleepers);\n  own.memory[entry] = memory;\n",
        "exposed_buffers_stress",
        THREAD,
    ),
    Fault(
        "what is shown takes the place of what was not hidden",
        "core/exposed_buffers.cc",
        "if ((open_ >> entry & 1) != 0) {",
        "if (number == 0) {",
        "exposed_buffers_stress",
    ),
    Fault(
        "what is shown is kept by whoever has it alone",
        "core/exposed_buffers.cc",
        "  keep_[entry] = std::move(keep);\n",
        "",
        "exposed_buffers_stress",
    ),
    Fault(
        "to hide what is shown waits for nobody",
        "core/exposed_buffers.cc",
        "  barrier_.Enter(mine, deadline.count() != 0 ? deadline : barrier_.options_.deadline);\n",
        "  static_cast<void>(deadline);\n",
        "exposed_buffers_stress",
    ),
    Fault(
        "the order in which what is shown is hidden matters",
        "core/exposed_buffers.cc",
        "  std::sort(numbers.begin(), numbers.end(),\n"
        "            [&](uint32_t a, uint32_t b) { return a - first < b - first; });\n",
        "  static_cast<void>(first);\n",
        "exposed_buffers_stress",
    ),
    Fault(
        "what is shown stays open though it was hidden",
        "core/exposed_buffers.cc",
        "    open_ &= ~(uint64_t{1} << number % kMaxExposed);\n",
        "",
        "exposed_buffers_stress",
    ),
    Fault(
        "numbers of what is shown do not begin anew after an error",
        "core/exposed_buffers.cc",
        "  last_ = 0;\n",
        "",
        "exposed_buffers_stress",
    ),
    Fault(
        "what was shown before an error is open after it",
        "core/exposed_buffers.cc",
        "  open_ = 0;\n",
        "",
        "exposed_buffers_stress",
    ),
    Fault(
        "what was shown before an error is seen after it",
        "core/rank_runtime_state.cc",
        "      control.team_slots[slot][r].exposure_table.last.store(0, "
        "std::memory_order_relaxed);\n",
        "",
        "exposed_buffers_stress",
    ),
    Fault(
        "what is shown is read where it lies in the reader",
        "shm/exposed_buffers.cc",
        "rank_.segments()->base(barrier.rank(index))",
        "rank_.segments()->base(rank_.id())",
        "exposed_buffers_stress",
    ),
    # ---- waits
    Fault(
        "a step is seen before what it announces: the wait loads relaxed",
        "core/wait.cc",
        "Reached(word.load(std::memory_order_acquire), target)",
        "Reached(word.load(std::memory_order_relaxed), target)",
        "wait",
        THREAD,
    ),
    Fault(
        "a step is published before what it announces: the store is relaxed",
        "core/wait.cc",
        "word.store(step, std::memory_order_release)",
        "word.store(step, std::memory_order_relaxed)",
        "wait",
        THREAD,
    ),
    Fault(
        "a sleeper is not woken",
        "core/wait.cc",
        "if (sleepers.load(std::memory_order_seq_cst) != 0) WakeAll(word);",
        "static_cast<void>(sleepers);",
        "wait",
    ),
    Fault(
        "one sleeper of several is woken",
        "core/wait.cc",
        "FUTEX_WAKE, INT_MAX, nullptr",
        "FUTEX_WAKE, 1, nullptr",
        "wait",
    ),
    Fault(
        "a sleeper stays announced",
        "core/wait.cc",
        "    sleepers.fetch_sub(1, std::memory_order_relaxed);\n",
        "",
        "wait",
    ),
    Fault(
        "who is announced does not look again before it sleeps",
        "core/wait.cc",
        "if (!Reached(seen, target) && abort.load",
        "if (abort.load",
        "wait",
    ),
    Fault(
        "an abort hides what was completed before it",
        "core/wait.cc",
        "abort.load(std::memory_order_acquire) != 0 && !reached();",
        "abort.load(std::memory_order_acquire) != 0;",
        "wait",
    ),
    Fault(
        "time in which a process was stopped counts",
        "core/wait.cc",
        "if (now - last_check > kStandstill) end",
        "if (now < looked) end",
        "wait",
    ),
    Fault(
        "a wait never ends by its deadline",
        "core/wait.cc",
        "if (now >= end) return WaitResult::kDeadline;",
        "static_cast<void>(end);",
        "wait",
    ),
    Fault(
        "the step that was waited for does not count",
        "core/shared_memory_layout.h",
        "return static_cast<int32_t>(a - b) >= 0;",
        "return static_cast<int32_t>(a - b) > 0;",
        "wait",
    ),
    # ---- meetings
    Fault(
        "a step is published before its descriptor",
        "core/collective_step_barrier.cc",
        """  slot.descriptor = mine;
  Trace("publish", rank(me_), step & 1);
  Publish(slot.seq, step, own.sleepers);  // pairs with the acquire in WaitFor
""",
        """  Trace("publish", rank(me_), step & 1);
  Publish(slot.seq, step, own.sleepers);  // pairs with the acquire in WaitFor
  slot.descriptor = mine;
""",
        STRESS,
        THREAD,
    ),
    Fault(
        "the last member is not waited for",
        "core/collective_step_barrier.cc",
        """  bool agree = true;
  for (int i = 0; i < size(); ++i) {""",
        """  bool agree = true;
  for (int i = 0; i < size() - 1; ++i) {""",
        STRESS,
    ),
    Fault(
        "only the last member's descriptor is compared",
        "core/collective_step_barrier.cc",
        "agree = agree && theirs.descriptor.Agrees(mine);",
        "agree = theirs.descriptor.Agrees(mine);",
        STRESS,
    ),
    Fault(
        "ranks that disagree about the number of elements go on",
        "core/shared_memory_layout.h",
        "type == o.type && count == o.count &&",
        "type == o.type &&",
        STRESS,
    ),
    Fault(
        "one staging buffer instead of two",
        "shm/team_operation.h",
        "(2 * guard_.barrier.slot_index(index) + (step & 1)) * kStageBytes",
        "(2 * guard_.barrier.slot_index(index) + (step & 0)) * kStageBytes",
        STRESS,
        THREAD,
    ),
    Fault(
        "who came in time is named as missing",
        "core/collective_step_barrier.cc",
        "seq.load(std::memory_order_acquire), step_)) continue;",
        "seq.load(std::memory_order_acquire), step_)) missing << separator;",
        "worker_table",
    ),
    Fault(
        "a team does not start again after a recovery",
        "core/collective_step_barrier.h",
        "    step_ = 0;\n",
        "",
        STRESS,
    ),
    Fault(
        "packets are not counted from 0 after a recovery",
        "core/rank_runtime_state.cc",
        "if (packets.generation != generation) packets = {0, generation};",
        "packets.generation = generation;",
        STRESS,
    ),
    Fault(
        "what was taken is not forgotten in a recovery",
        "core/rank_runtime_state.cc",
        "      channel.taken.store(0, std::memory_order_relaxed);\n",
        "",
        STRESS,
    ),
    Fault(
        "the steps of the first rank are not forgotten in a recovery",
        "core/rank_runtime_state.cc",
        "clear(control.team_slots[slot][r].slot);",
        "if (r > 0) clear(control.team_slots[slot][r].slot);",
        STRESS,
    ),
    Fault(
        "two threads of a rank may be in one team at once",
        "core/rank_runtime_state.h",
        "mark_->exchange(1, std::memory_order_seq_cst) == 0) return;",
        "mark_->exchange(1, std::memory_order_seq_cst) < 2) return;",
        "threads_stress",
    ),
    Fault(
        "a team is seen before its members: the number is stored relaxed",
        "core/teams.cc",
        "control.num_teams.store(count + 1, std::memory_order_release);",
        "control.num_teams.store(count + 1, std::memory_order_relaxed);",
        "threads_stress",
        THREAD,
    ),
    Fault(
        "who makes teams does not see what another thread made",
        "core/teams.cc",
        "word_.exchange(1, std::memory_order_acquire) != 0",
        "word_.exchange(1, std::memory_order_relaxed) != 0",
        "threads_stress",
        THREAD,
    ),
    Fault(
        "a rank has one seat for all the teams that were made",
        "core/teams.cc",
        "control.ranks[ranks[i]].team_slots.fetch_add(1, std::memory_order_release));",
        "control.ranks[ranks[i]].team_slots.fetch_or(1, std::memory_order_release));",
        "threads_stress",
    ),
    Fault(
        "the last reason of an abort counts, not the first",
        "core/rank_runtime_state.cc",
        """  uint32_t none = 0;
  control.abort.compare_exchange_strong(none, AbortWord(reason, rank), std::memory_order_acq_rel);
""",
        "  control.abort.store(AbortWord(reason, rank));\n",
        "worker_table",
    ),
    # ---- all-reduce and the other collectives
    Fault(
        "no exit step where inputs were read in place",
        "shm/allreduce.cc",
        "if (in_place_reads && !no_exit) team.Enter(reduction.descriptor);",
        "static_cast<void>(no_exit);",
        STRESS,
        THREAD,
    ),
    Fault(
        "inputs that are overwritten are read in place",
        "shm/allreduce.cc",
        "in_place = in_place || team.exposed(i).in_place != 0;",
        "in_place = in_place && team.exposed(i).in_place != 0;",
        STRESS,
        THREAD,
    ),
    Fault(
        "a rank's own slice is taken for everybody's",
        "shm/allreduce.cc",
        "reduction.sink.Copy(at + start, team.buffer(i), end - start);",
        "reduction.sink.Copy(at + start, team.buffer(team.index()), end - start);",
        STRESS,
    ),
    Fault(
        "slices start one place too early",
        "shm/allreduce.cc",
        "/ (line * n) * line * i);",
        "/ (line * n) * line * i - (i == 1));",
        STRESS,
    ),
    Fault(
        "pieces of rows that are normalised come in any order",
        "shm/allreduce_norm.cc",
        "in_order() const final { return true; }",
        "in_order() const final { return false; }",
        STRESS,
    ),
    Fault(
        "one input that lies in an arena is taken for all",
        "shm/allreduce.cc",
        "in_arenas = in_arenas && team.exposed(i).offset >= 0;",
        "in_arenas = team.exposed(i).offset >= 0;",
        STRESS,
    ),
    Fault(
        "no exit step after a gather in place",
        "shm/data_movement_collectives.cc",
        "if (in_place && !no_exit) team.Enter(move.descriptor);",
        "static_cast<void>(no_exit);",
        STRESS,
        THREAD,
    ),
    Fault(
        "parts of a scatter overlap in the staging buffer",
        "shm/data_movement_collectives.cc",
        "CopyBytes(team.NextBuffer() + p * bytes,",
        "CopyBytes(team.NextBuffer() + p * (bytes - 1),",
        STRESS,
    ),
    Fault(
        "the members that show nothing are read",
        "shm/data_movement_collectives.cc",
        "return move.root < 0 || member == move.root;",
        "return move.root < 0 || member >= 0;",
        STRESS,
    ),
    Fault(
        "the root of a gather is the member after it",
        "shm/data_movement_collectives.cc",
        "const bool receives = team.index() == call.root;",
        "const bool receives = team.index() == (call.root + 1) % team.size();",
        STRESS,
    ),
    Fault(
        "a member takes the part of a scatter that is the next one's",
        "shm/data_movement_collectives.cc",
        "const size_t chunk = static_cast<size_t>(team.index());",
        "const size_t chunk = (team.index() + 1) % team.size();",
        STRESS,
    ),
    Fault(
        "the roots of ranks are not compared",
        "core/shared_memory_layout.h",
        "root == o.root;",
        "root <= 64 + o.root;",
        STRESS,
    ),
    Fault(
        "the sources of a permute and the parts of an all-to-all are not compared",
        "core/collective_call.cc",
        "descriptor.layout_hash = HashOf(call.layout);",
        "descriptor.layout_hash = HashOf({1});",
        STRESS,
    ),
    Fault(
        "two lists have the same hash if their last numbers are the same",
        "core/collective_call.cc",
        "hash = (hash ^ static_cast<uint64_t>(number)) * 1099511628211u;",
        "hash = static_cast<uint64_t>(number) * 1099511628211u;",
        STRESS,
    ),
    Fault(
        "who receives from nobody has no zeros",
        "shm/data_movement_collectives.cc",
        "  if (wanted < 0) std::fill_n(recv.begin(), recv.bytes(), uint8_t{0});\n",
        "",
        STRESS,
    ),
    Fault(
        "a member takes what the first of those shows that have the same source",
        "shm/data_movement_collectives.cc",
        "const int64_t wanted = sources[team.index()];",
        "const int64_t wanted = std::find(sources.begin(), sources.end(), sources[team.index()]) -"
        " sources.begin();",
        STRESS,
    ),
    Fault(
        "a rank is in the first of the teams of a division",
        "core/teams.cc",
        "const int64_t* first = ranks + (own - ranks) / size * size;",
        "const int64_t* first = ranks + (own - ranks) / size / size;",
        STRESS,
    ),
    # ---- messages
    Fault(
        "no exit step where the parts of others were read in place",
        "shm/all_to_all.cc",
        "if (!(call.flags & kNoExitBarrier)) team.Enter(mine);",
        "",
        STRESS,
        THREAD,
    ),
    Fault(
        "parts that others take are not counted in a staging buffer",
        "core/all_to_all_layout.h",
        "for (int j = 0; j < to; ++j) bytes += piece(from, j, at, most);",
        "for (int j = 0; j < to; ++j) bytes += part(from, j);",
        STRESS,
    ),
    Fault(
        "a large part is cut where it is longer than a rank's own ones",
        "core/all_to_all_layout.h",
        "if (i != j) longest = std::max(longest, part(i, j));",
        "if (i != j && i < 1) longest = std::max(longest, part(i, j));",
        STRESS,
    ),
    Fault(
        "no exit step where a rank's part was reduced in place",
        "shm/reduce_scatter.cc",
        "if (!(call.flags & kNoExitBarrier)) team.Enter(mine);",
        "",
        STRESS,
        THREAD,
    ),
    Fault(
        "parts of a reduce-scatter lie on each other in the staging buffer",
        "shm/reduce_scatter.cc",
        "CopyBytes(team.NextBuffer() + i * bytes, send",
        "CopyBytes(team.NextBuffer() + i * bytes / 2, send",
        STRESS,
    ),
    Fault(
        "a packet is filled one too early",
        "core/point_to_point_waits_and_errors.h",
        "AwaitTaken(++packet_ - 2);",
        "AwaitTaken(++packet_ - 3);",
        STRESS,
        THREAD,
    ),
    Fault(
        "a packet is given back before it is read",
        "shm/point_to_point.cc",
        """    CopyBytes(recv.begin() + at, from, bytes, recv.bytes() >= kStreamBytes);
    message.PublishTaken();
""",
        """    message.PublishTaken();
    CopyBytes(recv.begin() + at, from, bytes, recv.bytes() >= kStreamBytes);
""",
        STRESS,
        THREAD,
    ),
    Fault(
        "a sender does not wait until its memory was read",
        "shm/point_to_point.cc",
        "    return message.AwaitTaken();\n",
        "    return;\n",
        STRESS,
        THREAD,
    ),
    Fault(
        "both packets of a link are in one place",
        "core/rank_runtime_state.cc",
        "(2 * dst + (packet & 1)) * kPacketBytes",
        "(2 * dst + (packet & 0)) * kPacketBytes",
        STRESS,
        THREAD,
    ),
    # ---- the arena
    Fault(
        "a block is given back without the lock",
        "core/arena_allocator.cc",
        """void Arena::Free(size_t offset, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
""",
        "void Arena::Free(size_t offset, size_t bytes) {\n",
        "arena",
        THREAD,
    ),
    Fault(
        "a free block is not joined with the one before it",
        "core/arena_allocator.cc",
        "if (previous->first + previous->second == offset) {",
        "if (previous->first + previous->second + 1 == offset) {",
        "arena",
    ),
    Fault(
        "the rest of a block is lost",
        "core/arena_allocator.cc",
        "if (size > bytes) AddFree(offset + bytes, size - bytes);",
        "if (size > 2 * bytes) AddFree(offset + bytes, size - bytes);",
        "arena",
    ),
    Fault(
        "what ends at the end of the arena does not grow with it",
        "core/arena_allocator.cc",
        "const size_t needed = bytes - tail;",
        "const size_t needed = bytes - 0 * tail;",
        "arena",
    ),
    Fault(
        "the whole arena is too large",
        "core/arena_allocator.cc",
        "  if (bytes > stats_.limit) {",
        "  if (bytes >= stats_.limit) {",
        "arena",
    ),
    Fault(
        "growth is not tried with less",
        "core/arena_allocator.cc",
        "if (fits && !grown && step > needed) {",
        "if (fits && !grown && step < needed) {",
        "arena",
    ),
    Fault(
        "pages in use go back to the system",
        "core/arena_allocator.cc",
        "std::min(RoundUp(offset, kGrowBytes), stats_.committed);",
        "std::min(offset / kGrowBytes * kGrowBytes, stats_.committed);",
        "arena",
    ),
    # ---- what is lent
    Fault(
        "who lends blocks ends without having seen what others did: the count is relaxed",
        "core/heap_interface.h",
        "users_.fetch_sub(1, std::memory_order_acq_rel) == 1",
        "users_.fetch_sub(1, std::memory_order_relaxed) == 1",
        "heap",
        THREAD,
    ),
    Fault(
        "who lends blocks ends before the last of them",
        "core/heap_interface.h",
        "users_.fetch_sub(1, std::memory_order_acq_rel) == 1",
        "users_.fetch_sub(1, std::memory_order_acq_rel) <= 2",
        "heap",
        ADDRESS,
    ),
    # ---- who joins, who leaves, what they say
    Fault(
        "any token is right",
        "core/admit_workers_to_session.cc",
        "sizeof(hello.token)) == 0) {",
        "0) == 0) {",
        "admission",
    ),
    Fault(
        "a rank may join twice",
        "core/admit_workers_to_session.cc",
        "if (admitted_[hello.rank]) return",
        "if (false) return",
        "admission",
    ),
    Fault(
        "one rank too many may join",
        "core/admit_workers_to_session.cc",
        "hello.rank < 0 || hello.rank >= n)",
        "hello.rank < 0 || hello.rank > n)",
        "admission",
    ),
    Fault(
        "a refusal does not end the wait for all",
        "core/worker_status_and_error_table.cc",
        """  refusals_.push_back(reason);
  changed_.notify_all();
""",
        "  refusals_.push_back(reason);\n",
        "admission",
    ),
    Fault(
        "a goodbye is taken for a death",
        "core/worker_status_and_error_table.cc",
        "  if (member.left) return;\n",
        "",
        "worker_table",
    ),
    Fault(
        "the last frames of a connection that ends are lost",
        "core/worker_status_and_error_table.cc",
        """  Frame frame;
  while (member.socket >= 0 && member.incoming.Next(&frame)) Handle""",
        """  Frame frame;
  while (more && member.socket >= 0 && member.incoming.Next(&frame)) Handle""",
        "worker_table",
    ),
    Fault(
        "a frame that is cut before its last byte counts as whole",
        "core/frame.cc",
        "if (here < length_) break;",
        "if (here + 1 < length_) break;",
        "handle_allgather",
    ),
    Fault(
        "who waits for a rank that died waits on",
        "core/worker_status_and_error_table.cc",
        "if (dead) Abort(control_, AbortReason::kDied, RankOf(member));",
        "",
        "worker_table",
    ),
    Fault(
        "the report is read without the lock",
        "core/worker_status_and_error_table.cc",
        """SessionReport WorkerTable::Report() {
  std::lock_guard<std::mutex> lock(mutex_);
""",
        "SessionReport WorkerTable::Report() {\n",
        "worker_table",
        THREAD,
    ),
    Fault(
        "a child that was forked is taken for its parent",
        "core/atfork_descriptors.cc",
        "  kept.generation.fetch_add(1, std::memory_order_relaxed);\n",
        "",
        "worker_table",
    ),
    Fault(
        "an exchange takes the answers of an older one",
        "core/handle_allgather_via_session_server.cc",
        "    if (header.number != number) continue;",
        "    if (header.number == 0) continue;",
        "handle_allgather",
    ),
    Fault(
        "an exchange is complete without the last rank",
        "core/handle_allgather_via_session_server.cc",
        "if (exposed.size() < static_cast<size_t>(num_ranks_)) return complete;",
        "if (exposed.size() + 1 < static_cast<size_t>(num_ranks_)) return complete;",
        "handle_allgather",
    ),
    # ---- frames, and hubs of several nodes
    Fault(
        "a frame may be as long as it says",
        "core/frame.cc",
        "header.bytes > limits_.bytes",
        "header.bytes > ~limits_.bytes",
        "frames",
    ),
    Fault(
        "a field is read beyond the end",
        "core/frame.cc",
        "  if (bytes > payload.size() - start) return false;\n",
        "",
        "frames",
    ),
    Fault(
        "one who never stops is heard for ever",
        "core/frame.cc",
        "taken < kReadAtOnce",
        "taken < ~size_t{0}",
        "frames",
    ),
    Fault(
        "an abort of a generation that is over ends the next one",
        "core/worker_status_and_error_table.cc",
        "} else if (generation == now) {",
        "} else {",
        "nodes",
    ),
    Fault(
        "an abort of a generation that has not begun here is forgotten",
        "core/worker_status_and_error_table.cc",
        "    pending_abort_ = {generation, word, 0};\n",
        "",
        "nodes",
    ),
    Fault(
        "other nodes are told of an abort once and never again",
        "core/internode_session_event_relay.cc",
        "if (peer->knows_abort && peer->abort_generation >= record.generation) continue;",
        "if (peer->knows_abort) continue;",
        "nodes",
    ),
    Fault(
        "a node speaks of the ranks of others",
        "core/worker_status_and_error_table.cc",
        "  if (control_.NodeOf(message.rank) != node) return false;\n  Member",
        "  Member",
        "nodes",
        ADDRESS,
    ),
    Fault(
        "the next generation begins before all nodes have begun",
        "core/worker_status_and_error_table.cc",
        "return Answered(recovered_) || ",
        "return true || ",
        "nodes",
    ),
    Fault(
        "who waits for a node that is lost waits on",
        "core/worker_status_and_error_table.cc",
        "  Abort(control_, AbortReason::kNodeLost, node);\n",
        "",
        "nodes",
    ),
    Fault(
        "a link that is silent lives on",
        "core/internode_control_messages_and_heartbeats.cc",
        "if (silence_counts_ && now - received_at_ > times_.silence) {",
        "if (now < received_at_) {",
        "nodes",
    ),
    Fault(
        "a controller that its user stops is lost",
        "core/internode_control_messages_and_heartbeats.cc",
        "watched_by_kernel_ = late && tcp == 0;",
        "watched_by_kernel_ = late && tcp > 0;",
        "nodes",
    ),
    Fault(
        "what is urgent waits for what is large",
        "core/internode_control_messages_and_heartbeats.cc",
        "urgent_.empty() ? ordered_ : urgent_",
        "ordered_.empty() ? urgent_ : ordered_",
        "nodes",
    ),
    # ---- the wire, and collectives across nodes
    Fault(
        "a request is posted before it is written",
        "core/internode_request_queue.cc",
        "  table().posted.store(posted + 1, std::memory_order_release);\n",
        "  table().posted.store(posted + 1, std::memory_order_relaxed);\n",
        "internode_ring",
        THREAD,
    ),
    Fault(
        "a message is done before it is said how long it was",
        "core/internode_request_queue_engine_side.cc",
        "  done.received = received_bytes;\n",
        "",
        "internode_ring",
    ),
    Fault(
        "after a recovery nobody waits for the engine",
        "core/internode_request_queue.cc",
        "WaitFor(control.flushed, generation,",
        "WaitFor(control.flushed, 0,",
        "internode",
    ),
    Fault(
        "a buffer is used again before its message was sent",
        "core/internode_request_queue.cc",
        "    if (!Reached(request.done.load(std::memory_order_acquire), it->ticket.target)) {\n",
        "    if (it->peer < 0) {\n",
        "internode",
    ),
    Fault(
        "a message of another collective is taken",
        "core/send_receive_internode_messages.cc",
        "!theirs.Agrees(mine_)",
        "false",
        "internode",
    ),
    Fault(
        "what is shown of a result lies where elements are shown",
        "mpi/pipelined_internode_reduce.cc",
        "constexpr size_t kResult = kStageBytes / 2;",
        "constexpr size_t kResult = 0;",
        "internode",
    ),
    Fault(
        "a part of a slice is not the one of its node",
        "mpi/reduction_slice_leader.cc",
        "elements[i] = sources[i] + range.first * plan_.width;",
        "elements[i] = sources[i] + (range.first - range.first) * plan_.width;",
        "internode",
    ),
    Fault(
        "a piece ends before its messages were sent",
        "mpi/reduction_slice_leader.cc",
        "  for (const RingTicket& ticket : piece_in_flight.sent) messages_.Await(ticket);\n",
        "",
        "internode",
    ),
    Fault(
        "in flat order ranks count from their node on",
        "mpi/internode_reduce_arithmetic.cc",
        "static_cast<size_t>(layout_.index_of[place]) * row;",
        "static_cast<size_t>(layout_.index_of[place] * 0) * row;",
        "internode",
    ),
    Fault(
        "an average across nodes is divided by the number of nodes",
        "mpi/internode_reduce_arithmetic.cc",
        "static_cast<int>(layout_.nodes.size()), count, layout_.size());",
        "static_cast<int>(layout_.nodes.size()), count,\n"
        "                           static_cast<int>(layout_.nodes.size()));",
        "internode",
    ),
    Fault(
        "who receives for a node does not show it",
        "mpi/run_move.cc",
        "      if (receiving.slot < 0) continue;\n",
        "      continue;\n",
        "internode",
    ),
    Fault(
        "first members compare their calls only where a stream goes between them",
        "mpi/run_move.cc",
        "if (layout_.index_of[layout_.me] != 0) return;",
        "if (layout_.index_of[layout_.me] >= 0) return;",
        "internode",
    ),
    Fault(
        "members that wait for another node compare nothing",
        "core/internode_request_queue.cc",
        "if (where_ != nullptr) stalled =",
        "if (where_ != nullptr && ring_.base() == nullptr) stalled =",
        "internode",
    ),
    Fault(
        "the first piece of a stream comes again",
        "mpi/run_move.cc",
        "send + exposing.stream->from + at,",
        "send + exposing.stream->from,",
        "internode",
    ),
    Fault(
        "partial sums are rounded",
        "shm/reduce_in_groups_round_once.cc",
        "representation_ = Representation::kFloat;\n",
        "representation_ = Representation::kSame;\n",
        "partial_reduction",
    ),
    Fault(
        "what is NaN is rounded as a number",
        "shm/normalize_row_impl.h",
        "if (__builtin_expect(nan != 0, 0)) KeepNans",
        "if (nan == 77) KeepNans",
        "partial_reduction",
    ),
]


class Copy:
    """The native core and its tests in a folder, where they can be broken."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.csrc = folder / "tvm_ipc" / "csrc"
        for source in sorted((ROOT / "tvm_ipc/csrc").rglob("*")) + sorted(HERE.iterdir()):
            target = folder / source.relative_to(ROOT)
            # What is as it was keeps its time, so that it is not compiled again.
            if source.is_file() and not (
                target.exists() and target.read_bytes() == source.read_bytes()
            ):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read_bytes())

    def run(self, test: str, sanitizer: str) -> str:
        """Build and run a test; return how it failed, or nothing."""
        build = self.folder / f"build-{sanitizer or 'plain'}"
        if not (build / "build.ninja").exists():
            options = [f"-DTVM_IPC_SANITIZE={sanitizer}", "--log-level=WARNING"]
            source = self.folder / "tests" / "native"
            check(["cmake", "-S", str(source), "-B", str(build), "-G", "Ninja", *options])
        check(["cmake", "--build", str(build), "--target", f"test_{test}", "--", "--quiet"])
        command = [str(build / f"test_{test}")]
        if sanitizer == THREAD:
            command = ["setarch", "-R", *command]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            return "it hangs"
        if done.returncode == 0:
            return ""
        said = (done.stdout + done.stderr).splitlines()
        told = [line for line in said if "FAILED" in line or "WARNING" in line or "ERROR" in line]
        return (told or [f"exit code {done.returncode}"])[0].strip()[:120]


def check(command: list[str]) -> None:
    """Run what must not fail."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}")


def misplaced(faults: list[Fault]) -> Iterator[str]:
    """Say which texts do not stand exactly once in their file."""
    for fault in faults:
        count = (ROOT / "tvm_ipc" / "csrc" / fault.file).read_text().count(fault.text)
        if count != 1:
            yield f"{fault.file}: the text of '{fault.what}' stands there {count} times"


def main() -> int:
    """Try the faults; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where to build; used again by the next run")
    parser.add_argument("--only", default="", help="faults with this in their file or description")
    parser.add_argument("--list", action="store_true", help="say what would be tried, and where")
    options = parser.parse_args()
    faults = [one for one in FAULTS if options.only in f"{one.file} {one.what}"]
    if wrong := list(misplaced(faults)):
        sys.exit("\n".join(wrong))
    if options.list:
        for fault in faults:
            print(f"{fault.file:24} {fault.what}  [{fault.test} {fault.sanitizer}]")
        return 0
    os.environ.setdefault("CCACHE_BASEDIR", str(options.folder.resolve()))
    copy = Copy(options.folder.resolve())
    for test, sanitizer in sorted({(one.test, one.sanitizer) for one in faults}):
        if failed := copy.run(test, sanitizer):
            sys.exit(f"without any fault {test} {sanitizer} fails: {failed}")
    unnoticed = 0
    for fault in faults:
        path = copy.csrc / fault.file
        right = path.read_text()
        path.write_text(right.replace(fault.text, fault.wrong))
        try:
            failed = copy.run(fault.test, fault.sanitizer)
        finally:
            path.write_text(right)
        unnoticed += not failed
        verdict = f"noticed: {failed}" if failed else "NOT NOTICED"
        print(f"{fault.file}: {fault.what}: {verdict}", flush=True)
    print(f"{len(faults) - unnoticed} of {len(faults)} noticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
