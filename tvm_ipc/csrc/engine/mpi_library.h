/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file mpi_library.h
 * \brief The functions of whichever MPI library the process has loaded.
 *
 * Handles are pointers in one MPI and 32-bit numbers in another. They are passed in 64-bit
 * registers, of which a function uses as many bits as it needs. Arrays of requests and statuses,
 * which MPI writes, are bytes; the code that has loaded MPI specifies the size of an entry.
 */
#ifndef TVM_IPC_ENGINE_MPI_LIBRARY_H_
#define TVM_IPC_ENGINE_MPI_LIBRARY_H_

#include <cstdint>
#include <string>

namespace tvm_ipc::engine {

using MpiHandle = uint64_t;

/*! \brief The MPI functions in use, and their parameters. */
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

/*! \brief Pointers to these functions; each returns 0 or an error. */
struct MpiFunctions {
#define TVM_IPC_DECLARE(name, ...) int (*name)(__VA_ARGS__) = nullptr;
  TVM_IPC_MPI_FUNCTIONS(TVM_IPC_DECLARE)
#undef TVM_IPC_DECLARE
};

/*!
 * \brief Find the functions in a library that this process has loaded, or in its dependencies.
 * \param path The path of the library, which stays loaded.
 */
MpiFunctions FindMpi(const std::string& path);

}  // namespace tvm_ipc::engine
#endif  // TVM_IPC_ENGINE_MPI_LIBRARY_H_
