/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file file_descriptor_and_memory_file.h
 * \brief Owned file descriptors, and files in memory.
 */
#ifndef TVM_IPC_CORE_FILE_DESCRIPTOR_AND_MEMORY_FILE_H_
#define TVM_IPC_CORE_FILE_DESCRIPTOR_AND_MEMORY_FILE_H_

#include <cstddef>
#include <utility>
#include <vector>

namespace tvm_ipc {

/*!
 * \brief Move a descriptor that has the number of a standard stream to a higher number.
 *
 * Where the program has closed a standard stream, the next file that is opened gets its number,
 * and what is printed then goes into that file. Python fills the numbers of closed streams before
 * sessions start (runtime/standard_fd_reservation.py), which protects the files of other libraries
 * too. This protects ours where a program closes its standard streams during a session.
 *
 * \return The descriptor; -1 with errno if there is none, or no other number is free.
 */
int AboveStandardStreams(int descriptor);
/*! \brief Duplicate a descriptor; -1 with errno if that fails. */
int DuplicateFile(int descriptor);

/*! \brief An open file, closed with its owner. It never has the number of a standard stream. */
class File {
 public:
  File() = default;
  explicit File(int descriptor) : descriptor_(AboveStandardStreams(descriptor)) {}
  File(File&& other) noexcept : descriptor_(other.Give()) {}
  File& operator=(File&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~File();

  /*! \brief Return the descriptor; -1 if there is none. */
  int get() const { return descriptor_; }
  /*! \brief Return the descriptor and give up its ownership. */
  int Give() { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_ = -1;
};

/*! \brief Return the descriptors, without their ownership. */
std::vector<int> Descriptors(const std::vector<File>& files);

/*! \brief Make an anonymous file of zeros; pages are allocated when they are touched. */
File MakeMemoryFile(const char* name, size_t bytes);
/*! \brief Return the size of a file. */
size_t FileBytes(int file);
/*! \brief Map a whole file for reading and writing, shared. */
void* MapFile(int file, size_t bytes);

/*! \brief The hint for errors of a process without free descriptors. */
constexpr const char* kMoreFiles =
    "; a higher limit of open files helps (RLIMIT_NOFILE, `ulimit -n`)";
/*! \brief Return that hint if the error is about descriptors; otherwise an empty text. */
const char* FilesHint(int error);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_FILE_DESCRIPTOR_AND_MEMORY_FILE_H_
