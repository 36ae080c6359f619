// SPDX-License-Identifier: Apache-2.0
#include "call.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <type_traits>
#include <vector>

#include "memory.h"
#include "module.h"
#include "settings.h"
#include "stream.h"

namespace cuda_double {

thread_local bool in_host_function = false;

namespace {

// The n-th call of a function fails, or with n = 0 each one.
struct Injection {
  std::string name;
  int64_t at = 0;
  Result result = kUnknown;
};

struct Log {
  std::mutex mutex;
  std::map<std::string, int64_t> calls;
  std::vector<Injection> injections;
  std::vector<std::string> violations;
  std::string why;
};

// "cuMemCreate:3", "cuMemCreate:3=2,cudaMalloc:0"
std::vector<Injection> Parse(const char* text) {
  std::vector<Injection> injections;
  std::stringstream items(text == nullptr ? "" : text);
  for (std::string item; std::getline(items, item, ',');) {
    char name[128] = {};
    long long at = 0;
    int code = kUnknown;
    if (std::sscanf(item.c_str(), "%127[^:]:%lld=%d", name, &at, &code) < 2 || at < 0) {
      std::fprintf(stderr, "cuda double: TVM_IPC_DOUBLE_FAIL: \"%s\" is not NAME:COUNT[=CODE]\n",
                   item.c_str());
      std::abort();
    }
    injections.push_back(Injection{name, at, static_cast<Result>(code)});
  }
  return injections;
}

Log& TheLog() {
  static auto* log = [] {
    auto* made = new Log;
    made->injections = Parse(std::getenv("TVM_IPC_DOUBLE_FAIL"));
    return made;
  }();
  return *log;
}

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + "\"";
}

void Count(std::stringstream& out, const char* name, size_t count, bool* first) {
  if (count == 0) return;
  out << (*first ? "" : ", ") << Quoted(name) << ": " << count;
  *first = false;
}

std::string Report() {
  Log& log = TheLog();
  std::lock_guard<std::mutex> lock(log.mutex);
  std::stringstream out;
  bool first = true;
  out << "{\"pid\": " << getpid() << ", \"leaks\": {";
  for (auto [name, count] : LeakedMemory()) Count(out, name, count, &first);
  Count(out, "stream", Streams().size(), &first);
  Count(out, "event", Events().size(), &first);
  Count(out, "graph", Graphs().size(), &first);
  Count(out, "graph to launch", GraphExecs().size(), &first);
  Count(out, "module", Modules().size(), &first);
  out << "}, \"violations\": [";
  for (size_t i = 0; i < log.violations.size(); ++i) {
    out << (i == 0 ? "" : ", ") << Quoted(log.violations[i]);
  }
  out << "], \"calls\": {";
  first = true;
  for (auto& [name, count] : log.calls) Count(out, name.c_str(), count, &first);
  out << "}}";
  return out.str();
}

// Written with one write, so lines of several processes do not mix.
__attribute__((destructor)) void ReportAtExit() {
  if (!Initialised() || TheSettings().report.empty()) return;
  std::FILE* file = std::fopen(TheSettings().report.c_str(), "a");
  if (file == nullptr) return;
  std::string line = Report() + "\n";
  std::setvbuf(file, nullptr, _IOFBF, line.size() + 1);
  std::fwrite(line.data(), 1, line.size(), file);
  std::fclose(file);
}

}  // namespace

void CountCall(const char* name) {
  Log& log = TheLog();
  std::lock_guard<std::mutex> lock(log.mutex);
  int64_t count = ++log.calls[name];
  for (const Injection& injection : log.injections) {
    if (injection.name == name && (injection.at == 0 || injection.at == count)) {
      throw Failure{injection.result, "a test wants it to fail"};
    }
  }
}

Context* CheckCall(Needs needs) {
  if (needs == Needs::kNothing) return nullptr;
  Require(Initialised(), kNotInitialised, "cuInit was not called in this process");
  Require(!in_host_function, kNotPermitted, "a function that a stream calls may not use CUDA");
  if (needs == Needs::kInit) return nullptr;
  Context* context = CurrentContext();
  Require(context != nullptr, kInvalidContext, "this thread has no current context");
  int fault = context->fault;
  if (fault != kSuccess) throw Failure{static_cast<Result>(fault), "the context is broken"};
  if (needs == Needs::kUnsafe) RequireNoCapture();
  return context;
}

int EndCall(const char* name, const Failure& failure) {
  Log& log = TheLog();
  std::lock_guard<std::mutex> lock(log.mutex);
  if (failure.result != kNotReady) {
    log.why = std::string(name) + ": " + failure.why;
    if (TheSettings().verbose) {
      std::fprintf(stderr, "cuda double: %s (%d)\n", log.why.c_str(), failure.result);
    }
  }
  return failure.result;
}

void NoteViolation(const std::string& text) {
  Log& log = TheLog();
  std::lock_guard<std::mutex> lock(log.mutex);
  log.violations.push_back(text);
  std::fprintf(stderr, "cuda double: %s\n", text.c_str());
}

}  // namespace cuda_double

using cuda_double::TheLog;

// For tests in this process: what is to fail from now on, counted anew; the report so far; and why
// the last call that failed did so.
CUDA_DOUBLE_API void tvm_ipc_double_fail(const char* what) {
  auto& log = TheLog();
  std::lock_guard<std::mutex> lock(log.mutex);
  log.injections = cuda_double::Parse(what);
  log.calls.clear();
}

CUDA_DOUBLE_API const char* tvm_ipc_double_report() {
  static thread_local auto* report = new std::string;
  *report = cuda_double::Report();
  return report->c_str();
}

CUDA_DOUBLE_API const char* tvm_ipc_double_why() {
  static thread_local auto* why = new std::string;
  auto& log = TheLog();
  std::lock_guard<std::mutex> lock(log.mutex);
  *why = log.why;
  return why->c_str();
}

// For the double of the runtime library.
CUDA_DOUBLE_API int tvm_ipc_double_count(const char* name) {
  try {
    cuda_double::CountCall(name);
    return cuda_double::kSuccess;
  } catch (const cuda_double::Failure& failure) {
    return cuda_double::EndCall(name, failure);
  }
}

CUDA_DOUBLE_API const char* tvm_ipc_double_runtime_name(int result) {
  switch (result) {
#define CUDA_DOUBLE_ERROR(number, ours, driver, runtime, text) \
  case number:                                                 \
    return runtime;
    CUDA_DOUBLE_ERRORS(CUDA_DOUBLE_ERROR)
#undef CUDA_DOUBLE_ERROR
    default:
      return nullptr;
  }
}

CUDA_DOUBLE_API int cuGetErrorName(int result, const char** name) {
  switch (result) {
#define CUDA_DOUBLE_ERROR(number, ours, driver, runtime, text) \
  case number:                                                 \
    *name = driver;                                            \
    return 0;
    CUDA_DOUBLE_ERRORS(CUDA_DOUBLE_ERROR)
#undef CUDA_DOUBLE_ERROR
    default:
      *name = nullptr;
      return cuda_double::kInvalidValue;
  }
}

CUDA_DOUBLE_API int cuGetErrorString(int result, const char** text_out) {
  switch (result) {
#define CUDA_DOUBLE_ERROR(number, ours, driver, runtime, text) \
  case number:                                                 \
    *text_out = text;                                          \
    return 0;
    CUDA_DOUBLE_ERRORS(CUDA_DOUBLE_ERROR)
#undef CUDA_DOUBLE_ERROR
    default:
      *text_out = nullptr;
      return cuda_double::kInvalidValue;
  }
}
