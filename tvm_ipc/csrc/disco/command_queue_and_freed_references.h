/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file command_queue_and_freed_references.h
 * \brief The commands that a session sends to its workers, and the references to their results.
 *
 * Disco's session is made for one thread and for workers that read promptly. Here any thread may
 * send, but never more than the workers' pipes hold, so that no write blocks. A reference may end
 * at any time in any thread. It then only records its register, and the next command frees it on
 * the workers. (Disco's own reference would write to the pipes, and throw in a destructor if a
 * worker has died.)
 */
#ifndef TVM_IPC_DISCO_COMMAND_QUEUE_AND_FREED_REFERENCES_H_
#define TVM_IPC_DISCO_COMMAND_QUEUE_AND_FREED_REFERENCES_H_

#include <tvm/ffi/any.h>
#include <tvm/ffi/function.h>
#include <tvm/runtime/disco/session.h>

#include <cstdint>
#include <map>
#include <mutex>

namespace tvm_ipc {

class FreedRegisters;

class CommandQueue {
 public:
  /*! \param room The number of bytes of commands that may be unread before a write could block. */
  explicit CommandQueue(int64_t room);

  /*!
   * \brief Send a command with the arguments of SessionObj::CallWithPacked.
   * \return The reference to its result. If there is no room, nothing is sent and the result is the
   *         number of bytes that it needs.
   */
  tvm::ffi::Any Send(const tvm::runtime::Session& session, tvm::ffi::PackedArgs args);
  /*! \brief Send the command by which workers acknowledge a ticket. It always has room. */
  void SendTicket(const tvm::runtime::Session& session, tvm::ffi::PackedArgs args, int64_t ticket);
  /*! \brief Record that every worker has read the commands before the ticket. */
  void Passed(int64_t ticket);
  /*! \brief Make a reference of Disco's record its register here when it ends. */
  tvm::runtime::DRef Adopt(tvm::runtime::DRef reference) const;

 private:
  void FreeRegisters(const tvm::runtime::Session& session);

  const int64_t room_;
  std::mutex mutex_;
  /*! \brief The number of bytes ever sent, and the number that the workers have read. */
  int64_t sent_ = 0;
  int64_t read_ = 0;
  std::map<int64_t, int64_t> sent_before_;  // by outstanding ticket
  tvm::ffi::ObjectPtr<FreedRegisters> freed_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_DISCO_COMMAND_QUEUE_AND_FREED_REFERENCES_H_
