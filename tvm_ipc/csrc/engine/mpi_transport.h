/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file mpi_transport.h
 * \brief Messages between nodes by MPI: node k is rank k.
 *
 * A message that is longer than its receive's buffer is an error of the ranks' protocol, which MPI
 * reports. Nothing here blocks in MPI: all operations are non-blocking and polled.
 */
#ifndef TVM_IPC_ENGINE_MPI_TRANSPORT_H_
#define TVM_IPC_ENGINE_MPI_TRANSPORT_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/mpi_library.h"
#include "engine/transport.h"

namespace tvm_ipc::engine {

/*! \brief Facts about MPI, from the code that has loaded it. */
struct MpiWorld {
  /*! \brief Two communicators of the agents: for messages, and for control data of the engines. */
  MpiHandle messages = 0;
  MpiHandle control = 0;
  /*! \brief MPI_BYTE. */
  MpiHandle byte = 0;
  int any_tag = 0;
  /*! \brief Bytes of a request and of a status. A message handle has at most 8. */
  size_t request_bytes = 0;
  size_t status_bytes = 0;
};

class MpiTransport final : public Transport {
 public:
  /*! \param functions Must outlive the transport. */
  MpiTransport(const MpiFunctions& functions, const MpiWorld& world, int nodes, int node);

  size_t in_flight() const final { return in_flight_.size(); }
  size_t sequential() const final { return scheduled_; }
  void Start(const RingMessage& message) final;
  void Progress(std::vector<Ended>* ended) final;
  bool Flush(uint32_t generation, const std::atomic<bool>& stopped) final;

 private:
  struct InFlight {
    int rank;
    int request;
    /*! \brief The source node of a receive; -1 for a send. */
    int source;
    uint64_t bytes;
    bool sequential;
  };
  /*! \brief The exchange of message counts between the engines. */
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
  /*! \brief For each node, how many messages were sent to it and received from it. */
  std::vector<int64_t> sent_, came_;
  /*! \brief The messages in flight, one for each request, in any order. */
  std::vector<InFlight> in_flight_;
  /*! \brief The number of sequential ones among them. */
  size_t scheduled_ = 0;
  std::vector<uint8_t> requests_, statuses_;
  std::vector<int> ended_;
  /*! \brief Whether receives may have been cancelled. */
  bool cancelled_ = false;
};

}  // namespace tvm_ipc::engine
#endif  // TVM_IPC_ENGINE_MPI_TRANSPORT_H_
