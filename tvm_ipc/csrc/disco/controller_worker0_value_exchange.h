/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file controller_worker0_value_exchange.h
 * \brief Values that the controller and worker 0, a thread of the same process, pass to each other.
 */
#ifndef TVM_IPC_DISCO_CONTROLLER_WORKER0_VALUE_EXCHANGE_H_
#define TVM_IPC_DISCO_CONTROLLER_WORKER0_VALUE_EXCHANGE_H_

#include <tvm/ffi/any.h>

#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace tvm_ipc {

namespace ffi = tvm::ffi;

/*! \brief Values that the controller passes to a worker of its own process. */
class LocalValues {
 public:
  static LocalValues& Global() {
    static LocalValues* values = new LocalValues();
    return *values;
  }
  /*! \brief Store a value until a worker takes it or the session discards it. */
  int64_t Put(const void* owner, ffi::Any value) {
    std::lock_guard<std::mutex> lock(mutex_);
    values_[++last_] = Entry{owner, std::move(value)};
    return last_;
  }
  bool Take(int64_t key, ffi::Any* value) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = values_.find(key);
    if (it == values_.end()) return false;
    *value = std::move(it->second.value);
    values_.erase(it);
    return true;
  }
  void Discard(const void* owner) {
    std::vector<ffi::Any> values;  // destroyed after the lock is released
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = values_.begin(); it != values_.end();) {
      if (it->second.owner == owner) values.push_back(std::move(it->second.value));
      it = it->second.owner == owner ? values_.erase(it) : std::next(it);
    }
  }

 private:
  struct Entry {
    const void* owner;
    ffi::Any value;
  };
  std::mutex mutex_;
  std::map<int64_t, Entry> values_;
  int64_t last_ = 0;
};

/*! \brief Values that a worker sends to the controller, kept only while the controller waits for
 * them. */
class HostFetches {
 public:
  static HostFetches& Global() {
    static HostFetches* fetches = new HostFetches();
    return *fetches;
  }
  struct Value {
    bool received = false;
    ffi::Any value;
  };
  void Want(int64_t key, std::weak_ptr<Value> value) {
    std::lock_guard<std::mutex> lock(mutex_);
    wanted_[key] = std::move(value);
  }
  void Forget(int64_t key) {
    std::lock_guard<std::mutex> lock(mutex_);
    wanted_.erase(key);
  }
  void Deliver(int64_t key, ffi::Any value) {
    std::shared_ptr<Value> last;  // its last reference is released after the lock
    std::lock_guard<std::mutex> lock(mutex_);
    auto it = wanted_.find(key);
    if (it == wanted_.end() || !(last = it->second.lock())) return;
    last->received = true;
    last->value = std::move(value);
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, std::weak_ptr<Value>> wanted_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_CONTROLLER_WORKER0_VALUE_EXCHANGE_H_
