/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file allreduce.cc
 * \brief All-reduce: four algorithms with bitwise identical results.
 *
 * All algorithms add in rank order with the same kernels, so the result has the same bits on every
 * rank and with every algorithm. `TeamBarrier` defines a step and explains why two staging buffers
 * suffice. With n ranks and S bytes, a rank moves:
 *
 *   eager    one step for each piece of kStageBytes. A rank copies its piece into its staging
 *            buffer, enters, and reduces the pieces of all. Reads (n + 1) S, writes 2 S, half of
 *            it in the cache. No exit barrier: the staging buffer is a second copy. Small
 *            messages prefetch the lines of the next staging buffer while they reduce.
 *   direct   inputs in the arenas are read in place, others are copied to the staging buffer
 *            before the step in, if they fit. One step in, reduce, and one step out if any input
 *            is read in place, which protects it until the slowest peer has read it. Reads n S,
 *            writes S.
 *   sliced   inputs in the arenas, in pieces of n slices. A rank reduces its slice of the piece
 *            into its staging buffer, enters, and copies the slices of all to the output. Reads
 *            2 S, writes S + S / n. No exit barrier: a rank that has entered the last piece has
 *            finished reading inputs, and all ranks wait for that.
 *   relayed  sliced for inputs that are staged: a piece is copied to the staging buffer in one
 *            step, its reduced slices in the next. Reads 3 S, writes 2 S + S / n.
 *
 * The choice depends only on facts that all ranks share after the first step: n, S, the strategy,
 * which inputs are in arenas, and whether any rank overwrites one of these. `direct` does not
 * allow that. `sliced` does, because a rank overwrites only slices that its peers have reduced
 * before they entered the step that permits it. A one-shot algorithm reads n S bytes and costs one
 * or two steps. The two-phase algorithms read about 2 S for any n, and cost a step per piece. So
 * one-shot algorithms are used for up to two ranks, and for small messages between more.
 */
#include "shm/allreduce.h"

#include <algorithm>

#include "shm/collectives.h"

namespace tvm_ipc {

namespace {

/*! \brief Above this size two phases are faster among three or more ranks. */
constexpr size_t kSliceBytes = 64 << 10;

/*! \brief Return whether slices are reduced and gathered. All ranks know before the first step. */
bool TwoPhases(int n, size_t bytes, Strategy strategy) {
  return strategy == Strategy::kTwoShot ||
         (strategy != Strategy::kOneShot && n > 2 && bytes > kSliceBytes);
}

/*! \brief The arguments that the algorithms share. */
struct Reduction {
  Team& team;
  const Buffer& send;
  ReduceFn reduce;
  Descriptor descriptor;
  Sink& sink;

