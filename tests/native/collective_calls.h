/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file collective_calls.h
 * \brief Calls of collectives, with the parameters that they have in programs.
 */
#ifndef TVM_IPC_TESTS_COLLECTIVE_CALLS_H_
#define TVM_IPC_TESTS_COLLECTIVE_CALLS_H_

#include <cstdint>
#include <vector>

#include "core/communication_backend.h"
#include "core/rank_runtime_state.h"

namespace tvm_ipc {

using SplitCounts = std::vector<int64_t>;
using Sources = std::vector<int64_t>;

/*! \brief A norm; `bias` is null for an RMSNorm. */
struct Norm {
  Buffer weight;
  const Buffer* bias;
  double epsilon;
};

/*! \brief Runs collectives on an endpoint. A tensor that a member does not have is null. */
class On {
 public:
  explicit On(Endpoint& endpoint) : endpoint_(endpoint) {}
  explicit On(Rank& rank) : endpoint_(rank.endpoint()) {}

  void AllReduce(const Buffer& send, ReduceKind kind, TeamId team, Strategy strategy, uint8_t flags,
                 const Buffer& recv) const {
    Call call = Of(Collective::kAllReduce, &send, team, flags, &recv);
    call.kind = kind;
    call.strategy = strategy;
    endpoint_.Run(call);
  }
  void AllReduceNorm(const Buffer& send, const Buffer& residual, const Norm& norm, TeamId team,
                     Strategy strategy, uint8_t flags, const Buffer& residual_out,
                     const Buffer& norm_out) const {
    Call call =
        Of(norm.bias == nullptr ? Collective::kAllReduceRmsNorm : Collective::kAllReduceLayerNorm,
           &send, team, flags, &residual_out);
    call.strategy = strategy;
    call.residual = residual;
    call.weight = norm.weight;
    if (norm.bias != nullptr) call.bias = *norm.bias;
    call.epsilon = norm.epsilon;
    call.norm_out = norm_out;
    endpoint_.Run(call);
  }
  void ReduceScatter(const Buffer& send, ReduceKind kind, TeamId team, uint8_t flags,
                     const Buffer& recv) const {
    Call call = Of(Collective::kReduceScatter, &send, team, flags, &recv);
    call.kind = kind;
    endpoint_.Run(call);
  }
  void Reduce(const Buffer& send, ReduceKind kind, int root, TeamId team, uint8_t flags,
              const Buffer* recv) const {
    Call call = Of(Collective::kReduce, &send, team, flags, recv, root);
    call.kind = kind;
    endpoint_.Run(call);
  }
  void AllToAll(const Buffer& send, NumberView parts, TeamId team, uint8_t flags,
                const Buffer& recv) const {
    Call call = Of(Collective::kAllToAll, &send, team, flags, &recv);
    call.layout = parts;
    endpoint_.Run(call);
  }
  void RaggedAllToAll(const Buffer& send, size_t row, const Buffer& counts, TeamId team,
                      uint8_t flags, const Buffer& recv, const Buffer& recv_counts) const {
    Call call = Of(Collective::kRaggedAllToAll, &send, team, flags, &recv);
    call.row = row;
    call.rows = send.count / row;
    call.counts = counts;
    call.recv_counts = recv_counts;
    endpoint_.Run(call);
  }
  void Permute(const Buffer& send, NumberView sources, TeamId team, uint8_t flags,
               const Buffer& recv) const {
    Call call = Of(Collective::kPermute, &send, team, flags, &recv);
    call.layout = sources;
    endpoint_.Run(call);
  }
  void AllGather(const Buffer& send, TeamId team, uint8_t flags, const Buffer& recv) const {
    endpoint_.Run(Of(Collective::kAllGather, &send, team, flags, &recv));
  }
  void Broadcast(const Buffer* send, int root, TeamId team, uint8_t flags,
                 const Buffer& recv) const {
    endpoint_.Run(Of(Collective::kBroadcast, send, team, flags, &recv, root));
  }
  void Scatter(const Buffer* send, int root, TeamId team, uint8_t flags, const Buffer& recv) const {
    endpoint_.Run(Of(Collective::kScatter, send, team, flags, &recv, root));
  }
  void Gather(const Buffer& send, int root, TeamId team, uint8_t flags, const Buffer* recv) const {
    endpoint_.Run(Of(Collective::kGather, &send, team, flags, recv, root));
  }

 private:
  static Call Of(Collective collective, const Buffer* send, TeamId team, uint8_t flags,
                 const Buffer* recv, int root = 0) {
    Call call(collective);
    if (send != nullptr) call.send = *send;
    if (recv != nullptr) call.recv = *recv;
    call.team = team;
    call.flags = flags;
    call.root = root;
    return call;
  }

  Endpoint& endpoint_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_TESTS_COLLECTIVE_CALLS_H_
