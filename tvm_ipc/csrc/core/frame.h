/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file frame.h
 * \brief The frames between a worker and the session server, which may carry open files.
 *
 * A frame is a header and the number of bytes that it specifies. Its files are sent with the
 * header's first byte, so they have arrived when the header has.
 */
#ifndef TVM_IPC_CORE_FRAME_H_
#define TVM_IPC_CORE_FRAME_H_

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "core/file_descriptor_and_memory_file.h"

namespace tvm_ipc {

/*! \brief The maximum number of files in one frame; the system's limit (SCM_MAX_FD) is 253. */
constexpr size_t kMaxFrameFiles = 128;

/*! \brief The type of a frame, which determines its payload. */
enum class FrameType : uint32_t {
  /*! \brief From a worker: Hello. */
  kHello = 1,
  /*! \brief From a worker: a ticket. */
  kDone = 2,
  /*! \brief From a worker: PackError. */
  kError = 3,
  /*! \brief From a worker: a key, and the bytes of a value. */
  kValue = 4,
  /*! \brief From a worker: a goodbye, without payload; a connection that ends without it is a
     death. */
  kBye = 5,
  /*! \brief From a worker: it has joined; the payload is the fallback backend, or empty. */
  kJoined = 6,
  /*! \brief From a worker: its memory handles; from the server: those of one rank. */
  kShared = 7,
  /*! \brief From a worker on one of several nodes: a copy, and the ranks of the team that it
   *         requests, or none. */
  kTeam = 8,
  /*! \brief From the server: Welcome, and the files of the session. */
  kWelcome = 9,
  /*! \brief From the server: why the worker is refused. */
  kRefusal = 10,
  // Between the session servers of several nodes (internode_control_messages_and_heartbeats.h):
  /*! \brief A piece of a NodeMessage, which others follow. */
  kPiece = 11,
  /*! \brief The last or only piece of a NodeMessage. */
  kLast = 12,
  /*! \brief A whole NodeMessage, which may arrive between the pieces of another. */
  kUrgent = 13,
};

struct FrameHeader {
  FrameType type;
  uint32_t num_files;
  uint64_t bytes;
};

/*! \brief A received frame. */
struct Frame {
  FrameType type;
  std::string payload;
  std::vector<File> files;
  /*! \brief Whether files were lost because this process has no descriptors left. */
  bool lost_files = false;
};

/*! \brief Return the bytes of a value. */
template <typename T>
std::string AsBytes(const T& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

/*!
 * \brief Send bytes, and files with the first of them. If too many files are on their way, wait
 *        until some are received (ETOOMANYREFS after 20 s), or with MSG_DONTWAIT return EAGAIN.
 * \param flags Flags of sendmsg.
 * \return The number of bytes sent; -1, with errno, on failure.
 */
int64_t SendSome(int socket, const char* bytes, size_t count, const std::vector<int>& files,
                 int flags);
/*! \brief Send a whole frame; return false, with errno, if the other side is gone. */
bool SendFrame(int socket, FrameType type, const std::string& payload,
               const std::vector<int>& files = {});

/*! \brief The limits of a reader; a frame beyond them is invalid. */
struct FrameLimits {
  /*! \brief Bytes of the payload. A worker's value may be as large as its memory. */
  uint64_t bytes = uint64_t{1} << 40;
  /*! \brief The range of valid types. */
  FrameType first = FrameType::kHello;
  FrameType last = FrameType::kRefusal;
  uint32_t files = kMaxFrameFiles;
};

/*!
 * \brief Assembles frames from the bytes of a socket.
 *
 * It keeps at most the frames of one call of Read and the received bytes of one incomplete frame.
 */
class FrameReader {
 public:
  FrameReader() = default;
  explicit FrameReader(const FrameLimits& limits) : limits_(limits) {}

  /*!
   * \brief Read the bytes that have arrived, up to about a megabyte, without waiting. Return false,
   *        with errno or 0, if no more will arrive. EPROTO means a frame that is invalid or exceeds
   *        the limits.
   */
  bool Read(int socket);
  /*! \brief Return whether the last call of Read read everything that had arrived. */
  bool drained() const { return drained_; }
  /*! \brief Get the next complete frame; return false if there is none. */
  bool Next(Frame* frame);
  /*! \brief Return the number of bytes kept of an incomplete frame. */
  size_t held() const { return bytes_.size(); }

 private:
  bool Cut();
  bool Begin(const FrameHeader& header);

  FrameLimits limits_;
  bool drained_ = true;
  bool broken_ = false;
  std::string bytes_;
  std::vector<File> files_;
  /*! \brief Whether the header of `current_` has arrived, and the length of its payload. */
  bool begun_ = false;
  uint64_t length_ = 0;
  Frame current_;
  std::deque<Frame> whole_;
};

/*! \brief Pack a worker's error as the payload of a frame; omit the middle of a very long text. */
std::string PackError(const std::string& kind, const std::string& message,
                      const std::string& traceback);
/*! \brief Pack a text, preceded by its length. */
std::string PackField(const std::string& text);
/*!
 * \brief Read the text that PackField wrote at the position, and move the position behind it.
 *        Return false and change nothing if the payload does not contain all of it.
 */
bool TakeField(const std::string& payload, size_t* position, std::string* text);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_FRAME_H_
