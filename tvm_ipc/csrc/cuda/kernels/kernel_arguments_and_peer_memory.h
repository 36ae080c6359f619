/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file kernel_arguments_and_peer_memory.h
 * \brief The interface between the host and the kernels: memory that peers map, and arguments.
 *        choose_kernel_and_grid.h chooses the kernel and its launch configuration.
 *
 * A kernel is `extern "C"`, takes one struct by value, and is correct for any number of blocks and
 * of threads per block, including one. <type> is float16, bfloat16, float32, float64, int8, uint8,
 * int16, uint16, int32, uint32, int64, uint64 or bool; <float> is one of the first three.
 *
 * | kernel | argument | operation |
 * |---|---|---|
 * | tvm_ipc_push_<type> | ReduceArgs | all-reduce or reduce: every member gets all inputs |
 * | tvm_ipc_push_slices_<type> | ReduceArgs | all-reduce or reduce-scatter: every member gets its |
 * |  |  | slice of all inputs, and for an all-reduce all reduced slices |
 * | tvm_ipc_pull_<type> | ReduceArgs | all-reduce, reduce or reduce-scatter; inputs are read in |
 * |  |  | place, in the regions of the members |
 * | tvm_ipc_parts_<type> | PartsArgs | a reduction of memory mapped on this rank; no barrier |
 * | tvm_ipc_push_norm_<float> | NormArgs | all-reduce, residual and norm, as tvm_ipc_push |
 * | tvm_ipc_norm_<float> | NormArgs | residual and norm of `reduce.send`; no barrier |
 * | tvm_ipc_move | MoveArgs | data movement; inputs are read in place |
 * | tvm_ipc_move_push | MoveArgs | data movement; inputs are pushed |
 * | tvm_ipc_barrier | BarrierArgs | waits for all members; one block |
 * | tvm_ipc_expose | ExposeArgs | sends a number to the members; one block |
 * | tvm_ipc_await | ExposeArgs | waits for the number of a member; one block |
 * | tvm_ipc_send | MessageArgs | sends through a channel; LanesOf(bytes) blocks |
 * | tvm_ipc_receive | MessageArgs | receives, likewise |
 * | tvm_ipc_write_pattern | PatternArgs | writes a test pattern, to probe memory that peers map |
 * | tvm_ipc_check_pattern | PatternArgs | checks the test pattern |
 *
 * Epochs. A team slot (TeamSlotMemory) counts its operations in device memory, so that a graph can
 * be replayed. Members write into each other's team slots; in epoch e they use buffer e & 1 and tag
 * every word with e. Data and tag are one word, so a reader sees both or neither. A member that has
 * finished epoch e + 1 has received a word of it from every member. So all members have finished
 * epoch e, and buffer e & 1 can be overwritten. For this reason every member takes part in every
 * operation of a team and receives at least the header of every other member.
 *
 * Each member zeroes its own team slot before the team's first operation and after an error. It
 * does so when no stream of any member runs a kernel of the team any more, and before any member
 * starts the next one: after zeroing, the members synchronize on the host. The channels of all
 * ranks are zeroed in the same way.
 *
 * This file is compiled by NVRTC without any other headers, by g++ for the host, and by g++ as
 * kernels for a CPU.
 */
#ifndef TVM_IPC_CUDA_KERNELS_KERNEL_ARGUMENTS_AND_PEER_MEMORY_H_
#define TVM_IPC_CUDA_KERNELS_KERNEL_ARGUMENTS_AND_PEER_MEMORY_H_

#include "cuda/kernels/operation_header_and_error_record.h"

