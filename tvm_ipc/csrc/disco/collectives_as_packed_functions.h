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
inline int IntOf(const std::string& what, int64_t number) {
  if (number == static_cast<int>(number)) return static_cast<int>(number);
  Fail(kind::kValue, what, ": the number ", number, " is beyond those that it takes");
}

/*! \brief Return the reduction with a number. `what` names the collective in errors. */
inline ReduceKind ReduceKindOf(const std::string& what, int64_t kind) {
  if (kind >= 0 && kind <= 4) return static_cast<ReduceKind>(kind);
  Fail(kind::kValue, what, ": there is no reduction ", kind,
       "; 0 to 4 are sum, prod, min, max, avg");
}

inline Strategy StrategyOf(const std::string& what, int64_t strategy) {
  if (strategy >= 0 && strategy <= 3) return static_cast<Strategy>(strategy);
  Fail(kind::kValue, what, ": there is no strategy ", strategy,
       "; 0 to 3 are ring, one-shot, two-shot, auto");
}

inline uint8_t FlagsOf(const std::string& what, int64_t flags) {
  if ((flags & ~int64_t{kNoExitBarrier}) == 0) return static_cast<uint8_t>(flags);
  Fail(kind::kValue, what, ": unknown flags ", flags);
}

/*! \brief A team: its id, or a partition of all ranks, which means the team with this rank. */
using TeamArgument = tvm::ffi::Variant<int64_t, tvm::ffi::Shape>;

inline TeamId TeamFor(const Rank& rank, const TeamArgument& team) {
  AsyncQueue* async_queue = AsyncQueue::OfThisThread();
  auto own = [&](TeamId id) { return async_queue == nullptr ? id : async_queue->TeamFor(id); };
  if (auto division = team.as<tvm::ffi::Shape>()) {
    const std::vector<int64_t> numbers(division->begin(), division->end());
    return own(TeamIn(rank, numbers));
  }
  const int64_t id = team.get<int64_t>();
  if (id >= 0 && id < kFirstTeam + int64_t{kMaxTeams}) return own(static_cast<TeamId>(id));
  Fail(kind::kValue, "there is no team ", id);
}

/*! \brief Converts an argument of a packed function, a `Type`, to a parameter of a collective. */
template <typename Parameter>
struct Passed;

template <>
struct Passed<int> {
  using Type = int64_t;
  Passed(const Rank& rank, const std::string& what, bool first, int64_t number)
      : value(IntOf(what, number)) {}
  int value;
};

template <>
struct Passed<TeamId> {
  using Type = TeamArgument;
  Passed(const Rank& rank, const std::string& what, bool first, const Type& team)
      : value(TeamFor(rank, team)) {}
  TeamId value;
};

template <>
struct Passed<ReduceKind> {
  using Type = int64_t;
  Passed(const Rank& rank, const std::string& what, bool first, int64_t number)
      : value(ReduceKindOf(what, number)) {}
  ReduceKind value;
};

template <>
struct Passed<Strategy> {
  using Type = int64_t;
  Passed(const Rank& rank, const std::string& what, bool first, int64_t number)
      : value(StrategyOf(what, number)) {}
  Strategy value;
};

template <>
struct Passed<uint8_t> {
  using Type = int64_t;
  Passed(const Rank& rank, const std::string& what, bool first, int64_t number)
      : value(FlagsOf(what, number)) {}
  uint8_t value;
};

template <>
struct Passed<const SplitCounts&> {
  using Type = tvm::ffi::Shape;
  Passed(const Rank& rank, const std::string& what, bool first, const Type& shape)
      : value(shape.begin(), shape.end()) {}
  SplitCounts value;
};

/*! \brief The first parameter of a collective is its input; any other tensor is its output. */
template <>
struct Passed<const Buffer&> {
  using Type = tvm::ffi::TensorView;
  Passed(const Rank& rank, const std::string& what, bool first, const Type& tensor)
      : value(ViewBuffer(rank, (what + (first ? ": send" : ": recv")).c_str(), tensor)) {}
  Buffer value;
};

/*! \brief A tensor that some members do not have. */
template <>
struct Passed<const Buffer*> {
  using Type = tvm::ffi::Optional<tvm::ffi::Tensor>;
  Passed(const Rank& rank, const std::string& what, bool first, const Type& tensor) {
    if (!tensor.has_value()) return;
    buffer = Passed<const Buffer&>(rank, what, first, tensor.value().GetDLTensorPtr()).value;
    value = &buffer;
  }
  Passed(const Passed& other) : buffer(other.buffer), value(other.value ? &buffer : nullptr) {}
  Buffer buffer;
  const Buffer* value = nullptr;
};

template <auto collective>
struct AsPacked;

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
 * \brief A collective of the calling thread's endpoint, as a packed function.
 *
 * If it belongs to a backend, it fails in sessions of other backends.
 */
template <typename... Parameters, void (Endpoint::*collective)(Parameters...)>
struct AsPacked<collective> {
  static constexpr const Signature& kSignature =
      SignatureOf<void, typename Passed<Parameters>::Type...>::kValue;

  static void Run(const PackedCall& call, tvm::ffi::Any* result) {
    auto with_rank = [&](typename Passed<Parameters>::Type... arguments) {
      Rank& rank = RequireRankOf(call.backend);
      bool first = true;
      // Braces evaluate the arguments in order.
      std::tuple<Passed<Parameters>...> passed{Passed<Parameters>(
          rank, call.what, std::exchange(first, false), std::move(arguments))...};
      std::apply([&](auto&... one) { (rank.endpoint().*collective)(one.value...); }, passed);
    };
    CallWithArguments<void, typename Passed<Parameters>::Type...>(
        call, result, with_rank, std::index_sequence_for<Parameters...>());
  }
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_COLLECTIVES_AS_PACKED_FUNCTIONS_H_
