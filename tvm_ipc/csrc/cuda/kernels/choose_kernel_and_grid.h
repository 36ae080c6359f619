/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file choose_kernel_and_grid.h
 * \brief Choice of the kernel and the grid for each operation. The choices depend only on values
 *        that all members know, so that all members choose the same.
 */
#ifndef TVM_IPC_CUDA_KERNELS_CHOOSE_KERNEL_AND_GRID_H_
#define TVM_IPC_CUDA_KERNELS_CHOOSE_KERNEL_AND_GRID_H_

#include "cuda/kernels/kernel_arguments_and_peer_memory.h"

namespace tvm_ipc {
namespace kernels {

/*!
 * \brief Return the path of an all-reduce. All paths give the same bits.
 * \param strategy A Strategy of core/communication_backend.h: 1 and 2 select one-shot and two-shot,
 * if the data fits.
 */
constexpr Path ChooseAllReduce(uint64_t count, uint64_t width, int size, uint32_t strategy) {
  const uint64_t bytes = count * width;
  const bool whole = bytes <= PushBytes(size);
  const bool slices = SliceOf(count, width, size) * width <= SliceBytes(size);
  if (strategy == 1) return whole ? Path::kPush : Path::kPull;
  if (strategy == 2) return slices ? Path::kPushSlices : Path::kPull;
  // Slices move less data but need a second exchange. They pay off once they save more than 512 KB.
  const uint64_t more = bytes * 2 * (size - 1) * (size - 2) / size;
  if (whole && more <= (512 << 10)) return Path::kPush;
  return slices ? Path::kPushSlices : Path::kPull;
}
/*! \brief Return the path of a reduce to one member, by the size of a member's input. */
constexpr Path ChooseReduce(uint64_t count, uint64_t width, int size) {
  return count * width <= PushBytes(size) ? Path::kPush : Path::kPull;
}
/*! \brief Return the path of a reduce-scatter, given the number of elements each member gets. */
constexpr Path ChooseReduceScatter(uint64_t part, uint64_t width, int size) {
  return part * width <= SliceBytes(size) ? Path::kPushSlices : Path::kPull;
}
/*! \brief Return the path of data movement, given the size of the largest piece that any member
 *         sends to another. */
constexpr Path ChooseMove(uint64_t longest, int size) {
  return longest <= PushBytes(size) ? Path::kPush : Path::kPull;
}
/*!
 * \brief Return whether a broadcast goes in slices: the root scatters one slice to each member, and
 *        the members then gather all slices from each other.
 *
 * If each member has a device of its own, a plain broadcast sends n - 1 times the data over the
 * root's links, and slices send 2 (n - 1) / n times the data over the links of each member. But
 * slices need a second kernel with its barriers. That takes about 10 us, in which links carry a few
 * megabytes.
 */
constexpr bool BroadcastsSlices(uint64_t bytes, int size, bool apart) {
  return apart && size > 2 && bytes * static_cast<uint64_t>(size - 1) >= (8 << 20);
}
/*! \brief Return whether tvm_ipc_push_norm supports the size. If not, use an all-reduce, then
 *         tvm_ipc_norm. */
constexpr bool FitsPushNorm(uint64_t count, uint64_t width, uint64_t row, int size) {
  if (row == 0 || count / row > kMaxRows) return false;
  return count / row * DivideUp(row * width, 8) * 8 <= PushBytes(size);
}

/*! \brief The launch limits of a device and the ranks on it; the minimum over all members. */
struct Limits {
  /*! \brief The number of blocks guaranteed to be resident at the same time, at most kMaxBlocks. */
  uint32_t blocks;
  /*! \brief The maximum number of threads per block. */
  uint32_t threads;
};

/*! \brief Return the limits of asynchronous operations, which run beside the program's operations;
 *         `limits` are those of the latter. */
constexpr Limits LimitsOfAsync(const Limits& limits) {
  const uint32_t quarter = limits.blocks / 4;
  return {quarter < 1 ? 1 : quarter, limits.threads};
}
/*!
 * \brief Return the limits of the program's operations, if `resident` blocks are guaranteed to be
 *        resident at the same time. A device may start a program's operation and an asynchronous
 *        one in either order, and its peers in the other order, so both must fit.
 */
constexpr Limits LimitsBesideAsync(uint32_t resident, uint32_t threads) {
  uint32_t blocks = resident < kMaxBlocks ? resident : kMaxBlocks;
  while (blocks > 1 && blocks + LimitsOfAsync({blocks, threads}).blocks > resident) --blocks;
  return {blocks < 1 ? 1 : blocks, threads};
}

struct Launch {
  uint32_t blocks;
  uint32_t threads;
  /*! \brief NormArgs::pieces. */
  uint32_t pieces = 1;
};

constexpr uint64_t AtMost(uint64_t a, uint64_t most) { return a < most ? a : most; }
constexpr uint64_t AtLeast(uint64_t a, uint64_t least) { return a < least ? least : a; }

/*! \brief Return the grid for `items`, with one thread per item. */
constexpr Launch LaunchFor(uint64_t items, uint64_t threads, const Limits& limits) {
  threads = AtMost(threads, limits.threads);
  const uint64_t blocks = AtLeast(AtMost(DivideUp(items, threads), limits.blocks), 1);
  return {static_cast<uint32_t>(blocks), static_cast<uint32_t>(threads)};
}

/*! \brief Return the grid for pushing, with one more block, which exchanges headers. */
constexpr Launch LaunchPush(uint64_t items, const Limits& limits) {
  const Launch launch = LaunchFor(items, 256, limits);
  return {static_cast<uint32_t>(AtMost(launch.blocks + 1, limits.blocks)), launch.threads};
}

/*! \brief Return the grid for an all-reduce, reduce or reduce-scatter of `bytes` in total. */
constexpr Launch LaunchReduce(Path path, uint64_t bytes, int size, const Limits& limits) {
  if (path == Path::kPush) return LaunchPush(DivideUp(bytes, 8), limits);
  if (path == Path::kPushSlices) return LaunchPush(DivideUp(bytes, 8 * size), limits);
  return LaunchFor(DivideUp(bytes, 16 * size), 512, limits);
}
/*! \brief Return the grid for moves of `bytes` to a member. */
constexpr Launch LaunchMove(Path path, uint64_t bytes, const Limits& limits) {
  if (path == Path::kPush) return LaunchPush(DivideUp(bytes, 8), limits);
  return LaunchFor(DivideUp(bytes, 16 * 4), 512, limits);
}
constexpr Launch LaunchParts(uint64_t bytes, const Limits& limits) {
  return LaunchFor(DivideUp(bytes, 16), 512, limits);
}
/*! \brief Return the grid for tvm_ipc_push_norm and tvm_ipc_norm. */
constexpr Launch LaunchNorm(uint64_t rows, uint64_t row_bytes, const Limits& limits) {
  // A block that has added a whole row normalises it without reading what other blocks have added.
  // That is faster, unless a thread has to add many pieces of 8 bytes.
  constexpr uint64_t kMostPieces = 4;
  const uint64_t warps = AtLeast(DivideUp(row_bytes, 8 * 32), 1);
  const uint64_t threads = AtMost(warps * 32, AtMost(512, limits.threads));
  const uint64_t pieces = AtLeast(AtMost(DivideUp(row_bytes, 8 * threads * kMostPieces),
                                         limits.blocks / AtLeast(AtMost(rows, limits.blocks), 1)),
                                  1);
  const uint64_t blocks = AtMost(rows * pieces + 1, limits.blocks);
  return {static_cast<uint32_t>(blocks), static_cast<uint32_t>(threads),
          static_cast<uint32_t>(pieces)};
}
/*! \brief Return the grid for tvm_ipc_barrier, tvm_ipc_expose and tvm_ipc_await. */
constexpr Launch LaunchMeet(const Limits& limits) { return LaunchFor(1, 128, limits); }
/*! \brief Return the grid for tvm_ipc_send and tvm_ipc_receive: the same number of blocks on both
 *         ranks, whatever the limits. */
constexpr Launch LaunchMessage(uint64_t bytes, const Limits& limits) {
  return {LanesOf(bytes), static_cast<uint32_t>(AtMost(512, limits.threads))};
}

}  // namespace kernels
}  // namespace tvm_ipc
#endif  // TVM_IPC_CUDA_KERNELS_CHOOSE_KERNEL_AND_GRID_H_
