/* SPDX-License-Identifier: Apache-2.0 */
/*! \file posting.cc */
#include "disco/posting.h"

#include <tvm/ffi/string.h>

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/works.h"
#include "disco/worker.h"

namespace tvm_ipc {

namespace ffi = tvm::ffi;

namespace {

/*! \brief A work as a value of programs. To drop it does not end it. */
class PostedWork : public ffi::Object {
 public:
  explicit PostedWork(std::shared_ptr<Work> work) : work(std::move(work)) {}
  const std::shared_ptr<Work> work;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("tvm_ipc.Work", PostedWork, ffi::Object);
};

/*! \brief Filled when the library is loaded, and only read from then on. */
std::map<std::string, ffi::Function>& Postable() {
  static auto* functions = new std::map<std::string, ffi::Function>();
  return *functions;
}

const std::pair<const std::string, ffi::Function>& Find(const std::string& name) {
  const auto found = Postable().find(name);
  if (found != Postable().end()) return *found;
  std::string known;
  for (const auto& [one, function] : Postable()) known += (known.empty() ? "" : ", ") + one;
  Fail(kind::kValue, "post: ", name, " cannot be posted; what can is ", known);
}

/*! \brief A function with arguments that are kept until it has been called. */
struct Call {
  ffi::Function function;
  std::vector<ffi::Any> arguments;

  void operator()() const {
    std::vector<ffi::AnyView> views(arguments.begin(), arguments.end());
    ffi::Any result;
    function.CallPacked(ffi::PackedArgs(views.data(), static_cast<int32_t>(views.size())), &result);
  }
};

}  // namespace

void MakePostable(const std::string& name) {
  Postable().emplace(name, ffi::Function::GetGlobalRequired(name));
}

void Post(ffi::PackedArgs args, ffi::Any* result) {
  Rank& rank = RequireRank();
  if (args.size() == 0 || !args[0].as<ffi::String>()) {
    Fail(kind::kType, "post: the first argument is the name of a function");
  }
  const auto& [name, function] = Find(std::string(args[0].cast<ffi::String>()));
  Call call{function, {}};
  for (int i = 1; i < args.size(); ++i) {
    if (args[i].type_index() == ffi::TypeIndex::kTVMFFIDLTensorPtr) {
      Fail(kind::kType, "post: argument ", i, " of ", name,
           " is a view of a tensor that nobody keeps; pass the tensor");
    }
    call.arguments.emplace_back(args[i]);
  }
  auto operation = [&rank, call = std::move(call)] { return worker::ReportErrors(rank, call); };
  *result =
      ffi::ObjectRef(ffi::make_object<PostedWork>(rank.works().Post(name, std::move(operation))));
}

void Wait(ffi::Any work) {
  const auto* posted = work.as<PostedWork>();
  if (posted == nullptr) {
    Fail(kind::kType, "wait: work is what post returned, not ", work.GetTypeKey());
  }
  posted->work->Wait();
}

}  // namespace tvm_ipc
