/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file cuda_rounds.cc
 * \brief Every collective between devices and its values, messages and norms.
 */
#include "cuda_rounds.h"

#include <cstring>

#include "collective_calls.h"
#include "expect.h"

namespace tvm_ipc {
namespace {

/*! \brief What rank `rank` has at `i`. */
int32_t Value(int rank, size_t i) { return static_cast<int32_t>(1000 * (rank + 1) + i % 997); }

}  // namespace

std::vector<int32_t> Values(int rank, size_t count, size_t from) {
  std::vector<int32_t> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = Value(rank, from + i);
  return values;
}

std::vector<int32_t> Sums(const std::vector<int>& ranks, size_t count, size_t from) {
  std::vector<int32_t> sums(count, 0);
  for (int rank : ranks) {
    for (size_t i = 0; i < count; ++i) sums[i] += Value(rank, from + i);
  }
  return sums;
}

void DoAll(Rank& rank, TeamId team, const std::vector<int>& ranks, size_t count, bool in_arena) {
  Endpoint& endpoint = rank.endpoint();
  const size_t n = ranks.size();
  const size_t me = static_cast<size_t>(rank.TeamIndex(team, "a test"));
  const std::vector<int32_t> mine = Values(rank.id(), count);
  const std::vector<int32_t> sums = Sums(ranks, count);
  OnDevice send(rank, mine, in_arena);
  OnDevice same(rank, count, in_arena);
  for (int strategy = 0; strategy <= 3; ++strategy) {
    same.Put(std::vector<int32_t>(count, -1));
    On(endpoint).AllReduce(send.buffer, ReduceKind::kSum, team, static_cast<Strategy>(strategy), 0,
                           same.buffer);
    EXPECT(same.Get() == sums, "all-reduce of ", count, " by strategy ", strategy);
  }
  same.Put(mine);
  On(endpoint).AllReduce(same.buffer, ReduceKind::kSum, team, Strategy::kAuto, kNoExitBarrier,
                         same.buffer);
  EXPECT(same.Get() == sums, "all-reduce in place of ", count);
  endpoint.Clear(same.buffer);
  EXPECT(same.Get() == std::vector<int32_t>(count, 0), "zeros of ", count);
  OnDevice whole(rank, count * n, in_arena);
  On(endpoint).AllGather(send.buffer, team, 0, whole.buffer);
  std::vector<int32_t> all;
  for (int r : ranks) {
    const std::vector<int32_t> part = Values(r, count);
    all.insert(all.end(), part.begin(), part.end());
  }
  EXPECT(whole.Get() == all, "all-gather of ", count);
  for (size_t root : {size_t{0}, n - 1}) {
    const bool is_root = me == root;
    const int place = static_cast<int>(root);
    On(endpoint).Broadcast(is_root ? &send.buffer : nullptr, place, team, 0, same.buffer);
    EXPECT(same.Get() == Values(ranks[root], count), "broadcast of ", count);
    whole.Put(is_root ? Values(rank.id(), count * n) : std::vector<int32_t>(count * n, -2));
    On(endpoint).Scatter(is_root ? &whole.buffer : nullptr, place, team, 0, same.buffer);
    EXPECT(same.Get() == Values(ranks[root], count, me * count), "scatter of ", count);
    On(endpoint).Gather(send.buffer, place, team, 0, is_root ? &whole.buffer : nullptr);
    if (is_root) EXPECT(whole.Get() == all, "gather of ", count);
    On(endpoint).Reduce(send.buffer, ReduceKind::kSum, place, team, 0,
                        is_root ? &same.buffer : nullptr);
    if (is_root) EXPECT(same.Get() == sums, "reduce of ", count);
  }
  whole.Put(Values(rank.id(), count * n));
  On(endpoint).ReduceScatter(whole.buffer, ReduceKind::kSum, team, kNoExitBarrier, same.buffer);
  EXPECT(same.Get() == Sums(ranks, count, me * count), "reduce-scatter of ", count);
  OnDevice other(rank, count * n, in_arena);
  On(endpoint).AllToAll(whole.buffer, {}, team, 0, other.buffer);
  all.clear();
  for (int r : ranks) {
    const std::vector<int32_t> part = Values(r, count, me * count);
    all.insert(all.end(), part.begin(), part.end());
  }
  EXPECT(other.Get() == all, "all-to-all of ", count);
  // Two inputs that stay as they are: nobody waits, unless both are copied to the same place.
  OnDevice second(rank, Values(rank.id() + 5, count), in_arena);
  On(endpoint).AllGather(send.buffer, team, kNoExitBarrier, whole.buffer);
  On(endpoint).AllGather(second.buffer, team, kNoExitBarrier, other.buffer);
  std::vector<int32_t> firsts;
  all.clear();
  for (int r : ranks) {
    const std::vector<int32_t> one = Values(r, count);
    const std::vector<int32_t> two = Values(r + 5, count);
    firsts.insert(firsts.end(), one.begin(), one.end());
    all.insert(all.end(), two.begin(), two.end());
  }
  EXPECT(whole.Get() == firsts && other.Get() == all, "all-gathers without an end, of ", count);
  Sources sources(n, -1);  // to the next one, but the first gets nothing
  for (size_t i = 1; i < n; ++i) sources[i] = static_cast<int64_t>(i) - 1;
  On(endpoint).Permute(send.buffer, sources, team, 0, same.buffer);
  EXPECT(same.Get() == (me == 0 ? std::vector<int32_t>(count, 0) : Values(ranks[me - 1], count)),
         "permute of ", count);
  // Member i gives i + j + count elements to member j.
  SplitCounts parts(n * n);
  for (size_t i = 0; i < n * n; ++i) parts[i] = static_cast<int64_t>(i / n + i % n + count);
  size_t given = 0;
  size_t taken = 0;
  all.clear();
  for (size_t j = 0; j < n; ++j) {
    given += static_cast<size_t>(parts[me * n + j]);
    size_t before = 0;
    for (size_t k = 0; k < me; ++k) before += static_cast<size_t>(parts[j * n + k]);
    const std::vector<int32_t> part =
        Values(ranks[j], static_cast<size_t>(parts[j * n + me]), before);
    all.insert(all.end(), part.begin(), part.end());
    taken += part.size();
  }
  OnDevice uneven(rank, Values(rank.id(), given), in_arena);
  OnDevice came(rank, taken, in_arena);
  On(endpoint).AllToAll(uneven.buffer, parts, team, 0, came.buffer);
  EXPECT(came.Get() == all, "uneven all-to-all of ", count);
  if (count == 0) return;
  // What peers show, read and reduced.
  ExposedBuffer exposed = endpoint.Expose(send.buffer, team, nullptr);
  std::vector<Buffer> of_all;
  for (size_t before = 0; before < n; ++before) {
    Buffer theirs = send.buffer;
    theirs.data = endpoint.PeerView(exposed, -static_cast<int64_t>(before)).data;
    of_all.push_back(theirs);
  }
  endpoint.ReduceSlices(ReduceKind::kSum, team, of_all, same.buffer);
  endpoint.Release(team, {&exposed});
  send.Put(std::vector<int32_t>(count, 0));  // nobody reads it any more
  EXPECT(same.Get() == sums, "parts of ", count);
}

void DoMessages(Rank& rank, size_t count, bool in_arena) {
  Endpoint& endpoint = rank.endpoint();
  const int n = rank.num_ranks();
  OnDevice send(rank, Values(rank.id(), count), in_arena);
  OnDevice recv(rank, count, in_arena);
  const int next = (rank.id() + 1) % n;
  const int before = (rank.id() + n - 1) % n;
  const bool small = send.buffer.bytes() <= (128 << 10);
  if (small || rank.id() % 2 == 0) endpoint.Send(send.buffer, next);
  endpoint.Receive(recv.buffer, before);
  if (!small && rank.id() % 2 != 0) endpoint.Send(send.buffer, next);
  EXPECT(recv.Get() == Values(before, count), "a message of ", count);
}

void DoNorm(Rank& rank) {
  constexpr ElementType kFloat32{2, 32, 1};
  // Ones: the sum is n everywhere, and its norm 1.
  const size_t count = 96, row = 32;
  std::vector<float> ones(count, 1.0F);
  std::vector<int32_t> bits(count);
  memcpy(bits.data(), ones.data(), count * sizeof(float));
  OnDevice send(rank, bits, false), residual(rank, std::vector<int32_t>(count, 0), false);
  OnDevice weight(rank, {bits.begin(), bits.begin() + row}, false);
  OnDevice sum(rank, count, false), norm(rank, count, false);
  for (OnDevice* one : {&send, &residual, &weight, &sum, &norm}) one->buffer.type = kFloat32;
  On(rank).AllReduceNorm(send.buffer, residual.buffer, {weight.buffer, nullptr, 0.0}, kWorld,
                         Strategy::kAuto, 0, sum.buffer, norm.buffer);
  bits = sum.Get();
  std::vector<float> sums(count), norms(count);
  memcpy(sums.data(), bits.data(), count * sizeof(float));
  bits = norm.Get();
  memcpy(norms.data(), bits.data(), count * sizeof(float));
  for (size_t i = 0; i < count; ++i) {
    EXPECT(sums[i] == static_cast<float>(rank.num_ranks()) && norms[i] == 1.0F, sums[i], norms[i]);
  }
}

}  // namespace tvm_ipc
