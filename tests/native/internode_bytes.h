/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file internode_bytes.h
 * \brief Collectives of ranks on several nodes, and how many bytes each node has to send to each
 *        other one for them: those that are wanted there, once.
 */
#ifndef TVM_IPC_TESTS_NATIVE_INTERNODE_BYTES_H_
#define TVM_IPC_TESTS_NATIVE_INTERNODE_BYTES_H_

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "collective_calls.h"
#include "core/rank_runtime_state.h"
#include "expect.h"
#include "shm/reduce_in_groups_round_once.h"

namespace tvm_ipc {

class InternodeBytes {
 public:
  enum Action {
    kAllReduce,
    kAllReduceNorm,
    kReduceScatter,
    kReduce,
    kAllGather,
    kBroadcast,
    kScatter,
    kGather,
    kAllToAll,
    kPermute,
    kActs
  };
  /*! \brief There are so many, one for each seed below it. */
  static constexpr uint64_t kCases = kActs * 2 * 2;

  /*! \param nodes The node of each rank. */
  InternodeBytes(uint64_t seed, const std::vector<int>& nodes)
      : act_(static_cast<Action>(seed % kActs)),
        large_(seed / kActs % 2 != 0),
        type_(seed / kActs / 2 % 2 != 0 ? ElementType{4, 16, 1} : ElementType{2, 32, 1}),
        reversed_(large_ == (type_.bits == 16)),
        n_(nodes.size()),
        // Pieces, nodes, lanes and members divide it, so that parts are equal.
        count_(large_ ? 8 * kUnit : kUnit),
        root_(n_ - 1),
        of_(nodes) {
    if (reversed_) std::reverse(of_.begin(), of_.end());
    for (size_t i = 0; i < n_; ++i)
      sources_.push_back(i % 3 == 2 ? -1 : static_cast<int64_t>(i / 2));
  }

  const char* name() const {
    static const char* const names[] = {"allreduce",  "allreduce_norm", "reduce_scatter", "reduce",
                                        "allgather",  "broadcast",      "scatter",        "gather",
                                        "all_to_all", "permute"};
    return names[act_];
  }

  /*! \brief Do it, on a rank. In `reversed` the places are the other way round. */
  void Run(Rank& rank, TeamId reversed) const {
    Endpoint& endpoint = rank.endpoint();
    const TeamId team = reversed_ ? reversed : kWorld;
    const auto id = static_cast<size_t>(rank.id());
    const size_t me = reversed_ ? n_ - 1 - id : id;
    const bool is_root = me == root_;
    const int root = static_cast<int>(root_);
    // Kept, for fresh pages cost more than all of the rest, most of all with ThreadSanitizer.
    static thread_local std::vector<uint8_t> one, two, three, four;
    for (std::vector<uint8_t>* memory : {&one, &two, &three, &four}) {
      if (memory->size() < n_ * count_ * width()) memory->resize(n_ * count_ * width());
    }
    const Buffer send{one.data(), count_, type_}, recv{two.data(), count_, type_};
    const Buffer all{three.data(), n_ * count_, type_};
    switch (act_) {
      case kAllReduce:
        return On(endpoint).AllReduce(send, ReduceKind::kSum, team, Strategy::kAuto, 0, recv);
      case kAllReduceNorm: {
        const Norm norm{{four.data(), kUnit, type_}, nullptr, 1e-5};
        const Buffer out{three.data(), count_, type_}, residual{two.data(), count_, type_};
        const Buffer rows{four.data() + kUnit * width(), count_, type_};
        return On(endpoint).AllReduceNorm(send, residual, norm, team, Strategy::kAuto, 0, out,
                                          rows);
      }
      case kReduceScatter:
        return On(endpoint).ReduceScatter(send, ReduceKind::kSum, team, 0,
                                          {two.data(), count_ / n_, type_});
      case kReduce:
        return On(endpoint).Reduce(send, ReduceKind::kSum, root, team, 0,
                                   is_root ? &recv : nullptr);
      case kAllGather:
        return On(endpoint).AllGather(send, team, 0, all);
      case kBroadcast:
        return On(endpoint).Broadcast(is_root ? &send : nullptr, root, team, 0, recv);
      case kScatter:
        return On(endpoint).Scatter(is_root ? &all : nullptr, root, team, 0, recv);
      case kGather:
        return On(endpoint).Gather(send, root, team, 0, is_root ? &all : nullptr);
      case kAllToAll:
        return On(endpoint).AllToAll({one.data(), n_ * count_, type_}, {}, team, 0, all);
      case kPermute:
        return On(endpoint).Permute(send, sources_, team, 0, recv);
      case kActs:
        break;
    }
  }

  /*! \brief Bytes that a node has to send to another one. */
  size_t Needed(int from, int to, bool flat) const {
    const size_t bytes = count_ * width(), there = Members(to), nodes = Nodes();
    const size_t said = Said(from, flat);
    const int root = of_[root_];
    // Whether each node adds up as much as any other, and says what it came to: fewer bytes.
    size_t most = 0;
    for (int node : of_) most = std::max(most, Said(node, flat));
    const bool divided = large_ && most + width() < nodes * most;
    switch (act_) {
      case kAllReduce:
      case kAllReduceNorm:
        return divided ? count_ / nodes * (said + width()) : count_ * said;
      case kReduceScatter:
        return count_ / n_ * there * said;
      case kReduce:
        if (divided) return count_ / nodes * (said + (to == root ? width() : 0));
        return to == root ? count_ * said : 0;
      case kAllGather:
        return Members(from) * bytes;
      case kBroadcast:
        return from == root ? bytes : 0;
      case kScatter:
        return from == root ? there * bytes : 0;
      case kGather:
        return to == root ? Members(from) * bytes : 0;
      case kAllToAll:
        return Members(from) * there * bytes;
      case kPermute: {
        std::set<int64_t> wanted;
        for (size_t i = 0; i < n_; ++i) {
          const int64_t source = sources_[i];
          if (of_[i] == to && source >= 0 && of_[static_cast<size_t>(source)] == from) {
            wanted.insert(source);
          }
        }
        return wanted.size() * bytes;
      }
      case kActs:
        break;
    }
    return 0;
  }

  /*! \brief Compare with what was sent. */
  void Expect(std::map<std::pair<int, int>, size_t> sent, bool flat) const {
    const std::set<int> nodes(of_.begin(), of_.end());
    for (int from : nodes) {
      for (int to : nodes) {
        if (from == to) continue;
        const size_t found = sent[{from, to}], needed = Needed(from, to, flat);
        EXPECT(found == needed, name(), " of ", count_, " x ", Name(type_), flat ? ", flat" : "",
               reversed_ ? ", reversed" : "", ": node ", from, " of ", nodes.size(), " sent node ",
               to, " ", found, " bytes, not ", needed);
      }
    }
  }

 private:
  static constexpr size_t kUnit = 7680;

  size_t width() const { return type_.bytes(); }
  size_t Members(int node) const {
    return static_cast<size_t>(std::count(of_.begin(), of_.end(), node));
  }
  size_t Nodes() const { return std::set<int>(of_.begin(), of_.end()).size(); }
  size_t Said(int node, bool flat) const {
    return flat ? Members(node) * width() : Partial("test", type_, ReduceKind::kSum).width();
  }

  const Action act_;
  const bool large_;
  const ElementType type_;
  const bool reversed_;
  const size_t n_;
  const size_t count_;
  const size_t root_;
  /*! \brief By place. */
  std::vector<int> of_;
  Sources sources_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_TESTS_NATIVE_INTERNODE_BYTES_H_
