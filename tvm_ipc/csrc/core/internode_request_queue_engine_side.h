/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file internode_request_queue_engine_side.h
 * \brief The engine's side of the internode ring (internode_request_queue.h): the requests of all
 * ranks of a node, in a process that maps their memory.
 *
 * One thread runs this loop:
 *
 *   if generation() != flushed(): ensure that no message of an older generation can arrive and that
 *       no request is in use; then call Flushed(the generation)
 *   Take() some requests, and start them
 *   Done() for each that has ended
 *   Sleep() if nothing is in flight
 */
#ifndef TVM_IPC_CORE_INTERNODE_REQUEST_QUEUE_ENGINE_SIDE_H_
#define TVM_IPC_CORE_INTERNODE_REQUEST_QUEUE_ENGINE_SIDE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/internode_request_queue.h"
#include "core/rank_runtime_state.h"

namespace tvm_ipc {

/*! \brief A message to start. */
struct RingMessage {
  /*! \brief The rank and its request, for `Done`. */
  int32_t rank;
  int32_t request;
  /*! \brief 1: send; 0: receive. */
  int32_t sends;
  /*! \brief The other node. */
  int32_t peer;
  int32_t tag;
  uint32_t generation;
  /*! \brief The address in this process, and the length; for a receive the capacity. */
  uint64_t address;
  uint64_t bytes;
};

class EngineRing {
 public:
  /*! \param segments The memory of the node's session server. */
  explicit EngineRing(std::shared_ptr<Segments> segments);

  /*! \brief Take at most `most` posted requests; return how many. */
  size_t Take(RingMessage* messages, size_t most);
  /*! \brief Mark a request as done; `received_bytes` is how many bytes it had. */
  void Done(int rank, int request, uint64_t received_bytes);
  /*! \brief Sleep until a request is posted, the session has recovered, or WakeEngine is called;
   *         return false after the time. */
  bool Sleep(std::chrono::nanoseconds most);
  /*! \brief End a sleep; any thread may call this. */
  void WakeEngine() { tvm_ipc::WakeEngine(control_); }

  /*! \brief Return the session's generation, the number of recoveries. */
  uint32_t generation() const { return control_.generation.load(std::memory_order_acquire); }
  uint32_t flushed() const { return control_.flushed.load(std::memory_order_relaxed); }
  /*! \brief Let ranks post for this generation; drop requests of older ones. */
  void Flushed(uint32_t generation);

  /*! \brief Return the number of nodes, and the index of this one. */
  int nodes() const { return control_.num_nodes; }
  int node() const { return control_.NodeOf(control_.first_here); }

 private:
  RingTable& table(int rank) const;

  std::shared_ptr<Segments> segments_;
  Control& control_;
  /*! \brief The number of requests taken from each rank. */
  std::vector<uint32_t> taken_;
  uint32_t last_bell_ = 0;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_INTERNODE_REQUEST_QUEUE_ENGINE_SIDE_H_
