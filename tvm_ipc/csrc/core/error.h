/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file error.h
 * \brief The core's exception, with the name of the Python class that it is converted to.
 */
#ifndef TVM_IPC_CORE_ERROR_H_
#define TVM_IPC_CORE_ERROR_H_

#include <sstream>
#include <stdexcept>
#include <string>

namespace tvm_ipc {

/*! \brief The kinds of errors, as names of Python classes. */
namespace kind {
constexpr const char* kValue = "ValueError";
constexpr const char* kType = "TypeError";
constexpr const char* kMemory = "MemoryError";
constexpr const char* kRuntime = "RuntimeError";
/*! \brief Ranks called different operations, or the same one with different arguments. */
constexpr const char* kMismatch = "MismatchError";
/*! \brief A rank did not arrive in time. */
constexpr const char* kDeadline = "DeadlineError";
/*! \brief This rank stopped because of an error that another rank reports. */
constexpr const char* kPeer = "PeerError";
}  // namespace kind

class Error : public std::runtime_error {
 public:
  Error(const char* kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  const char* kind() const { return kind_; }

 private:
  const char* kind_;
};

/*! \brief Concatenate the arguments as text. */
template <typename... Args>
std::string Text(const Args&... args) {
  std::ostringstream os;
  (os << ... << args);
  return os.str();
}

template <typename... Args>
[[noreturn]] void Fail(const char* kind, const Args&... args) {
  throw Error(kind, Text(args...));
}

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_ERROR_H_