  size_t width() const { return send.type.bytes(); }
};

void Eager(Reduction& reduction) {
  Team& team = reduction.team;
  const size_t width = reduction.width();
  const size_t piece = kStageBytes / width;
  const void* sources[kMaxRanks];
  // In place, a piece of the output is written only after the piece of the input was staged.
  for (size_t at = 0; at < reduction.send.count || at == 0; at += piece) {
    const size_t count = std::min(piece, reduction.send.count - at);
    CopyBytes(team.NextBuffer(), reduction.send.begin() + at * width, count * width, false);
    team.Enter(reduction.descriptor);
    if (reduction.send.bytes() <= kEagerBytes) team.ClaimNextBuffer(kEagerBytes);
    for (int i = 0; i < team.size(); ++i) sources[i] = team.buffer(i);
    sources[team.index()] = reduction.send.begin() + at * width;
    reduction.sink.Reduce(at, sources, team.size(), count);
  }
}

void Direct(Reduction& reduction) {
  Team& team = reduction.team;
  const void* sources[kMaxRanks];
  bool in_place_reads = false;
  for (int i = 0; i < team.size(); ++i) {
    const int64_t offset = team.exposed(i).offset;
    sources[i] = offset >= 0 ? team.memory(i, offset) : team.buffer(i);
    in_place_reads = in_place_reads || offset >= 0;
  }
  sources[team.index()] = reduction.send.data;
  reduction.sink.Reduce(0, sources, team.size(), reduction.send.count);
  const bool no_exit = (reduction.descriptor.flags & kNoExitBarrier) != 0;
  if (in_place_reads && !no_exit) team.Enter(reduction.descriptor);
}

/*! \brief Return where slice i of a piece starts, in whole cache lines. The last slice takes the
 *         rest. */
size_t SliceStart(size_t count, int n, int i, size_t width) {
  if (i == n) return count;
  const size_t line = kLine / width;
  return std::min(count, (count + line * n - 1) / (line * n) * line * i);
}

/*! \brief Enter with this rank's reduced slice, then pass the slices of all ranks to the sink. */
void GatherSlices(Reduction& reduction, size_t at, size_t count) {
  Team& team = reduction.team;
  const size_t width = reduction.width();
  team.Enter(reduction.descriptor);
  // Each member begins with a different slice, to spread the reads over the memory of all.
  const int first = reduction.sink.in_order() ? 0 : team.index();
  for (int k = 0; k < team.size(); ++k) {
    const int i = (first + k) % team.size();
    const size_t start = SliceStart(count, team.size(), i, width);
    const size_t end = SliceStart(count, team.size(), i + 1, width);
    reduction.sink.Copy(at + start, team.buffer(i), end - start);
  }
}

void Sliced(Reduction& reduction) {
  Team& team = reduction.team;
  const int n = team.size();
  const size_t width = reduction.width();
  const size_t piece = kStageBytes / width * n;
  int64_t offsets[kMaxRanks];  // the peers' descriptors change with the steps below
  for (int i = 0; i < n; ++i) offsets[i] = team.exposed(i).offset;
  const void* sources[kMaxRanks];
  for (size_t at = 0; at < reduction.send.count; at += piece) {
    const size_t count = std::min(piece, reduction.send.count - at);
    const size_t start = SliceStart(count, n, team.index(), width);
    const size_t end = SliceStart(count, n, team.index() + 1, width);
    for (int i = 0; i < n; ++i) sources[i] = team.memory(i, offsets[i]) + (at + start) * width;
    reduction.reduce(team.NextBuffer(), sources, n, end - start, false);
    GatherSlices(reduction, at, count);
  }
}

void Relayed(Reduction& reduction) {
  Team& team = reduction.team;
  const int n = team.size();
  const size_t width = reduction.width();
  const size_t piece = kStageBytes / width;
  const void* sources[kMaxRanks];
  for (size_t at = 0; at < reduction.send.count; at += piece) {
    const size_t count = std::min(piece, reduction.send.count - at);
    CopyBytes(team.NextBuffer(), reduction.send.begin() + at * width, count * width, false);
    team.Enter(reduction.descriptor);
    const size_t start = SliceStart(count, n, team.index(), width);
    const size_t end = SliceStart(count, n, team.index() + 1, width);
    for (int i = 0; i < n; ++i) sources[i] = team.buffer(i) + start * width;
    reduction.reduce(team.NextBuffer(), sources, n, end - start, false);
    GatherSlices(reduction, at, count);
  }
}

/*! \brief The output of an all-reduce. */
class Output final : public Sink {
 public:
  Output(const Buffer& recv, ReduceFn reduce)
      : recv_(recv), reduce_(reduce), stream_(recv.bytes() >= kStreamBytes) {}
  void Reduce(size_t at, const void* const* sources, int num_sources, size_t count) final {
    reduce_(To(at), sources, num_sources, count, stream_);
  }
  void Copy(size_t at, const void* reduced, size_t count) final {
    CopyBytes(To(at), reduced, count * recv_.type.bytes(), stream_);
  }
  bool in_order() const final { return false; }

 private:
  void* To(size_t at) const { return recv_.begin() + at * recv_.type.bytes(); }

  const Buffer& recv_;
  ReduceFn reduce_;
  bool stream_;
};

}  // namespace

void AllReduceInto(Team& team, const Buffer& send, ReduceFn reduce, const Descriptor& mine,
                   Sink& sink) {
  if (team.size() == 1) {
    const void* source = send.data;
    return sink.Reduce(0, &source, 1, send.count);
  }
  const auto strategy = static_cast<Strategy>(mine.strategy);
  Reduction reduction{team, send, reduce, mine, sink};
  const bool two_phases = TwoPhases(team.size(), send.bytes(), strategy);
  // Small inputs are staged before the first step, so that one step is enough.
  if (!two_phases && send.bytes() <= kEagerBytes) return Eager(reduction);
  const bool fits = send.bytes() <= kStageBytes;
  if (!two_phases && fits && mine.offset < 0) {
    CopyBytes(team.NextBuffer(), send.data, send.bytes(), false);
  }
  team.Enter(mine);
  bool in_arenas = true;
  bool in_place = false;
  for (int i = 0; i < team.size(); ++i) {
    in_arenas = in_arenas && team.exposed(i).offset >= 0;
    in_place = in_place || team.exposed(i).in_place != 0;
  }
  if (two_phases) return in_arenas ? Sliced(reduction) : Relayed(reduction);
  if (!in_place && (in_arenas || fits)) return Direct(reduction);
  if (!in_arenas || strategy == Strategy::kOneShot) return Eager(reduction);
  return Sliced(reduction);
}

void AllReduce(Team& team, const Call& call) {
  const ReduceFn reduce = RequireReduce("allreduce", call.send.type, call.kind);
  Descriptor mine = team.Describe(call);
  mine.in_place = call.send.Overlaps(call.recv) && mine.offset >= 0;
  Output output(call.recv, reduce);
  AllReduceInto(team, call.send, reduce, mine, output);
}

}  // namespace tvm_ipc
