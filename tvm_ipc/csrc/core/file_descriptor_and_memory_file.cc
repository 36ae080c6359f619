/* SPDX-License-Identifier: Apache-2.0 */
/*! \file file_descriptor_and_memory_file.cc */
#include "core/file_descriptor_and_memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"

namespace tvm_ipc {

int AboveStandardStreams(int descriptor) {
  if (descriptor < 0 || descriptor > STDERR_FILENO) return descriptor;
  const int moved = DuplicateFile(descriptor);
  const int error = errno;
  close(descriptor);
  errno = error;
  return moved;
}

int DuplicateFile(int descriptor) { return fcntl(descriptor, F_DUPFD_CLOEXEC, STDERR_FILENO + 1); }

File::~File() {
  if (descriptor_ >= 0) close(descriptor_);
}

std::vector<int> Descriptors(const std::vector<File>& files) {
  std::vector<int> descriptors;
  for (const File& file : files) descriptors.push_back(file.get());
  return descriptors;
}

File MakeMemoryFile(const char* name, size_t bytes) {
  File file(memfd_create(name, MFD_CLOEXEC));
  if (file.get() < 0) {
    Fail(kind::kRuntime, "cannot make shared memory (memfd_create): ", strerror(errno),
         FilesHint(errno));
  }
  if (ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) {
    Fail(kind::kMemory, "cannot reserve ", bytes, " bytes of shared memory: ", strerror(errno));
  }
  return file;
}

size_t FileBytes(int file) {
  struct stat status{};
  if (fstat(file, &status) != 0) Fail(kind::kRuntime, "fstat: ", strerror(errno));
  return static_cast<size_t>(status.st_size);
}

void* MapFile(int file, size_t bytes) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (address == MAP_FAILED) {
    Fail(kind::kMemory, "cannot map ", bytes, " bytes of shared memory: ", strerror(errno),
         "; a lower arena_limit (TVM_IPC_ARENA_LIMIT) or a higher RLIMIT_AS helps");
  }
  return address;
}

const char* FilesHint(int error) { return error == EMFILE || error == ENFILE ? kMoreFiles : ""; }

}  // namespace tvm_ipc
