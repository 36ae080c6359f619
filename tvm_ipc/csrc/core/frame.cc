/* SPDX-License-Identifier: Apache-2.0 */
/*! \file frame.cc */
#include "core/frame.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "core/error.h"

namespace tvm_ipc {

namespace {

/*! \brief The most bytes of an error text that a rank sends to the controller. */
constexpr size_t kLongestText = size_t{1} << 20;
/*! \brief The most bytes to read from a socket at a time, so that other sockets get their turn. */
constexpr size_t kReadAtOnce = size_t{1} << 20;
/*! \brief How long a sender waits for others to receive files, and how often it tries. */
constexpr auto kFilesReceived = std::chrono::seconds(20);
constexpr auto kNextTry = std::chrono::milliseconds(1);

/*! \brief Return a text without its middle if it is too long. */
std::string Shortened(const std::string& text) {
  if (text.size() <= kLongestText) return text;
  auto inside_a_character = [&](size_t at) { return (text[at] & 0xC0) == 0x80; };
  size_t left = kLongestText / 2, right = text.size() - kLongestText / 2;
  while (left > 0 && inside_a_character(left)) --left;
  while (right < text.size() && inside_a_character(right)) ++right;
  return Text(text.substr(0, left), "\n... [", right - left, " of ", text.size(),
              " bytes are left out here] ...\n", text.substr(right));
}

/*! \brief Ancillary data for the files of a frame. */
struct FileSpace {
  alignas(cmsghdr) char bytes[CMSG_SPACE(sizeof(int) * kMaxFrameFiles)] = {};
};

}  // namespace

int64_t SendSome(int socket, const char* bytes, size_t count, const std::vector<int>& files,
                 int flags) {
  iovec data{const_cast<char*>(bytes), count};
  FileSpace space;
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (!files.empty()) {
    message.msg_control = space.bytes;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * files.size());
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int) * files.size());
    memcpy(CMSG_DATA(part), files.data(), sizeof(int) * files.size());
  }
  for (auto waited = kNextTry; true;) {
    const ssize_t sent = sendmsg(socket, &message, flags | MSG_NOSIGNAL);
    if (sent >= 0 || (errno != EINTR && errno != ETOOMANYREFS)) return sent;
    if (errno == EINTR) continue;
    // Files that nobody has received yet count against the limit of open files of their sender,
    // together with those of other programs of the user. Workers receive theirs soon.
    if (waited > kFilesReceived) return -1;
    std::this_thread::sleep_for(kNextTry);
    waited += kNextTry;
    if (flags & MSG_DONTWAIT) {
      errno = EAGAIN;
      return -1;
    }
  }
}

bool SendFrame(int socket, FrameType type, const std::string& payload,
               const std::vector<int>& files) {
  const FrameHeader header{type, static_cast<uint32_t>(files.size()), payload.size()};
  const std::string bytes = AsBytes(header) + payload;
  for (size_t at = 0; at < bytes.size();) {
    const int64_t sent = SendSome(socket, bytes.data() + at, bytes.size() - at,
                                  at == 0 ? files : std::vector<int>(), 0);
    if (sent <= 0) return false;
    at += static_cast<size_t>(sent);
  }
  return true;
}

bool FrameReader::Read(int socket) {
  char chunk[64 << 10];
  drained_ = true;
  for (size_t taken = 0; taken < kReadAtOnce;) {
    if (broken_) break;
    // Read no further than the incomplete header whose files have arrived: the next frame may come
    // with files of its own.
    const size_t room = files_.empty() ? sizeof(chunk) : sizeof(FrameHeader) - bytes_.size();
    iovec data{chunk, room};
    FileSpace space;
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = space.bytes;
    message.msg_controllen = sizeof(space.bytes);
    const ssize_t got = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    for (cmsghdr* part = CMSG_FIRSTHDR(&message); part; part = CMSG_NXTHDR(&message, part)) {
      if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
      for (size_t at = 0; at + CMSG_LEN(sizeof(int)) <= part->cmsg_len; at += sizeof(int)) {
        int file;
        memcpy(&file, CMSG_DATA(part) + at, sizeof(file));
        File received(file);
        if (received.get() >= 0) files_.push_back(std::move(received));  // otherwise it is lost
      }
    }
    bytes_.append(chunk, static_cast<size_t>(got));
    taken += static_cast<size_t>(got);
    broken_ = !Cut();  // after each read, to match files with the header that they came with
    errno = 0;
    if (got == 0) return false;
  }
  if (broken_) {
    bytes_ = std::string();
    files_.clear();
    errno = EPROTO;
    return false;
  }
  drained_ = false;
  return true;
}

bool FrameReader::Begin(const FrameHeader& header) {
  if (header.type < limits_.first || header.type > limits_.last || header.bytes > limits_.bytes ||
      header.num_files > limits_.files ||
      (header.num_files > 0 && files_.size() > header.num_files)) {
    return false;
  }
  begun_ = true;
  length_ = header.bytes;
  current_ = Frame{header.type, "", {}, false};
  // One recvmsg returns no bytes beyond those that the files came with, so all of them belong here.
  if (header.num_files > 0) current_.files = std::exchange(files_, {});
  current_.lost_files = current_.files.size() < header.num_files;
  return true;
}

/*! \brief Assemble frames from the bytes; return false if they are invalid. */
bool FrameReader::Cut() {
  size_t position = 0;
  while (true) {
    const size_t here = bytes_.size() - position;
    if (!begun_) {
      FrameHeader header;
      if (here < sizeof(header)) break;
      memcpy(&header, bytes_.data() + position, sizeof(header));
      position += sizeof(header);
      if (!Begin(header)) return false;
      continue;
    }
    if (here < length_) break;
    current_.payload = bytes_.substr(position, length_);
    position += length_;
    whole_.push_back(std::move(current_));
    begun_ = false;
  }
  bytes_.erase(0, position);
  // Remaining files may only belong to a header that has arrived in part.
  const bool header_comes = !begun_ && !bytes_.empty();
  return files_.empty() || (header_comes && files_.size() <= kMaxFrameFiles);
}

bool FrameReader::Next(Frame* frame) {
  if (whole_.empty()) return false;
  *frame = std::move(whole_.front());
  whole_.pop_front();
  return true;
}

std::string PackError(const std::string& kind, const std::string& message,
                      const std::string& traceback) {
  return PackField(kind) + PackField(Shortened(message)) + PackField(Shortened(traceback));
}

std::string PackField(const std::string& text) { return AsBytes(uint64_t{text.size()}) + text; }

bool TakeField(const std::string& payload, size_t* position, std::string* text) {
  uint64_t bytes = 0;
  if (*position > payload.size() || payload.size() - *position < sizeof(bytes)) return false;
  memcpy(&bytes, payload.data() + *position, sizeof(bytes));
  const size_t start = *position + sizeof(bytes);
  if (bytes > payload.size() - start) return false;
  *text = payload.substr(start, bytes);
  *position = start + bytes;
  return true;
}

}  // namespace tvm_ipc
