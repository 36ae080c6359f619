// SPDX-License-Identifier: Apache-2.0
// What TVM_IPC_DOUBLE_* in the environment says; README.md has the list.
#ifndef TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_SETTINGS_H_
#define TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_SETTINGS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace cuda_double {

struct Settings {
  std::vector<int> devices;  // physical numbers of those that are visible
  int multiprocessors = 4;
  int capability = 90;
  size_t memory = size_t{256} << 20;         // bytes of each device
  size_t granularity = size_t{2} << 20;      // of virtual memory
  int poison = 0xFF;                         // byte in fresh memory, -1: zeros
  size_t poison_limit = size_t{64} << 20;    // bytes of an allocation beyond which it stays sparse
  std::map<int, int> attributes;             // device attributes by number
  bool peers = true;                         // whether all devices see each other,
  std::set<std::pair<int, int>> peer_pairs;  // or only these (physical numbers)
  uint64_t delay_seed = 0;
  int delay_microseconds = 0;    // at most, before each operation of a stream; 0: none
  bool shuffle_threads = false;  // threads of a block run in another order each time
  std::string kernels;           // library that serves cubins and PTX
  std::string report;            // file to which a line is added at exit
  bool guard = false;            // the host cannot touch memory of devices
  bool verbose = false;          // say on stderr why a call failed
};

const Settings& TheSettings();

}  // namespace cuda_double

#endif  // TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_SETTINGS_H_
