/* SPDX-License-Identifier: Apache-2.0 */
/*! \file start_async_packed_functions.cc */
#include "disco/start_async_packed_functions.h"

#include <tvm/ffi/string.h>

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/async_queue.h"
#include "core/error.h"
#include "disco/worker_session_functions.h"

namespace tvm_ipc {

namespace ffi = tvm::ffi;

namespace {

/*! \brief A request as a value of programs. Dropping it does not cancel the operation. */
class StartedRequest : public ffi::Object {
 public:
  explicit StartedRequest(std::shared_ptr<Request> request) : request(std::move(request)) {}
  const std::shared_ptr<Request> request;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("tvm_ipc.Request", StartedRequest, ffi::Object);
};

/*! \brief Return the startable functions, by name. Filled when the library is loaded, then only
 *         read. */
std::map<std::string, ffi::Function>& Startable() {
  static auto* functions = new std::map<std::string, ffi::Function>();
  return *functions;
}

const std::pair<const std::string, ffi::Function>& Find(const std::string& name) {
  const auto entry = Startable().find(name);
  if (entry != Startable().end()) return *entry;
  std::string names;
  for (const auto& [startable, function] : Startable()) {
    names += (names.empty() ? "" : ", ") + startable;
  }
  Fail(kind::kValue, "start: ", name, " cannot be started asynchronously; expected one of ", names);
}

/*! \brief A function, and the arguments that it is called with. */
struct BoundFunction {
  ffi::Function function;
  std::vector<ffi::Any> arguments;

  void operator()() const {
    std::vector<ffi::AnyView> views(arguments.begin(), arguments.end());
    ffi::Any result;
    function.CallPacked(ffi::PackedArgs(views.data(), static_cast<int32_t>(views.size())), &result);
  }
};

}  // namespace

void MakeStartable(const std::string& name) {
  Startable().emplace(name, ffi::Function::GetGlobalRequired(name));
}

void Start(ffi::PackedArgs args, ffi::Any* result) {
  Rank& rank = RequireRank();
  if (args.size() == 0 || !args[0].as<ffi::String>()) {
    Fail(kind::kType, "start: the first argument is the name of a function");
  }
  const auto& [name, function] = Find(std::string(args[0].cast<ffi::String>()));
  BoundFunction call{function, {}};
  for (int i = 1; i < args.size(); ++i) {
    if (args[i].type_index() == ffi::TypeIndex::kTVMFFIDLTensorPtr) {
      Fail(kind::kType, "start: argument ", i, " of ", name,
           " is a view that does not own its tensor; pass the tensor itself");
    }
    call.arguments.emplace_back(args[i]);
  }
  auto operation = [&rank, call = std::move(call)] { return worker::ReportErrors(rank, call); };
  *result = ffi::ObjectRef(
      ffi::make_object<StartedRequest>(rank.async_queue().Start(name, std::move(operation))));
}

void Wait(ffi::Any request) {
  const auto* started = request.as<StartedRequest>();
  if (started == nullptr) {
    Fail(kind::kType, "wait: request is what start returned, not ", request.GetTypeKey());
  }
  started->request->Wait();
}

}  // namespace tvm_ipc
