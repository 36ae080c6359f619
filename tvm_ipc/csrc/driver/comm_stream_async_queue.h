/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file comm_stream_async_queue.h
 * \brief Asynchronous operations of backends with streams: they run on their own stream, beside the
 *        program's.
 *
 *   program's stream      ... a  start         b  c   wait   d ...
 *   asynchronous stream       operation after a           (d after the operation)
 *
 * A start enqueues the operation immediately on the asynchronous stream, which first waits for
 * everything enqueued on the caller's stream so far. Waiting for a request makes the caller's
 * stream wait for it, not the host. All asynchronous operations of a rank share one stream, in the
 * order in which they were started, so those of one team never overlap.
 *
 * The program's own operations run meanwhile, and the order in which the device runs both is
 * unknown. So the kernels of both must fit on the device together.
 */
#ifndef TVM_IPC_DRIVER_COMM_STREAM_ASYNC_QUEUE_H_
#define TVM_IPC_DRIVER_COMM_STREAM_ASYNC_QUEUE_H_

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "core/async_queue.h"
#include "driver/owned_streams_and_events.h"

namespace tvm_ipc::cuda {

class StreamRequest;

/*! \brief The asynchronous operations of a rank, on a stream of a device. */
class StreamAsyncQueue final : public AsyncQueue {
 public:
  StreamAsyncQueue(Rank& rank, std::shared_ptr<Device> device,
                   std::shared_ptr<const OwnStream> stream);
  ~StreamAsyncQueue() final;

  std::shared_ptr<Request> Start(std::string name, std::function<bool()> operation) final;
  void Drain() final;

 private:
  /*! \brief Release the resources of operations that have ended; return whether some are still
   *         running. */
  bool LetGo();

  std::shared_ptr<Device> device_;
  std::shared_ptr<const OwnStream> stream_;
  OwnEvent program_event_;
  std::mutex mutex_;
  /*! \brief The started operations, in order. Each keeps the buffers it uses alive until it is
   *         removed. */
  std::deque<std::shared_ptr<StreamRequest>> started_;
};

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_DRIVER_COMM_STREAM_ASYNC_QUEUE_H_
