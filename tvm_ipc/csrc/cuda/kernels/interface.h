/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file interface.h
 * \brief What the host and the kernels have in common: memory that peers map, and arguments.
 *        Which kernel is launched, and how: launch.h.
 *
 * A kernel is `extern "C"`, takes one struct by value, and is right for every number of blocks and
 * of threads in them, one included. <type> is float16, bfloat16, float32, float64, int8, uint8,
 * int16, uint16, int32, uint32, int64, uint64 or bool; <float> is one of the first three.
 *
 *   tvm_ipc_push_<type>        ReduceArgs   all-reduce or reduce: everyone gets all inputs
 *   tvm_ipc_push_slices_<type> ReduceArgs   all-reduce or reduce-scatter: everyone gets its slice
 * of all inputs, and of an all-reduce all reduced slices tvm_ipc_pull_<type>        ReduceArgs
 * all-reduce, reduce or reduce-scatter of inputs that are read where they lie, in the members'
 * regions tvm_ipc_parts_<type>       PartsArgs    a reduction of memory that is mapped here; no
 * meeting tvm_ipc_push_norm_<float>  NormArgs     all-reduce, residual and norm: as tvm_ipc_push
 *   tvm_ipc_norm_<float>       NormArgs     residual and norm of what `reduce.send` has; no meeting
 *   tvm_ipc_move               MoveArgs     what only moves bytes: read where they lie
 *   tvm_ipc_move_push          MoveArgs     the same, pushed
 *   tvm_ipc_meet               MeetArgs     all members hear from all; one block
 *   tvm_ipc_show               ShowArgs     tell the members a number; one block
 *   tvm_ipc_await              ShowArgs     wait until a member has told it; one block
 *   tvm_ipc_send               MessageArgs  through a channel; LanesOf(bytes) blocks
 *   tvm_ipc_receive            MessageArgs  likewise
 *   tvm_ipc_write_pattern      PatternArgs  for the probe of memory that peers map
 *   tvm_ipc_check_pattern      PatternArgs  likewise
 *
 * Epochs. A seat counts its operations in device memory, so that a graph can be replayed. What
 * members write into each other's seats in epoch e lies in slot e & 1 and carries e: data and tag
 * are one word, which is there or is not. Who has ended epoch e + 1 has heard from all members in
 * it, so all have ended e, and slot e & 1 can be written again. Hence every operation of a team is
 * one of all its members, and hears from all of them: by their headers at the least.
 *
 * A seat is zeroed by its owner before the team is used for the first time, and after an error:
 * when no stream of any member runs a kernel of the team any more, and before any member starts
 * the next one. (Each zeroes its own, then they meet on the host.) So are channels, of all ranks.
 *
 * Compiled by NVRTC without any header, by g++ for the host, and by g++ as kernels for a CPU.
 */
#ifndef TVM_IPC_CUDA_KERNELS_INTERFACE_H_
#define TVM_IPC_CUDA_KERNELS_INTERFACE_H_

#include "cuda/kernels/header.h"

