/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file engine_wire.h
 * \brief The engine's side of the wire (wire.h): what the ranks of a node have posted, in one
 *        process that has their memory mapped.
 *
 * One thread does this, over and over:
 *
 *   if generation() != flushed(): see to it that nothing of older generations arrives any more, and
 *       that no request is in use; then Flushed(the generation)
 *   Take() some works, and start them
 *   Done() each that has ended
 *   Sleep() if nothing is under way
 */
#ifndef TVM_IPC_CORE_ENGINE_WIRE_H_
#define TVM_IPC_CORE_ENGINE_WIRE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/group.h"
#include "core/wire.h"

namespace tvm_ipc {

/*! \brief A message to start. Nothing in it but numbers. */
struct WireWork {
  /*! \brief Whose request it is, and which: what `Done` is told. */
  int32_t rank;
  int32_t request;
  /*! \brief 1: send it; 0: receive it. */
  int32_t sends;
  /*! \brief To or from which node. */
  int32_t peer;
  int32_t tag;
  uint32_t generation;
  /*! \brief Where its bytes are in this process; of a receive, how many there is room for. */
  uint64_t address;
  uint64_t bytes;
};

class EngineWire {
 public:
  /*! \param segments Of the node's hub. */
  explicit EngineWire(std::shared_ptr<Segments> segments);

  /*! \brief Take what was posted, at most so many; how many there were. */
  size_t Take(WireWork* works, size_t most);
  /*! \brief One of them has ended; `came` is how many bytes it had. */
  void Done(int rank, int request, uint64_t came);
  /*! \brief Sleep until something is posted, or the session has recovered, or it was rung for;
   *         false if the time is over. */
  bool Sleep(std::chrono::nanoseconds most);
  /*! \brief End a sleep; any thread. */
  void Ring() { tvm_ipc::Ring(control_); }

  /*! \brief How often the session has recovered. */
  uint32_t generation() const { return control_.generation.load(std::memory_order_acquire); }
  uint32_t flushed() const { return control_.flushed.load(std::memory_order_relaxed); }
  /*! \brief Ranks may post for this generation. What was posted for older ones is forgotten. */
  void Flushed(uint32_t generation);

  /*! \brief How many nodes there are, and which of them this is. */
  int nodes() const { return control_.num_nodes; }
  int node() const { return control_.NodeOf(control_.first_here); }

 private:
  WireTable& table(int rank) const;

  std::shared_ptr<Segments> segments_;
  Control& control_;
  /*! \brief By rank: how many requests were taken. */
  std::vector<uint32_t> taken_;
  uint32_t heard_ = 0;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_ENGINE_WIRE_H_
