/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file mpi_transport.h
 * \brief Messages between nodes by MPI: node k is rank k.
 *
 * A message that is longer than its receive has room for is an error of the ranks' protocol, which
 * MPI tells. Nothing here waits in MPI: all is begun, and looked at.
 */
#ifndef TVM_IPC_ENGINE_MPI_TRANSPORT_H_
#define TVM_IPC_ENGINE_MPI_TRANSPORT_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/mpi_library.h"
#include "engine/transport.h"

namespace tvm_ipc::engine {

/*! \brief What who has loaded MPI says of it. */
struct MpiWorld {
  /*! \brief Two communicators of the agents: of messages, and of what engines tell each other. */
  MpiHandle messages = 0;
  MpiHandle control = 0;
  /*! \brief MPI_BYTE. */
  MpiHandle byte = 0;
  int any_tag = 0;
  /*! \brief Bytes of a request, and of a status. A message's handle has at most 8. */
  size_t request_bytes = 0;
  size_t status_bytes = 0;
};

class MpiTransport final : public Transport {
 public:
  /*! \param functions Which outlive it. */
  MpiTransport(const MpiFunctions& functions, const MpiWorld& world, int nodes, int node);

  size_t busy() const final { return under_way_.size(); }
  size_t in_turn() const final { return in_turn_; }
  void Start(const WireWork& work) final;
  void Progress(std::vector<Ended>* ended) final;
  bool Flush(uint32_t generation, const std::atomic<bool>& stopped) final;

 private:
  struct UnderWay {
    int rank;
    int request;
    /*! \brief The node that it comes from; -1: it is sent. */
    int source;
    uint64_t bytes;
    bool in_turn;
  };
  /*! \brief What the engines tell each other. */
  struct Counts;

  void Check(const char* call, int result) const;
  uint8_t* Request(size_t i) { return requests_.data() + i * world_.request_bytes; }
  uint8_t* Status(size_t i) { return statuses_.data() + i * world_.status_bytes; }
  bool Receives() const;
  void Tell(Counts* counts, uint32_t generation);
  bool Told(Counts* counts, uint32_t generation);
  void Drop(int node, int64_t sent);

  const MpiFunctions& mpi_;
  const MpiWorld world_;
  const int nodes_;
  const int node_;
  /*! \brief Of each node, how many messages were sent to it, and have come from it. */
  std::vector<int64_t> sent_, came_;
  /*! \brief One for each request, in any order. */
  std::vector<UnderWay> under_way_;
  /*! \brief How many of them go in turn. */
  size_t in_turn_ = 0;
  std::vector<uint8_t> requests_, statuses_;
  std::vector<int> ended_;
  /*! \brief Receives may have been taken back. */
  bool cancelled_ = false;
};

}  // namespace tvm_ipc::engine
#endif  // TVM_IPC_ENGINE_MPI_TRANSPORT_H_
