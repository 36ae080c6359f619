// SPDX-License-Identifier: Apache-2.0
// Functions and their launches.
#include <algorithm>
#include <cstring>
#include <memory>

#include "call.h"
#include "memory.h"
#include "module.h"
#include "settings.h"
#include "stream.h"

namespace cuda_double {

// As the driver's headers lay it out.
struct LaunchConfig {
  CpuDim grid, block;
  unsigned int shared;
  Handle stream;
  const char* attributes;
  unsigned int attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56);

namespace {

constexpr int kMostShared = 232448, kUsualShared = 49152;

std::shared_ptr<Function> FunctionOf(Handle handle) {
  return Functions().Get(handle, "no function, or its module is unloaded");
}

int Shared(const Function& function) {
  return function.dynamic_shared > 0 ? function.dynamic_shared : kUsualShared;
}

// What a driver refuses when a kernel is launched.
void Check(const Function& function, const CpuDim& grid, const CpuDim& block, size_t shared) {
  Require(grid.x > 0 && grid.y > 0 && grid.z > 0 && block.x > 0 && block.y > 0 && block.z > 0,
          kInvalidValue, "a grid or a block of nothing");
  Require(grid.x <= 2147483647 && grid.y <= 65535 && grid.z <= 65535, kInvalidValue,
          "a grid with too many blocks");
  Require(block.x <= 1024 && block.y <= 1024 && block.z <= 64 &&
              uint64_t{block.x} * block.y * block.z <= 1024,
          kInvalidValue, "a block with too many threads");
  Require(uint64_t{block.x} * block.y * block.z <= function.kernel->max_threads, kOutOfResources,
          "more threads than the kernel's launch bounds");
  Require(shared + function.kernel->static_shared <= static_cast<size_t>(Shared(function)),
          kInvalidValue, "more shared memory than the function may have");
}

void LaunchOn(Context& context, Handle function_handle, CpuDim grid, CpuDim block, size_t shared,
              Handle stream_handle, void** arguments, void** extra) {
  std::shared_ptr<Function> function = FunctionOf(function_handle);
  std::shared_ptr<Stream> stream = StreamOf(context, stream_handle);
  Require(function->context == stream->context, kInvalidHandle,
          "a function of another context than the stream's");
  Require(extra == nullptr, kNotSupported, "the double takes arguments as pointers only");
  Check(*function, grid, block, shared);
  auto launch = std::make_shared<Launch>();
  launch->kernel = function->kernel;
  launch->grid = grid;
  launch->block = block;
  launch->dynamic_shared = shared;
  for (uint32_t i = 0; i < function->kernel->parameters; ++i) {
    Require(arguments != nullptr && arguments[i] != nullptr, kInvalidValue, "an argument is null");
    auto* bytes = static_cast<const char*>(arguments[i]);
    launch->arguments.emplace_back(bytes, bytes + function->kernel->sizes[i]);
  }
  Submit(*stream,
         [launch, module = function->module.lock()](GridRunner& runner) { runner.Run(*launch); });
}

constexpr size_t kAttributeBytes = 72, kAttributeValue = 8;
constexpr int kCooperative = 2, kClusterDimension = 4;

void CheckAttributes(const LaunchConfig& config) {
  for (unsigned int i = 0; i < config.attribute_count; ++i) {
    const char* attribute = config.attributes + i * kAttributeBytes;
    int id;
    std::memcpy(&id, attribute, sizeof(id));
    unsigned int value[3];
    std::memcpy(value, attribute + kAttributeValue, sizeof(value));
    Require(id != kCooperative || value[0] == 0, kNotSupported,
            "the double has no cooperative launches");
    Require(id != kClusterDimension || (value[0] <= 1 && value[1] <= 1 && value[2] <= 1),
            kNotSupported, "the double has no clusters");
  }
}

}  // namespace
}  // namespace cuda_double

using namespace cuda_double;