namespace tvm_ipc {
namespace kernels {

// ---- memory that peers map --------------------------------------------------------------------

/*! \brief 32 bits of data, tagged with their epoch (in a channel: their packet number). */
using TaggedWord = uint64_t;

/*! \brief A member's slot of a team, in the member's region. 128-byte aligned. */
struct alignas(128) TeamSlotMemory {
  // Accessed by the owner only:
  /*! \brief The number of the last finished operation. Never 0 after the first: see NextEpoch. */
  uint32_t epoch;
  /*! \brief The number of blocks of the running launch that have finished. */
  uint32_t arrived;
  /*! \brief Nonzero after an error: every kernel returns immediately. */
  uint32_t failed;
  /*! \brief The number of finished pieces of each row, in tvm_ipc_push_norm. */
  alignas(128) uint32_t rows[kMaxRows];
  // Written by peers, each at its own index:
  /*! \brief The last number that each member has exposed. */
  alignas(128) uint32_t exposed[kMaxMembers];
  /*! \brief Headers, by epoch & 1. */
  alignas(128) TaggedWord headers[2][kMaxMembers][kHeaderWords];
  /*!
   * \brief Barrier flags between blocks of the same index: [0] for the barrier in the middle of an
   *        operation, [1] for the one at its end. They need no double buffering: a peer sets its
   *        flags again only after it has received the owner's header of the next epoch.
   */
  alignas(128) uint32_t flags[2][kMaxBlocks][kMaxMembers];
  /*! \brief Staging buffers for pushed data, by epoch & 1. */
  alignas(128) uint8_t stage[2][kStageBytes];
};

/*! \brief Return the next epoch. It is never 0, the epoch of zeroed memory, and consecutive epochs
 *         differ in epoch & 1. */
constexpr uint32_t NextEpoch(uint32_t epoch) { return epoch == ~0u ? 2 : epoch + 1; }

/*! \brief The number of lanes of a channel. Each lane has its own packets and its own block. */
constexpr uint32_t kLanes = 8;
constexpr uint64_t kPacketBytes = 64 << 10;

/*!
 * \brief Return how many lanes carry a message: one if it fits in a packet, otherwise all. Each
 *        lane carries a multiple of 16 bytes; the last ones carry the remainder.
 */
constexpr uint32_t LanesOf(uint64_t bytes) { return bytes <= kPacketBytes ? 1 : kLanes; }

/*! \brief The receiving end of a channel, in the receiver's region. */
struct alignas(128) ReceiveQueue {
  struct alignas(128) PerBlock {
    /*! \brief The number of packets received. Written by the owner. */
    uint32_t packet;
    /*! \brief Headers, by packet & 1. Written by the sender, as is `data`. */
    alignas(128) TaggedWord headers[2][kHeaderWords];
    alignas(128) uint8_t data[2][kPacketBytes];
  } lanes[kLanes];
};

/*! \brief The sending end of a channel, in the sender's region. */
struct alignas(128) SendQueue {
  struct alignas(128) PerBlock {
    /*! \brief The number of packets sent. Written by the owner. */
    uint32_t packet;
    /*! \brief The number of packets that the receiver has taken. Written by the receiver. */
    alignas(128) uint32_t taken;
  } lanes[kLanes];
};

/*! \brief All channels of a rank, in its region, by the other rank. */
struct alignas(128) ChannelMemory {
  /*! \brief The failure flag of messages: Guard::failed points to it. */
  uint32_t failed;
  SendQueue out[kMaxMembers];
  ReceiveQueue in[kMaxMembers];
};

// ---- arguments --------------------------------------------------------------------------------

struct TeamArgs {
  int32_t size;
  /*! \brief This member's index in the team. */
  int32_t place;
  /*! \brief The members' team slots, as mapped on this rank; at least 16-byte aligned. */
  TeamSlotMemory* team_slot[kMaxMembers];
  /*! \brief The members' regions, as mapped on this rank, for inputs that are read in place. */
  const uint8_t* region[kMaxMembers];
  Guard guard;
};

struct BarrierArgs {
  TeamArgs team;
  Header header;
};

/*!
 * \brief Arguments of a reduction of header.count elements of `send`. Pointers are aligned to
 *        elements.
 *
 * In a reduce-scatter, too, header.count counts the elements of `send`. `recv` may be equal to
 * `send`. It is null on ranks that do not need the result: those of a reduce that are not its root.
 * In a reduce-scatter, `recv` may be this member's slice of `send`.
 */
struct ReduceArgs {
  TeamArgs team;
  Header header;
  const void* send;
  void* recv;
  /*! \brief For tvm_ipc_pull only: this member's scratch buffer of ScratchBytes, which is at offset
   *         header.scratch. */
  void* scratch;
  /*! \brief For tvm_ipc_pull of a reduce-scatter only: as in MoveArgs. */
  uint32_t leaves_early;
};

/*! \brief Arguments of recv[i] = parts[0][i] op parts[1][i] op ..., evaluated in this order. `recv`
 *         may be one of the parts. */
struct PartsArgs {
  const void* parts[kMaxMembers];
  int32_t size;
  /*! \brief A Kind. */
  uint32_t kind;
  uint64_t count;
  void* recv;
};

/*!
 * \brief Arguments of residual_out = residual + sum, and norm_out = norm of the rows of
 *        residual_out.
 *
 * The reduce.header.count elements form rows of `row` elements. reduce.recv is not used.
 * residual_out may be equal to residual; the outputs overlap nothing else.
 */
struct NormArgs {
  ReduceArgs reduce;
  const void* residual;
  void* residual_out;
  void* norm_out;
  const void* weight;
  /*! \brief The bias of a LayerNorm; null for RMSNorm. */
  const void* bias;
  uint64_t row;
  float epsilon;
  /*! \brief A FloatType, as are bias_type and out_type. */
  uint32_t weight_type;
  uint32_t bias_type;
  uint32_t out_type;
  /*! \brief The number of pieces that a row is split into, one per block (see LaunchNorm). */
  uint32_t pieces;
};

/*! \brief Arguments of data movement: bytes to and from each member, by index in the team. */
struct MoveArgs {
  TeamArgs team;
  Header header;
  const void* send;
  void* recv;
  /*! \brief Offsets in `send` of the bytes for each member. Only tvm_ipc_move_push uses them and
   *         give_bytes. */
  uint64_t give_from[kMaxMembers];
  uint64_t give_bytes[kMaxMembers];
  /*! \brief Offsets, in each member's `send`, of the bytes for this member. They go to offset
   *         take_to in `recv`. */
  uint64_t take_from[kMaxMembers];
  uint64_t take_to[kMaxMembers];
  uint64_t take_bytes[kMaxMembers];
  /*!
   * \brief For tvm_ipc_move: nonzero if this member's input stays unchanged until the team's next
   *        operation has begun on all members. This member then does not wait until the others have
   *        read it. The value may differ between members, and all of them signal that they have
   *        read.
   */
  uint32_t leaves_early;
};

/*! \brief Arguments of tvm_ipc_expose and tvm_ipc_await. */
struct ExposeArgs {
  TeamArgs team;
  /*! \brief The header for error reports. */
  Header header;
  uint32_t number;
  /*! \brief For tvm_ipc_await: the member whose number it waits for. */
  int32_t member;
};

/*! \brief Arguments of a message. header.count and header.type must agree on both sides. */
struct MessageArgs {
  Guard guard;
  Header header;
  /*! \brief The other rank, for error reports. */
  int32_t peer;
  /*! \brief The queue in the sender's region; mapped for tvm_ipc_receive. */
  SendQueue* send_queue;
  /*! \brief The queue in the receiver's region; mapped for tvm_ipc_send. */
  ReceiveQueue* receive_queue;
  const void* send;
  void* recv;
  uint64_t bytes;
};

/*! \brief Arguments of the pattern kernels. Word i of the pattern depends on the seed and on i. */
struct PatternArgs {
  uint64_t* memory;
  uint64_t words;
  uint64_t seed;
  /*! \brief The counter to which tvm_ipc_check_pattern adds the number of wrong words. */
  uint32_t* wrong;
};

// ---- layout ------------------------------------------------------------------------------------

/*! \brief The way in which data is moved. */
enum class Path : uint32_t { kPush = 1, kPushSlices = 2, kPull = 3 };

/*! \brief Return a / b. Numbers below 2**32 take few instructions; a 64-bit division takes more
 *         than a hundred. */
constexpr uint64_t Quotient(uint64_t a, uint64_t b) {
  return (a | b) >> 32 == 0 ? static_cast<uint32_t>(a) / static_cast<uint32_t>(b) : a / b;
}
constexpr uint64_t DivideUp(uint64_t a, uint64_t b) { return Quotient(a + b - 1, b); }

/*! \brief Return the maximum size of an input that every member can push to every other. */
constexpr uint64_t PushBytes(int size) { return Quotient(kStageBytes / 2, size) / 8 * 8; }
/*! \brief Return the maximum size of a slice: two slices of each member fit in a staging buffer. */
constexpr uint64_t SliceBytes(int size) { return Quotient(kStageBytes / 4, size) / 8 * 8; }

/*!
 * \brief Return the number of elements in a slice of an all-reduce. Every member has one slice; the
 *        last slices may be shorter or empty. A slice is a multiple of 16 bytes, so that slices
 *        have the alignment of the input.
 */
constexpr uint64_t SliceOf(uint64_t count, uint64_t width, int size) {
  const uint64_t pack = 16 / width;
  return DivideUp(DivideUp(count, pack), size) * pack;
}
/*! \brief Return the size of the scratch that tvm_ipc_pull needs for an all-reduce or a reduce. */
constexpr uint64_t ScratchBytes(uint64_t count, uint64_t width, int size) {
  return SliceOf(count, width, size) * width;
}

}  // namespace kernels
}  // namespace tvm_ipc
#endif  // TVM_IPC_CUDA_KERNELS_KERNEL_ARGUMENTS_AND_PEER_MEMORY_H_
