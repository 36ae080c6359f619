/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file rendezvous.h
 * \brief Who may join a session: an abstract Unix socket with a random name, the session's token,
 *        and the same user. Who knows the token gets the session's files, or hears why not.
 *
 * The workers' half of it is join.h. All of this runs in the hub's thread.
 */
#ifndef TVM_IPC_CORE_RENDEZVOUS_H_
#define TVM_IPC_CORE_RENDEZVOUS_H_

#include <poll.h>

#include <chrono>
#include <string>
#include <vector>

#include "core/control.h"
#include "core/file.h"
#include "core/join.h"
#include "core/monitor.h"

namespace tvm_ipc {

class Rendezvous {
 public:
  /*!
   * \param backend The name of the session's, which the workers must say too.
   * \param files What every worker gets: the control block's first.
   * \param monitor Told who came, and who was refused.
   */
  Rendezvous(const std::string& backend, const Welcome& welcome, std::vector<File> files,
             Control& control, Monitor& monitor);
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  const Invitation& invitation() const { return invitation_; }

  /*!
   * \brief Add what is to be polled.
   * \return How long, in milliseconds, before somebody has to leave; -1 if nobody has.
   */
  int Watch(std::vector<pollfd>* polled);
  /*! \brief Somebody came, or says something. */
  void Serve(int file);
  /*! \brief After all who were served: turn out who says nothing for too long, and a crowd. */
  void Tidy();

 private:
  /*!
   * \brief Somebody who connected and has not shown the token yet. Any program of the user can do
   *        that, any number of times: it costs a descriptor while there is room, and no wait.
   */
  struct Stranger {
    int socket;
    std::chrono::steady_clock::time_point came;
    std::string said;
  };

  void Listen();
  bool Accept();
  void Hear(int socket);
  void Admit(int socket, const Hello& hello);
  /*! \brief Why a worker cannot join; empty if it can. */
  std::string Check(const Hello& hello) const;
  void CloseDoor();

  const std::string backend_;
  const Welcome welcome_;
  std::vector<File> files_;
  Control& control_;
  Monitor& monitor_;
  const Invitation invitation_;
  int listener_ = -1;
  /*! \brief In the order in which they came. */
  std::vector<Stranger> strangers_;
  /*! \brief Who is not to come, or has come. */
  std::vector<bool> admitted_;
  /*! \brief Whether there was a descriptor for the last who came, and how often there was none. */
  bool descriptors_ = true;
  int without_ = 0;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_RENDEZVOUS_H_
