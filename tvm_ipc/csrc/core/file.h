/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file file.h
 * \brief Open files that have an owner, and files that are nothing but memory.
 */
#ifndef TVM_IPC_CORE_FILE_H_
#define TVM_IPC_CORE_FILE_H_

#include <cstddef>
#include <utility>
#include <vector>

namespace tvm_ipc {

/*! \brief An open file, closed with its owner. */
class File {
 public:
  File() = default;
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(File&& other) noexcept : descriptor_(other.Give()) {}
  File& operator=(File&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~File();

  /*! \brief The descriptor; -1 if there is none. */
  int get() const { return descriptor_; }
  /*! \brief The descriptor, whose owner the caller is from now on. */
  int Give() { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_ = -1;
};

/*! \brief The descriptors, for calls that only look at them. */
std::vector<int> Descriptors(const std::vector<File>& files);

/*! \brief A file of zeros that only those see who are given it; pages come as they are touched. */
File MakeMemoryFile(const char* name, size_t bytes);
/*! \brief How large a file is. */
size_t FileBytes(int file);
/*! \brief The whole file, mapped to be read and written by all who map it. */
void* MapFile(int file, size_t bytes);

/*! \brief What to say where a process has no descriptor left. */
constexpr const char* kMoreFiles =
    "; a higher limit of open files helps (RLIMIT_NOFILE, `ulimit -n`)";
/*! \brief The same, or nothing where something else is the matter. */
const char* FilesHint(int error);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_FILE_H_