CUDA_DOUBLE_API int cuLaunchKernel(Handle function, unsigned int gx, unsigned int gy,
                                   unsigned int gz, unsigned int bx, unsigned int by,
                                   unsigned int bz, unsigned int shared, Handle stream,
                                   void** arguments, void** extra) {
  return Call("cuLaunchKernel", Needs::kContext, [&](Context& context) {
    LaunchOn(context, function, {gx, gy, gz}, {bx, by, bz}, shared, stream, arguments, extra);
  });
}

CUDA_DOUBLE_API int cuLaunchKernelEx(const LaunchConfig* config, Handle function, void** arguments,
                                     void** extra) {
  return Call("cuLaunchKernelEx", Needs::kContext, [&](Context& context) {
    CheckAttributes(*config);
    LaunchOn(context, function, config->grid, config->block, config->shared, config->stream,
             arguments, extra);
  });
}

CUDA_DOUBLE_API int cuLaunchCooperativeKernel(Handle, unsigned int, unsigned int, unsigned int,
                                              unsigned int, unsigned int, unsigned int,
                                              unsigned int, Handle, void**) {
  return Call("cuLaunchCooperativeKernel", Needs::kContext, [&](Context&) {
    throw Failure{kNotSupported, "the double has no cooperative launches"};
  });
}

CUDA_DOUBLE_API int cuFuncGetAttribute(int* value, int attribute, Handle handle) {
  return Call("cuFuncGetAttribute", Needs::kContext, [&](Context&) {
    std::shared_ptr<Function> function = FunctionOf(handle);
    switch (attribute) {
      case 0:  // threads of a block
        *value = static_cast<int>(function->kernel->max_threads);
        return;
      case 1:  // static shared memory
        *value = static_cast<int>(function->kernel->static_shared);
        return;
      case 4:  // registers
        *value = 32;
        return;
      case 5:  // versions of PTX and binary
      case 6:
        *value = TheSettings().capability;
        return;
      case 8:
        *value = Shared(*function) - static_cast<int>(function->kernel->static_shared);
        return;
      default:
        Require(attribute >= 0 && attribute < 16, kInvalidValue, "no such attribute");
        *value = 0;
    }
  });
}

CUDA_DOUBLE_API int cuFuncSetAttribute(Handle handle, int attribute, int value) {
  return Call("cuFuncSetAttribute", Needs::kContext, [&](Context&) {
    std::shared_ptr<Function> function = FunctionOf(handle);
    if (attribute == 8) {
      int most = kMostShared - static_cast<int>(function->kernel->static_shared);
      Require(value >= 0 && value <= most, kInvalidValue, "more shared memory than there is");
      function->dynamic_shared = value + static_cast<int>(function->kernel->static_shared);
    } else {
      Require(attribute >= 9 && attribute < 16, kInvalidValue, "an attribute that is not settable");
    }
  });
}

CUDA_DOUBLE_API int cuFuncLoad(Handle handle) {
  return Call("cuFuncLoad", Needs::kUnsafe, [&](Context&) { FunctionOf(handle); });
}

CUDA_DOUBLE_API int cuFuncSetCacheConfig(Handle handle, int) {
  return Call("cuFuncSetCacheConfig", Needs::kContext, [&](Context&) { FunctionOf(handle); });
}

CUDA_DOUBLE_API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Handle handle,
                                                                int threads, size_t shared) {
  return Call("cuOccupancyMaxActiveBlocksPerMultiprocessor", Needs::kContext, [&](Context&) {
    Require(threads > 0 && threads <= 1024, kInvalidValue, "threads of a block");
    *blocks =
        BlocksOfMultiprocessor(*FunctionOf(handle)->kernel, static_cast<size_t>(threads), shared);
  });
}

CUDA_DOUBLE_API int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, Handle handle,
                                                                         int threads, size_t shared,
                                                                         unsigned int) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, handle, threads, shared);
}

CUDA_DOUBLE_API int cuTensorMapEncodeTiled(...) {
  return Call("cuTensorMapEncodeTiled", Needs::kInit,
              [&] { throw Failure{kNotSupported, "the double has no tensor maps"}; });
}
