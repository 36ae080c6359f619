# SPDX-License-Identifier: Apache-2.0
"""Makes one small fault at a time in a copy of the native core, and says whether a test notices.

    python tests/native/faults.py FOLDER [--only WORD] [--list]

builds tests/native in FOLDER as it is, then once more for each fault, with ThreadSanitizer where
the fault is a missing order. `FAULTS` holds the text that a fault replaces, so a change to the core
may have to be made there, too: a text that is not found once is told. This takes long, less
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
        "core/shows.cc",
        "  own.memory[place] = memory;\n",
        "  Publish(own.last, number, own.sleepers);\n  own.memory[place] = memory;\n",
        "shows_stress",
        THREAD,
    ),
    Fault(
        "what is shown takes the place of what was not hidden",
        "core/shows.cc",
        "if ((open_ >> place & 1) != 0) {",
        "if (number == 0) {",
        "shows_stress",
    ),
    Fault(
        "what is shown is kept by whoever has it alone",
        "core/shows.cc",
        "  keep_[place] = std::move(keep);\n",
        "",
        "shows_stress",
    ),
    Fault(
        "to hide what is shown waits for nobody",
        "core/shows.cc",
        "  meeting_.Enter(mine, deadline.count() != 0 ? deadline : meeting_.options_.deadline);\n",
        "  static_cast<void>(deadline);\n",
        "shows_stress",
    ),
    Fault(
        "the order in which what is shown is hidden matters",
        "core/shows.cc",
        "  std::sort(numbers.begin(), numbers.end(),\n"
        "            [&](uint32_t a, uint32_t b) { return a - first < b - first; });\n",
        "  static_cast<void>(first);\n",
        "shows_stress",
    ),
    Fault(
        "what is shown stays open though it was hidden",
        "core/shows.cc",
        "    open_ &= ~(uint64_t{1} << number % kMaxShown);\n",
        "",
        "shows_stress",
    ),
    Fault(
        "numbers of what is shown do not begin anew after an error",
        "core/shows.cc",
        "  last_ = 0;\n",
        "",
        "shows_stress",
    ),
    Fault(
        "what was shown before an error is open after it",
        "core/shows.cc",
        "  open_ = 0;\n",
        "",
        "shows_stress",
    ),
    Fault(
        "what was shown before an error is seen after it",
        "core/group.cc",
        "      control.seats[place][r].board.last.store(0, std::memory_order_relaxed);\n",
        "",
        "shows_stress",
    ),
    Fault(
        "what is shown is read where it lies in the reader",
        "shm/shows.cc",
        "rank.segments()->base(meeting.rank(place))",
        "rank.segments()->base(rank.id())",
        "shows_stress",
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
        "a wait never ends by its deadline",
        "core/wait.cc",
        "if (Clock::now() >= end) return WaitResult::kDeadline;",
        "static_cast<void>(end);",
        "wait",
    ),
    Fault(
        "the step that was waited for does not count",
        "core/control.h",
        "return static_cast<int32_t>(a - b) >= 0;",
        "return static_cast<int32_t>(a - b) > 0;",
        "wait",
    ),
    # ---- meetings
    Fault(
        "a step is published before its descriptor",
        "core/meeting.cc",
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
        "core/meeting.cc",
        """  bool agree = true;
  for (int i = 0; i < size(); ++i) {""",
        """  bool agree = true;
  for (int i = 0; i < size() - 1; ++i) {""",
        STRESS,
    ),
    Fault(
        "only the last member's descriptor is compared",
        "core/meeting.cc",
        "agree = agree && theirs.descriptor.Agrees(mine);",
        "agree = theirs.descriptor.Agrees(mine);",
        STRESS,
    ),
    Fault(
        "ranks that disagree about the number of elements go on",
        "core/control.h",
        "type == o.type && count == o.count &&",
        "type == o.type &&",
        STRESS,
    ),
    Fault(
        "one staging buffer instead of two",
        "shm/team.h",
        "(2 * turn_.meeting.place(index) + (step & 1)) * kStageBytes",
        "(2 * turn_.meeting.place(index) + (step & 0)) * kStageBytes",
        STRESS,
        THREAD,
    ),
    Fault(
        "who came in time is named as missing",
        "core/meeting.cc",
        "seq.load(std::memory_order_acquire), step_)) continue;",
        "seq.load(std::memory_order_acquire), step_)) missing << separator;",
        "monitor",
    ),
    Fault(
        "a team does not start again after a recovery",
        "core/meeting.h",
        "    step_ = 0;\n",
        "",
        STRESS,
    ),
    Fault(
        "packets are not counted from 0 after a recovery",
        "core/group.cc",
        "if (packets.generation != generation) packets = {0, generation};",
        "packets.generation = generation;",
        STRESS,
    ),
    Fault(
        "what was taken is not forgotten in a recovery",
        "core/group.cc",
        "      channel.taken.store(0, std::memory_order_relaxed);\n",
        "",
        STRESS,
    ),
    Fault(
        "the steps of the first rank are not forgotten in a recovery",
        "core/group.cc",
        "clear(control.seats[place][r].slot);",
        "if (r > 0) clear(control.seats[place][r].slot);",
        STRESS,
    ),
    Fault(
        "two threads of a rank may be in one team at once",
        "core/group.h",
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
        "control.ranks[ranks[i]].seats.fetch_add(1, std::memory_order_release));",
        "control.ranks[ranks[i]].seats.fetch_or(1, std::memory_order_release));",
        "threads_stress",
    ),
    Fault(
        "the last reason of an abort counts, not the first",
        "core/group.cc",
        """  uint32_t none = 0;
  control.abort.compare_exchange_strong(none, AbortWord(reason, rank), std::memory_order_acq_rel);
""",
        "  control.abort.store(AbortWord(reason, rank));\n",
        "monitor",
    ),
    # ---- all-reduce and the other collectives
    Fault(
        "no exit step where inputs were read in place",
        "shm/allreduce.cc",
        "if (in_place_reads && !(call.descriptor.flags",
        "if (false && in_place_reads && !(call.descriptor.flags",
        STRESS,
        THREAD,
    ),
    Fault(
        "inputs that are overwritten are read in place",
        "shm/allreduce.cc",
        "in_place = in_place || team.shown(i).in_place != 0;",
        "in_place = in_place && team.shown(i).in_place != 0;",
        STRESS,
        THREAD,
    ),
    Fault(
        "a rank's own slice is taken for everybody's",
        "shm/allreduce.cc",
        "call.sink.Copy(at + start, team.buffer(i), end - start);",
        "call.sink.Copy(at + start, team.buffer(team.index()), end - start);",
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
        "in_arenas = in_arenas && team.shown(i).offset >= 0;",
        "in_arenas = team.shown(i).offset >= 0;",
        STRESS,
    ),
    Fault(
        "no exit step after a gather in place",
        "shm/collectives.cc",
        "if (in_place && !left) team.Enter(move.descriptor);",
        "if (in_place && !left && false) team.Enter(move.descriptor);",
        STRESS,
        THREAD,
    ),
    Fault(
        "parts of a scatter overlap in the staging buffer",
        "shm/collectives.cc",
        "CopyBytes(team.NextBuffer() + p * bytes,",
        "CopyBytes(team.NextBuffer() + p * (bytes - 1),",
        STRESS,
    ),
    Fault(
        "the members that show nothing are read",
        "shm/collectives.cc",
        "return move.root < 0 || member == move.root;",
        "return move.root < 0 || member >= 0;",
        STRESS,
    ),
    Fault(
        "the root of a gather is the member after it",
        "shm/collectives.cc",
        "const bool receives = team.index() == root;",
        "const bool receives = team.index() == (root + 1) % team.size();",
        STRESS,
    ),
    Fault(
        "a member takes the part of a scatter that is the next one's",
        "shm/collectives.cc",
        "const size_t part = static_cast<size_t>(team.index());",
        "const size_t part = (team.index() + 1) % team.size();",
        STRESS,
    ),
    Fault(
        "the roots of ranks are not compared",
        "core/control.h",
        "root == o.root;",
        "root <= 64 + o.root;",
        STRESS,
    ),
    Fault(
        "the sources of a permute are not compared",
        "shm/collectives.cc",
        "  mine.parts = HashOf(sources);\n",
        "",
        STRESS,
    ),
    Fault(
        "two lists have the same hash if their last numbers are the same",
        "core/meeting.cc",
        "hash = (hash ^ static_cast<uint64_t>(number)) * 1099511628211u;",
        "hash = static_cast<uint64_t>(number) * 1099511628211u;",
        STRESS,
    ),
    Fault(
        "who receives from nobody has no zeros",
        "shm/collectives.cc",
        "  if (wanted < 0) std::fill_n(recv.begin(), recv.bytes(), uint8_t{0});\n",
        "",
        STRESS,
    ),
    Fault(
        "a member takes what the first of those shows that have the same source",
        "shm/collectives.cc",
        "const int64_t wanted = sources[team.index()];",
        "const int64_t wanted = std::find(sources.begin(), sources.end(), sources[team.index()]) -"
        " sources.begin();",
        STRESS,
    ),
    Fault(
        "a rank is in the first of the teams of a division",
        "core/teams.cc",
        "const int64_t* first = ranks + (found - ranks) / size * size;",
        "const int64_t* first = ranks + (found - ranks) / size / size;",
        STRESS,
    ),
    # ---- messages
    Fault(
        "no exit step where the parts of others were read in place",
        "shm/all_to_all.cc",
        "if (!(flags & kNoExitBarrier)) team.Enter(mine);",
        "",
        STRESS,
        THREAD,
    ),
    Fault(
        "parts that others take are not counted in a staging buffer",
        "shm/division.h",
        "for (int j = 0; j < to; ++j) bytes += piece(from, j, at, most);",
        "for (int j = 0; j < to; ++j) bytes += part(from, j);",
        STRESS,
    ),
    Fault(
        "a large part is cut where it is longer than a rank's own ones",
        "shm/division.h",
        "if (i != j) longest = std::max(longest, part(i, j));",
        "if (i != j && i < 1) longest = std::max(longest, part(i, j));",
        STRESS,
    ),
    Fault(
        "no exit step where a rank's part was reduced in place",
        "shm/reduce_scatter.cc",
        "if (!(flags & kNoExitBarrier)) team.Enter(mine);",
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
        "shm/point_to_point.cc",
        """    ++packet;
    AwaitMessage(rank, channel.taken, packet - 2, channel.sender_sleeps, mine, "send to", receiver);
    CopyBytes""",
        """    ++packet;
    AwaitMessage(rank, channel.taken, packet - 3, channel.sender_sleeps, mine, "send to", receiver);
    CopyBytes""",
        STRESS,
        THREAD,
    ),
    Fault(
        "a packet is given back before it is read",
        "shm/point_to_point.cc",
        """    CopyBytes(recv.begin() + at, from, bytes, recv.bytes() >= kStreamBytes);
    Publish(channel.taken, packet, channel.sender_sleeps);
""",
        """    Publish(channel.taken, packet, channel.sender_sleeps);
    CopyBytes(recv.begin() + at, from, bytes, recv.bytes() >= kStreamBytes);
""",
        STRESS,
        THREAD,
    ),
    Fault(
        "a sender does not wait until its memory was read",
        "shm/point_to_point.cc",
        """    publish();
    AwaitMessage(rank, channel.taken, packet, channel.sender_sleeps, mine, "send to", receiver);
""",
        "    publish();\n",
        STRESS,
        THREAD,
    ),
    Fault(
        "both packets of a link are in one place",
        "core/group.cc",
        "(2 * dst + (packet & 1)) * kPacketBytes",
        "(2 * dst + (packet & 0)) * kPacketBytes",
        STRESS,
        THREAD,
    ),
    # ---- the arena
    Fault(
        "a block is given back without the lock",
        "core/arena.cc",
        """void Arena::Free(size_t offset, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
""",
        "void Arena::Free(size_t offset, size_t bytes) {\n",
        "arena",
        THREAD,
    ),
    Fault(
        "a free block is not joined with the one before it",
        "core/arena.cc",
        "if (previous->first + previous->second == offset) {",
        "if (previous->first + previous->second + 1 == offset) {",
        "arena",
    ),
    Fault(
        "the rest of a block is lost",
        "core/arena.cc",
        "if (size > bytes) AddFree(offset + bytes, size - bytes);",
        "if (size > 2 * bytes) AddFree(offset + bytes, size - bytes);",
        "arena",
    ),
    Fault(
        "what ends at the end of the arena does not grow with it",
        "core/arena.cc",
        "const size_t needed = bytes - tail;",
        "const size_t needed = bytes - 0 * tail;",
        "arena",
    ),
    Fault(
        "the whole arena is too large",
        "core/arena.cc",
        "  if (bytes > stats_.limit) {",
        "  if (bytes >= stats_.limit) {",
        "arena",
    ),
    Fault(
        "growth is not tried with less",
        "core/arena.cc",
        "if (fits && !grown && step > needed) {",
        "if (fits && !grown && step < needed) {",
        "arena",
    ),
    Fault(
        "pages in use go back to the system",
        "core/arena.cc",
        "std::min(RoundUp(offset, kGrowBytes), stats_.committed);",
        "std::min(offset / kGrowBytes * kGrowBytes, stats_.committed);",
        "arena",
    ),
    # ---- what is lent
    Fault(
        "who lends blocks ends without having seen what others did: the count is relaxed",
        "core/heap.h",
        "users_.fetch_sub(1, std::memory_order_acq_rel) == 1",
        "users_.fetch_sub(1, std::memory_order_relaxed) == 1",
        "heap",
        THREAD,
    ),
    Fault(
        "who lends blocks ends before the last of them",
        "core/heap.h",
        "users_.fetch_sub(1, std::memory_order_acq_rel) == 1",
        "users_.fetch_sub(1, std::memory_order_acq_rel) <= 2",
        "heap",
        ADDRESS,
    ),
    # ---- who joins, who leaves, what they say
    Fault(
        "any token is right",
        "core/rendezvous.cc",
        "sizeof(hello.token)) == 0) {",
        "0) == 0) {",
        "rendezvous",
    ),
    Fault(
        "a rank may join twice",
        "core/rendezvous.cc",
        "if (admitted_[hello.rank]) return",
        "if (false) return",
        "rendezvous",
    ),
    Fault(
        "one rank too many may join",
        "core/rendezvous.cc",
        "hello.rank < 0 || hello.rank >= n)",
        "hello.rank < 0 || hello.rank > n)",
        "rendezvous",
    ),
    Fault(
        "a refusal does not end the wait for all",
        "core/monitor.cc",
        """  refusals_.push_back(reason);
  changed_.notify_all();
""",
        "  refusals_.push_back(reason);\n",
        "rendezvous",
    ),
    Fault(
        "a goodbye is taken for a death",
        "core/monitor.cc",
        "  if (member.left) return;\n",
        "",
        "monitor",
    ),
    Fault(
        "the last frames of a connection that ends are lost",
        "core/monitor.cc",
        """  Frame frame;
  while (member.socket >= 0 && member.said.Next(&frame)) Handle""",
        """  Frame frame;
  while (more && member.socket >= 0 && member.said.Next(&frame)) Handle""",
        "monitor",
    ),
    Fault(
        "a frame that is cut before its last byte counts as whole",
        "core/frame.cc",
        "if (here < length_) break;",
        "if (here + 1 < length_) break;",
        "exchange",
    ),
    Fault(
        "who waits for a rank that died waits on",
        "core/monitor.cc",
        "if (dead) Abort(control_, AbortReason::kDied, RankOf(member));",
        "",
        "monitor",
    ),
    Fault(
        "the report is read without the lock",
        "core/monitor.cc",
        """SessionReport Monitor::Report() {
  std::lock_guard<std::mutex> lock(mutex_);
""",
        "SessionReport Monitor::Report() {\n",
        "monitor",
        THREAD,
    ),
    Fault(
        "a child that was forked is taken for its parent",
        "core/forked.cc",
        "  kept.generation.fetch_add(1, std::memory_order_relaxed);\n",
        "",
        "monitor",
    ),
    Fault(
        "an exchange takes the answers of an older one",
        "core/exchange.cc",
        "    if (header.number != number) continue;",
        "    if (header.number == 0) continue;",
        "exchange",
    ),
    Fault(
        "an exchange is complete without the last rank",
        "core/exchange.cc",
        "if (shown.size() < static_cast<size_t>(num_ranks_)) return complete;",
        "if (shown.size() + 1 < static_cast<size_t>(num_ranks_)) return complete;",
        "exchange",
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
        "core/monitor_of_nodes.cc",
        "} else if (generation == now) {",
        "} else {",
        "nodes",
    ),
    Fault(
        "an abort of a generation that has not begun here is forgotten",
        "core/monitor_of_nodes.cc",
        "    coming_ = {generation, word, 0};\n",
        "",
        "nodes",
    ),
    Fault(
        "other nodes are told of an abort once and never again",
        "core/nodes.cc",
        "if (other->told && other->told_generation >= ended.generation) continue;",
        "if (other->told) continue;",
        "nodes",
    ),
    Fault(
        "a node speaks of the ranks of others",
        "core/monitor_of_nodes.cc",
        "  if (control_.NodeOf(message.rank) != node) return false;\n  Member",
        "  Member",
        "nodes",
        ADDRESS,
    ),
    Fault(
        "the next generation begins before all nodes have begun",
        "core/monitor_of_nodes.cc",
        "return Answered(recovered_) || ",
        "return true || ",
        "nodes",
    ),
    Fault(
        "who waits for a node that is lost waits on",
        "core/monitor_of_nodes.cc",
        "  Abort(control_, AbortReason::kNodeLost, node);\n",
        "",
        "nodes",
    ),
    Fault(
        "a link that is silent lives on",
        "core/node_link.cc",
        "if (begun_to_speak_ && now - heard_ > times_.silence) {",
        "if (now < heard_) {",
        "nodes",
    ),
    Fault(
        "what is urgent waits for what is large",
        "core/node_link.cc",
        "urgent_.empty() ? ordered_ : urgent_",
        "ordered_.empty() ? urgent_ : ordered_",
        "nodes",
    ),
    # ---- the wire, and collectives across nodes
    Fault(
        "a request is posted before it is written",
        "core/wire.cc",
        "  table().posted.store(posted + 1, std::memory_order_release);\n",
        "  table().posted.store(posted + 1, std::memory_order_relaxed);\n",
        "wire",
        THREAD,
    ),
    Fault(
        "a message is done before it is said how long it was",
        "core/engine_wire.cc",
        "  done.came = came;\n",
        "",
        "wire",
    ),
    Fault(
        "after a recovery nobody waits for the engine",
        "core/wire.cc",
        "WaitFor(control.flushed, generation,",
        "WaitFor(control.flushed, 0,",
        "across",
    ),
    Fault(
        "a buffer is used again before its message was sent",
        "core/wire.cc",
        "    if (!Reached(request.done.load(std::memory_order_acquire), it->ticket.target)) {\n",
        "    if (it->peer < 0) {\n",
        "across",
    ),
    Fault(
        "a message of another collective is taken",
        "core/wire_messages.cc",
        "!theirs.Agrees(mine_)",
        "false",
        "across",
    ),
    Fault(
        "what is shown of a result lies where elements are shown",
        "mpi/reduce_across.cc",
        "constexpr size_t kResult = kStageBytes / 2;",
        "constexpr size_t kResult = 0;",
        "across",
    ),
    Fault(
        "a part of a slice is not the one of its node",
        "mpi/lane.cc",
        "elements[i] = sources[i] + range.first * plan_.width;",
        "elements[i] = sources[i] + (range.first - range.first) * plan_.width;",
        "across",
    ),
    Fault(
        "a piece ends before its messages were sent",
        "mpi/lane.cc",
        "  for (const WireTicket& ticket : flight.sent) messages_.Await(ticket);\n",
        "",
        "across",
    ),
    Fault(
        "in flat order ranks count from their node on",
        "mpi/combine.cc",
        "static_cast<size_t>(layout_.index_of[place]) * row;",
        "static_cast<size_t>(layout_.index_of[place] * 0) * row;",
        "across",
    ),
    Fault(
        "an average across nodes is divided by the number of nodes",
        "mpi/combine.cc",
        "static_cast<int>(layout_.nodes.size()), count, layout_.size());",
        "static_cast<int>(layout_.nodes.size()), count,\n"
        "                           static_cast<int>(layout_.nodes.size()));",
        "across",
    ),
    Fault(
        "who receives for a node does not show it",
        "mpi/run_move.cc",
        "      if (receiving.slot < 0) continue;\n",
        "      continue;\n",
        "across",
    ),
    Fault(
        "the first piece of a stream comes again",
        "mpi/run_move.cc",
        "send + showing.stream->from + at,",
        "send + showing.stream->from,",
        "across",
    ),
    Fault(
        "partial sums are rounded",
        "shm/partial.cc",
        "way_ = Way::kFloat;\n",
        "way_ = Way::kSame;\n",
        "partial",
    ),
    Fault(
        "what is NaN is rounded as a number",
        "shm/norm_impl.h",
        "if (__builtin_expect(nan != 0, 0)) KeepNans",
        "if (nan == 77) KeepNans",
        "partial",
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
