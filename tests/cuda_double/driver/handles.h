// SPDX-License-Identifier: Apache-2.0
// Handles that callers get are numbers which are never used twice, so one that was destroyed is
// known.
#ifndef TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_HANDLES_H_
#define TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_HANDLES_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "errors.h"

namespace cuda_double {

using Handle = uint64_t;  // as wide as the pointers that the API's handles are

template <class T>
class Handles {
 public:
  explicit Handles(uint64_t kind) : next_(kind << 40) {}

  Handle Add(std::shared_ptr<T> object) {
    std::lock_guard<std::mutex> lock(mutex_);
    next_ += 16;
    objects_[next_] = std::move(object);
    return next_;
  }

  std::shared_ptr<T> Find(Handle handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second;
  }

  std::shared_ptr<T> Get(Handle handle, const char* what = "a handle that is not one, or destroyed",
                         Result otherwise = kInvalidHandle) {
    std::shared_ptr<T> object = Find(handle);
    Require(object != nullptr, otherwise, what);
    return object;
  }

  std::shared_ptr<T> Remove(Handle handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = objects_.find(handle);
    if (found == objects_.end()) {
      throw Failure{kInvalidHandle, "a handle that is not one, or destroyed already"};
    }
    std::shared_ptr<T> object = std::move(found->second);
    objects_.erase(found);
    return object;
  }

  std::vector<std::shared_ptr<T>> All() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::shared_ptr<T>> all;
    for (auto& [handle, object] : objects_) all.push_back(object);
    return all;
  }

  size_t size() {
    std::lock_guard<std::mutex> lock(mutex_);
    return objects_.size();
  }

 private:
  std::mutex mutex_;
  std::map<Handle, std::shared_ptr<T>> objects_;
  uint64_t next_;
};

}  // namespace cuda_double

#endif  // TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_HANDLES_H_
