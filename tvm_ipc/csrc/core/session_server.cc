/* SPDX-License-Identifier: Apache-2.0 */
/*! \file session_server.cc */
#include "core/session_server.h"

#include <fcntl.h>
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
#include "core/internode_request_queue.h"
#include "core/machine_name_and_memory.h"
#include "core/rank_runtime_state.h"
#include "core/teams.h"
#include "core/thread_signals.h"
#include "core/wait.h"

namespace tvm_ipc {

namespace {

/*! \brief The longest timeout, 31 years. */
constexpr double kLongestSeconds = 1e9;

size_t WholePages(size_t bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

Welcome MakeWelcome(const SessionServerOptions& options, int ranks_here) {
  // The engine between nodes needs a core too, since ranks wait for its work.
  const int in_use = std::max(1, ranks_here) + (options.nodes.empty() ? 0 : 1);
  const WaitPolicy policy = ChooseWaitPolicy(in_use, AvailableCores());
  Welcome welcome{};
  // A huge timeout must not overflow when it is converted to nanoseconds.
  const double seconds = std::min(options.timeout_seconds, kLongestSeconds);
  welcome.deadline_ns = static_cast<int64_t>(seconds * 1e9);
  welcome.spins = policy.spins;
  welcome.yields = policy.yields;
  welcome.flat = options.flat;
  if (options.otherwise != nullptr) {
    std::string(options.otherwise->name()).copy(welcome.otherwise, sizeof(welcome.otherwise) - 1);
  }
  options.instruction_set.copy(welcome.instruction_set, sizeof(welcome.instruction_set) - 1);
  return welcome;
}

/*! \brief Record which ranks are on which node. */
void AssignRanks(const SessionServerOptions& options, Control* control) {
  const int n = options.num_ranks;
  control->num_ranks = control->ranks_here = n;
  if (options.nodes.empty()) return;
  const int nodes = static_cast<int>(options.nodes.size());
  if (nodes > kMaxNodes || options.node < -1 || options.node >= nodes) {
    Fail(kind::kValue, "a session has 1 to ", kMaxNodes, " nodes; got ", nodes,
         " nodes, and this server is for node ", options.node);
  }
  control->ranks_here = 0;
  int first = 0;
  for (const NodeSpec& node : options.nodes) {
    NodeRecord& record = control->nodes[control->num_nodes];
    if (node.ranks < 1 || node.name.size() >= sizeof(record.name)) {
      Fail(kind::kValue, "a node has at least one rank and a name of at most ",
           sizeof(record.name) - 1, " letters; ", node.name, " has ", node.ranks, " ranks");
    }
    record.first = first;
    record.ranks = node.ranks;
    node.name.copy(record.name, sizeof(record.name) - 1);
    if (control->num_nodes == options.node) {
      control->first_here = first;
      control->ranks_here = node.ranks;
    }
    ++control->num_nodes;
    first += node.ranks;
  }
  if (first != n) Fail(kind::kValue, "the nodes have ", first, " ranks, the session has ", n);
  control->ring_bytes = RingBytes(n);
}

/*! \brief Duplicate the descriptors of files. */
std::vector<File> Copies(const std::vector<File>& files) {
  std::vector<File> copies;
  for (const File& file : files) {
    copies.emplace_back(DuplicateFile(file.get()));
    if (copies.back().get() < 0) {
      Fail(kind::kRuntime, "cannot map the memory of the ranks: ", strerror(errno),
           FilesHint(errno));
    }
  }
  return copies;
}

/*! \brief Return the shorter of two times in milliseconds; -1 means never. */
int Sooner(int a, int b) {
  if (a < 0 || b < 0) return std::max(a, b);
  return std::min(a, b);
}

}  // namespace

void SessionServer::Unmap::operator()(Control* control) const { munmap(control, bytes); }

SessionServer::SessionServer(const SessionServerOptions& options) {
  const int n = options.num_ranks;
  if (n < 1 || n > kMaxRanks) {
    Fail(kind::kValue, "a session has 1 to ", kMaxRanks, " workers, not ", n);
  }
  const size_t control_bytes = Control::Bytes(n);
  std::vector<File> files;
  files.push_back(MakeMemoryFile("tvm_ipc control", control_bytes));
  auto* control = static_cast<Control*>(MapFile(files[0].get(), control_bytes));
  control_ = std::unique_ptr<Control, Unmap>(control, Unmap{control_bytes});
  AssignRanks(options, control);
  const int here = std::max(1, control_->ranks_here);
  control_->controller_pid = getpid();
  control_->arena_bytes = WholePages(options.arena_bytes == 0 ? options.backend->DefaultArena(here)
                                                              : options.arena_bytes);
  std::vector<File> segments = options.backend->Prepare(*control_);
  if (segments.empty() && options.otherwise != nullptr) {
    segments = options.otherwise->Prepare(*control_);
  }
  for (File& file : segments) files.push_back(std::move(file));
  wake_ = File(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (wake_.get() < 0) {
    Fail(kind::kRuntime, "cannot listen for workers: ", strerror(errno), FilesHint(errno));
  }
  worker_table_ = std::make_unique<WorkerTable>(*control_);
  if (control_->num_nodes > 0) {
    worker_table_->SetWake([this] { Wake(); });
    nodes_ = std::make_unique<Nodes>(*control_, *worker_table_, options.node, options.link_times);
  }
  // Admission closes its files when all ranks have joined.
  const std::vector<File> mapped = control_->ring_bytes == 0 ? std::vector<File>() : Copies(files);
  admission_ = std::make_unique<Admission>(options.backend->name(), MakeWelcome(options, here),
                                           std::move(files), *control_, *worker_table_);
  if (mapped.size() > 1) {
    const std::vector<int> numbers = Descriptors(mapped);
    segments_ = Segments::Map(admission_->invitation().token, numbers[0],
                              std::vector<int>(numbers.begin() + 1, numbers.end()));
  }
  thread_ = StartThread("the session server", [this] { Run(); });
}

SessionServer::~SessionServer() {
  stop_ = true;
  Wake();
  thread_.join();
}

void SessionServer::Wake() {
  const uint64_t one = 1;
  if (write(wake_.get(), &one, sizeof(one)) < 0) {
  }
}

void SessionServer::Run() {
  std::vector<pollfd> polled;
  while (!stop_) {
    polled = {{wake_.get(), POLLIN, 0}};
    int patience = admission_->Watch(&polled);
    const size_t pending_peers = polled.size();
    if (nodes_ != nullptr) patience = Sooner(patience, nodes_->Watch(&polled));
    const size_t links = polled.size();
    worker_table_->Watch(&polled, nodes_ == nullptr || !nodes_->full());
    if (poll(polled.data(), polled.size(), patience) < 0) continue;
    uint64_t calls;
    if (polled[0].revents != 0 && read(wake_.get(), &calls, sizeof(calls)) < 0) continue;
    for (size_t i = 1; i < polled.size(); ++i) {
      if (polled[i].revents == 0) continue;
      if (i < pending_peers) {
        admission_->Serve(polled[i].fd);
      } else if (i < links) {
        nodes_->Serve(polled[i]);
      } else {
        worker_table_->Serve(polled[i]);
      }
    }
    admission_->Tidy();
    if (nodes_ != nullptr) nodes_->Tidy();
  }
  if (nodes_ != nullptr) nodes_->Tidy();  // the last message may be that the session is closed
}

void SessionServer::Attach(int node, File socket) {
  if (nodes_ == nullptr) Fail(kind::kRuntime, "all ranks of this session are on one machine");
  nodes_->Attach(node, std::move(socket));
  Wake();
}

TeamId SessionServer::TeamOf(const std::vector<int>& ranks, uint32_t copy) {
  if (nodes_ != nullptr && control_->ranks_here > 0) {
    Fail(kind::kRuntime, "a node's session server cannot create teams; only the controller's can");
  }
  const TeamId team = tvm_ipc::TeamOf(*control_, ranks, copy);
  if (nodes_ != nullptr) Wake();  // to send the team to the nodes
  return team;
}

void SessionServer::AbortClosed() {
  Abort(*control_, AbortReason::kClosed, 0);
  if (nodes_ != nullptr) Wake();
}

}  // namespace tvm_ipc
