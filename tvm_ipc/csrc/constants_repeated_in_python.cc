/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file constants_repeated_in_python.cc
 * \brief The library's values of the constants that Python repeats.
 *
 * Every enumerator is a case of a switch, so that the compiler warns if one is missing.
 */
#include "constants_repeated_in_python.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/extra/json.h>

#include "backends.h"
#include "blas/kernels_complementing_blas.h"
#include "blas/run_matmul_piece.h"
#include "core/arena_allocator.h"
#include "core/communication_backend.h"
#include "core/worker_status_and_error_table.h"

namespace tvm_ipc {

namespace {

namespace ffi = tvm::ffi;
using Map = ffi::Map<ffi::String, ffi::Any>;

const char* PythonName(ReduceKind kind) {
  switch (kind) {
    case ReduceKind::kSum:
      return "SUM";
    case ReduceKind::kProd:
      return "PROD";
    case ReduceKind::kMin:
      return "MIN";
    case ReduceKind::kMax:
      return "MAX";
    case ReduceKind::kAvg:
      return "AVG";
    case ReduceKind::kBand:
      return "BAND";
    case ReduceKind::kBor:
      return "BOR";
    case ReduceKind::kBxor:
      return "BXOR";
    case ReduceKind::kTreeSum:
      return "TREE_SUM";
  }
  return nullptr;
}

const char* PythonName(Strategy strategy) {
  switch (strategy) {
    case Strategy::kDefault:
      return "DEFAULT";
    case Strategy::kOneShot:
      return "ONESHOT";
    case Strategy::kTwoShot:
      return "TWOSHOT";
    case Strategy::kAuto:
      return "AUTO";
  }
  return nullptr;
}

const char* PythonName(StepKind step) {
  switch (step) {
    case kStepAdd:
      return "ADD";
    case kStepMultiply:
      return "MULTIPLY";
    case kStepRelu:
      return "RELU";
    case kStepGelu:
      return "GELU";
    case kStepGeluTanh:
      return "GELU_TANH";
    case kStepSilu:
      return "SILU";
  }
  return nullptr;
}

const char* PythonName(WorkerTable::Progress progress) {
  switch (progress) {
    case WorkerTable::Progress::kDone:
      return "DONE";
    case WorkerTable::Progress::kPending:
      return "PENDING";
    case WorkerTable::Progress::kAttention:
      return "ATTENTION";
  }
  return nullptr;
}

/*! \brief Return the enumerators of an enumeration, whose numbers have no gaps. */
template <typename Enumeration>
Map NumbersOf(int first = 0) {
  Map numbers;
  for (int number = first;; ++number) {
    const char* name = PythonName(static_cast<Enumeration>(number));
    if (name == nullptr) return numbers;
    numbers.Set(name, number);
  }
}

/*! \brief Return the types that each reduction supports. */
Map ReducedTypes() {
  Map reduced;
  for (int kind = 0; const char* name = PythonName(static_cast<ReduceKind>(kind)); ++kind) {
    ffi::Array<ffi::Any> types;
    for (int code = 0; code < 32; ++code) {
      for (int bits = 1; bits <= 128; ++bits) {
        const ElementType type{static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
        if (FindBackend("auto").Reduces(type, static_cast<ReduceKind>(kind))) {
          types.push_back(ffi::String(Name(type)));
        }
      }
    }
    reduced.Set(name, types);
  }
  return reduced;
}

}  // namespace

ffi::String Numbers() {
  Map flags;
  flags.Set("NONE", 0);
  flags.Set("NO_EXIT_BARRIER", kNoExitBarrier);
  Map teams;
  teams.Set("WORLD", kWorld);
  teams.Set("GROUP", kGroup);
  ffi::Array<ffi::Any> backends;
  for (const Backend* backend : Backends()) {
    const int64_t device = backend->capabilities().device_type;
    backends.push_back(ffi::Array<ffi::Any>{ffi::String(backend->name()), device});
  }
  Map json;
  json.Set("BACKENDS", backends);
  json.Set("MAX_WORKERS", kMaxRanks);
  json.Set("MAX_STEPS", kMaxSteps);
  json.Set("MAX_EXPOSED", static_cast<int64_t>(kMaxExposed));
  json.Set("MAX_STREAMS", kMaxStreams);
  json.Set("IPC_MEMORY", ffi::String(kIpcMemory));
  json.Set("Team", teams);
  json.Set("AllReduceStrategy", NumbersOf<Strategy>());
  json.Set("ReduceKind", NumbersOf<ReduceKind>());
  json.Set("CollectiveFlag", flags);
  json.Set("Epilogue", NumbersOf<StepKind>(kStepAdd));
  json.Set("Progress", NumbersOf<WorkerTable::Progress>());
  json.Set("reduced", ReducedTypes());
  return ffi::json::Stringify(json);
}

}  // namespace tvm_ipc
