/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file handle_allgather_via_session_server.h
 * \brief All-gather of memory handles through the session server: bytes or open files that a rank
 *        exports and the others import.
 *
 * It is a collective call. A rank sends its handles with the number of the exchange; once the
 * server has those of all ranks, it sends all of them to every rank.
 */
#ifndef TVM_IPC_CORE_HANDLE_ALLGATHER_VIA_SESSION_SERVER_H_
#define TVM_IPC_CORE_HANDLE_ALLGATHER_VIA_SESSION_SERVER_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/file_descriptor_and_memory_file.h"
#include "core/frame.h"

namespace tvm_ipc {

/*! \brief The handles of one rank. */
struct Exported {
  std::string bytes;
  std::vector<File> files;
};

/*! \brief The start of the payload of a kShared frame; the exchange's name and bytes follow. */
struct HandleAllGatherHeader {
  /*! \brief Unique for each exchange, and the same on every rank. */
  uint64_t number;
  int32_t rank;
  int32_t reserved;
};

/*! \brief A frame for several ranks, and its files. */
struct Message {
  std::string bytes;
  std::vector<File> files;
};

/*! \brief The frames that are queued for one rank, which may read them late. */
class Outgoing {
 public:
  void Add(std::shared_ptr<const Message> message) { messages_.push_back(std::move(message)); }
  bool empty() const { return messages_.empty(); }
  /*! \brief Send what the socket takes; return false, with errno, if it is broken. */
  bool Send(int socket);
  /*! \brief Drop frames that have not been started. */
  void Clear();

 private:
  std::deque<std::shared_ptr<const Message>> messages_;
  size_t sent_ = 0;  // of the first one
};

/*! \brief The session server's side: keeps handles until those of all ranks have arrived. */
class HandleAllGather {
 public:
  explicit HandleAllGather(int num_ranks) : num_ranks_(num_ranks) {}
  /*! \brief Add a rank's handles; return the messages for every rank if it was the last one. */
  std::vector<std::shared_ptr<const Message>> Add(int rank, Frame frame);
  /*! \brief Drop incomplete exchanges. */
  void Clear() { exposed_.clear(); }

 private:
  int num_ranks_;
  /*! \brief The handles so far, by the number of the exchange, then by rank. */
  std::map<uint64_t, std::map<int, std::shared_ptr<const Message>>> exposed_;
};

class Rank;
/*!
 * \brief Send handles to all ranks; return those of each rank, in rank order.
 * \param what The purpose of the handles, which must be the same on all ranks.
 *
 * Throw if the session is aborted or a rank does not take part in time.
 */
std::vector<Exported> AllGatherHandles(Rank& rank, const std::string& what, Exported mine);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_HANDLE_ALLGATHER_VIA_SESSION_SERVER_H_
