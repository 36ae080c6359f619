/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file no_gpus.cc
 * \brief What the table of backends wants of those for GPUs, where nothing runs on them: tests with
 *        a sanitizer, for which they would take long to compile.
 */
#include "cuda/backend_factory.h"
#include "nccl/endpoint_and_backend.h"

namespace tvm_ipc {
namespace {

class Absent final : public Backend {
 public:
  explicit Absent(const char* name) : name_(name) {}
  const char* name() const final { return name_; }
  Capabilities capabilities() const final { return {2, true}; }
  std::string Refusal(const std::vector<int>&) const final { return "these tests lack it"; }
  std::vector<File> Prepare(const Control&) const final { Refuse(); }
  std::unique_ptr<Endpoint> Start(Rank&) const final { Refuse(); }
  bool Reduces(ElementType, ReduceKind) const final { return false; }
  std::vector<std::string> instruction_sets() const final { return {}; }
  std::string instruction_set() const final { return "none"; }
  bool UseInstructionSet(const std::string&) const final { return false; }

 private:
  [[noreturn]] void Refuse() const { Fail(kind::kValue, name_, ": these tests lack it"); }

  const char* name_;
};

}  // namespace

const Backend& Cuda() {
  static const Absent cuda("cuda");
  return cuda;
}

const Backend& Nccl() {
  static const Absent nccl("nccl");
  return nccl;
}

}  // namespace tvm_ipc
