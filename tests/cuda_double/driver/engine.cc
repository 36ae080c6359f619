// SPDX-License-Identifier: Apache-2.0
// The threads of streams, and the order between operations.
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <thread>
#include <utility>

#include "call.h"
#include "memory.h"
#include "settings.h"
#include "stream.h"

namespace cuda_double {
namespace {

struct Engine {
  // Held by whoever gives work to a stream; alone by a call that waits for devices, as a driver's
  // lock is: until what is on them has ended, no other thread can give them work.
  std::shared_mutex door;
  std::mutex mutex;
  std::condition_variable progress;  // an operation ended
  std::vector<std::weak_ptr<Capture>> captures;
  uint64_t next_capture = 1;
};

Engine& TheEngine() {
  static auto* engine = new Engine;  // never destroyed: threads of streams use it until the end
  return *engine;
}

double Now() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void Execute(Stream& stream, Operation& operation, GridRunner& runner) {
  if (stream.context->fault != kSuccess) return;
  try {
    Touch touch;
    operation.task(runner);
  } catch (const Failure& failure) {
    int fine = kSuccess;
    stream.context->fault.compare_exchange_strong(fine, failure.result);
    if (TheSettings().verbose) {
      std::fprintf(stderr, "cuda double: device %d: %s\n", stream.context->physical,
                   failure.why.c_str());
    }
  }
}

void RunStream(std::shared_ptr<Stream> stream) {
  CatchFaults();
  GridRunner runner;
  Engine& engine = TheEngine();
  const Settings& settings = TheSettings();
  std::mt19937_64 random(settings.delay_seed ^ stream->handle);
  std::unique_lock<std::mutex> lock(engine.mutex);
  while (true) {
    stream->wake.wait(lock, [&] { return !stream->queue.empty() || stream->closing; });
    if (stream->queue.empty()) return;
    std::shared_ptr<Operation> operation = stream->queue.front();
    for (const std::shared_ptr<Operation>& other : operation->after) {
      engine.progress.wait(lock, [&] { return other->done; });
    }
    lock.unlock();
    if (settings.delay_microseconds > 0) {
      usleep(static_cast<useconds_t>(random() % (settings.delay_microseconds + 1)));
    }
    Execute(*stream, *operation, runner);
    lock.lock();
    stream->queue.pop_front();
    operation->finished = Now();
    operation->done = true;
    operation->task = nullptr;  // it may own memory or handles
    operation->after.clear();
    engine.progress.notify_all();
  }
}

void Invalidate(Capture& capture) { capture.invalid = true; }

// A capture that somebody may still end.
std::vector<std::shared_ptr<Capture>> LiveCaptures(Engine& engine) {
  std::vector<std::shared_ptr<Capture>> live;
  auto& all = engine.captures;
  all.erase(std::remove_if(all.begin(), all.end(), [](auto& weak) { return weak.expired(); }),
            all.end());
  for (auto& weak : all) {
    if (auto capture = weak.lock(); capture != nullptr && capture->origin != nullptr) {
      live.push_back(capture);
    }
  }
  return live;
}

void AddNode(Stream& stream, Task task) {
  Capture& capture = *stream.capture;
  Require(!capture.invalid, kCaptureInvalidated, "the capture has been ended by another call");
  capture.graph.nodes.push_back(Node{std::move(task), stream.tail});
  stream.tail = {capture.graph.nodes.size() - 1};
}

// The legacy stream would wait for streams that are captured. With the context's mutex held.
void RequireNoBlockingCapture(Context& context) {
  for (auto& weak : context.streams) {
    std::shared_ptr<Stream> other = weak.lock();
    if (other == nullptr || !other->blocking || other->capture == nullptr) continue;
    Invalidate(*other->capture);
    throw Failure{kCaptureImplicit, "the legacy stream is used while a stream is captured"};
  }
}

std::shared_ptr<Operation> Enqueue(Stream& stream, Task task,
                                   std::vector<std::shared_ptr<Operation>> after) {
  auto operation = std::make_shared<Operation>();
  operation->task = std::move(task);
  Context& context = *stream.context;
  std::lock_guard<std::mutex> lock(context.mutex);
  if (stream.legacy) {  // after all that was given to blocking streams
    RequireNoBlockingCapture(context);
    for (auto& weak : context.streams) {
      std::shared_ptr<Stream> other = weak.lock();
      if (other == nullptr || !other->blocking) continue;
      if (other->last != nullptr && !other->last->done) after.push_back(other->last);
    }
  } else if (stream.blocking && context.legacy != nullptr && context.legacy->last != nullptr &&
             !context.legacy->last->done) {
    after.push_back(context.legacy->last);
  }
  operation->after = std::move(after);
  stream.queue.push_back(operation);
  stream.last = operation;
  stream.wake.notify_one();
  return operation;
}

}  // namespace

uint64_t ThisThread() {
  static std::atomic<uint64_t> next{1};
  static thread_local uint64_t mine = next++;
  return mine;
}

std::shared_ptr<Stream> NewStream(Context& context, bool blocking, bool legacy) {
  auto stream = std::make_shared<Stream>(&context, blocking, legacy);
  if (!legacy) stream->handle = Streams().Add(stream);
  {
    std::lock_guard<std::mutex> lock(context.mutex);
    auto& all = context.streams;
    all.erase(std::remove_if(all.begin(), all.end(), [](auto& weak) { return weak.expired(); }),
              all.end());
    if (legacy) {
      context.legacy = stream;
    } else {
      all.push_back(stream);
    }
  }
  std::thread(RunStream, stream).detach();
  return stream;
}

std::shared_ptr<Operation> Submit(Stream& stream, Task task) {
  Engine& engine = TheEngine();
  std::shared_lock<std::shared_mutex> door(engine.door);
  std::lock_guard<std::mutex> lock(engine.mutex);
  if (stream.capture != nullptr) {
    AddNode(stream, std::move(task));
    return nullptr;
  }
  return Enqueue(stream, std::move(task), {});
}

void Record(Event& event, Stream& stream) {
  Engine& engine = TheEngine();
  std::shared_lock<std::shared_mutex> door(engine.door);
  std::lock_guard<std::mutex> lock(engine.mutex);
  event.capture = stream.capture;
  if (stream.capture != nullptr) {
    Require(!stream.capture->invalid, kCaptureInvalidated, "the capture was ended by another call");
    event.nodes = stream.tail;
    event.recorded = nullptr;
  } else {
    event.recorded = Enqueue(stream, [](GridRunner&) {}, {});
  }
}

void WaitEvent(Stream& stream, const std::shared_ptr<Event>& event) {
  Engine& engine = TheEngine();
  std::shared_lock<std::shared_mutex> door(engine.door);
  std::lock_guard<std::mutex> lock(engine.mutex);
  if (event->capture != nullptr) {
    Require(event->capture->origin != nullptr, kCaptureInvalidated, "its capture has ended");
    Require(!event->capture->invalid, kCaptureInvalidated, "its capture was ended by another call");
    Require(!stream.legacy, kCaptureImplicit, "the legacy stream cannot be captured");
    if (stream.capture == nullptr) {
      stream.capture = event->capture;
      stream.tail.clear();
    } else if (stream.capture != event->capture) {
      Invalidate(*stream.capture);
      Invalidate(*event->capture);
      throw Failure{kCaptureMerge, "two captures meet"};
    }
    for (size_t node : event->nodes) {
      if (std::find(stream.tail.begin(), stream.tail.end(), node) == stream.tail.end()) {
        stream.tail.push_back(node);
      }
    }
    return;
  }
  if (stream.capture != nullptr) {
    Invalidate(*stream.capture);
    throw Failure{kCaptureIsolation, "a captured stream waits for work that is not captured"};
  }
  if (event->recorded == nullptr || event->recorded->done) return;
  Enqueue(stream, [](GridRunner&) {}, {event->recorded});
}

void BeginCapture(Stream& stream, int mode) {
  Engine& engine = TheEngine();
  std::lock_guard<std::mutex> lock(engine.mutex);
  Require(!stream.legacy, kCaptureUnsupported, "the legacy stream cannot be captured");
  Require(stream.capture == nullptr, kInvalidValue, "the stream is captured already");
  Require(mode >= 0 && mode <= 2, kInvalidValue, "no such mode of capture");
  auto capture = std::make_shared<Capture>();
  capture->context = stream.context;
  capture->mode = mode;
  capture->thread = ThisThread();
  capture->id = engine.next_capture++;
  capture->origin = &stream;
  stream.capture = capture;
  stream.tail.clear();
  engine.captures.push_back(capture);
}

std::shared_ptr<Graph> EndCapture(Stream& stream) {
  Engine& engine = TheEngine();
  std::lock_guard<std::mutex> lock(engine.mutex);
  std::shared_ptr<Capture> capture = stream.capture;
  Require(capture != nullptr, kInvalidValue, "the stream is not captured");
  Require(capture->origin == &stream, kCaptureUnmatched, "another stream's capture");
  Require(capture->mode == 2 || capture->thread == ThisThread(), kCaptureWrongThread,
          "another thread began the capture");
  std::vector<bool> joined(capture->graph.nodes.size());
  std::vector<size_t> left = stream.tail;
  while (!left.empty()) {
    size_t node = left.back();
    left.pop_back();
    if (joined[node]) continue;
    joined[node] = true;
    const auto& after = capture->graph.nodes[node].after;
    left.insert(left.end(), after.begin(), after.end());
  }
  capture->origin = nullptr;
  for (auto& weak : [&] {
         std::lock_guard<std::mutex> context_lock(capture->context->mutex);
         return capture->context->streams;
       }()) {
    if (auto other = weak.lock(); other != nullptr && other->capture == capture) {
      other->capture = nullptr;
      other->tail.clear();
    }
  }
  stream.capture = nullptr;
  Require(!capture->invalid, kCaptureInvalidated, "the capture was ended by another call");
  Require(std::all_of(joined.begin(), joined.end(), [](bool is) { return is; }), kCaptureUnjoined,
          "work of another stream was captured that this stream does not wait for");
  return std::make_shared<Graph>(capture->graph);
}

void LaunchGraph(const std::shared_ptr<GraphExec>& exec, Stream& stream) {
  Task task = [exec](GridRunner& runner) {
    for (const Node& node : exec->graph.nodes) node.task(runner);
  };
  Engine& engine = TheEngine();
  std::shared_lock<std::shared_mutex> door(engine.door);
  std::lock_guard<std::mutex> lock(engine.mutex);
  if (stream.capture != nullptr) return AddNode(stream, std::move(task));
  std::vector<std::shared_ptr<Operation>> after;
  if (exec->last != nullptr && !exec->last->done) after.push_back(exec->last);
  exec->last = Enqueue(stream, std::move(task), std::move(after));
}

bool IsIdle(Stream& stream) {
  std::lock_guard<std::mutex> lock(TheEngine().mutex);
  return stream.last == nullptr || stream.last->done;
}

std::shared_ptr<Operation> Recorded(Event& event) {
  std::lock_guard<std::mutex> lock(TheEngine().mutex);
  Require(event.capture == nullptr, kCapturedEvent, "recorded while a stream was captured");
  return event.recorded;
}

bool IsDone(const std::shared_ptr<Operation>& operation) {
  if (operation == nullptr) return true;
  std::lock_guard<std::mutex> lock(TheEngine().mutex);
  return operation->done;
}

void WaitFor(const std::shared_ptr<Operation>& operation) {
  if (operation == nullptr) return;
  std::unique_lock<std::mutex> lock(TheEngine().mutex);
  TheEngine().progress.wait(lock, [&] { return operation->done; });
}

void WaitForStream(Stream& stream) {
  std::shared_ptr<Operation> last;
  {
    std::lock_guard<std::mutex> lock(TheEngine().mutex);
    if (stream.capture != nullptr) {
      Invalidate(*stream.capture);
      throw Failure{kCaptureUnsupported, "somebody waits for a stream that is captured"};
    }
    if (stream.legacy) {
      std::lock_guard<std::mutex> context_lock(stream.context->mutex);
      RequireNoBlockingCapture(*stream.context);
    }
    last = stream.last;
  }
  WaitFor(last);
}

void WaitForContext(Context& context) {
  std::vector<std::shared_ptr<Operation>> all;
  {
    std::lock_guard<std::mutex> lock(TheEngine().mutex);
    std::lock_guard<std::mutex> context_lock(context.mutex);
    if (context.legacy != nullptr) all.push_back(context.legacy->last);
    for (auto& weak : context.streams) {
      if (auto stream = weak.lock()) all.push_back(stream->last);
    }
  }
  for (auto& operation : all) WaitFor(operation);
}

void WaitForDevices() {
  std::unique_lock<std::shared_mutex> door(TheEngine().door);
  for (int device = 0; device < DeviceCount(); ++device) WaitForContext(PrimaryContext(device));
}

void Close(Stream& stream) {
  std::lock_guard<std::mutex> lock(TheEngine().mutex);
  stream.closing = true;
  if (stream.capture != nullptr) Invalidate(*stream.capture);
  stream.wake.notify_one();
}

int ExchangeCaptureMode(int mode) {
  static thread_local int mine = 0;
  return mode < 0 ? mine : std::exchange(mine, mode);
}

void RequireNoCaptureIn(Context& context) {
  Engine& engine = TheEngine();
  std::lock_guard<std::mutex> lock(engine.mutex);
  bool any = false;
  for (auto& capture : LiveCaptures(engine)) {
    if (capture->context != &context) continue;
    any = true;
    Invalidate(*capture);
  }
  Require(!any, kCaptureUnsupported, "a stream of the context is captured");
}

void RequireNoCapture() {
  int allows = ExchangeCaptureMode(-1);
  if (allows == 2) return;
  Engine& engine = TheEngine();
  std::lock_guard<std::mutex> lock(engine.mutex);
  bool forbidden = false;
  for (auto& capture : LiveCaptures(engine)) {
    bool mine = capture->thread == ThisThread();
    if ((mine && capture->mode != 2) || (!mine && capture->mode == 0 && allows == 0)) {
      forbidden = true;
      Invalidate(*capture);
    }
  }
  Require(!forbidden, kCaptureUnsupported, "a stream is captured meanwhile");
}

bool IsCapturing(Stream& stream, bool* invalid, uint64_t* id) {
  std::lock_guard<std::mutex> lock(TheEngine().mutex);
  if (stream.capture == nullptr) return false;
  *invalid = stream.capture->invalid;
  *id = stream.capture->id;
  return true;
}

}  // namespace cuda_double
