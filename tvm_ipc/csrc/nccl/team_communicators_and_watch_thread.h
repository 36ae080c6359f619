/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file team_communicators_and_watch_thread.h
 * \brief The communicators of a rank, one for each of its teams, and the thread that watches them.
 *
 * Before NCCL is called, the members of a team compare their calls on the host
 * (host_barrier_and_agreement.h). If the calls differed, NCCL would wait indefinitely or write
 * wrong data. A team's communicator is created in its first operation, after this comparison. Only
 * the members take part, so ranks need not create the communicators of their teams in a common
 * order.
 *
 * NCCL's kernels wait on the device and do not notice errors or dead workers. Therefore each
 * operation is recorded between two events, which a watch thread polls. If the session has stopped,
 * or an operation takes longer than the session's deadline, the watch thread ends the
 * communicators, which ends their kernels; the worker's thread gets the error in its next call.
 *
 * After an error, the members of a team keep their communicator if all of them still have it and
 * have enqueued the same operations on it. CUDA graphs with operations of it then stay valid.
 * Otherwise, for example if a message was sent but not received, they create a new one.
 */
#ifndef TVM_IPC_NCCL_TEAM_COMMUNICATORS_AND_WATCH_THREAD_H_
#define TVM_IPC_NCCL_TEAM_COMMUNICATORS_AND_WATCH_THREAD_H_

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "core/error.h"
#include "core/internode_request_queue.h"
#include "core/rank_runtime_state.h"
#include "core/team_members_by_node.h"
#include "driver/device_properties_and_context.h"
#include "nccl/communicator.h"
#include "nccl/host_barrier_and_agreement.h"
#include "nccl/in_flight_ops.h"

namespace tvm_ipc::nccl {

class Communicators {
 public:
  /*! \brief Create the first communicator, together with all ranks. */
  Communicators(Rank& rank, std::shared_ptr<cuda::Device> device);
  ~Communicators();
  Communicators(const Communicators&) = delete;
  Communicators& operator=(const Communicators&) = delete;

  /*! \brief A function that makes the NCCL calls of an operation on a stream. */
  using Launch = std::function<Called(Handle, cuda::Stream)>;
  /*! \brief Return the host barrier of a team's members, for their next operation. */
  Gathering Gather(TeamId team);
  /*! \brief Run an operation of a team with more than one member. */
  void Run(Gathering& team, const Descriptor& mine, const Launch& launch);
  /*! \brief Run a message between this rank and another one, without a host barrier. */
  void RunMessage(const Descriptor& mine, int sender, int receiver, const Launch& launch);

  const cuda::Device& device() const { return *device_; }
  /*! \brief Return the ring to other nodes. It exists only in a session with several nodes. */
  InternodeRing& ring() { return *ring_; }
  /*! \brief Return the calling thread's stream. */
  cuda::Stream stream() const;
  /*! \brief Update the world's communicator after a recovery. All ranks call this, with the number
   *         of recoveries. */
  void Follow(uint32_t generation);
  /*! \brief Wait until the device has finished everything that was enqueued; throw its errors. */
  void Settle();
  /*! \brief Throw the error that the watch thread has found, if any. */
  void Check();

 private:
  /*! \brief The state of a team. Only a thread that is in an operation of the team accesses it. */
  struct Entry {
    /*! \brief The communicator, which is replaced only under the lock. */
    std::unique_ptr<Communicator> communicator;
    uint32_t generation = 0;
    /*! \brief The number of collective operations that were enqueued. */
    uint32_t operations = 0;
    /*! \brief The messages sent minus the messages received, each counted as a hash of its two
     *         ranks. The sum over all members is 0 if every message was received. */
    uint64_t messages = 0;
    /*! \brief Whether a graph has operations that one member may end before others begin. */
    bool captured_alone = false;
    cuda::Stream stream = nullptr;
    /*! \brief The event after the last operation; null before the first one. */
    Events::Shared last;
    /*! \brief Whether a CUDA graph has operations of this team. */
    std::atomic<bool> captured{false};
  };

  Entry& Of(Gathering& team);
  void Make(Gathering& team, Entry& entry);
  void Enqueue(Entry& entry, const Descriptor& mine, const std::string& where,
               const Launch& launch);
  static void Capture(Entry& entry, const Descriptor& mine);
  void EndAll();
  void Lose(const Error& error);
  /*! \brief Wait until the device has finished everything on a stream, and all operations. */
  void Await(cuda::Stream on);
  void Watch();
  /*! \brief Shut down the communicators at the end of the watch thread. */
  void Leave();
  /*! \brief Poll the device once. Return whether operations are in flight. */
  bool Look();
  bool capturing(cuda::Stream stream) const;
  /*! \brief Record which stream the worker's thread uses. */
  void SeeStream(cuda::Stream stream);
  /*! \brief Return whether the recorded default stream has unfinished work. */
  bool busy() const;
  /*! \brief End all operations on the device, because the session has stopped. */
  void LoseStopped(const std::string& what);

  Rank& rank_;
  const Library& library_;
  std::shared_ptr<cuda::Device> device_;
  const cuda::Driver& driver_;
  const Limits limits_;
  NodeLayouts layouts_;
  std::optional<InternodeRing> ring_;
  InFlightOps in_flight_ops_;
  /*!
   * \brief Whether ranks are threads of one process. If one of them frees memory, the call waits
   *        for everything that all of them have on their devices, and blocks their launches
   *        meanwhile. So it must not come when some members have launched an operation and others
   *        have not.
   */
  bool meets_ = false;
  uint32_t generation_ = 0;
  /*! \brief The stream that the worker's thread used last, if it is a default stream; otherwise
   *         null, because a program may have destroyed its own stream. */
  std::atomic<cuda::Stream> stream_{nullptr};
  /*! \brief Whether any graph has operations. */
  std::atomic<bool> captured_{false};

  std::mutex mutex_;  // guards the members below
  std::map<const TeamBarrier*, Entry> entries_;
  Entry* world_ = nullptr;
  std::optional<Error> lost_;
  std::atomic<bool> has_lost_{false};
  std::atomic<bool> graphs_lost_{false};

  /*! \brief Held while the watch thread polls. */
  std::mutex look_mutex_;
  std::mutex watch_mutex_;
  std::condition_variable watched_;
  bool something_ = false;
  bool stop_ = false;
  /*! \brief When the watch thread first saw that the session had stopped while operations were in
   *         flight. */
  std::optional<std::chrono::steady_clock::time_point> stopped_;
  std::thread watch_;
};

}  // namespace tvm_ipc::nccl
#endif  // TVM_IPC_NCCL_TEAM_COMMUNICATORS_AND_WATCH_THREAD_H_
