/* SPDX-License-Identifier: Apache-2.0 */
/*! \file machine_name_and_memory.cc */
#include "core/machine_name_and_memory.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>

namespace tvm_ipc {

std::string ThisMachine() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  return boot + " " + host;
}

size_t PhysicalMemory() {
  size_t bytes =
      static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size_t limit = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit && limit < bytes) bytes = limit;
  return bytes;
}

size_t DefaultArenaBytes(int num_ranks) {
  return std::max<size_t>(PhysicalMemory() / 2 / num_ranks, size_t{64} << 20);
}

}  // namespace tvm_ipc
