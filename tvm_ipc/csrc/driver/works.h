/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file works.h
 * \brief Works where operations go to streams: they are on a stream of their own, beside the
 *        program's.
 *
 *   program's stream   ... a  post          b  c   wait   d ...
 *   works' stream              work after a           (d after the work)
 *
 * Who posts starts the operation at once, on the works' stream, which waits there for what the
 * poster's stream has by then. To wait for a work lets the waiter's stream wait for it, and not the
 * host. All works of a rank are on one stream, in the order in which they were posted, so those of
 * one team do not meet each other.
 *
 * The program's own operations go on meanwhile, and in which order a device comes to them and to
 * works nobody knows. So kernels of both must fit on the device together.
 */
#ifndef TVM_IPC_DRIVER_WORKS_H_
#define TVM_IPC_DRIVER_WORKS_H_

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "core/works.h"
#include "driver/stream.h"

namespace tvm_ipc::cuda {

class WorkOnStream;

/*! \brief The works of a rank, on a stream of a device. */
class WorksOnStream final : public Works {
 public:
  WorksOnStream(Rank& rank, std::shared_ptr<Device> device);
  ~WorksOnStream() final;

  std::shared_ptr<Work> Post(std::string name, std::function<bool()> operation) final;
  void Drain() final;

 private:
  /*! \brief Let go of what works have used that the device has ended; whether some go on. */
  bool LetGo();

  std::shared_ptr<Device> device_;
  OwnStream stream_;
  OwnEvent posted_;
  std::mutex mutex_;
  /*! \brief In their order; what they use is kept as long as they are here. */
  std::deque<std::shared_ptr<WorkOnStream>> started_;
};

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_DRIVER_WORKS_H_
