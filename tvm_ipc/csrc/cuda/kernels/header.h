/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file header.h
 * \brief What members say of an operation, how kernels tell the host of errors, and the limits of
 *        both: the part of interface.h that has nothing to do with memory.
 */
#ifndef TVM_IPC_CUDA_KERNELS_HEADER_H_
#define TVM_IPC_CUDA_KERNELS_HEADER_H_

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

/*! \brief The most members of a team, and ranks of a session that have channels. */
constexpr int kMaxMembers = 16;
/*! \brief The most blocks of a launch. */
constexpr uint32_t kMaxBlocks = 128;
/*! \brief Bytes of a slot of a seat for pushed data: half of them are tags. */
constexpr uint64_t kStageBytes = 1 << 20;
/*! \brief Rows that tvm_ipc_push_norm can do at a time, at most. */
constexpr uint32_t kMaxRows = 4096;

// ---- what operations say of themselves --------------------------------------------------------

/*! \brief What a header says that its rank does; the host has words for them. */
enum Operation : uint32_t {
  kMeet = 1,
  kAllReduce,
  kReduceScatter,
  kReduce,
  kAllReduceRms,
  kAllReduceLayer,
  kAllGather,
  kBroadcast,
  kScatter,
  kGather,
  kAllToAll,
  kPermute,
  kSend,
  kShow,
};

/*!
 * \brief What a member does; the members must do the same. In words of 32 bits.
 *
 * The kernel sets `grid`; all else is the host's.
 */
struct Header {
  /*! \brief An Operation. */
  uint32_t operation = 0;
  /*! \brief ReduceKind of core/element.h | strategy << 8 | flags << 16; 0 where there is none. */
  uint32_t mode = 0;
  /*! \brief ElementType of core/element.h: code | bits << 8 | lanes << 16. */
  uint32_t type = 0;
  /*! \brief A place in the team, or -1. */
  int32_t root = -1;
  uint64_t count = 0;
  /*! \brief A hash of more that must agree, as in Descriptor of core/control.h. */
  uint64_t parts = 0;
  /*! \brief blocks << 16 | threads, of the kernels that want it to agree: set by them. */
  uint32_t grid = 0;
  /*! \brief Which kernel it is: a Path. */
  uint32_t path = 0;

  // Not compared:
  /*! \brief Where this member's input lies in its region; for kernels that pull. */
  uint64_t input = 0;
  /*! \brief Where this member's scratch lies in its region; for tvm_ipc_pull_<type>. */
  uint64_t scratch = 0;
};
constexpr int kHeaderWords = sizeof(Header) / sizeof(uint32_t);
/*! \brief How many words, from the first one on, must agree. */
constexpr int kComparedWords = 10;
static_assert(kHeaderWords == 14 && kHeaderWords % 2 == 0, "pairs of words travel together");

constexpr uint32_t Mode(uint32_t kind, uint32_t strategy, uint32_t flags) {
  return kind | strategy << 8 | flags << 16;
}
constexpr uint32_t KindOf(uint32_t mode) { return mode & 0xff; }
constexpr uint32_t FlagsOf(uint32_t mode) { return mode >> 16 & 0xff; }

/*! \brief ReduceKind of core/element.h. */
enum Kind : uint32_t { kSum = 0, kProd = 1, kMin = 2, kMax = 3, kAvg = 4 };

/*! \brief Types of weights, of biases, and of what norms give. */
enum FloatType : uint32_t { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2 };

// ---- errors -----------------------------------------------------------------------------------

enum ErrorCode : uint32_t {
  kNoError = 0,
  /*! \brief A member was not heard of in time. */
  kDeadline = 1,
  /*! \brief The abort word of the session was set. */
  kAborted = 2,
  /*! \brief A member does something else: the record has both headers. */
  kMismatch = 3,
};

/*! \brief What was waited for. */
enum Phase : uint32_t {
  kForHeader = 0,
  kForData = 1,
  kForResult = 2,
  kForMiddle = 3,
  kForEnd = 4,
  kForShow = 5,
  kForCredit = 6,
  kForMessage = 7,
};

/*! \brief Filled by the first thread of a seat that fails; `code` last, with release. Pinned. */
struct ErrorRecord {
  uint32_t code;
  /*! \brief The place in the team (the rank, for messages) that was waited for or differs. */
  int32_t member;
  uint32_t phase;
  uint32_t epoch;
  Header mine;
  /*! \brief Of a mismatch. */
  Header theirs;
};

/*! \brief When to stop waiting, and whom to tell. */
struct Guard {
  /*! \brief Nanoseconds. */
  uint64_t timeout;
  /*! \brief Not zero: leave. Host memory that the device reads; null: there is none. */
  const uint32_t* abort;
  /*! \brief In this rank's device memory: set by the first that fails; all others leave. */
  uint32_t* failed;
  ErrorRecord* error;
};

}  // namespace kernels
}  // namespace tvm_ipc
#endif  // TVM_IPC_CUDA_KERNELS_HEADER_H_
