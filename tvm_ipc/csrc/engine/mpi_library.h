/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file mpi_library.h
 * \brief MPI's functions, found in the library that the process has loaded: whichever MPI that is.
 *
 * Handles are pointers in one MPI and 32-bit numbers in another. They are given in registers of 64
 * bits, of which a function takes what it knows. Arrays of requests and statuses, which MPI writes,
 * are bytes, and who has loaded MPI says how long each is.
 */
#ifndef TVM_IPC_ENGINE_MPI_LIBRARY_H_
#define TVM_IPC_ENGINE_MPI_LIBRARY_H_

#include <cstdint>
#include <string>

namespace tvm_ipc::engine {

using MpiHandle = uint64_t;

/*! \brief Those that are used, and their parameters. */
#define TVM_IPC_MPI_FUNCTIONS(X)                                    \
  X(Isend, const void*, int, MpiHandle, int, int, MpiHandle, void*) \
  X(Irecv, void*, int, MpiHandle, int, int, MpiHandle, void*)       \
  X(Testsome, int, void*, int*, int*, void*)                        \
  X(Testall, int, void*, int*, void*)                               \
  X(Cancel, void*)                                                  \
  X(Test_cancelled, const void*, int*)                              \
  X(Get_count, const void*, MpiHandle, int*)                        \
  X(Improbe, int, int, MpiHandle, int*, void*, void*)               \
  X(Mrecv, void*, int, MpiHandle, void*, void*)                     \
  X(Error_string, int, char*, int*)

/*! \brief Pointers to them; each returns 0 or an error. */
struct MpiFunctions {
#define TVM_IPC_DECLARE(name, ...) int (*name)(__VA_ARGS__) = nullptr;
  TVM_IPC_MPI_FUNCTIONS(TVM_IPC_DECLARE)
#undef TVM_IPC_DECLARE
};

/*!
 * \brief Those of a library that this process has loaded, or of what that needs.
 * \param path Of the library, which stays loaded.
 */
MpiFunctions FindMpi(const std::string& path);

}  // namespace tvm_ipc::engine
#endif  // TVM_IPC_ENGINE_MPI_LIBRARY_H_
