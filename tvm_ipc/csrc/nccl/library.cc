/* SPDX-License-Identifier: Apache-2.0 */
/*! \file library.cc */
#include "nccl/library.h"

#include <atomic>
#include <cstring>
#include <mutex>

#include "core/dynamic_library.h"
#include "core/error.h"

namespace tvm_ipc::nccl {

namespace {

/*! \brief The minimum version, 2.19: nonblocking communicators and ncclMemAlloc. */
constexpr int kLeastVersion = 21900;
constexpr const char* kInstall =
    "; the extra `cuda` of tvm-ipc installs it, and so does `pip install nvidia-nccl-cu13`";

std::mutex loading;
std::string path_to_load;                     // guarded by loading
std::atomic<const Library*> loaded{nullptr};  // never freed: it has threads of its own

std::string VersionText(int version) {
  return Text(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

}  // namespace

void UseLibrary(const std::string& path) {
  std::lock_guard<std::mutex> lock(loading);
  path_to_load = path;
}

const Library& TheLibrary() {
  if (const Library* library = loaded.load(std::memory_order_acquire)) return *library;
  std::lock_guard<std::mutex> lock(loading);
  if (const Library* library = loaded.load(std::memory_order_acquire)) return *library;
  const auto* library = new Library(path_to_load.empty() ? "libnccl.so.2" : path_to_load);
  loaded.store(library, std::memory_order_release);
  return *library;
}

Library::Library(const std::string& path) : path_(path) {
  const DynamicLibrary file(path);
  if (!file.error().empty()) {
    Fail(kind::kRuntime, "NCCL cannot be loaded: ", file.error(), kInstall);
  }
  std::string missing;
  auto take = [&](auto* function, const char* name) {
    function->name_ = name;
    return file.Find(name, &function->call_);
  };
#define TVM_IPC_TAKE(name, ...) \
  if (!take(&(name), "nccl" #name) && missing.empty()) missing = "nccl" #name;
  TVM_IPC_NCCL_FUNCTIONS(TVM_IPC_TAKE)
#undef TVM_IPC_TAKE
  file.Find("ncclGetErrorString", &get_error_string_);
  file.Find("ncclGetLastError", &get_last_error_);
  if (GetVersion.exists() && GetVersion(&version_) == kSuccess && version_ < kLeastVersion) {
    Fail(kind::kRuntime, Name(), " is too old, needed is ", VersionText(kLeastVersion), " or newer",
         kInstall);
  }
  if (!missing.empty()) Fail(kind::kRuntime, path_, " has no function ", missing, kInstall);
}

std::string Library::Name() const { return Text("NCCL ", VersionText(version_), " (", path_, ")"); }

std::string Library::Describe(Result result, Handle communicator) const {
  std::string text = get_error_string_ == nullptr ? Text("error ", static_cast<int>(result))
                                                  : get_error_string_(result);
  const char* last = get_last_error_ == nullptr ? nullptr : get_last_error_(communicator);
  if (last != nullptr && *last != '\0') text += Text(": ", last);
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  if (text.find("Duplicate GPU") != std::string::npos) {
    text += "; NCCL wants a device for each rank: give other device_ids, or fewer workers";
  } else if (result != kInvalidArgument) {
    text += "; with NCCL_DEBUG=WARN it says more";
  }
  return text;
}

void Library::Check(const char* call, Result result, Handle communicator) const {
  if (result == kSuccess) return;
  Fail(kind::kRuntime, call, ": ", Describe(result, communicator));
}

bool FindReduction(ElementType type, ReduceKind kind, Type* nccl_type, Operator* nccl_operator,
                   const char** why) {
  constexpr uint8_t kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4, kBool = 6;
  constexpr Operator kOperators[] = {kSum, kProd, kMin, kMax, kAvg};
  if (IsBitwise(kind)) {
    *why = "it has no bitwise reductions; use the backend cuda, or gather and reduce";
    return false;
  }
  if (kind == ReduceKind::kTreeSum) {
    *why = "it adds in an order of its own; use the backend cuda, or sum";
    return false;
  }
  *nccl_operator = kOperators[static_cast<int>(kind)];
  const bool average = kind == ReduceKind::kAvg;
  *why = nullptr;
  if (type.lanes == 1 && type.code == kFloat &&
      (type.bits == 16 || type.bits == 32 || type.bits == 64)) {
    *nccl_type = type.bits == 16 ? kFloat16 : type.bits == 32 ? kFloat32 : kFloat64;
  } else if (type == ElementType{kBFloat, 16, 1}) {
    *nccl_type = kBfloat16;
  } else if (type == ElementType{kBool, 8, 1} && !average) {
    // On zeros and ones, the maximum is a logical or and the minimum a logical and.
    *nccl_type = kUint8;
    const bool all = kind == ReduceKind::kProd || kind == ReduceKind::kMin;
    *nccl_operator = all ? kMin : kMax;
  } else if (type.lanes == 1 && (type.code == kInt || type.code == kUInt) && average) {
    *why = "its average of integers is wrong where their sum does not fit; sum, then divide";
  } else if (type.lanes == 1 && (type.code == kInt || type.code == kUInt) &&
             (type.bits == 8 || type.bits == 32 || type.bits == 64)) {
    const int is_unsigned = type.code == kUInt;
    const int width = type.bits == 8 ? kInt8 : type.bits == 32 ? kInt32 : kInt64;
    *nccl_type = static_cast<Type>(width + is_unsigned);
  } else {
    *why =
        "it has no such type; cast to one that it has: float16, bfloat16, float32, float64, or"
        " integers of 8, 32 or 64 bits";
  }
  return *why == nullptr;
}

}  // namespace tvm_ipc::nccl
