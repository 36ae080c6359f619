/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file flights.h
 * \brief Operations that have been enqueued, until the device has done them.
 */
#ifndef TVM_IPC_NCCL_FLIGHTS_H_
#define TVM_IPC_NCCL_FLIGHTS_H_

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/control.h"
#include "driver/device.h"

namespace tvm_ipc::nccl {

/*! \brief An event of a device, which goes back to the others when nobody needs it. */
class Events {
 public:
  using Shared = std::shared_ptr<cuda::Event>;
  explicit Events(std::shared_ptr<cuda::Device> device) : device_(std::move(device)) {}
  ~Events();
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;

  /*! \brief Recorded on a stream. The calling thread has the device's context. */
  static Shared Record(const std::shared_ptr<Events>& events, cuda::Stream stream);

 private:
  std::shared_ptr<cuda::Device> device_;
  std::mutex mutex_;
  std::vector<cuda::Event> free_;
};

/*! \brief One of them. */
struct Flight {
  /*! \brief What it is, for errors. */
  Descriptor descriptor;
  std::string where;
  cuda::Stream stream = nullptr;
  Events::Shared begin;
  /*! \brief nullptr until it has been enqueued. */
  Events::Shared end;
  /*! \brief When the device was first seen to have come to it. */
  bool begun = false;
  std::chrono::steady_clock::time_point since;
};

/*! \brief All of a rank, in the order in which they were enqueued. */
class Flights {
 public:
  enum class State {
    kEmpty,      //!< the device has done all of them
    kEnqueuing,  //!< all but the one that a thread is about to enqueue
    kPending,    //!< not yet
    kLate,       //!< one of them has begun, and has not ended within the deadline
    kBroken,     //!< the device does nothing any more
  };
  struct Found {
    State state = State::kEmpty;
    /*! \brief Of what is pending, late or broken, the one that was enqueued first. */
    std::string what;
    cuda::Status status = cuda::kSuccess;
  };

  explicit Flights(const std::shared_ptr<cuda::Device>& device)
      : driver_(device->driver()), events_(std::make_shared<Events>(device)) {}

  ~Flights();
  Flights(const Flights&) = delete;
  Flights& operator=(const Flights&) = delete;

  const std::shared_ptr<Events>& events() const { return events_; }
  /*! \brief Before it is enqueued, without its end. */
  void Add(Flight flight);
  /*! \brief What began there has been enqueued, and will have ended there. */
  void Enqueued(const Events::Shared& begin, const Events::Shared& end);
  /*! \brief What began there has not been enqueued. */
  void Drop(const Events::Shared& begin);
  /*! \brief Forget those that are done. The calling thread has the device's context. */
  Found Look(std::chrono::nanoseconds deadline);
  /*! \brief Forget them all. */
  void Clear();
  /*! \brief As long as it lives, a rank of this process is about to have one. */
  struct Coming {
    Coming();
    ~Coming();
    Coming(const Coming&) = delete;
    Coming& operator=(const Coming&) = delete;
  };
  /*! \brief Wait until no rank of this process has any; whether that came to be. */
  static bool AwaitProcess(std::chrono::nanoseconds patience);
  /*! \brief Forget them all for good, and give back what the driver has for them. */
  void Close();

 private:
  const cuda::Driver& driver_;
  std::shared_ptr<Events> events_;
  std::mutex mutex_;
  std::deque<Flight> flights_;
  /*! \brief How many of them the process's number has. */
  int64_t counted_ = 0;

  /*! \brief After each change. */
  void Count();
};

}  // namespace tvm_ipc::nccl
#endif  // TVM_IPC_NCCL_FLIGHTS_H_
