/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file streams.h
 * \brief On which stream of a device the calling thread's work goes. What runs programs there
 * knows: it says so by filling the table. Where nobody has, each thread has the one that it was
 * told to use, for all devices.
 */
#ifndef TVM_IPC_CORE_STREAMS_H_
#define TVM_IPC_CORE_STREAMS_H_

#include <cstdint>

namespace tvm_ipc {

struct Streams {
  /*! \brief The calling thread's stream of a device, of the kind that DLPack numbers; null is the
   *         device's default stream. */
  void* (*current)(int32_t device_type, int32_t device);
  /*! \brief From now on the calling thread's work on the device goes to the stream. */
  void (*use)(int32_t device_type, int32_t device, void* stream);
};

/*! \brief Filled when a library is loaded, and only read from then on. */
Streams& ProgramStreams();

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_STREAMS_H_
