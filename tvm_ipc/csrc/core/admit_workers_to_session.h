/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file admit_workers_to_session.h
 * \brief Admits workers to a session, over an abstract Unix socket with a random name. A worker
 * must run as the same user and know the session's token. It gets the session's files, or the
 *        reason why it is refused.
 *
 * The workers' side is worker_handshake.h. All of this runs in the session server's thread. The
 * rules that it shares with the listener for other machines (nodes/admission.py) are in
 * docs/internals.md.
 */
#ifndef TVM_IPC_CORE_ADMIT_WORKERS_TO_SESSION_H_
#define TVM_IPC_CORE_ADMIT_WORKERS_TO_SESSION_H_

#include <poll.h>

#include <chrono>
#include <string>
#include <vector>

#include "core/file_descriptor_and_memory_file.h"
#include "core/shared_memory_layout.h"
#include "core/worker_handshake.h"
#include "core/worker_status_and_error_table.h"

namespace tvm_ipc {

class Admission {
 public:
  /*!
   * \param backend The name of the session's backend, which workers must name too.
   * \param files The files that every worker gets; the control block is the first.
   * \param worker_table Records admitted and refused workers.
   */
  Admission(const std::string& backend, const Welcome& welcome, std::vector<File> files,
            Control& control, WorkerTable& worker_table);
  ~Admission();
  Admission(const Admission&) = delete;
  Admission& operator=(const Admission&) = delete;

  const Invitation& invitation() const { return invitation_; }

  /*!
   * \brief Add the descriptors to poll.
   * \return The time in milliseconds until a pending peer times out; -1 if there is none.
   */
  int Watch(std::vector<pollfd>* polled);
  /*! \brief Accept a connection, or read from a pending peer. */
  void Serve(int file);
  /*! \brief Close pending peers that have timed out or are too many; called after all were served.
   */
  void Tidy();

 private:
  /*!
   * \brief A connection that has not sent the token yet. Any program of the user can connect any
   *        number of times; each costs at most a descriptor and never a wait.
   */
  struct PendingPeer {
    int socket;
    std::chrono::steady_clock::time_point arrived;
    std::string received;
  };

  void Listen();
  bool Accept();
  void Receive(int socket);
  void Admit(int socket, const Hello& hello);
  /*! \brief Return why a worker cannot join; empty if it can. */
  std::string Check(const Hello& hello) const;
  void CloseListener();

  const std::string backend_;
  const Welcome welcome_;
  std::vector<File> files_;
  Control& control_;
  WorkerTable& worker_table_;
  const Invitation invitation_;
  int listener_ = -1;
  /*! \brief The pending peers, in order of arrival. */
  std::vector<PendingPeer> pending_peers_;
  /*! \brief For each rank: whether it has joined, or belongs to another node. */
  std::vector<bool> admitted_;
  /*! \brief Whether the last accept had a free descriptor, and how many in a row had none. */
  bool has_descriptors_ = true;
  int failed_accepts_ = 0;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_ADMIT_WORKERS_TO_SESSION_H_
