/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file report_worker_errors.cc
 * \brief Reports the errors of a worker to its session.
 */
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <functional>
#include <new>
#include <optional>
#include <string>

#include "disco/worker_session_functions.h"

namespace tvm_ipc::worker {

namespace ffi = tvm::ffi;

namespace {

void ReportError(Rank& rank, const std::string& kind, const std::string& message,
                 const std::string& traceback) {
  // Report first: the controller must see the cause before its consequences on other ranks.
  rank.connection().Send(FrameType::kError, PackError(kind, message, traceback));
  rank.FailSession();
}

/*! \brief Return the kind of an error. TVM reports a lack of GPU memory as a general runtime error.
 */
std::string KindOf(const ffi::Error& error) {
  const std::string message = error.message();
  const bool no_memory = message.find("cudaErrorMemoryAllocation (2)") != std::string::npos;
  return no_memory ? kind::kMemory : error.kind();
}

/*!
 * \brief Return the device error that may have caused a program's error of this kind, if any.
 *
 * A kernel that fails leaves its result unwritten, and only the next operation throws its error. A
 * program that reads the result on the host before that may raise because of its contents.
 */
std::optional<Error> CauseOf(const Rank& rank, const std::string& kind) {
  if (kind == kind::kMismatch || kind == kind::kDeadline || kind == kind::kPeer) return {};
  try {
    rank.endpoint().CheckReports();
  } catch (const Error& cause) {
    return cause;
  }
  return {};
}

/*! \brief Report an error that a program raised, or its cause if that is known. */
void ReportRaised(Rank& rank, const ffi::Error& error) {
  const std::string kind = KindOf(error);
  const std::string traceback = error.TracebackMostRecentCallLast();
  const std::optional<Error> cause = CauseOf(rank, kind);
  if (!cause) return ReportError(rank, kind, error.message(), traceback);
  ReportError(rank, cause->kind(),
              Text(cause->what(), "; the program continued without its result and raised ", kind,
                   ": ", error.message()),
              traceback);
}

/*! \brief End a process that was forked in a worker's function and returned from it. */
void ExitForkedChild(const Rank& rank, const char* error = "") {
  if (!rank.in_forked_child()) return;
  std::fprintf(
      stderr,
      "tvm_ipc: process %d, which a function of worker %d has forked, returned from the"
      " function and is ended here, because it is not a worker; end it with os._exit%s%s\n",
      getpid(), rank.id(), *error ? ". It raised: " : "", error);
  _exit(1);
}

}  // namespace

bool ReportErrors(Rank& rank, const std::function<void()>& function) {
  try {
    function();
    ExitForkedChild(rank);
    return true;
  } catch (const ffi::Error& error) {
    ExitForkedChild(rank, error.get() == nullptr ? "an exception" : error.what());
    if (error.get() == nullptr) {
      ReportError(
          rank, kind::kRuntime,
          "a Python exception without a printable text: its __str__ raised, or returned text"
          " that cannot be encoded; see the worker's output above",
          "");
      return false;
    }
    ReportRaised(rank, error);
  } catch (const Error& error) {
    ExitForkedChild(rank, error.what());
    ReportError(rank, error.kind(), error.what(), "");
  } catch (const std::bad_alloc&) {
    ReportError(rank, kind::kMemory, "the system has no memory for an allocation", "");
  } catch (const std::exception& error) {
    ReportError(rank, kind::kRuntime, error.what(), "");
  } catch (...) {
    ReportError(rank, kind::kRuntime, "an exception that is not a std::exception", "");
  }
  return false;
}

}  // namespace tvm_ipc::worker
