/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file current_stream_hooks.h
 * \brief Functions that get and set the calling thread's stream of a device. The library that runs
 *        programs on devices fills this table. By default each thread has the stream that was set
 *        with `use`, for all devices.
 */
#ifndef TVM_IPC_CORE_CURRENT_STREAM_HOOKS_H_
#define TVM_IPC_CORE_CURRENT_STREAM_HOOKS_H_

#include <cstdint>

namespace tvm_ipc {

struct Streams {
  /*! \brief Return the calling thread's stream of a device, with DLPack's device type; null is the
   *         default stream. */
  void* (*current)(int32_t device_type, int32_t device);
  /*! \brief Send the calling thread's work on the device to the stream. */
  void (*use)(int32_t device_type, int32_t device, void* stream);
};

/*! \brief Return the table, which is filled when a library is loaded, and then only read. */
Streams& ProgramStreams();

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_CURRENT_STREAM_HOOKS_H_
