/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file modules.h
 * \brief The kernels of this library, loaded on a device and found by name.
 */
#ifndef TVM_IPC_CUDA_MODULES_H_
#define TVM_IPC_CUDA_MODULES_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/element_type_and_reduce_kind.h"
#include "cuda/kernels/choose_kernel_and_grid.h"
#include "driver/device_properties_and_context.h"

namespace tvm_ipc::cuda {

/*! \brief Return the targets for which the kernels are compiled: "sm_90", "compute_90". */
std::vector<std::string> Architectures();
/*! \brief Return the target that runs on a device of the capability. If none does, return "" and
 *         set `why`. */
std::string ArchitectureFor(int capability, std::string* why);

/*! \brief The kernels for one element type; null if there is none. */
struct TypeKernels {
  Kernel push = nullptr;
  Kernel push_slices = nullptr;
  Kernel pull = nullptr;
  Kernel parts = nullptr;
  Kernel push_norm = nullptr;
  Kernel norm = nullptr;
};

/*! \brief All kernels of this library on one device. */
class Kernels {
 public:
  /*! \brief Return the kernels of a device, which are loaded once per process. All are loaded at
   *         the same time: loading one later could wait for kernels that wait for it. */
  static std::shared_ptr<const Kernels> Load(const std::shared_ptr<Device>& device);
  ~Kernels();
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  /*! \brief Return the kernels of a reduction. Throw kind::kType if the type is not supported. */
  const TypeKernels& OfReduction(const char* operation, ElementType type, ReduceKind kind) const;
  /*! \brief Return the kernels of a norm. Throw if the type is not supported. */
  const TypeKernels& OfNorm(const char* operation, ElementType type) const;

  Kernel move = nullptr;
  Kernel move_push = nullptr;
  Kernel meet = nullptr;
  Kernel expose = nullptr;
  Kernel await = nullptr;
  Kernel send = nullptr;
  Kernel receive = nullptr;
  Kernel write_pattern = nullptr;
  Kernel check_pattern = nullptr;

  /*! \brief Return the launch limits if `ranks` ranks share the device, so that their kernels are
   *         resident together. */
  kernels::Limits LimitsFor(int ranks) const;

 private:
  explicit Kernels(std::shared_ptr<Device> device);
  /*! \brief Return a kernel of one of the sources. */
  Kernel Find(const std::string& source, const std::string& name);

  std::shared_ptr<Device> device_;
  /*! \brief The modules, by the name of their source. */
  std::map<std::string, Module> modules_;
  std::vector<TypeKernels> types_;
  /*! \brief The number of blocks of `threads_` threads that the whole device can hold, for any of
   *         the kernels. */
  uint32_t resident_ = UINT32_MAX;
  uint32_t threads_ = 512;
};

/*! \brief Return whether there is a kernel for a reduction of the type. */
bool IsReduced(ElementType type, ReduceKind kind);
/*! \brief Return the kernels::FloatType of a type of weights and norms. Throw if there is none. */
uint32_t FloatTypeOf(const char* operation, ElementType type);

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_CUDA_MODULES_H_
