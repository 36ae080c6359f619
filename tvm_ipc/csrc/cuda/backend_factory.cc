/* SPDX-License-Identifier: Apache-2.0 */
/*! \file backend_factory.cc */
#include "cuda/backend_factory.h"

#include <memory>
#include <string>
#include <vector>

#include "cuda/cuda_endpoint.h"
#include "cuda/device_support_report.h"
#include "cuda/probe_device_pair_sharing.h"

namespace tvm_ipc {

namespace {

class CudaBackend final : public Backend {
 public:
  const char* name() const final { return "cuda"; }
  Capabilities capabilities() const final { return {cuda::kDeviceType, true, true}; }
  /*! \brief Return no files: the workers allocate their regions. */
  std::vector<File> Prepare(const Control&) const final { return {}; }
  /*! \brief Return 0: the workers choose the size by the memory of their devices. */
  size_t DefaultArena(int) const final { return 0; }
  std::unique_ptr<Endpoint> Start(Rank& rank) const final {
    return std::make_unique<cuda::CudaEndpoint>(rank);
  }
  bool Reduces(ElementType type, ReduceKind kind) const final {
    return cuda::IsReduced(type, kind);
  }
  std::string Refusal(const std::vector<int>& devices) const final {
    return cuda::Refusal(devices);
  }
  std::string Info() const final { return cuda::Info(); }
  std::string Probe(const std::vector<int>& devices) const final { return cuda::Probe(devices); }
};

}  // namespace

const Backend& Cuda() {
  static const CudaBackend backend;
  return backend;
}

}  // namespace tvm_ipc
