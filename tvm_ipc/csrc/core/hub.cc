/* SPDX-License-Identifier: Apache-2.0 */
/*! \file hub.cc */
#include "core/hub.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/group.h"
#include "core/machine.h"
#include "core/process.h"
#include "core/teams.h"
#include "core/wait.h"

namespace tvm_ipc {

namespace {

/*! \brief 31 years. */
constexpr double kLongestSeconds = 1e9;

size_t WholePages(size_t bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

Welcome MakeWelcome(const HubOptions& options) {
  const WaitPolicy policy = ChooseWaitPolicy(options.num_ranks, AvailableCores());
  Welcome welcome{};
  // What is no deadline in practice must not become one in the past when it is counted in ns.
  const double seconds = std::min(options.timeout_seconds, kLongestSeconds);
  welcome.deadline_ns = static_cast<int64_t>(seconds * 1e9);
  welcome.spins = policy.spins;
  welcome.yields = policy.yields;
  if (options.otherwise != nullptr) {
    std::string(options.otherwise->name()).copy(welcome.otherwise, sizeof(welcome.otherwise) - 1);
  }
  options.instruction_set.copy(welcome.instruction_set, sizeof(welcome.instruction_set) - 1);
  return welcome;
}

}  // namespace

void Hub::Unmap::operator()(Control* control) const { munmap(control, bytes); }

Hub::Hub(const HubOptions& options) {
  const int n = options.num_ranks;
  if (n < 1 || n > kMaxRanks) {
    Fail(kind::kValue, "a session has 1 to ", kMaxRanks, " workers, not ", n);
  }
  const size_t arena_bytes =
      WholePages(options.arena_bytes == 0 ? options.backend->DefaultArena(n) : options.arena_bytes);
  const size_t control_bytes = Control::Bytes(n);
  std::vector<File> files;
  files.push_back(MakeMemoryFile("tvm_ipc control", control_bytes));
  auto* control = static_cast<Control*>(MapFile(files[0].get(), control_bytes));
  control_ = std::unique_ptr<Control, Unmap>(control, Unmap{control_bytes});
  control_->num_ranks = n;
  control_->controller_pid = getpid();
  control_->arena_bytes = arena_bytes;
  std::vector<File> segments = options.backend->Prepare(*control_);
  if (segments.empty() && options.otherwise != nullptr) {
    segments = options.otherwise->Prepare(*control_);
  }
  for (File& file : segments) files.push_back(std::move(file));
  wake_ = File(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (wake_.get() < 0) {
    Fail(kind::kRuntime, "cannot listen for workers: ", strerror(errno), FilesHint(errno));
  }
  monitor_ = std::make_unique<Monitor>(*control_);
  rendezvous_ = std::make_unique<Rendezvous>(options.backend->name(), MakeWelcome(options),
                                             std::move(files), *control_, *monitor_);
  thread_ = StartThread("the session's hub", [this] { Run(); });
}

Hub::~Hub() {
  stop_ = true;
  const uint64_t one = 1;
  if (write(wake_.get(), &one, sizeof(one)) < 0) {
  }
  thread_.join();
}

void Hub::Run() {
  std::vector<pollfd> polled;
  while (!stop_) {
    polled = {{wake_.get(), POLLIN, 0}};
    const int patience = rendezvous_->Watch(&polled);
    const size_t strangers = polled.size();
    monitor_->Watch(&polled);
    if (poll(polled.data(), polled.size(), patience) < 0) continue;
    for (size_t i = 1; i < polled.size(); ++i) {
      if (polled[i].revents == 0) continue;
      if (i < strangers) {
        rendezvous_->Serve(polled[i].fd);
      } else {
        monitor_->Serve(polled[i]);
      }
    }
    rendezvous_->Tidy();
  }
}

TeamId Hub::TeamOf(const std::vector<int>& ranks, uint32_t copy) {
  return tvm_ipc::TeamOf(*control_, ranks, copy);
}

void Hub::AbortClosed() { Abort(*control_, AbortReason::kClosed, 0); }

}  // namespace tvm_ipc
