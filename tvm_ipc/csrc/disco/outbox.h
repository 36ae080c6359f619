/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file outbox.h
 * \brief The commands of one session on their way to its workers, and the references to what they
 *        return.
 *
 * Disco's session is made for one thread, and for workers that read. Here any thread may send, at
 * most as much as the workers' pipes hold, so that no write waits for a worker. A reference that
 * ends, at any time in any thread, only notes the register that it names; the next command frees
 * it on the workers. (Disco's own would write to the pipes, and throw in a destructor if a worker
 * died.)
 */
#ifndef TVM_IPC_DISCO_OUTBOX_H_
#define TVM_IPC_DISCO_OUTBOX_H_

#include <tvm/ffi/any.h>
#include <tvm/ffi/function.h>
#include <tvm/runtime/disco/session.h>

#include <cstdint>
#include <map>
#include <mutex>

namespace tvm_ipc {

class FreedRegisters;

class Outbox {
 public:
  /*! \param room how many bytes of commands may be unread before a write could wait. */
  explicit Outbox(int64_t room);

  /*!
   * \brief Send a command: `args` are as those of SessionObj::CallWithPacked.
   * \return The reference to its result; or, if it must wait for others to be read, nothing was
   *         sent, and the number of its bytes.
   */
  tvm::ffi::Any Send(const tvm::runtime::Session& session, tvm::ffi::PackedArgs args);
  /*! \brief Send the command by which workers tell that they came so far. It always has room. */
  void SendTicket(const tvm::runtime::Session& session, tvm::ffi::PackedArgs args, int64_t ticket);
  /*! \brief Every worker has read what was sent before the ticket. */
  void Passed(int64_t ticket);
  /*! \brief Take over a reference that Disco made. */
  tvm::runtime::DRef Adopt(tvm::runtime::DRef reference) const;

 private:
  void FreeRegisters(const tvm::runtime::Session& session);

  const int64_t room_;
  std::mutex mutex_;
  /*! \brief Bytes ever sent, and how many of them are known to be read. */
  int64_t sent_ = 0;
  int64_t read_ = 0;
  std::map<int64_t, int64_t> sent_before_;  // of each ticket on its way
  tvm::ffi::ObjectPtr<FreedRegisters> freed_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_OUTBOX_H_
