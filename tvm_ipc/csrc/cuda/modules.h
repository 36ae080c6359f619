/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file modules.h
 * \brief Our kernels on a device: loaded, and found by name.
 */
#ifndef TVM_IPC_CUDA_MODULES_H_
#define TVM_IPC_CUDA_MODULES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/element.h"
#include "cuda/kernels/launch.h"
#include "driver/device.h"

namespace tvm_ipc::cuda {

/*! \brief What our kernels are compiled for: "sm_90", "compute_90". */
std::vector<std::string> Architectures();
/*! \brief Of these the one that runs on a device of the capability; "" and why if none does. */
std::string ArchitectureFor(int capability, std::string* why);

/*! \brief The kernels for one type of elements; null where there is none. */
struct TypeKernels {
  Kernel push = nullptr;
  Kernel push_slices = nullptr;
  Kernel pull = nullptr;
  Kernel parts = nullptr;
  Kernel push_norm = nullptr;
  Kernel norm = nullptr;
};

/*! \brief All of them. */
class Kernels {
 public:
  /*! \brief Those of a device, loaded once in a process; all at once, since to load one later could
   *         wait for kernels that wait for it. */
  static std::shared_ptr<const Kernels> Load(const std::shared_ptr<Device>& device);
  ~Kernels();
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  /*! \brief Throws kind::kType where elements of the type are not reduced so. */
  const TypeKernels& OfReduction(const char* operation, ElementType type, ReduceKind kind) const;
  /*! \brief Throws where rows of the type are not normalised. */
  const TypeKernels& OfNorm(const char* operation, ElementType type) const;

  Kernel move = nullptr;
  Kernel move_push = nullptr;
  Kernel meet = nullptr;
  Kernel show = nullptr;
  Kernel await = nullptr;
  Kernel send = nullptr;
  Kernel receive = nullptr;
  Kernel write_pattern = nullptr;
  Kernel check_pattern = nullptr;

  /*! \brief What is surely resident together where so many ranks share the device. */
  kernels::Limits LimitsFor(int ranks) const;

 private:
  explicit Kernels(std::shared_ptr<Device> device);
  Kernel Find(const std::string& name);

  std::shared_ptr<Device> device_;
  std::vector<Module> modules_;
  std::vector<TypeKernels> types_;
  /*! \brief Of any kernel, blocks of `threads_` on the whole device. */
  uint32_t resident_ = UINT32_MAX;
  uint32_t threads_ = 512;
};

/*! \brief Whether elements of the type are reduced so. */
bool IsReduced(ElementType type, ReduceKind kind);
/*! \brief The number that kernels have for a type of weights and norms. Throws if it has none. */
uint32_t FloatTypeOf(const char* operation, ElementType type);

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_CUDA_MODULES_H_
