/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file group.h
 * \brief A rank: the teams and links it has, and the threads that act for it.
 */
#ifndef TVM_IPC_CORE_GROUP_H_
#define TVM_IPC_CORE_GROUP_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/arena.h"
#include "core/backend.h"
#include "core/connection.h"
#include "core/control.h"
#include "core/error.h"
#include "core/file.h"
#include "core/link.h"
#include "core/meeting.h"
#include "core/works.h"

namespace tvm_ipc {

/*! \brief The shared memory of a session, mapped once in a process for all its ranks here. */
class Segments {
 public:
  /*!
   * \brief Map, or find the mapping that another rank of this process made.
   * \param token The session's.
   * \param control The control block's file.
   * \param segments The files of the ranks that are here, in rank order.
   */
  static std::shared_ptr<Segments> Map(const std::string& token, int control,
                                       const std::vector<int>& segments);
  ~Segments();
  Segments(const Segments&) = delete;
  Segments& operator=(const Segments&) = delete;

  Control& control() const { return *control_; }
  /*! \brief Null where the rank is elsewhere, or the backend has no segments. */
  uint8_t* base(int rank) const { return bases_[rank]; }
  size_t segment_bytes() const { return segment_bytes_; }

 private:
  Segments() = default;
  Control* control_ = nullptr;
  size_t control_bytes_ = 0;
  size_t segment_bytes_ = 0;
  std::vector<uint8_t*> bases_;
};

/*! \brief A mark that somebody is in an operation; one holder at a time. */
class Busy {
 public:
  /*! \param mark Null where nobody else could be. */
  explicit Busy(std::atomic<uint32_t>* mark) : mark_(mark) {
    if (mark_ == nullptr || mark_->exchange(1, std::memory_order_seq_cst) == 0) return;
    mark_ = nullptr;
    refused_ = true;
  }
  Busy(Busy&& other) noexcept
      : mark_(std::exchange(other.mark_, nullptr)), refused_(other.refused_) {}
  ~Busy() {
    if (mark_ != nullptr) mark_->store(0, std::memory_order_release);
  }

  /*! \brief Whether somebody else holds it. */
  bool refused() const { return refused_; }

 private:
  std::atomic<uint32_t>* mark_;
  bool refused_ = false;
};

/*! \brief One operation of a team, from `Rank::Begin` on: no other thread of the rank is in one. */
struct Turn {
  Meeting& meeting;
  Busy busy;
};

/*! \brief One message of a link, likewise. */
struct Link {
  Busy busy;
  Channel& channel;
  /*! \brief The number of the last packet. */
  uint32_t& packet;
};

/*! \brief One message to or from a rank of another node. */
struct RemoteLink {
  Busy busy;
  /*! \brief Of the session. */
  uint32_t generation;
};

/*!
 * \brief One worker of a session, owned by the worker's thread.
 *
 * Other threads may act for it (`ShareCurrentRank`, `ActFor`), in operations of different teams and
 * links at once; in one of them they take turns, or are refused.
 */
class Rank {
 public:
  /*!
   * \param connection To the controller's hub.
   * \param segment This rank's own file, to commit pages of the arena.
   */
  Rank(int id, std::shared_ptr<Segments> segments, RankOptions options,
       std::shared_ptr<Connection> connection, File segment);
  ~Rank();
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  int id() const { return id_; }
  int num_ranks() const { return num_ranks_; }
  int group_size() const { return group_size_; }
  /*! \brief How many ranks are in a team that there is. */
  int SizeOf(TeamId team) const;
  /*! \brief They, in order. */
  std::vector<int> RanksOf(TeamId team) const;
  /*! \brief This rank's place in a team; throws if it has none. `operation` is for the error. */
  int PlaceIn(TeamId team, const char* operation) const;
  const RankOptions& options() const { return options_; }
  Control& control() const { return segments_->control(); }
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  const std::shared_ptr<Segments>& segments() const { return segments_; }

  /*! \brief An operation of a team is about to start; throws where it must not. */
  Turn Begin(TeamId team);
  /*!
   * \brief The same of a team whose members are on several nodes: those on this node meet. Its
   *        places are those among them, in the team's order.
   */
  Turn BeginAcross(TeamId team);
  /*! \brief A message to or from another rank is about to start, likewise. */
  Link BeginSend(int to);
  Link BeginReceive(int from);
  /*! \brief The same with a rank of another node. */
  RemoteLink BeginRemote(int peer, bool sends);
  /*! \brief Send a question about teams (teams.h); how many there are by now. */
  uint32_t Ask(const std::string& question) const;
  /*! \brief Throw if the session cannot go on; how often it has recovered. */
  uint32_t CheckSession() const;

