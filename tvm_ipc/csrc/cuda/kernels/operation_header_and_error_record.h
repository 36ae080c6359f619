/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file operation_header_and_error_record.h
 * \brief The header of an operation, the error record that kernels fill for the host, and the
 *        limits of both: the part of kernel_arguments_and_peer_memory.h that does not concern
 * memory.
 */
#ifndef TVM_IPC_CUDA_KERNELS_OPERATION_HEADER_AND_ERROR_RECORD_H_
#define TVM_IPC_CUDA_KERNELS_OPERATION_HEADER_AND_ERROR_RECORD_H_

#if defined(__CUDACC_RTC__)
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long uintptr_t;
#else
#include <cstdint>
#endif

namespace tvm_ipc {
namespace kernels {

/*! \brief The maximum number of members of a team, and of ranks with channels in a session. */
constexpr int kMaxMembers = 16;
/*! \brief The maximum number of blocks of a launch. */
constexpr uint32_t kMaxBlocks = 128;
/*! \brief The size of a staging buffer for pushed data; half of it are tags. */
constexpr uint64_t kStageBytes = 1 << 20;
/*! \brief The maximum number of rows in one tvm_ipc_push_norm. */
constexpr uint32_t kMaxRows = 4096;

// ---- headers ----------------------------------------------------------------------------------

/*! \brief The operation in a header; the host has a name for each. */
enum Operation : uint32_t {
  kBarrier = 1,
  kAllReduce,
  kReduceScatter,
  kReduce,
  kAllReduceRmsNorm,
  kAllReduceLayerNorm,
  kAllGather,
  kBroadcast,
  kScatter,
  kGather,
  kAllToAll,
  kRaggedAllToAll,
  kPermute,
  kSend,
  kExpose,
};

/*!
 * \brief The description of an operation, which must agree on all members. It is sent as 32-bit
 *        words.
 *
 * The kernel sets `grid`; the host sets everything else.
 */
struct Header {
  /*! \brief An Operation. */
  uint32_t operation = 0;
  /*! \brief ReduceKind (core/element_type_and_reduce_kind.h) | strategy << 8 | flags << 16; 0 if
   * not used. */
  uint32_t mode = 0;
  /*! \brief ElementType of core/element_type_and_reduce_kind.h: code | bits << 8 | lanes << 16. */
  uint32_t type = 0;
  /*! \brief The root's index in the team, or -1. */
  int32_t root = -1;
  uint64_t count = 0;
  /*! \brief A hash of further values that must agree, as in Descriptor of
   *         core/shared_memory_layout.h. */
  uint64_t parts = 0;
  /*! \brief blocks << 16 | threads, set by the kernels that require it to agree. */
  uint32_t grid = 0;
  /*! \brief The kernel: a Path. */
  uint32_t path = 0;

  // Not compared:
  /*! \brief The offset of this member's input in its region, for kernels that pull. */
  uint64_t input = 0;
  /*! \brief The offset of this member's scratch in its region, for tvm_ipc_pull_<type>. */
  uint64_t scratch = 0;
};
constexpr int kHeaderWords = sizeof(Header) / sizeof(uint32_t);
/*! \brief The number of words, from the first one on, that must agree. */
constexpr int kComparedWords = 10;
static_assert(kHeaderWords == 14 && kHeaderWords % 2 == 0, "pairs of words travel together");

constexpr uint32_t Mode(uint32_t kind, uint32_t strategy, uint32_t flags) {
  return kind | strategy << 8 | flags << 16;
}
constexpr uint32_t KindOf(uint32_t mode) { return mode & 0xff; }
constexpr uint32_t FlagsOf(uint32_t mode) { return mode >> 16 & 0xff; }

/*! \brief ReduceKind of core/element_type_and_reduce_kind.h. */
enum Kind : uint32_t {
  kSum = 0,
  kProd = 1,
  kMin = 2,
  kMax = 3,
  kAvg = 4,
  kBand = 5,
  kBor = 6,
  kBxor = 7,
  kTreeSum = 8
};

/*! \brief The types of weights, biases and results of norms. */
enum FloatType : uint32_t { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2 };

// ---- errors -----------------------------------------------------------------------------------

enum ErrorCode : uint32_t {
  kNoError = 0,
  /*! \brief A member did not answer before the deadline. */
  kDeadline = 1,
  /*! \brief The abort word of the session was set. */
  kAborted = 2,
  /*! \brief The header of a member differs: the record has both headers. */
  kMismatch = 3,
};

/*! \brief What a thread waited for. */
enum Phase : uint32_t {
  kForHeader = 0,
  kForData = 1,
  kForResult = 2,
  kForMiddle = 3,
  kForEnd = 4,
  kForExposed = 5,
  kForCredit = 6,
  kForMessage = 7,
};

/*! \brief An error report in pinned memory. The first thread of a team slot that fails fills it and
 *         stores `code` last, with release. */
struct ErrorRecord {
  uint32_t code;
  /*! \brief The member that did not answer or differs: its index in the team; for messages, its
   *         rank. */
  int32_t member;
  uint32_t phase;
  uint32_t epoch;
  Header mine;
  /*! \brief The other header, for a mismatch. */
  Header theirs;
};

/*! \brief The conditions that end a wait, and the record for the error. */
struct Guard {
  /*! \brief The deadline of a wait, in nanoseconds. */
  uint64_t timeout;
  /*! \brief The abort word, in host memory that the device reads; null if there is none. If it is
   *         nonzero, waits end. */
  const uint32_t* abort;
  /*! \brief The failure flag, in this rank's device memory. The first thread that fails sets it,
   *         which ends the waits of all others. */
  uint32_t* failed;
  ErrorRecord* error;
};

}  // namespace kernels
}  // namespace tvm_ipc
#endif  // TVM_IPC_CUDA_KERNELS_OPERATION_HEADER_AND_ERROR_RECORD_H_
