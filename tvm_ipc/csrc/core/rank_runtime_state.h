/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file rank_runtime_state.h
 * \brief A rank of a session: its teams and channels, and the threads that act for it.
 */
#ifndef TVM_IPC_CORE_RANK_RUNTIME_STATE_H_
#define TVM_IPC_CORE_RANK_RUNTIME_STATE_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/arena_allocator.h"
#include "core/async_queue.h"
#include "core/collective_step_barrier.h"
#include "core/communication_backend.h"
#include "core/emulated_link.h"
#include "core/error.h"
#include "core/file_descriptor_and_memory_file.h"
#include "core/shared_memory_layout.h"
#include "core/worker_socket_to_session_server.h"

namespace tvm_ipc {

/*! \brief The shared memory of a session. A process maps it once for all its ranks. */
class Segments {
 public:
  /*!
   * \brief Map the memory, or return the mapping that another rank of this process has made.
   * \param token The session's token, which identifies the mapping.
   * \param control The file of the control block.
   * \param segments The files of the ranks on this node, in rank order.
   */
  static std::shared_ptr<Segments> Map(const std::string& token, int control,
                                       const std::vector<int>& segments);
  ~Segments();
  Segments(const Segments&) = delete;
  Segments& operator=(const Segments&) = delete;

  Control& control() const { return *control_; }
  /*! \brief Return the start of a rank's segment; null if the rank is on another node, or the
   *         backend has no segments. */
  uint8_t* base(int rank) const { return bases_[rank]; }
  size_t segment_bytes() const { return segment_bytes_; }

 private:
  Segments() = default;
  Control* control_ = nullptr;
  size_t control_bytes_ = 0;
  size_t segment_bytes_ = 0;
  std::vector<uint8_t*> bases_;
};

/*! \brief Marks an operation as in use while it lives; one holder at a time. */
class InUseFlag {
 public:
  /*! \param mark Null if no other thread can be in the operation. */
  explicit InUseFlag(std::atomic<uint32_t>* mark) : mark_(mark) {
    if (mark_ == nullptr || mark_->exchange(1, std::memory_order_seq_cst) == 0) return;
    mark_ = nullptr;
    refused_ = true;
  }
  InUseFlag(InUseFlag&& other) noexcept
      : mark_(std::exchange(other.mark_, nullptr)), refused_(other.refused_) {}
  ~InUseFlag() {
    if (mark_ != nullptr) mark_->store(0, std::memory_order_release);
  }

  /*! \brief Return whether another thread holds the mark. */
  bool refused() const { return refused_; }

 private:
  std::atomic<uint32_t>* mark_;
  bool refused_ = false;
};

/*! \brief One operation of a team, from `Rank::Begin` on. It excludes the rank's other threads. */
struct OpGuard {
  TeamBarrier& barrier;
  InUseFlag in_use;
};

/*! \brief One message to or from a rank of this node. It excludes the rank's other threads. */
struct Link {
  InUseFlag in_use;
  Channel& channel;
  /*! \brief The number of the last packet. */
  uint32_t& packet;
};

/*! \brief One message to or from a rank of another node. */
struct RemoteLink {
  InUseFlag in_use;
  /*! \brief The session's generation. */
  uint32_t generation;
};

/*!
 * \brief One worker of a session, owned by the worker's thread.
 *
 * Other threads may act for it (`ShareCurrentRank`, `ActFor`). They may be in operations of
 * different teams and channels at the same time. A second thread in the same one is an error.
 */
class Rank {
 public:
  /*!
   * \param connection The connection to the session server.
   * \param segment This rank's own file, used to commit pages of the arena.
   */
  Rank(int id, std::shared_ptr<Segments> segments, RankOptions options,
       std::shared_ptr<Connection> connection, File segment);
  ~Rank();
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  int id() const { return id_; }
  int num_ranks() const { return num_ranks_; }
  int group_size() const { return group_size_; }
  /*! \brief Return the size of a team; 0 if there is no such team. */
  int SizeOf(TeamId team) const;
  /*! \brief Return the ranks of a team, in order. */
  std::vector<int> RanksOf(TeamId team) const;
  /*! \brief Return this rank's index in a team; throw if it is no member. `operation` is for the
   *         error. */
  int TeamIndex(TeamId team, const char* operation) const;
  /*! \brief Return this rank's index in a team; -1 if it is no member, or there is no such team. */
  int FindTeamIndex(TeamId team) const;
  const RankOptions& options() const { return options_; }
  /*! \brief Set `RankOptions::queues_for_graphs`; only before the backend starts. */
  void set_queues_for_graphs(int value) { options_.queues_for_graphs = value; }
  Control& control() const { return segments_->control(); }
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  const std::shared_ptr<Segments>& segments() const { return segments_; }

  /*! \brief Begin an operation of a team; throw if it cannot start. */
  OpGuard Begin(TeamId team);
  /*!
   * \brief Begin an operation of a team whose members are on several nodes.
   *
   * The barrier is that of the members on this node; its indices count only these, in team order.
   */
  OpGuard BeginInternode(TeamId team);
  /*! \brief Begin a message to or from another rank of this node; throw if it cannot start. */
  Link BeginSend(int to);
  Link BeginReceive(int from);
  /*! \brief Begin a message to or from a rank of another node. */
  RemoteLink BeginRemote(int peer, bool sends);
  /*! \brief Send a team request (teams.h); return how many this rank has sent. */
  uint32_t SendTeamRequest(const std::string& request) const;
  /*! \brief Throw if the session is aborted; return its generation, the number of recoveries. */
  uint32_t CheckSession() const;

