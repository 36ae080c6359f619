// SPDX-License-Identifier: Apache-2.0
// Devices and their primary contexts. A thread has a stack of contexts; its top is the current one.
#ifndef TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_CONTEXT_H_
#define TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_CONTEXT_H_

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "handles.h"

namespace cuda_double {

class Stream;

struct Context {
  Handle handle = 0;
  int device = 0;    // as the process counts them
  int physical = 0;  // as the machine does
  int retained = 0;
  std::atomic<int> fault{kSuccess};            // set by what broke it; all later calls return it
  std::atomic<size_t> used{0};                 // bytes of the device's memory
  std::mutex mutex;                            // the members below
  std::set<int> peers;                         // devices whose memory it may use
  std::shared_ptr<Stream> legacy;              // the default stream
  std::vector<std::weak_ptr<Stream>> streams;  // all others
};

Handles<Context>& Contexts();

int DeviceCount();
void RequireDevice(int device);
bool CanAccessPeer(int device, int peer);
int DeviceAttribute(int attribute, int device);

// The primary context of a device, whether or not somebody retains it.
Context& PrimaryContext(int device);
Context* CurrentContext();  // null if the thread has none
std::shared_ptr<Context> ContextOf(Handle handle);

bool Initialised();

}  // namespace cuda_double

#endif  // TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_CONTEXT_H_
