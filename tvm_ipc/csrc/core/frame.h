/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file frame.h
 * \brief What travels between a worker and the hub: frames of bytes, which may carry open files.
 *
 * A frame is a header and as many bytes as it says. Its files go with the header's first byte, so
 * that they are there when the header is.
 */
#ifndef TVM_IPC_CORE_FRAME_H_
#define TVM_IPC_CORE_FRAME_H_

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "core/file.h"

namespace tvm_ipc {

/*! \brief The most files in one frame; the system's own limit (SCM_MAX_FD) is 253. */
constexpr size_t kMaxFrameFiles = 128;

/*! \brief What a frame is about, and what its payload is. */
enum class FrameType : uint32_t {
  /*! \brief Of a worker: Hello. */
  kHello = 1,
  /*! \brief Of a worker: a ticket. */
  kDone = 2,
  /*! \brief Of a worker: PackError. */
  kError = 3,
  /*! \brief Of a worker: a key, and the bytes of a value. */
  kValue = 4,
  /*! \brief Of a worker: nothing; what ends a connection without it is a death. */
  kBye = 5,
  /*! \brief Of a worker: nothing; it has all it needs. */
  kJoined = 6,
  /*! \brief Of a worker, what it shows to all, and of the hub, what one of them showed: Round. */
  kShared = 7,
  /*! \brief Of a worker on one of several nodes: a copy, and the ranks of the team that it needs,
     or none. */
  kTeam = 8,
  /*! \brief Of the hub: Welcome, and the files of the session. */
  kWelcome = 9,
  /*! \brief Of the hub: why not. */
  kRefusal = 10,
  // Between the hubs of several nodes (node_link.h): of a NodeMessage,
  /*! \brief a part, which others follow, */
  kPiece = 11,
  /*! \brief the last or only part, */
  kLast = 12,
  /*! \brief all, which may come between the parts of another. */
  kUrgent = 13,
};

struct FrameHeader {
  FrameType type;
  uint32_t num_files;
  uint64_t bytes;
};

/*! \brief A frame as it came. */
struct Frame {
  FrameType type;
  std::string payload;
  std::vector<File> files;
  /*! \brief Whether files are missing, for want of descriptors here. */
  bool lost_files = false;
};

/*! \brief The bytes of a value. */
template <typename T>
std::string AsBytes(const T& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

/*!
 * \brief Send bytes, and files with the first of them.
 * \param flags As of sendmsg.
 * \return How many bytes were sent; -1 with errno.
 */
int64_t SendSome(int socket, const char* bytes, size_t count, const std::vector<int>& files,
                 int flags);
/*! \brief Send a whole frame; false, with errno, when the other side is gone. */
bool SendFrame(int socket, FrameType type, const std::string& payload,
               const std::vector<int>& files = {});

/*! \brief What a reader takes of a frame; more is no frame of ours. */
struct FrameLimits {
  /*! \brief Of the payload. A worker's value may be as large as its memory. */
  uint64_t bytes = uint64_t{1} << 40;
  /*! \brief The types that may come. */
  FrameType first = FrameType::kHello;
  FrameType last = FrameType::kRefusal;
  uint32_t files = kMaxFrameFiles;
};

/*!
 * \brief Puts frames together, however the socket cuts them.
 *
 * It keeps no more than the frames of one call of Read and one that is not whole, and of that no
 * more than has come.
 */
class FrameReader {
 public:
  FrameReader() = default;
  explicit FrameReader(const FrameLimits& limits) : limits_(limits) {}

  /*!
   * \brief Take in what has come, without waiting, up to a megabyte or so; false, with errno or 0,
   *        once no more will. With EPROTO what came is no frame within the limits.
   */
  bool Read(int socket);
  /*! \brief Whether the last call of Read took all there was. */
  bool drained() const { return drained_; }
  /*! \brief The next whole frame, if it is here. */
  bool Next(Frame* frame);
  /*! \brief How many bytes of a frame that is not whole it keeps. */
  size_t held() const { return bytes_.size(); }

 private:
  bool Cut();
  bool Begin(const FrameHeader& header);

  FrameLimits limits_;
  bool drained_ = true;
  bool broken_ = false;
  std::string bytes_;
  std::vector<File> files_;
  /*! \brief The frame whose header is here, and how long it is. */
  bool begun_ = false;
  uint64_t length_ = 0;
  Frame current_;
  std::deque<Frame> whole_;
};

/*! \brief A worker's error as the payload of a frame; of a very long text the middle is left out.
 */
std::string PackError(const std::string& kind, const std::string& message,
                      const std::string& traceback);
/*! \brief A text, and before it its length. */
std::string PackField(const std::string& text);
/*!
 * \brief Read the text that PackField wrote at the position, which moves behind it; false, and
 *        nothing changes, if the payload has not all of it.
 */
bool TakeField(const std::string& payload, size_t* position, std::string* text);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_FRAME_H_