  /*! \brief Return the start of this rank's arena. */
  uint8_t* arena_base() const;
  /*! \brief Return the offset of [data, data + bytes) in this rank's segment; -1 if it is not in
   *         the arena. */
  int64_t OffsetOf(const void* data, size_t bytes) const;

  uint8_t* packet_buffer(int src, int dst, uint32_t packet) const;

  /*! \brief Return a flag that is set once the rank leaves the session. From then on the end of the
   *         connection is not a death. */
  const std::shared_ptr<std::atomic<bool>>& left() const { return left_; }

  /*!
   * \brief Leave the session, once all asynchronous operations have ended. Afterwards no thread can
   *        act for the rank.
   */
  void Leave();
  /*! \brief Let several threads act for the rank. Only a thread that acts for it may call this. */
  void Share() {
    if (!shared_) shared_ = true;  // other threads only read it, once they have begun to act
  }

  /*! \brief Return whether this is a copy of the rank in a process that its worker has forked. */
  bool in_forked_child() const { return connection_->in_forked_child(); }

  /*! \brief Abort the session because this rank failed, which ends the waits of all ranks. */
  void FailSession();
  Connection& connection() const { return *connection_; }

  /*! \brief Return the emulated link over which the rank receives; off by default. */
  EmulatedLink& link() { return link_; }

  /*! \brief Return the rank's asynchronous operations; the first call makes the queue. */
  AsyncQueue& async_queue();
  /*! \brief Return when all asynchronous operations have ended. */
  void Drain();

  /*! \brief Start the backend, which ends with the rank. */
  void Start(const Backend& backend) {
    backend_ = &backend;
    endpoint_ = backend.Start(*this);
  }
  bool started() const { return endpoint_ != nullptr; }
  const Backend& backend() const { return *backend_; }
  Endpoint& endpoint() const { return *endpoint_; }

 private:
  struct Packets {
    uint32_t last = 0;
    uint32_t generation = 0;
  };

  TeamBarrier& UserTeam(TeamId team);
  const TeamRecord& Record(TeamId team) const;
  OpGuard Acquire(TeamBarrier& barrier);
  [[noreturn]] void FailInternode(const std::string& what) const;
  Link BeginMessage(const char* verb, int peer, Channel& channel, std::atomic<uint32_t>& in_use,
                    Packets& packets);
  /*!
   * \brief Throw if the calling thread acts for another thread's rank on a backend with streams.
   *
   * There operations of two threads would enter one stream in an order that differs between ranks.
   * And a call that frees memory would wait for the other thread's operations, which wait for
   * peers.
   */
  void RequireOwnThread() const;
  void CheckThread(uint32_t generation) const;
  void RequireExclusive(const InUseFlag& in_use, const char* verb, int peer) const;

  int id_;
  int num_ranks_;
  int group_size_;
  std::shared_ptr<Segments> segments_;
  RankOptions options_;
  std::shared_ptr<Connection> connection_;
  std::shared_ptr<std::atomic<bool>> left_ = std::make_shared<std::atomic<bool>>(false);
  bool shared_ = false;
  TeamBarrier world_;
  TeamBarrier group_;
  /*! \brief The barriers of user-created teams, by id; null until the first operation. */
  std::unique_ptr<std::atomic<TeamBarrier*>[]> user_teams_;
  std::mutex internode_mutex_;
  /*! \brief The barriers of the members on this node, for teams of several nodes. */
  std::map<TeamId, std::unique_ptr<TeamBarrier>> internode_;
  mutable std::mutex team_request_mutex_;
  mutable uint32_t team_requests_ = 0;
  std::vector<Packets> sent_;
  std::vector<Packets> received_;
  std::shared_ptr<Arena> arena_;
  const Backend* backend_ = nullptr;
  std::unique_ptr<Endpoint> endpoint_;
  EmulatedLink link_;
  std::mutex async_queue_mutex_;
  std::unique_ptr<AsyncQueue> async_queue_;
};

/*! \brief Return the rank of the calling thread; nullptr if it has none. */
Rank* CurrentRank();
/*! \brief Give the worker's thread its rank; nullptr takes it away. */
void SetCurrentRank(std::unique_ptr<Rank> rank);
/*! \brief Return the calling thread's rank, for other threads to act for it. */
std::shared_ptr<Rank> ShareCurrentRank();
/*! \brief Let the calling thread, which has no rank, act for this one until the session recovers.
 */
void ActFor(std::shared_ptr<Rank> rank);
void StopActing();

/*! \brief Set the abort reason unless there is one, and wake all waiting ranks. */
void Abort(Control& control, AbortReason reason, int rank);
/*! \brief Return whether no rank with several threads is inside an operation. */
bool IsIdle(Control& control);
/*! \brief Undo the abort and begin the next generation at step 0. All ranks must be alive and idle.
 */
void ResetSession(Control& control);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_RANK_RUNTIME_STATE_H_