namespace tvm_ipc {
namespace kernels {

// ---- memory that peers map --------------------------------------------------------------------

/*! \brief 32 bits of data, and the epoch (of a channel: the packet) that they belong to. */
using TaggedWord = uint64_t;

/*! \brief A member's place in a team, in its region. 128-byte aligned. */
struct alignas(128) SeatMemory {
  // Of the owner alone:
  /*! \brief Operations done. Never 0 after the first: see NextEpoch. */
  uint32_t epoch;
  /*! \brief Blocks of the running launch that are done. */
  uint32_t arrived;
  /*! \brief Not zero after an error: every kernel leaves at once. */
  uint32_t failed;
  /*! \brief Of tvm_ipc_push_norm: how many pieces of a row are done. */
  alignas(128) uint32_t rows[kMaxRows];
  // Written by peers, each at its place:
  /*! \brief The last number that a member has shown. */
  alignas(128) uint32_t shown[kMaxMembers];
  /*! \brief By epoch & 1. */
  alignas(128) TaggedWord headers[2][kMaxMembers][kHeaderWords];
  /*!
   * \brief [0] in the middle, [1] at the end; of a block to the peers' of its number. One slot is
   *        enough: a member writes them again after it has heard of the next epoch from this one.
   */
  alignas(128) uint32_t flags[2][kMaxBlocks][kMaxMembers];
  /*! \brief By epoch & 1. */
  alignas(128) uint8_t stage[2][kStageBytes];
};

/*! \brief The next epoch: 0 is that of zeroed memory, and neighbours have different slots. */
constexpr uint32_t NextEpoch(uint32_t epoch) { return epoch == ~0u ? 2 : epoch + 1; }

/*! \brief Lanes of a channel, each with packets and a block of its own. */
constexpr uint32_t kLanes = 8;
constexpr uint64_t kPacketBytes = 64 << 10;

/*!
 * \brief A message goes through one lane if it fits in a packet, else through all: a multiple of
 *        16 bytes through each, the rest through the last ones.
 */
constexpr uint32_t LanesOf(uint64_t bytes) { return bytes <= kPacketBytes ? 1 : kLanes; }

/*! \brief Of a channel, in the receiver's region. */
struct alignas(128) Inbox {
  struct alignas(128) Lane {
    /*! \brief The owner's: packets taken. */
    uint32_t packet;
    /*! \brief The sender's, by packet & 1. */
    alignas(128) TaggedWord headers[2][kHeaderWords];
    alignas(128) uint8_t data[2][kPacketBytes];
  } lanes[kLanes];
};

/*! \brief Of a channel, in the sender's region. */
struct alignas(128) Outbox {
  struct alignas(128) Lane {
    /*! \brief The owner's: packets sent. */
    uint32_t packet;
    /*! \brief The receiver's: packets that it has taken. */
    alignas(128) uint32_t taken;
  } lanes[kLanes];
};

/*! \brief All channels of a rank, in its region; by the other rank. */
struct alignas(128) ChannelMemory {
  /*! \brief What Guard::failed of messages points to. */
  uint32_t failed;
  Outbox out[kMaxMembers];
  Inbox in[kMaxMembers];
};

// ---- arguments --------------------------------------------------------------------------------

struct TeamArgs {
  int32_t size;
  /*! \brief This member's. */
  int32_t place;
  /*! \brief The members' seats, as they are mapped here; 16-byte aligned or better. */
  SeatMemory* seat[kMaxMembers];
  /*! \brief The members' regions, as they are mapped here, for what is read where it lies. */
  const uint8_t* region[kMaxMembers];
  Guard guard;
};

struct MeetArgs {
  TeamArgs team;
  Header header;
};

/*!
 * \brief header.count elements of send (of a reduce-scatter too); pointers are aligned to elements.
 *
 * recv may be send, or null where the result is not wanted (a reduce, at others than its root). Of
 * a reduce-scatter it may be this member's part of send.
 */
struct ReduceArgs {
  TeamArgs team;
  Header header;
  const void* send;
  void* recv;
  /*! \brief tvm_ipc_pull: this member's own, at header.scratch, of ScratchBytes; else unused. */
  void* scratch;
  /*! \brief tvm_ipc_pull of a reduce-scatter: as in MoveArgs. */
  uint32_t leaves_early;
};

/*! \brief recv[i] = parts[0][i] op parts[1][i] ...: in this order. recv may be one of the parts. */
struct PartsArgs {
  const void* parts[kMaxMembers];
  int32_t size;
  /*! \brief A Kind. */
  uint32_t kind;
  uint64_t count;
  void* recv;
};

/*!
 * \brief residual_out = residual + the sum; norm_out = its rows, normalised.
 *
 * reduce.header.count elements are rows of `row` elements; reduce.recv is not used. residual_out
 * may be residual; outputs overlap nothing else.
 */
struct NormArgs {
  ReduceArgs reduce;
  const void* residual;
  void* residual_out;
  void* norm_out;
  const void* weight;
  /*! \brief Null: RMSNorm. */
  const void* bias;
  uint64_t row;
  float epsilon;
  /*! \brief FloatTypes. */
  uint32_t weight_type;
  uint32_t bias_type;
  uint32_t out_type;
  /*! \brief Into how many pieces, each a block's, a row is divided: launch.h says so. */
  uint32_t pieces;
};

/*! \brief Bytes for and from the members, by place. */
struct MoveArgs {
  TeamArgs team;
  Header header;
  const void* send;
  void* recv;
  /*! \brief What this member gives: from an offset in send on. For tvm_ipc_move_push. */
  uint64_t give_from[kMaxMembers];
  uint64_t give_bytes[kMaxMembers];
  /*! \brief What it takes: from an offset in the member's send on, to an offset in recv. */
  uint64_t take_from[kMaxMembers];
  uint64_t take_to[kMaxMembers];
  uint64_t take_bytes[kMaxMembers];
  /*!
   * \brief tvm_ipc_move: not zero if what this member gives stays as it is until the team's next
   *        operation has begun everywhere. Then it does not wait for those who still read it; each
   *        member has its own word, and all tell that they have read.
   */
  uint32_t leaves_early;
};

/*! \brief `member`: of tvm_ipc_await, whose number. */
struct ShowArgs {
  TeamArgs team;
  /*! \brief For errors. */
  Header header;
  uint32_t number;
  int32_t member;
};

/*! \brief header.count and header.type must agree with the other side's. */
struct MessageArgs {
  Guard guard;
  Header header;
  /*! \brief The other rank: for errors. */
  int32_t peer;
  /*! \brief The sender's; tvm_ipc_receive has it mapped. */
  Outbox* outbox;
  /*! \brief The receiver's; tvm_ipc_send has it mapped. */
  Inbox* inbox;
  const void* send;
  void* recv;
  uint64_t bytes;
};

/*! \brief Word i depends on the seed and on i. */
struct PatternArgs {
  uint64_t* memory;
  uint64_t words;
  uint64_t seed;
  /*! \brief tvm_ipc_check_pattern adds how many words are wrong. */
  uint32_t* wrong;
};

// ---- layout ------------------------------------------------------------------------------------

/*! \brief How data is moved. */
enum class Path : uint32_t { kPush = 1, kPushSlices = 2, kPull = 3 };

/*! \brief The most bytes of an input that every member can push to every other. */
constexpr uint64_t PushBytes(int size) { return kStageBytes / 2 / size / 8 * 8; }
/*! \brief The most bytes of a slice: two of each member fit. */
constexpr uint64_t SliceBytes(int size) { return kStageBytes / 4 / size / 8 * 8; }

constexpr uint64_t DivideUp(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

/*!
 * \brief Elements of a slice of an all-reduce: every member has one, the last ones less or none.
 *        Multiples of 16 bytes, so that slices are aligned as inputs are.
 */
constexpr uint64_t SliceOf(uint64_t count, uint64_t width, int size) {
  const uint64_t pack = 16 / width;
  return DivideUp(DivideUp(count, pack), size) * pack;
}
/*! \brief Of the scratch that tvm_ipc_pull needs for an all-reduce or a reduce. */
constexpr uint64_t ScratchBytes(uint64_t count, uint64_t width, int size) {
  return SliceOf(count, width, size) * width;
}

}  // namespace kernels
}  // namespace tvm_ipc
#endif  // TVM_IPC_CUDA_KERNELS_INTERFACE_H_
