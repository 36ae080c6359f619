/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file data_movement_collectives_device_code.h
 * \brief Data movement: gathers, scatters, broadcasts, all-to-alls and permutations.
 */
#ifndef TVM_IPC_CUDA_KERNELS_DATA_MOVEMENT_COLLECTIVES_DEVICE_CODE_H_
#define TVM_IPC_CUDA_KERNELS_DATA_MOVEMENT_COLLECTIVES_DEVICE_CODE_H_

#include "cuda/kernels/reduce_small_inputs_by_push.h"

namespace tvm_ipc {
namespace kernels {

/*! \brief The index of a thread among the threads that share a copy, and their number. */
struct Share {
  uint64_t worker;
  uint64_t workers;
};

TVM_IPC_DEVICE Share OfBlock() { return {Thread(), Threads()}; }
TVM_IPC_DEVICE Share OfGrid() {
  return {static_cast<uint64_t>(Block()) * Threads() + Thread(),
          static_cast<uint64_t>(Blocks()) * Threads()};
}

template <typename Unit>
TVM_IPC_DEVICE void CopyUnits(uint8_t* to, const uint8_t* from, uint64_t count, Share share) {
#pragma unroll 4
  for (uint64_t i = share.worker; i < count; i += share.workers) {
    reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
  }
}

/*! \brief Copy pairs; each thread has four loads in flight. */
TVM_IPC_DEVICE void CopyPairs(uint8_t* to, const uint8_t* from, uint64_t count, Share share) {
#pragma unroll 1
  for (uint64_t start = share.worker; start < count; start += 4 * share.workers) {
    Pair pairs[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint64_t i = start + k * share.workers;
      if (i < count) pairs[k] = ReadPair(from + 16 * i);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint64_t i = start + k * share.workers;
      if (i < count) WritePair(to + 16 * i, pairs[k]);
    }
  }
}

/*! \brief Copy bytes with all threads of a share, in the largest unit in which source and target
 *         have the same alignment. */
TVM_IPC_DEVICE void Copy(void* target, const void* source, uint64_t bytes, Share share) {
  uint8_t* to = static_cast<uint8_t*>(target);
  const uint8_t* from = static_cast<const uint8_t*>(source);
  const uintptr_t apart = reinterpret_cast<uintptr_t>(to) ^ reinterpret_cast<uintptr_t>(from);
  const uint64_t unit = apart % 16 == 0 ? 16 : apart % 4 == 0 ? 4 : apart % 2 == 0 ? 2 : 1;
  const uint64_t before = Least((0 - reinterpret_cast<uintptr_t>(to)) % unit, bytes);
  CopyUnits<uint8_t>(to, from, before, share);
  to += before;
  from += before;
  const uint64_t count = (bytes - before) / unit;
  if (unit == 16) {
    CopyPairs(to, from, count, share);
  } else if (unit == 4) {
    CopyUnits<uint32_t>(to, from, count, share);
  } else if (unit == 2) {
    CopyUnits<uint16_t>(to, from, count, share);
  } else {
    CopyUnits<uint8_t>(to, from, count, share);
  }
  const uint64_t done = count * unit;
  CopyUnits<uint8_t>(to + done, from + done, bytes - before - done, share);
}

/*! \brief Copy the bytes that this member takes from its own input, unless they are in place. */
TVM_IPC_DEVICE void TakeOwn(const MoveArgs& args, Share share) {
  const int place = args.team.place;
  const uint8_t* from = static_cast<const uint8_t*>(args.send) + args.take_from[place];
  uint8_t* to = static_cast<uint8_t*>(args.recv) + args.take_to[place];
  if (args.take_bytes[place] != 0 && to != from) Copy(to, from, args.take_bytes[place], share);
}

/*! \brief Move data by reading the members' inputs in place. */
TVM_IPC_DEVICE void Move(const MoveArgs& args) {
  TeamOperation operation(args.team, args.header, Grid::kSame);
  if (!operation.Begin()) return;
  if (operation.talks()) operation.Tell<true>();
  if (!operation.Hear<true>()) return operation.End();
  // Each member starts at a different peer, so that they do not all read the same memory.
#pragma unroll 1
  for (int shift = 1; shift < operation.size(); ++shift) {
    const int member = operation.After(shift);
    if (args.take_bytes[member] == 0) continue;
    Copy(static_cast<uint8_t*>(args.recv) + args.take_to[member],
         args.team.region[member] + operation.input(member) + args.take_from[member],
         args.take_bytes[member], OfGrid());
  }
  TakeOwn(args, OfGrid());
  operation.Barrier(kForEnd, args.leaves_early == 0);
  operation.End();
}

/*! \brief Return the largest number of pieces of 8 bytes exchanged with any other member. */
TVM_IPC_DEVICE uint64_t LongestEights(const uint64_t* bytes, int size, int place) {
  uint64_t longest = 0;
#pragma unroll 1
  for (int member = 0; member < size; ++member) {
    if (member != place && bytes[member] > longest) longest = bytes[member];
  }
  return DivideUp(longest, 8);
}

/*! \brief Move data by pushing it, 8 bytes at a time, as in reduce_small_inputs_by_push.h. */
TVM_IPC_DEVICE void MovePush(const MoveArgs& args) {
  TeamOperation operation(args.team, args.header, Grid::kAny);
  if (!operation.Begin()) return;
  const int size = operation.size();
  const Stage stage = WholeStage(size);
  if (operation.talks()) operation.Tell<false>();
  if (operation.computes()) {
    const uint64_t longest = LongestEights(args.give_bytes, size, operation.place());
    // Push item i to every member before item i + 1, so that a block b waits only for blocks b.
#pragma unroll 1
    for (uint64_t i = operation.worker(); i < longest; i += operation.workers()) {
#pragma unroll 1
      for (int shift = 1; shift < size; ++shift) {
        const int member = operation.After(shift);
        const Eights<1> part(static_cast<const uint8_t*>(args.send) + args.give_from[member],
                             args.give_bytes[member]);
        if (i < part.size()) stage.Push(operation, member, i, part.Load(i));
      }
    }
  }
  if (operation.talks()) operation.Hear<false>();
  if (operation.computes()) {
    TakeOwn(args, {operation.worker(), operation.workers()});
    const uint64_t longest = LongestEights(args.take_bytes, size, operation.place());
#pragma unroll 1
    for (uint64_t i = operation.worker(); i < longest && !operation.failed();
         i += operation.workers()) {
#pragma unroll 1
      for (int shift = 1; shift < size; ++shift) {
        const int member = operation.After(shift);
        const Eights<1> part(static_cast<uint8_t*>(args.recv) + args.take_to[member],
                             args.take_bytes[member]);
        if (i >= part.size()) continue;
        Pair pair = stage.Look(operation, member, i);
        while (!Has(pair, operation.epoch()) && !operation.GivesUp(kForData, member)) {
          pair = stage.Look(operation, member, i);
        }
        if (!operation.failed()) part.Store(i, Eight(pair));
      }
    }
  }
  operation.End();
}

/*! \brief Wait for all members. After it, their earlier writes can be read. */
TVM_IPC_DEVICE void MeetTeam(const BarrierArgs& args) {
  TeamOperation operation(args.team, args.header, Grid::kAny);
  if (!operation.Begin()) return;
  if (operation.talks()) {
    operation.Tell<true>();
    operation.Hear<true>();
  }
  operation.End();
}

}  // namespace kernels
}  // namespace tvm_ipc
#endif  // TVM_IPC_CUDA_KERNELS_DATA_MOVEMENT_COLLECTIVES_DEVICE_CODE_H_
