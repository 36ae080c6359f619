/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file launch.h
 * \brief Which kernel does an operation, and with how many blocks: functions of what all members
 *        know, so that they choose alike.
 */
#ifndef TVM_IPC_CUDA_KERNELS_LAUNCH_H_
#define TVM_IPC_CUDA_KERNELS_LAUNCH_H_

#include "cuda/kernels/interface.h"

namespace tvm_ipc {
namespace kernels {

/*!
 * \brief How an all-reduce is done; a function of what all members know. The same bits always.
 * \param strategy Strategy of core/backend.h: 1 and 2 are one-shot and two-shot, while these fit.
 */
constexpr Path ChooseAllReduce(uint64_t count, uint64_t width, int size, uint32_t strategy) {
  const uint64_t bytes = count * width;
  const bool whole = bytes <= PushBytes(size);
  const bool slices = SliceOf(count, width, size) * width <= SliceBytes(size);
  if (strategy == 1) return whole ? Path::kPush : Path::kPull;
  if (strategy == 2) return slices ? Path::kPushSlices : Path::kPull;
  // Slices move less, and cost a second way: worth it from a difference of half a megabyte on.
  const uint64_t more = bytes * 2 * (size - 1) * (size - 2) / size;
  if (whole && more <= (512 << 10)) return Path::kPush;
  return slices ? Path::kPushSlices : Path::kPull;
}
/*! \brief Of a reduce to one member: its input, or that of all, is small enough or not. */
constexpr Path ChooseReduce(uint64_t count, uint64_t width, int size) {
  return count * width <= PushBytes(size) ? Path::kPush : Path::kPull;
}
/*! \brief Of a reduce-scatter, by the elements that each member gets. */
constexpr Path ChooseReduceScatter(uint64_t part, uint64_t width, int size) {
  return part * width <= SliceBytes(size) ? Path::kPushSlices : Path::kPull;
}
/*! \brief Of what only moves, by the bytes of the longest piece that anyone gives to another. */
constexpr Path ChooseMove(uint64_t longest, int size) {
  return longest <= PushBytes(size) ? Path::kPush : Path::kPull;
}
/*!
 * \brief Whether a broadcast goes in slices: one to each member, which all then take from each
 * other.
 *
 * Where members have devices of their own, n - 1 that take all of it are n - 1 times its bytes over
 * the root's links, and slices 2 (n - 1) / n times over those of each. They cost a second kernel
 * and its meetings, some 10 us, in which links carry a few megabytes.
 */
constexpr bool BroadcastsSlices(uint64_t bytes, int size, bool apart) {
  return apart && size > 2 && bytes * static_cast<uint64_t>(size - 1) >= (8 << 20);
}
/*! \brief Whether tvm_ipc_push_norm can do it; else an all-reduce, then tvm_ipc_norm. */
constexpr bool FitsPushNorm(uint64_t count, uint64_t width, uint64_t row, int size) {
  if (row == 0 || count / row > kMaxRows) return false;
  return count / row * DivideUp(row * width, 8) * 8 <= PushBytes(size);
}

/*! \brief What a device and the ranks on it allow, the least of all members. */
struct Limits {
  /*! \brief Blocks that are surely resident together: at most kMaxBlocks. */
  uint32_t blocks;
  /*! \brief Threads of a block. */
  uint32_t threads;
};

/*! \brief Of works, beside the program's operations, which have what `limits` says. */
constexpr Limits LimitsOfWorks(const Limits& limits) {
  const uint32_t quarter = limits.blocks / 4;
  return {quarter < 1 ? 1 : quarter, limits.threads};
}
/*!
 * \brief Of the program's operations, where so many blocks are surely resident together: a device
 *        may come to one of them and to one of works in any order, and peers in another one, so
 *        that there must be room for both.
 */
constexpr Limits LimitsBesideWorks(uint32_t resident, uint32_t threads) {
  uint32_t blocks = resident < kMaxBlocks ? resident : kMaxBlocks;
  while (blocks > 1 && blocks + LimitsOfWorks({blocks, threads}).blocks > resident) --blocks;
  return {blocks < 1 ? 1 : blocks, threads};
}

struct Launch {
  uint32_t blocks;
  uint32_t threads;
  /*! \brief For NormArgs. */
  uint32_t pieces = 1;
};

constexpr uint64_t AtMost(uint64_t a, uint64_t most) { return a < most ? a : most; }
constexpr uint64_t AtLeast(uint64_t a, uint64_t least) { return a < least ? least : a; }

/*! \brief For `items` that a thread each is enough for. */
constexpr Launch LaunchFor(uint64_t items, uint64_t threads, const Limits& limits) {
  threads = AtMost(threads, limits.threads);
  const uint64_t blocks = AtLeast(AtMost(DivideUp(items, threads), limits.blocks), 1);
  return {static_cast<uint32_t>(blocks), static_cast<uint32_t>(threads)};
}

/*! \brief With one block more, which exchanges headers. */
constexpr Launch LaunchPush(uint64_t items, const Limits& limits) {
  const Launch launch = LaunchFor(items, 256, limits);
  return {static_cast<uint32_t>(AtMost(launch.blocks + 1, limits.blocks)), launch.threads};
}

/*! \brief For an all-reduce, reduce, reduce-scatter of so many bytes in all. */
constexpr Launch LaunchReduce(Path path, uint64_t bytes, int size, const Limits& limits) {
  if (path == Path::kPush) return LaunchPush(DivideUp(bytes, 8), limits);
  if (path == Path::kPushSlices) return LaunchPush(DivideUp(bytes, 8 * size), limits);
  return LaunchFor(DivideUp(bytes, 16 * size), 512, limits);
}
/*! \brief For moves of so many bytes to a member. */
constexpr Launch LaunchMove(Path path, uint64_t bytes, const Limits& limits) {
  if (path == Path::kPush) return LaunchPush(DivideUp(bytes, 8), limits);
  return LaunchFor(DivideUp(bytes, 16 * 4), 512, limits);
}
constexpr Launch LaunchParts(uint64_t bytes, const Limits& limits) {
  return LaunchFor(DivideUp(bytes, 16), 512, limits);
}
/*! \brief For tvm_ipc_push_norm and tvm_ipc_norm. */
constexpr Launch LaunchNorm(uint64_t rows, uint64_t row_bytes, const Limits& limits) {
  const uint64_t threads = AtMost(256, limits.threads);
  const uint64_t pieces = AtLeast(AtMost(DivideUp(row_bytes, 8 * threads),
                                         limits.blocks / AtLeast(AtMost(rows, limits.blocks), 1)),
                                  1);
  const uint64_t blocks = AtMost(rows * pieces + 1, limits.blocks);
  return {static_cast<uint32_t>(blocks), static_cast<uint32_t>(threads),
          static_cast<uint32_t>(pieces)};
}
/*! \brief For tvm_ipc_meet, tvm_ipc_show and tvm_ipc_await. */
constexpr Launch LaunchMeet(const Limits& limits) { return LaunchFor(1, 128, limits); }
/*! \brief For tvm_ipc_send and tvm_ipc_receive: as many blocks, whatever the limits. */
constexpr Launch LaunchMessage(uint64_t bytes, const Limits& limits) {
  return {LanesOf(bytes), static_cast<uint32_t>(AtMost(512, limits.threads))};
}

}  // namespace kernels
}  // namespace tvm_ipc
#endif  // TVM_IPC_CUDA_KERNELS_LAUNCH_H_