  /*! \brief The start of this rank's arena. */
  uint8_t* arena_base() const;
  /*! \brief Where [data, data + bytes) lies in this rank's segment, or -1. */
  int64_t OffsetOf(const void* data, size_t bytes) const;

  uint8_t* packet_buffer(int src, int dst, uint32_t packet) const;

  /*! \brief Set once the rank says goodbye; the end of the connection means nothing then. */
  const std::shared_ptr<std::atomic<bool>>& left() const { return left_; }

  /*!
   * \brief Say goodbye to the hub, once, when all works have ended; nobody can act for the rank any
   *        more.
   */
  void Leave();
  /*! \brief From now on several threads act for it. Only a thread that does so may say this. */
  void Share() {
    if (!shared_) shared_ = true;  // others only read it, and see it from when they begin to act
  }

  /*! \brief Whether this is the copy of a rank in a process that was forked off its worker. */
  bool forked() const { return connection_->forked(); }

  /*! \brief End the waits of all ranks, since this one failed. */
  void FailSession();
  Connection& connection() const { return *connection_; }

  /*! \brief Over which it receives; by default there is none. */
  EmulatedLink& link() { return link_; }

  /*! \brief What the rank has posted; what does it starts with the first call. */
  Works& works();
  /*! \brief Returns when all works have ended. */
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

  Meeting& Made(TeamId team);
  const TeamRecord& Record(TeamId team) const;
  Turn Take(Meeting& meeting);
  [[noreturn]] void FailElsewhere(const std::string& what) const;
  Link BeginMessage(const char* verb, int peer, Channel& channel, std::atomic<uint32_t>& busy,
                    Packets& packets);
  /*!
   * \brief Throw where the calling thread acts for the rank and operations only start (streams).
   *
   * What two threads start stands in one stream, in an order that differs between ranks; and a call
   * of one that frees memory waits for what the other has started, which waits for peers.
   */
  void RequireOwnThread() const;
  void CheckThread(uint32_t generation) const;
  void RequireAlone(const Busy& busy, const char* verb, int peer) const;

  int id_;
  int num_ranks_;
  int group_size_;
  std::shared_ptr<Segments> segments_;
  RankOptions options_;
  std::shared_ptr<Connection> connection_;
  std::shared_ptr<std::atomic<bool>> left_ = std::make_shared<std::atomic<bool>>(false);
  bool shared_ = false;
  Meeting world_;
  Meeting group_;
  /*! \brief Those of the teams that were made, by id; null until the first operation. */
  std::unique_ptr<std::atomic<Meeting*>[]> made_;
  std::mutex across_mutex_;
  /*! \brief Of the members on this node alone. */
  std::map<TeamId, std::unique_ptr<Meeting>> across_;
  mutable std::mutex ask_mutex_;
  mutable uint32_t asked_ = 0;
  std::vector<Packets> sent_;
  std::vector<Packets> received_;
  std::shared_ptr<Arena> arena_;
  const Backend* backend_ = nullptr;
  std::unique_ptr<Endpoint> endpoint_;
  EmulatedLink link_;
  std::mutex works_mutex_;
  std::unique_ptr<Works> works_;
};

/*! \brief The rank of the calling thread, nullptr if it has none. */
Rank* CurrentRank();
/*! \brief Give the worker's thread its rank, or take it away with nullptr. */
void SetCurrentRank(std::unique_ptr<Rank> rank);
/*! \brief The calling thread's rank, so that others may act for it too. */
std::shared_ptr<Rank> ShareCurrentRank();
/*! \brief The calling thread, which has none, acts for the rank, until the session recovers. */
void ActFor(std::shared_ptr<Rank> rank);
void StopActing();

/*! \brief Set the reason unless there is one, and wake everybody who waits. */
void Abort(Control& control, AbortReason reason, int rank);
/*! \brief Whether no rank that several threads act for is inside an operation. */
bool Idle(Control& control);
/*! \brief Undo the abort: all start again at step 0. All ranks live, and are idle. */
void StartAgain(Control& control);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_GROUP_H_
