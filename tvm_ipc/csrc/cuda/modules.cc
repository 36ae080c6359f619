/* SPDX-License-Identifier: Apache-2.0 */
/*! \file modules.cc */
#include "cuda/modules.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "core/error.h"
#include "cuda/embedded_kernel_images.h"

namespace tvm_ipc::cuda {

namespace {

/*! \brief The types that kernels reduce. The first three also have norms; they are in the order of
 *         kernels::FloatType. */
constexpr const char* kTypes[] = {"float16", "bfloat16", "float32", "float64", "int8",
                                  "uint8",   "int16",    "uint16",  "int32",   "uint32",
                                  "int64",   "uint64",   "bool"};
constexpr int kNumTypes = std::size(kTypes);
constexpr int kNumNormTypes = 3;
constexpr int kBool = kNumTypes - 1;

int IndexOf(ElementType type) {
  const std::string name = tvm_ipc::Name(type);
  const auto* found = std::find(std::begin(kTypes), std::end(kTypes), name);
  return found == std::end(kTypes) ? -1 : static_cast<int>(found - kTypes);
}

/*! \brief Return the index of a type. Each thread caches the last type it looked up. */
int KnownIndexOf(ElementType type) {
  thread_local ElementType last;
  thread_local int index = -1;
  if (type != last) {
    index = IndexOf(type);
    last = type;
  }
  return index;
}

/*! \brief Return whether an image of machine code or PTX runs on devices of a capability. */
bool Runs(const KernelImage& image, int capability) {
  if (image.ptx) return image.capability <= capability;
  return image.capability / 10 == capability / 10 && image.capability <= capability;
}

/*! \brief Return the best image of each source. */
std::map<std::string, const KernelImage*> ImagesFor(int capability) {
  std::map<std::string, const KernelImage*> best;
  for (size_t i = 0; i < kNumKernelImages; ++i) {
    const KernelImage& image = kKernelImages[i];
    if (!Runs(image, capability)) continue;
    const KernelImage*& one = best[image.source];
    auto rank = [](const KernelImage& of) { return std::pair(!of.ptx, of.capability); };
    if (one == nullptr || rank(image) > rank(*one)) one = &image;
  }
  return best;
}

std::string ArchitectureOf(const KernelImage& image) {
  return (image.ptx ? "compute_" : "sm_") + std::to_string(image.capability);
}

constexpr const char* kWithoutKernels =
    "this tvm-ipc was built without its CUDA kernels (TVM_IPC_CUDA=OFF); install one that has them";

}  // namespace

std::vector<std::string> Architectures() {
  std::vector<std::string> names;
  std::set<std::string> seen;
  for (size_t i = 0; i < kNumKernelImages; ++i) {
    if (seen.insert(ArchitectureOf(kKernelImages[i])).second)
      names.push_back(ArchitectureOf(kKernelImages[i]));
  }
  return names;
}

std::string ArchitectureFor(int capability, std::string* why) {
  const auto images = ImagesFor(capability);
  if (!images.empty()) return ArchitectureOf(*images.begin()->second);
  if (kNumKernelImages == 0) {
    *why = kWithoutKernels;
    return "";
  }
  std::string known;
  for (const std::string& name : Architectures()) known += (known.empty() ? "" : ", ") + name;
  *why = Text("our kernels are compiled for ", known,
              ", none of which runs on a device of capability ", capability / 10, ".",
              capability % 10);
  return "";
}

bool IsReduced(ElementType type, ReduceKind kind) {
  const int index = KnownIndexOf(type);
  if (index < 0) return false;
  if (IsBitwise(kind)) return index != kBool && type.code <= 1;  // DLPack's codes of integers
  return !(index == kBool && kind == ReduceKind::kAvg);
}

uint32_t FloatTypeOf(const char* operation, ElementType type) {
  const int index = KnownIndexOf(type);
  if (index >= 0 && index < kNumNormTypes) return static_cast<uint32_t>(index);
  Fail(kind::kType, operation, ": ", tvm_ipc::Name(type),
       " is not normalised; cast to float32, float16 or bfloat16");
}

std::shared_ptr<const Kernels> Kernels::Load(const std::shared_ptr<Device>& device) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<const Kernels>> loaded;
  std::lock_guard<std::mutex> lock(mutex);
  std::weak_ptr<const Kernels>& known = loaded[device->ordinal()];
  std::shared_ptr<const Kernels> kernels = known.lock();
  if (kernels == nullptr) {
    kernels.reset(new Kernels(device));
    known = kernels;
  }
  return kernels;
}

