/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file communicators.h
 * \brief The communicators of a rank, one for each of its teams, and the thread that watches them.
 *
 * Before NCCL is called, the members of a team meet on the host and compare what they are about to
 * do (gathering.h): NCCL itself would wait for ever, or write wrong data, where they disagree.
 * A team's communicator is made in its first operation, when its members have met anyway, so that
 * nobody else has to come and no order of teams matters.
 *
 * NCCL's kernels wait on the device, where nobody hears of an error or a death. So each operation
 * lies between two events, and a thread looks from time to time what the device has come to. If the
 * session has stopped, or an operation takes longer than the session's deadline, it ends the
 * communicators, which ends their kernels; the worker's thread hears of it in its next call.
 *
 * After an error the members of a team keep their communicator if all of them still have it, and
 * have done the same with it: CUDA graphs that hold operations of it stay right. Otherwise, as when
 * one has sent what nobody has received, they make another one.
 */
#ifndef TVM_IPC_NCCL_COMMUNICATORS_H_
#define TVM_IPC_NCCL_COMMUNICATORS_H_

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
#include "core/group.h"
#include "core/layout.h"
#include "core/wire.h"
#include "driver/device.h"
#include "nccl/communicator.h"
#include "nccl/flights.h"
#include "nccl/gathering.h"

namespace tvm_ipc::nccl {

class Communicators {
 public:
  /*! \brief Meet all ranks, in their first communicator. */
  Communicators(Rank& rank, std::shared_ptr<cuda::Device> device);
  ~Communicators();
  Communicators(const Communicators&) = delete;
  Communicators& operator=(const Communicators&) = delete;

  /*! \brief What is called between the members of a team, on a stream. */
  using Work = std::function<Called(Handle, cuda::Stream)>;
  /*! \brief The members of a team, who are about to do something. */
  Gathering Gather(TeamId team);
  /*! \brief An operation of a team with more than one member. */
  void Run(Gathering& team, const Descriptor& mine, const Work& work);
  /*! \brief A message between two ranks, one of which is this one; they need not meet. */
  void RunMessage(const Descriptor& mine, int sender, int receiver, const Work& work);

  const cuda::Device& device() const { return *device_; }
  /*! \brief By which other nodes are reached; only in a session that has several. */
  RankWire& wire() { return *wire_; }
  /*! \brief The calling thread's stream. */
  cuda::Stream stream() const;
  /*! \brief All ranks are told how often the session has recovered. */
  void Follow(uint32_t generation);
  /*! \brief Wait until the device has done what was enqueued; throw what went wrong. */
  void Settle();
  /*! \brief Throw what the watch has found. */
  void Check();

 private:
  /*! \brief A team's. Only a thread that is in an operation of the team touches it. */
  struct Entry {
    /*! \brief Replaced under the lock. */
    std::unique_ptr<Communicator> communicator;
    uint32_t generation = 0;
    /*! \brief Operations of all members that were enqueued. */
    uint32_t operations = 0;
    /*! \brief Of messages: those that were sent, less those that were received, where each counts
     *         as a hash of its ends. Over all members the sum is 0 if each was received. */
    uint64_t messages = 0;
    /*! \brief Whether a graph has operations that a member may end before others have begun. */
    bool captured_alone = false;
    cuda::Stream stream = nullptr;
    /*! \brief The end of its last operation; null before. */
    Events::Shared last;
    /*! \brief Whether a CUDA graph has some of its operations. */
    std::atomic<bool> captured{false};
  };

  Entry& Of(Gathering& team);
  void Make(Gathering& team, Entry& entry);
  void Enqueue(Entry& entry, const Descriptor& mine, const std::string& where, const Work& work);
  static void Capture(Entry& entry, const Descriptor& mine);
  void EndAll();
  void Lose(const Error& error);
  /*! \brief Wait until the device has done what was enqueued on a stream, and all operations. */
  void Await(cuda::Stream on);
  void Watch();
  /*! \brief The last that the watch does. */
  void Leave();
  /*! \brief One look; whether there is anything to look at. */
  bool Look();
  bool capturing(cuda::Stream stream) const;
  /*! \brief Whether the stream has something to do. */
  bool busy() const;

  Rank& rank_;
  const Library& library_;
  std::shared_ptr<cuda::Device> device_;
  const cuda::Driver& driver_;
  const Limits limits_;
  Layouts layouts_;
  std::optional<RankWire> wire_;
  Flights flights_;
  /*!
   * \brief Whether ranks are threads of one process. A call of one that frees memory waits for what
   *        all of them have on their devices, and keeps the others from adding to that, so it must
   *        not come when some members have begun an operation and others have not.
   */
  bool meets_ = false;
  uint32_t generation_ = 0;
  /*! \brief Where the worker's thread was last seen to work. */
  std::atomic<cuda::Stream> stream_{nullptr};
  /*! \brief Whether any graph has operations. */
  std::atomic<bool> captured_{false};

  std::mutex mutex_;  // of what follows
  std::map<const Meeting*, Entry> entries_;
  Entry* world_ = nullptr;
  std::optional<Error> lost_;
  std::atomic<bool> has_lost_{false};
  std::atomic<bool> graphs_lost_{false};

  /*! \brief Held while the watch looks. */
  std::mutex look_mutex_;
  std::mutex watch_mutex_;
  std::condition_variable watched_;
  bool something_ = false;
  bool stop_ = false;
  /*! \brief When the session was first seen to have stopped while something was on its way. */
  std::optional<std::chrono::steady_clock::time_point> stopped_;
  std::thread watch_;
};

}  // namespace tvm_ipc::nccl
#endif  // TVM_IPC_NCCL_COMMUNICATORS_H_
