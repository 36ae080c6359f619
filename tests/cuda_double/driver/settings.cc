// SPDX-License-Identifier: Apache-2.0
#include "settings.h"

#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace cuda_double {
namespace {

std::string Text(const char* name) {
  const char* value = std::getenv((std::string("TVM_IPC_DOUBLE_") + name).c_str());
  return value == nullptr ? "" : value;
}

[[noreturn]] void Refuse(const std::string& name, const std::string& value) {
  std::fprintf(stderr, "cuda double: TVM_IPC_DOUBLE_%s=%s is not understood\n", name.c_str(),
               value.c_str());
  std::abort();
}

int64_t ToNumber(const std::string& name, const std::string& text) {
  char* end = nullptr;
  int64_t value = std::strtoll(text.c_str(), &end, 0);
  if (end == text.c_str() || *end != '\0') Refuse(name, text);
  return value;
}

int64_t Number(const char* name, int64_t otherwise) {
  std::string text = Text(name);
  return text.empty() ? otherwise : ToNumber(name, text);
}

std::vector<std::string> Split(const std::string& text, char between) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, between);) parts.push_back(part);
  return parts;
}

// "a=b,c=d" or "a-b,c-d"
std::vector<std::pair<int, int>> Pairs(const char* name, char between) {
  std::vector<std::pair<int, int>> pairs;
  std::string text = Text(name);
  for (const std::string& item : Split(text, ',')) {
    std::vector<std::string> two = Split(item, between);
    if (two.size() != 2) Refuse(name, text);
    pairs.emplace_back(static_cast<int>(ToNumber(name, two[0])),
                       static_cast<int>(ToNumber(name, two[1])));
  }
  return pairs;
}

// As CUDA_VISIBLE_DEVICES does it: the first number that is no device ends the list.
std::vector<int> VisibleDevices(int count) {
  std::vector<int> devices;
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) {
    for (int device = 0; device < count; ++device) devices.push_back(device);
    return devices;
  }
  for (const std::string& item : Split(visible, ',')) {
    char* end = nullptr;
    int64_t device = std::strtoll(item.c_str(), &end, 10);
    if (end == item.c_str() || *end != '\0' || device < 0 || device >= count) break;
    devices.push_back(static_cast<int>(device));
  }
  return devices;
}

Settings Read() {
  Settings settings;
  settings.devices = VisibleDevices(static_cast<int>(Number("DEVICES", 2)));
  settings.multiprocessors = static_cast<int>(Number("MULTIPROCESSORS", settings.multiprocessors));
  settings.capability = static_cast<int>(Number("CAPABILITY", settings.capability));
  settings.memory = static_cast<size_t>(Number("MEMORY", static_cast<int64_t>(settings.memory)));
  settings.granularity =
      static_cast<size_t>(Number("GRANULARITY", static_cast<int64_t>(settings.granularity)));
  settings.poison = static_cast<int>(Number("POISON", settings.poison));
  for (auto [attribute, value] : Pairs("ATTRIBUTES", '=')) settings.attributes[attribute] = value;
  if (std::string peers = Text("PEERS"); !peers.empty()) {
    settings.peers = false;
    if (peers != "none") {
      for (auto [one, other] : Pairs("PEERS", '-')) {
        settings.peer_pairs.emplace(one, other);
        settings.peer_pairs.emplace(other, one);
      }
    }
  }
  if (std::string delay = Text("DELAY"); !delay.empty()) {  // seed:microseconds
    std::vector<std::string> parts = Split(delay, ':');
    if (parts.size() != 2) Refuse("DELAY", delay);
    settings.delay_seed = static_cast<uint64_t>(ToNumber("DELAY", parts[0]));
    settings.delay_microseconds = static_cast<int>(ToNumber("DELAY", parts[1]));
  }
  settings.shuffle_threads = Number("SHUFFLE", 0) != 0;
  settings.kernels = Text("KERNELS");
  settings.report = Text("REPORT");
  settings.guard = Number("GUARD", 0) != 0;
  settings.verbose = Number("VERBOSE", 0) != 0;
  return settings;
}

}  // namespace

const Settings& TheSettings() {
  static const Settings* settings = new Settings(Read());
  return *settings;
}

}  // namespace cuda_double
