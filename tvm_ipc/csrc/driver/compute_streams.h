/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file compute_streams.h
 * \brief The streams of a rank on which a program runs kernels side by side.
 *
 * Stream 0 is the one on which the program begins. The others belong to the rank and are created on
 * first use. A program chooses the stream of what follows, and orders streams by events:
 *
 *   Use(1); Await(0);  ...  Use(0);  ...  Await(1);
 *
 * The host never waits. Different threads of a rank may use the streams at the same time.
 */
#ifndef TVM_IPC_DRIVER_COMPUTE_STREAMS_H_
#define TVM_IPC_DRIVER_COMPUTE_STREAMS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "driver/owned_streams_and_events.h"

namespace tvm_ipc::cuda {

class ComputeStreams {
 public:
  explicit ComputeStreams(std::shared_ptr<Device> device) : device_(std::move(device)) {}

  /*! \brief Send what the calling thread enqueues from now on to a stream. */
  void Use(int64_t number);
  /*! \brief Make the calling thread's stream wait for everything on another stream so far. */
  void Await(int64_t number);
  /*! \brief Make the calling thread's stream wait for everything on the streams other than 0. */
  void AwaitAll();
  /*!
   * \brief Return the calling thread to its stream 0, which then waits for all other streams.
   * \return Whether the thread was on another stream.
   */
  bool Leave();

 private:
  /*! \brief Return a stream by its number; create it if needed. */
  Stream Find(int64_t number);
  void AwaitLocked(Stream other);
  void RequireNoCapture(const char* operation) const;

  std::shared_ptr<Device> device_;
  std::mutex mutex_;
  std::map<int64_t, std::unique_ptr<OwnStream>> streams_;
  /*! \brief The streams 0 of threads that are on another one. */
  std::map<std::thread::id, Stream> bases_;
  /*! \brief Streams that were used since something waited for all of them. */
  std::set<int64_t> used_;
  std::unique_ptr<OwnEvent> event_;
};

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_DRIVER_COMPUTE_STREAMS_H_