Kernels::Kernels(std::shared_ptr<Device> device) : device_(std::move(device)) {
  std::string why;
  const int capability = device_->facts().capability();
  if (ArchitectureFor(capability, &why).empty()) Fail(kind::kRuntime, device_->name(), ": ", why);
  const Here here(*device_);
  for (const auto& [source, image] : ImagesFor(capability)) {
    const std::string what = Text("to load our kernels (", source, ", ", ArchitectureOf(*image),
                                  ") on ", device_->name());
    Module module = nullptr;
    device_->driver().cuModuleLoadData(what.c_str(), &module, image->data);
    modules_[source] = module;
  }
  for (const char* type : kTypes) {
    auto reduction = [&](const char* name) {
      return Find("reduce", Text("tvm_ipc_", name, "_", type));
    };
    TypeKernels kernels{reduction("push"), reduction("push_slices"), reduction("pull"),
                        reduction("parts")};
    if (types_.size() < kNumNormTypes) {
      kernels.push_norm = Find("norm", Text("tvm_ipc_push_norm_", type));
      kernels.norm = Find("norm", Text("tvm_ipc_norm_", type));
    }
    types_.push_back(kernels);
  }
  for (const auto& [kernel, name] : {std::pair(&move, "tvm_ipc_move"),
                                     {&move_push, "tvm_ipc_move_push"},
                                     {&meet, "tvm_ipc_barrier"},
                                     {&expose, "tvm_ipc_expose"},
                                     {&await, "tvm_ipc_await"},
                                     {&send, "tvm_ipc_send"},
                                     {&receive, "tvm_ipc_receive"},
                                     {&write_pattern, "tvm_ipc_write_pattern"},
                                     {&check_pattern, "tvm_ipc_check_pattern"}}) {
    *kernel = Find("move", name);
  }
}

Kernels::~Kernels() {
  Quietly(*device_, [this](const Driver& driver) {
    for (const auto& [source, module] : modules_) driver.cuModuleUnload.Try(module);
  });
}

Kernel Kernels::Find(const std::string& source, const std::string& name) {
  const Driver& driver = device_->driver();
  Kernel kernel = nullptr;
  const auto module = modules_.find(source);
  const Status status = module == modules_.end()
                            ? Status{kNotFound}
                            : driver.cuModuleGetFunction.Try(&kernel, module->second, name.c_str());
  if (status == kNotFound) {
    Fail(kind::kRuntime, "the kernels of this tvm-ipc have no ", name,
         "; its parts are of different versions: build it again");
  }
  if (status != kSuccess) FailCall("cuModuleGetFunction", name.c_str(), status);
  if (driver.cuFuncLoad.exists()) driver.cuFuncLoad(name.c_str(), kernel);
  constexpr int kMaxThreads = 0;
  int threads = 0;
  driver.cuFuncGetAttribute(name.c_str(), &threads, kMaxThreads, kernel);
  threads_ = std::min(threads_, static_cast<uint32_t>(threads));
  int blocks = 0;
  driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(name.c_str(), &blocks, kernel,
                                                     static_cast<int>(threads_), 0);
  const int64_t all = int64_t{blocks} * device_->facts().multiprocessors;
  resident_ = static_cast<uint32_t>(std::min<int64_t>(resident_, all));
  return kernel;
}

const TypeKernels& Kernels::OfReduction(const char* operation, ElementType type,
                                        ReduceKind kind) const {
  if (IsReduced(type, kind)) return types_[KnownIndexOf(type)];
  Fail(kind::kType, operation, ": ", tvm_ipc::Name(kind), " of ", tvm_ipc::Name(type),
       " is not supported; cast to a type that is, such as ", SupportedTypeOf(kind));
}

const TypeKernels& Kernels::OfNorm(const char* operation, ElementType type) const {
  return types_[FloatTypeOf(operation, type)];
}

kernels::Limits Kernels::LimitsFor(int ranks) const {
  return kernels::LimitsBesideAsync(resident_ / static_cast<uint32_t>(ranks), threads_);
}

}  // namespace tvm_ipc::cuda
