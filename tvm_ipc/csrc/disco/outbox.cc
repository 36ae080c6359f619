/* SPDX-License-Identifier: Apache-2.0 */
/*! \file outbox.cc */
#include "disco/outbox.h"

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/string.h>

#include <atomic>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace tvm_ipc {

namespace ffi = tvm::ffi;
using tvm::runtime::DRef;
using tvm::runtime::DRefObj;
using tvm::runtime::Session;
using tvm::runtime::SessionObj;

namespace {

/*! \brief The bytes of a message that frees a register, and of one that carries a ticket. */
constexpr int64_t kFreeBytes = 48;
constexpr int64_t kTicketBytes = 80;

/*! \brief At least the bytes of a command in Disco's protocol. */
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

/*! \brief Stands for the session in its references, which tell it when they end. */
class FreedRegisters : public SessionObj {
 public:
  ~FreedRegisters() override {
    while (Take() != 0) {
    }
  }
  /*! \brief A register that nobody refers to any more; 0 if there is none. One taker at a time. */
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
  // A reference may end in a garbage collection, while its thread holds any lock, and in a process
  // that was forked while another thread did: so there is none here.
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
    throw ffi::Error(kind::kType, "a reference of tvm_ipc.Session works by its own methods only",
                     "");
  }

  std::atomic<Node*> noted_{nullptr};
  Node* taken_ = nullptr;
};

Outbox::Outbox(int64_t room) : room_(room), freed_(ffi::make_object<FreedRegisters>()) {}

ffi::Any Outbox::Send(const Session& session, ffi::PackedArgs args) {
  const int64_t bytes = CommandBytes(args) + kTicketBytes;
  std::lock_guard<std::mutex> lock(mutex_);
  FreeRegisters(session);
  if (sent_ - read_ + bytes > room_) return bytes;
  sent_ += bytes;  // first: a session whose write fails is at its end
  return Adopt(session->CallWithPacked(args));
}

void Outbox::SendTicket(const Session& session, ffi::PackedArgs args, int64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  FreeRegisters(session);
  sent_before_[ticket] = sent_;
  Adopt(session->CallWithPacked(args));
}

void Outbox::Passed(int64_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  while (!sent_before_.empty() && sent_before_.begin()->first <= ticket) {
    read_ = sent_before_.begin()->second;
    sent_before_.erase(sent_before_.begin());
  }
}

DRef Outbox::Adopt(DRef reference) const {
  const_cast<DRefObj*>(reference.operator->())->session = ffi::ObjectRef(freed_);
  return reference;
}

void Outbox::FreeRegisters(const Session& session) {
  // A protected member of a base class, named through a class that may name it.
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
