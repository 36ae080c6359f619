/* SPDX-License-Identifier: Apache-2.0 */
/*! \file command_queue_and_freed_references.cc */
#include "disco/command_queue_and_freed_references.h"

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/string.h>

#include <atomic>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/thread_signals.h"

namespace tvm_ipc {

namespace ffi = tvm::ffi;
using tvm::runtime::DRef;
using tvm::runtime::DRefObj;
using tvm::runtime::Session;
using tvm::runtime::SessionObj;

namespace {

/*! \brief The sizes in bytes of a message that frees a register, and of one with a ticket. */
constexpr int64_t kFreeBytes = 48;
constexpr int64_t kTicketBytes = 80;

/*! \brief Return an upper bound of a command's bytes in Disco's protocol. */
int64_t CommandBytes(const ffi::PackedArgs& args) {
  int64_t bytes = 16;
  for (int i = 0; i < args.size(); ++i) {
    bytes += 16;
    const ffi::AnyView value = args[i];
    const TVMFFIAny raw_value = value.CopyToTVMFFIAny();
    if (raw_value.type_index == ffi::TypeIndex::kTVMFFIByteArrayPtr) {
      bytes += static_cast<int64_t>(static_cast<TVMFFIByteArray*>(raw_value.v_ptr)->size);
    } else if (raw_value.type_index == ffi::TypeIndex::kTVMFFIRawStr) {
      bytes += static_cast<int64_t>(strlen(raw_value.v_c_str));
    } else if (auto text = value.as<ffi::String>()) {
      bytes += static_cast<int64_t>(text->size());
    } else if (auto raw = value.as<ffi::Bytes>()) {
      bytes += static_cast<int64_t>(raw->size());
    } else if (auto shape = value.as<ffi::Shape>()) {
      bytes += static_cast<int64_t>(shape->size() * sizeof(int64_t));
    }
  }
  return bytes;
}

}  // namespace

/*! \brief Replaces the session in its references, and records the registers of ended ones. */
class FreedRegisters : public SessionObj {
 public:
  ~FreedRegisters() override {
    while (Take() != 0) {
    }
  }
  /*! \brief Take a register that has no reference any more; 0 if there is none. One caller at a
   *         time. */
  int64_t Take() {
    if (taken_ == nullptr) taken_ = noted_.exchange(nullptr, std::memory_order_acquire);
    if (taken_ == nullptr) return 0;
    Node* node = taken_;
    taken_ = node->next;
    const int64_t reg = node->reg;
    delete node;
    return reg;
  }

  DRef CallWithPacked(const ffi::PackedArgs& args) final { Refuse(); }
  int64_t GetNumWorkers() final { Refuse(); }
  DRef GetGlobalFunc(const std::string& name) final { Refuse(); }
  void CopyFromWorker0(const tvm::runtime::Tensor& host, const DRef& remote) final { Refuse(); }
  void CopyToWorker0(const tvm::runtime::Tensor& host, const DRef& remote) final { Refuse(); }
  void SyncWorker(int worker_id) final { Refuse(); }
  void Shutdown() final { Refuse(); }
  void InitCCL(ffi::String ccl, ffi::Shape device_ids) final { Refuse(); }
  ffi::Any DebugGetFromRemote(int64_t reg, int worker_id) final { Refuse(); }
  void DebugSetRegister(int64_t reg, ffi::AnyView value, int worker_id) final { Refuse(); }

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("tvm_ipc.FreedRegisters", FreedRegisters, SessionObj);

 protected:
  // A reference may end in a garbage collection while its thread holds any lock, or in a process
  // that was forked while another thread held one. So this must not take a lock.
  void DeallocReg(int reg) final {
    Node* node = new Node{reg, noted_.load(std::memory_order_relaxed)};
    while (!noted_.compare_exchange_weak(node->next, node, std::memory_order_release,
                                         std::memory_order_relaxed)) {
    }
  }

 private:
  struct Node {
    int64_t reg;
    Node* next;
  };
  [[noreturn]] static void Refuse() {
    throw ffi::Error(kind::kType,
                     "a reference of tvm_ipc.Session supports only its own methods, not those of"
                     " Disco's session",
                     "");
  }

  std::atomic<Node*> noted_{nullptr};
  Node* taken_ = nullptr;
};

CommandQueue::CommandQueue(int64_t room)
    : room_(room), freed_(ffi::make_object<FreedRegisters>()) {}

ffi::Any CommandQueue::Send(const Session& session, ffi::PackedArgs args) {
  const int64_t bytes = CommandBytes(args) + kTicketBytes;
  std::lock_guard<std::mutex> lock(mutex_);
  BlockSigpipe blocked;
  FreeRegisters(session);
  if (sent_ - read_ + bytes > room_) return bytes;
  sent_ += bytes;  // before the write: a session whose write fails cannot continue
  return Adopt(session->CallWithPacked(args));
}

void CommandQueue::SendTicket(const Session& session, ffi::PackedArgs args, int64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  BlockSigpipe blocked;
  FreeRegisters(session);
  sent_before_[ticket] = sent_;
  Adopt(session->CallWithPacked(args));
}

void CommandQueue::Passed(int64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  while (!sent_before_.empty() && sent_before_.begin()->first <= ticket) {
    read_ = sent_before_.begin()->second;
    sent_before_.erase(sent_before_.begin());
  }
}

DRef CommandQueue::Adopt(DRef reference) const {
  const_cast<DRefObj*>(reference.operator->())->session = ffi::ObjectRef(freed_);
  return reference;
}

void CommandQueue::FreeRegisters(const Session& session) {
  // Names the protected member through a derived class, which may access it.
  struct Access : SessionObj {
    using SessionObj::DeallocReg;
  };
  auto* object = const_cast<SessionObj*>(session.operator->());
  while (sent_ - read_ + kFreeBytes <= room_) {
    const int64_t reg = freed_->Take();
    if (reg == 0) return;
    sent_ += kFreeBytes;
    (object->*(&Access::DeallocReg))(static_cast<int>(reg));
  }
}

}  // namespace tvm_ipc
