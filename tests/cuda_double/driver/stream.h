// SPDX-License-Identifier: Apache-2.0
// Streams: a queue and a thread each, so what is asynchronous on a device is asynchronous here.
#ifndef TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_STREAM_H_
#define TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_STREAM_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "context.h"
#include "grid.h"
#include "handles.h"

namespace cuda_double {

// What a stream does, again at each launch of a graph.
using Task = std::function<void(GridRunner&)>;

struct Operation {
  Task task;
  std::vector<std::shared_ptr<Operation>> after;  // of other streams
  bool done = false;
  double finished = 0;  // seconds
};

struct Node {
  Task task;
  std::vector<size_t> after;
};

struct Graph {
  std::vector<Node> nodes;  // each after those that it depends on
};

struct Capture {
  Graph graph;
  Context* context = nullptr;
  int mode = 0;  // 0: global, 1: of the thread, 2: relaxed
  uint64_t thread = 0;
  uint64_t id = 0;
  Stream* origin = nullptr;
  bool invalid = false;
};

class Stream {
 public:
  Stream(Context* context, bool blocking, bool legacy)
      : context(context), blocking(blocking), legacy(legacy) {}

  Handle handle = 0;
  Context* const context;
  const bool blocking;  // ordered with the legacy stream
  const bool legacy;
  int priority = 0;

  // Guarded by the engine's mutex.
  std::deque<std::shared_ptr<Operation>> queue;
  std::shared_ptr<Operation> last;
  bool closing = false;
  std::condition_variable wake;
  std::shared_ptr<Capture> capture;
  std::vector<size_t> tail;  // nodes of the capture that the next one comes after
};

struct Event {
  bool timed = true;
  bool blocking_sync = false;
  bool interprocess = false;
  Context* context = nullptr;
  std::shared_ptr<Operation> recorded;  // null: nothing, and counts as done
  std::shared_ptr<Capture> capture;     // or recorded while a stream was captured
  std::vector<size_t> nodes;
};

struct GraphExec {
  Graph graph;
  Context* context = nullptr;
  std::shared_ptr<Operation> last;  // launches of one graph follow each other
};

Handles<Stream>& Streams();
Handles<Event>& Events();
Handles<Graph>& Graphs();
Handles<GraphExec>& GraphExecs();

// Returns the stream with a handle. The handle of a destroyed stream ends the process, as in
// drivers.
std::shared_ptr<Stream> LiveStream(Handle handle);
// 0 and 1: the legacy default stream of the context; 2: that of the thread. Others must be of the
// context.
std::shared_ptr<Stream> StreamOf(Context& context, Handle handle);
std::shared_ptr<Stream> NewStream(Context& context, bool blocking, bool legacy = false);

// Appends to the stream, or to the graph while it is captured.
std::shared_ptr<Operation> Submit(Stream& stream, Task task);
void Record(Event& event, Stream& stream);
void WaitEvent(Stream& stream, const std::shared_ptr<Event>& event);
void BeginCapture(Stream& stream, int mode);
std::shared_ptr<Graph> EndCapture(Stream& stream);
void LaunchGraph(const std::shared_ptr<GraphExec>& exec, Stream& stream);

bool IsIdle(Stream& stream);
std::shared_ptr<Operation> Recorded(Event& event);  // throws if it was captured
bool IsDone(const std::shared_ptr<Operation>& operation);
void WaitFor(const std::shared_ptr<Operation>& operation);
void WaitForStream(Stream& stream);     // refused while it is captured
void WaitForContext(Context& context);  // all its streams
// All streams of the process, as what changes memory may, whose devices see each other; no other
// thread gives them work meanwhile.
void WaitForDevices();
void Close(Stream& stream);

// What the thread cares for: 0 captures of all threads, 1 its own, 2 none. Gives what it was; -1
// only asks.
int ExchangeCaptureMode(int mode);
// Ends captures that forbid what this thread is about to do, and throws if there are any.
void RequireNoCapture();
// The same of any capture of a stream of the context, whatever its mode.
void RequireNoCaptureIn(Context& context);
bool IsCapturing(Stream& stream, bool* invalid, uint64_t* id);
uint64_t ThisThread();

}  // namespace cuda_double

#endif  // TVM_IPC_TESTS_CUDA_DOUBLE_DRIVER_STREAM_H_
