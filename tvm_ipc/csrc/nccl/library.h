/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file library.h
 * \brief The functions of NCCL that this library calls, loaded from libnccl.so.2 on first use.
 *
 * This file declares the types and constants of NCCL's interface, so that the library builds and
 * runs on machines without NCCL.
 */
#ifndef TVM_IPC_NCCL_LIBRARY_H_
#define TVM_IPC_NCCL_LIBRARY_H_

#include <climits>
#include <cstddef>
#include <string>

#include "core/element_type_and_reduce_kind.h"
#include "driver/cuda_driver_api.h"

namespace tvm_ipc::nccl {

using Handle = struct ncclComm*;

/*! \brief The id by which the members of a communicator connect to each other: ncclUniqueId. */
struct UniqueId {
  char bytes[128];
};

/*! \brief The result of a call: ncclResult_t. */
enum Result : int {
  kSuccess = 0,
  kCudaFailed = 1,
  kSystemFailed = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteFailed = 6,
  kInProgress = 7,
};

/*! \brief The values of ncclDataType_t that NCCL can reduce on all devices. */
enum Type : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};

/*! \brief ncclRedOp_t. Its order is not that of ReduceKind. */
enum Operator : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };

/*!
 * \brief ncclConfig_t of NCCL 2.17. Later versions only add members, and the struct contains its
 *        size and version, so later libraries accept it.
 */
struct Config {
  static constexpr int kUnset = INT_MIN;
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21700;
  int blocking = kUnset;
  int cluster = kUnset;
  int least_blocks = kUnset;
  int most_blocks = kUnset;
  const char* network = nullptr;
};
static_assert(sizeof(Config) == 40, "as NCCL 2.17 has it");

/*! \brief Expand X(name, parameters...) for each function, named without "nccl". */
#define TVM_IPC_NCCL_FUNCTIONS(X)                                                    \
  X(GetVersion, int*)                                                                \
  X(GetUniqueId, UniqueId*)                                                          \
  X(CommInitRankConfig, Handle*, int, UniqueId, int, Config*)                        \
  X(CommGetAsyncError, Handle, Result*)                                              \
  X(CommFinalize, Handle)                                                            \
  X(CommDestroy, Handle)                                                             \
  X(CommAbort, Handle)                                                               \
  X(GroupStart)                                                                      \
  X(GroupEnd)                                                                        \
  X(AllReduce, const void*, void*, size_t, Type, Operator, Handle, cuda::Stream)     \
  X(ReduceScatter, const void*, void*, size_t, Type, Operator, Handle, cuda::Stream) \
  X(Reduce, const void*, void*, size_t, Type, Operator, int, Handle, cuda::Stream)   \
  X(AllGather, const void*, void*, size_t, Type, Handle, cuda::Stream)               \
  X(Broadcast, const void*, void*, size_t, Type, int, Handle, cuda::Stream)          \
  X(Send, const void*, size_t, Type, int, Handle, cuda::Stream)                      \
  X(Recv, void*, size_t, Type, int, Handle, cuda::Stream)                            \
  X(MemAlloc, void**, size_t)                                                        \
  X(MemFree, void*)

/*! \brief A function of NCCL. */
template <typename... Args>
class Function {
 public:
  Result operator()(Args... args) const { return call_(args...); }
  /*! \brief Return the name as in NCCL's documentation, for errors. */
  const char* name() const { return name_; }
  bool exists() const { return call_ != nullptr; }

 private:
  friend class Library;
  const char* name_ = nullptr;
  Result (*call_)(Args...) = nullptr;
};

class Library {
 public:
#define TVM_IPC_DECLARE(name, ...) Function<__VA_ARGS__> name;
  TVM_IPC_NCCL_FUNCTIONS(TVM_IPC_DECLARE)
#undef TVM_IPC_DECLARE

  /*! \brief Return the version: 22703 for 2.27.3. */
  int version() const { return version_; }
  const std::string& path() const { return path_; }
  /*! \brief Return the version and the file, as "NCCL 2.27.3 (libnccl.so.2)". */
  std::string Name() const;
  /*! \brief Return the text of a result, with NCCL's last error message. */
  std::string Describe(Result result, Handle communicator = nullptr) const;
  /*! \brief Throw if the result of a call is not kSuccess. */
  void Check(const char* call, Result result, Handle communicator = nullptr) const;

 private:
  friend const Library& TheLibrary();
  explicit Library(const std::string& path);

  std::string path_;
  int version_ = 0;
  const char* (*get_error_string_)(Result) = nullptr;
  const char* (*get_last_error_)(Handle) = nullptr;
};

/*!
 * \brief Set the file from which NCCL is loaded on first use. If it is empty, the system's loader
 *        searches for NCCL.
 */
void UseLibrary(const std::string& path);
/*! \brief Return NCCL, which the first call loads. Throw an error with the reason if that fails. */
const Library& TheLibrary();

/*! \brief Find NCCL's type and operator for a reduction. Return false and set `why` if there is
 *         none. */
bool FindReduction(ElementType type, ReduceKind kind, Type* nccl_type, Operator* nccl_operator,
                   const char** why);

}  // namespace tvm_ipc::nccl
#endif  // TVM_IPC_NCCL_LIBRARY_H_
