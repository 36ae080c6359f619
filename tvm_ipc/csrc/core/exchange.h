/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file exchange.h
 * \brief What every rank shows to all others through the hub: the handles of memory that it
 *        exports, which are bytes or open files, and which the others import.
 *
 * An exchange is a collective call. A rank sends what it shows, with the number of the exchange;
 * once the hub has that of all ranks, it sends every rank what each of them showed.
 */
#ifndef TVM_IPC_CORE_EXCHANGE_H_
#define TVM_IPC_CORE_EXCHANGE_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/file.h"
#include "core/frame.h"

namespace tvm_ipc {

/*! \brief What one rank shows. */
struct Exported {
  std::string bytes;
  std::vector<File> files;
};

/*! \brief What the payload of a frame kShared begins with; the exchange's name and bytes follow. */
struct ExchangeHeader {
  /*! \brief The same for one exchange on every rank, and never again. */
  uint64_t number;
  int32_t rank;
  int32_t reserved;
};

/*! \brief A frame for several, and its files. */
struct Message {
  std::string bytes;
  std::vector<File> files;
};

/*! \brief Frames on their way to one rank, which need not read them soon. */
class Outgoing {
 public:
  void Add(std::shared_ptr<const Message> message) { messages_.push_back(std::move(message)); }
  bool empty() const { return messages_.empty(); }
  /*! \brief Send what the socket takes; false, with errno, if it takes nothing any more. */
  bool Send(int socket);
  /*! \brief Forget what was not begun. */
  void Clear();

 private:
  std::deque<std::shared_ptr<const Message>> messages_;
  size_t sent_ = 0;  // of the first one
};

/*! \brief The hub's part: keeps what ranks show until all have. */
class Exchange {
 public:
  explicit Exchange(int num_ranks) : num_ranks_(num_ranks) {}
  /*! \brief Take what a rank shows; the messages for every rank, if it was the last one. */
  std::vector<std::shared_ptr<const Message>> Add(int rank, Frame frame);
  /*! \brief Forget what is not complete. */
  void Clear() { shown_.clear(); }

 private:
  int num_ranks_;
  /*! \brief By the number of the exchange, then by rank. */
  std::map<uint64_t, std::map<int, std::shared_ptr<const Message>>> shown_;
};

class Rank;
/*!
 * \brief Show something to all ranks, and see what each of them shows, in rank order.
 * \param what For whom it is; all ranks must say the same.
 *
 * Ends in an error when the session stops or a rank does not come in time.
 */
std::vector<Exported> ExchangeWithAll(Rank& rank, const std::string& what, Exported mine);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_EXCHANGE_H_
