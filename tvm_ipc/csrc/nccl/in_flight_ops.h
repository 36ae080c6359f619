/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file in_flight_ops.h
 * \brief Operations that have been enqueued and that the device has not finished.
 */
#ifndef TVM_IPC_NCCL_IN_FLIGHT_OPS_H_
#define TVM_IPC_NCCL_IN_FLIGHT_OPS_H_

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/shared_memory_layout.h"
#include "driver/device_properties_and_context.h"

namespace tvm_ipc::nccl {

/*! \brief A pool of a device's events. An event returns to it when its last owner releases it. */
class Events {
 public:
  using Shared = std::shared_ptr<cuda::Event>;
  explicit Events(std::shared_ptr<cuda::Device> device) : device_(std::move(device)) {}
  ~Events();
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;

  /*! \brief Return an event recorded on a stream. The device's context must be current on the
   *         calling thread. */
  static Shared Record(const std::shared_ptr<Events>& events, cuda::Stream stream);

 private:
  std::shared_ptr<cuda::Device> device_;
  std::mutex mutex_;
  std::vector<cuda::Event> free_;
};

/*! \brief An operation in flight. */
struct InFlightOp {
  /*! \brief The operation, for errors. */
  Descriptor descriptor;
  std::string where;
  cuda::Stream stream = nullptr;
  Events::Shared begin;
  /*! \brief The event after the operation; null until it has been enqueued. */
  Events::Shared end;
  /*! \brief Whether the device has begun the operation, as seen by a poll. */
  bool begun = false;
  /*! \brief The time of the poll that first saw it. */
  std::chrono::steady_clock::time_point since;
};

/*! \brief All operations of a rank that are in flight, in the order in which they were enqueued. */
class InFlightOps {
 public:
  enum class State {
    kEmpty,      //!< the device has finished all operations
    kEnqueuing,  //!< all but those that a thread is about to enqueue are finished
    kPending,    //!< some operations are not finished
    kLate,       //!< an operation has begun, and has not ended within the deadline
    kBroken,     //!< the device has failed
  };
  struct Found {
    State state = State::kEmpty;
    /*! \brief The first operation, in the order of enqueueing, that has this state. */
    std::string what;
    cuda::Status status = cuda::kSuccess;
  };

  explicit InFlightOps(const std::shared_ptr<cuda::Device>& device)
      : driver_(device->driver()), events_(std::make_shared<Events>(device)) {}

  ~InFlightOps();
  InFlightOps(const InFlightOps&) = delete;
  InFlightOps& operator=(const InFlightOps&) = delete;

  const std::shared_ptr<Events>& events() const { return events_; }
  /*! \brief Add an operation that is about to be enqueued, without its end event. */
  void Add(InFlightOp in_flight_op);
  /*! \brief Set the end event of the operation with a begin event, once it has been enqueued. */
  void Enqueued(const Events::Shared& begin, const Events::Shared& end);
  /*! \brief Remove the operation with a begin event, which has not been enqueued. */
  void Drop(const Events::Shared& begin);
  /*! \brief Poll the device and remove finished operations. The device's context must be current on
   *         the calling thread. */
  Found Look(std::chrono::nanoseconds deadline);
  /*! \brief Remove all operations. */
  void Clear();
  /*! \brief A scope in which a rank of this process is about to add an operation. */
  struct EnqueueScope {
    EnqueueScope();
    ~EnqueueScope();
    EnqueueScope(const EnqueueScope&) = delete;
    EnqueueScope& operator=(const EnqueueScope&) = delete;
  };
  /*! \brief Wait until no rank of this process has operations in flight. Return false if that takes
   *         too long. */
  static bool AwaitProcess(std::chrono::nanoseconds patience);
  /*! \brief Remove all operations and free the events. No operation may be added afterwards. */
  void Close();

 private:
  const cuda::Driver& driver_;
  std::shared_ptr<Events> events_;
  std::mutex mutex_;
  std::deque<InFlightOp> in_flight_ops_;
  /*! \brief The number of operations that this object has added to the count of the process. */
  int64_t counted_ = 0;

  /*! \brief Update the count of the process; called after each change. */
  void Count();
};

}  // namespace tvm_ipc::nccl
#endif  // TVM_IPC_NCCL_IN_FLIGHT_OPS_H_
