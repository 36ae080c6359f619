/* SPDX-License-Identifier: Apache-2.0 */
/*! \file device_support_report.cc */
#include "cuda/device_support_report.h"

#include <cstdio>
#include <sstream>
#include <vector>

#include "core/error.h"
#include "cuda/modules.h"

namespace tvm_ipc::cuda {

namespace {

std::string Joined(const std::vector<std::string>& values) {
  std::string text;
  for (const std::string& value : values) text += (text.empty() ? "" : ", ") + value;
  return '[' + text + ']';
}

/*! \brief Return a device as JSON. If the driver does not describe it, return only the reason. */
std::string InfoOf(int ordinal) {
  std::ostringstream json;
  DeviceFacts facts;
  std::string why;
  std::string kernels;
  try {
    facts = FactsOf(ordinal);
    kernels = ArchitectureFor(facts.capability(), &why);
  } catch (const Error& error) {
    why = error.what();
  }
  json << "{\"id\": " << ordinal << ", \"name\": " << Quoted(facts.name)
       << ", \"memory\": " << facts.memory << ", \"capability\": \"" << facts.major << '.'
       << facts.minor << "\", \"uuid\": " << Quoted(facts.uuid)
       << ", \"pci\": " << Quoted(facts.pci) << ", \"multiprocessors\": " << facts.multiprocessors
       << ", \"kernels\": " << Quoted(kernels) << ", \"reason\": " << Quoted(why)
       << ", \"vmm\": " << (facts.files ? "true" : "false") << "}";
  return json.str();
}

}  // namespace

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (char c : text) {
    char escaped[8];
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      snprintf(escaped, sizeof(escaped), "\\u%04x", static_cast<unsigned>(c));
      quoted += escaped;
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

std::string Info() {
  std::vector<std::string> architectures;
  for (const std::string& name : Architectures()) architectures.push_back(Quoted(name));
  std::string why;
  const Driver* driver = FindDriver(&why);
  const int count = driver == nullptr ? 0 : driver->num_devices();
  std::vector<std::string> devices;
  std::vector<std::string> links;
  for (int i = 0; i < count; ++i) {
    devices.push_back(InfoOf(i));
    std::vector<std::string> row;
    for (int j = 0; j < count; ++j) {
      try {
        row.push_back(Quoted(NameOf(LinkBetween(i, j))));
      } catch (const Error&) {
        row.push_back(Quoted(""));
      }
    }
    links.push_back(Joined(row));
  }
  std::ostringstream json;
  json << "{\"architectures\": " << Joined(architectures)
       << ", \"driver\": {\"version\": " << (driver == nullptr ? 0 : driver->version())
       << ", \"reason\": " << Quoted(why) << "}, \"max_ranks\": " << kernels::kMaxMembers
       << ", \"devices\": " << Joined(devices) << ", \"links\": " << Joined(links) << "}";
  return json.str();
}

std::string Refusal(const std::vector<int>& devices) {
  std::string why;
  if (FindDriver(&why) == nullptr) return why;
  if (devices.size() > static_cast<size_t>(kernels::kMaxMembers)) {
    return Text("it connects ", kernels::kMaxMembers, " workers at most, not ", devices.size());
  }
  try {
    for (int device : devices) {
      if (ArchitectureFor(FactsOf(device).capability(), &why).empty()) {
        return Text("cuda:", device, ": ", why);
      }
    }
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace tvm_ipc::cuda
