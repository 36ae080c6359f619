/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file collectives_as_packed_functions.h
 * \brief Collectives of the backends as packed functions, with the parameters that
 *        `tvm_ipc/packed_functions` lists.
 */
#ifndef TVM_IPC_DISCO_COLLECTIVES_AS_PACKED_FUNCTIONS_H_
#define TVM_IPC_DISCO_COLLECTIVES_AS_PACKED_FUNCTIONS_H_

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/container/variant.h>
#include <tvm/ffi/optional.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/async_queue.h"
#include "core/communication_backend.h"
#include "core/rank_runtime_state.h"
#include "core/teams.h"
#include "disco/tensor_to_buffer.h"
#include "disco/typed_to_packed_function.h"
#include "disco/worker_session_functions.h"

namespace tvm_ipc {

/*! \brief Convert a program's number to an int; throw if it does not fit. */
inline int IntOf(const char* what, int64_t number) {
  if (number == static_cast<int>(number)) return static_cast<int>(number);
  Fail(kind::kValue, what, ": the number ", number, " is beyond those that it takes");
}

/*! \brief Return the reduction with a number. `what` names the collective in errors. */
inline ReduceKind ReduceKindOf(const char* what, int64_t kind) {
  if (kind >= 0 && kind < kNumReduceKinds) return static_cast<ReduceKind>(kind);
  Fail(kind::kValue, what, ": there is no reduction ", kind,
       "; 0 to 8 are sum, prod, min, max, avg, band, bor, bxor, tree_sum");
}

/*! \brief A team: its id, or teams of equal size, which means the team with this rank. */
using TeamArgument = tvm::ffi::Variant<int64_t, tvm::ffi::Shape>;

/*! \brief Return the team of this rank; kNoTeam if the argument lists teams without it. */
inline TeamId FindTeamFor(const Rank& rank, const TeamArgument& team) {
  AsyncQueue* async_queue = AsyncQueue::OfThisThread();
  auto own = [&](TeamId id) { return async_queue == nullptr ? id : async_queue->TeamFor(id); };
  if (auto division = team.as<tvm::ffi::Shape>()) {
    const std::vector<int64_t> numbers(division->begin(), division->end());
    const TeamId found = TeamIn(rank, numbers);
    return found == kNoTeam ? kNoTeam : own(found);
  }
  const int64_t id = team.get<int64_t>();
  if (id >= 0 && id < kFirstTeam + int64_t{kMaxTeams}) return own(static_cast<TeamId>(id));
  Fail(kind::kValue, "there is no team ", id);
}

/*! \brief Return the team of this rank, for functions that only members may call. */
inline TeamId TeamFor(const Rank& rank, const char* operation, const TeamArgument& team) {
  const TeamId found = FindTeamFor(rank, team);
  if (found != kNoTeam) return found;
  const auto teams = team.get<tvm::ffi::Shape>();
  std::string ranks;
  for (size_t i = 1; i < teams.size(); ++i) {
    ranks += (i == 1 ? "" : ", ") + std::to_string(teams[i]);
  }
  Fail(kind::kValue, operation, ": teams of the ranks [", ranks, "]: rank ", rank.id(),
       " is in none; only members may call it");
}

/*! \brief Return the calling thread's rank; throw unless its session runs the backend. nullptr
 *         accepts any backend. */
inline Rank& RequireRankOf(const Backend* backend) {
  Rank& rank = RequireRank();
  if (backend != nullptr && backend != &rank.backend()) {
    Fail(kind::kValue, "this function is one of the backend ", backend->name(),
         ", and the session runs ", rank.backend().name());
  }
  return rank;
}

/*!
 * \brief The parameters of collectives, with the names that core/collective_list.h has for them.
 *
 * `Type` is the type of the argument, and `Set` writes it to its field of a call.
 */
namespace parameter {

inline constexpr char kSend[] = "send", kRecv[] = "recv", kResidual[] = "residual",
                      kWeight[] = "weight", kBias[] = "bias", kResidualOut[] = "residual_out",
                      kNormOut[] = "norm_out", kCounts[] = "counts", kRecvCounts[] = "recv_counts";

template <Buffer Call::* field, const char* name>
struct Tensor {
  using Type = tvm::ffi::TensorView;
  static void Set(Call& call, const Rank& rank, const Type& tensor) {
    call.*field = ViewBuffer(rank, tensor, Name(call.collective), ": ", name);
  }
};
using Send = Tensor<&Call::send, kSend>;
using Recv = Tensor<&Call::recv, kRecv>;
using Residual = Tensor<&Call::residual, kResidual>;
using Weight = Tensor<&Call::weight, kWeight>;
using Bias = Tensor<&Call::bias, kBias>;
using ResidualOut = Tensor<&Call::recv, kResidualOut>;
using NormOut = Tensor<&Call::norm_out, kNormOut>;
using Counts = Tensor<&Call::counts, kCounts>;
using RecvCounts = Tensor<&Call::recv_counts, kRecvCounts>;

/*! \brief A tensor whose first axis counts rows. */
struct SendRows {
  using Type = tvm::ffi::TensorView;
  static void Set(Call& call, const Rank& rank, const Type& tensor) {
    Send::Set(call, rank, tensor);
    if (tensor.ndim() == 0) {
      Fail(kind::kValue, Name(call.collective), ": send has no axes; its first axis counts rows");
    }
    call.rows = static_cast<size_t>(tensor.size(0));
    call.row = 1;
    for (int axis = 1; axis < tensor.ndim(); ++axis) {
      call.row *= static_cast<size_t>(tensor.size(axis));
    }
  }
};

/*! \brief A tensor that the other members need not have. */
template <typename Whole>
struct OfRoot {
  using Type = tvm::ffi::Optional<tvm::ffi::Tensor>;
  static void Set(Call& call, const Rank& rank, const Type& tensor) {
    if (tensor.has_value()) Whole::Set(call, rank, tensor.value().GetDLTensorPtr());
  }
};
using SendOfRoot = OfRoot<Send>;
using RecvOfRoot = OfRoot<Recv>;

struct Kind {
  using Type = int64_t;
  static void Set(Call& call, const Rank&, Type kind) {
    call.kind = ReduceKindOf(Name(call.collective), kind);
  }
};

struct Root {
  using Type = int64_t;
  static void Set(Call& call, const Rank&, Type root) {
    call.root = IntOf(Name(call.collective), root);
  }
};

struct Team {
  using Type = TeamArgument;
  static void Set(Call& call, const Rank& rank, const Type& team) {
    call.team = FindTeamFor(rank, team);
  }
};

struct AllReduceStrategy {
  using Type = int64_t;
  static void Set(Call& call, const Rank&, Type strategy) {
    if (strategy < 0 || strategy > 3) {
      Fail(kind::kValue, Name(call.collective), ": there is no strategy ", strategy,
           "; 0 to 3 are ring, one-shot, two-shot, auto");
    }
    call.strategy = static_cast<Strategy>(strategy);
  }
};

struct Flags {
  using Type = int64_t;
  static void Set(Call& call, const Rank&, Type flags) {
    if ((flags & ~int64_t{kNoExitBarrier}) != 0) {
      Fail(kind::kValue, Name(call.collective), ": unknown flags ", flags);
    }
    call.flags = static_cast<uint8_t>(flags);
  }
};

struct Splits {
  using Type = tvm::ffi::Shape;
  static void Set(Call& call, const Rank&, const Type& numbers) {
    call.layout = NumberView(numbers.data(), numbers.size());
  }
};
using Sources = Splits;

struct Epsilon {
  using Type = double;
  static void Set(Call& call, const Rank&, Type epsilon) { call.epsilon = epsilon; }
};

}  // namespace parameter

/*!
 * \brief A collective of the calling thread's endpoint, as a packed function.
 *
 * If it belongs to a backend, it fails in sessions of other backends.
 */
template <Collective collective, typename... Parameters>
struct AsPacked {
  static constexpr const Signature& kSignature =
      SignatureOf<void, typename Parameters::Type...>::kValue;

  static void Run(const PackedCall& packed, tvm::ffi::Any* result) {
    Run(packed, std::index_sequence_for<Parameters...>());
  }

 private:
  template <size_t... I>
  static void Run(const PackedCall& packed, std::index_sequence<I...>) {
    // The call views numbers of the arguments. Braces evaluate them in order.
    const std::tuple<typename Parameters::Type...> arguments{
        ArgumentOf<typename Parameters::Type>(packed, I)...};
    const Rank& rank = RequireRankOf(packed.backend);
    Call call(collective);
    (Parameters::Set(call, rank, std::get<I>(arguments)), ...);
    if (call.team != kNoTeam) return rank.endpoint().Run(call);
    // A rank outside of the teams does not take part: its results are zeros.
    if (TraitsOf(collective).relation == Relation::kNorm) {
      Fail(kind::kValue, Name(collective), ": rank ", rank.id(),
           " is in none of the teams; only members may call it");
    }
    for (const Buffer* result : {&call.recv, &call.norm_out}) {
      if (result->exists()) rank.endpoint().Clear(*result);
    }
  }
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_COLLECTIVES_AS_PACKED_FUNCTIONS_H_
