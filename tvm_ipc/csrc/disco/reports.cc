/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reports.cc
 * \brief What goes wrong in a worker, as its session is told.
 */
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <functional>
#include <new>
#include <optional>
#include <string>

#include "disco/worker.h"

namespace tvm_ipc::worker {

namespace ffi = tvm::ffi;

namespace {

void ReportError(Rank& rank, const std::string& kind, const std::string& message,
                 const std::string& traceback) {
  // The report first: the controller must not see the others' consequences before the cause.
  rank.connection().Send(FrameType::kError, PackError(kind, message, traceback));
  rank.FailSession();
}

/*! \brief TVM tells a lack of memory on a GPU as any other error of the runtime library. */
std::string KindOf(const ffi::Error& error) {
  const std::string message = error.message();
  const bool no_memory = message.find("cudaErrorMemoryAllocation (2)") != std::string::npos;
  return no_memory ? kind::kMemory : error.kind();
}

/*!
 * \brief What a device had reported when a program raised an error of some kind.
 *
 * A kernel that gave up leaves its result as it was, and only the next operation throws that. A
 * program that reads the result on the host before may raise because of what it finds there.
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

/*! \brief Report what a program raised, as what it followed from if that is known. */
void ReportRaised(Rank& rank, const ffi::Error& error) {
  const std::string kind = KindOf(error);
  const std::string traceback = error.TracebackMostRecentCallLast();
  const std::optional<Error> cause = CauseOf(rank, kind);
  if (!cause) return ReportError(rank, kind, error.message(), traceback);
  ReportError(
      rank, cause->kind(),
      Text(cause->what(), "; the program went on without what it would have given, and raised ",
           kind, ": ", error.message()),
      traceback);
}

/*! \brief End a process that was forked in a worker's function and did not end there. */
void LeaveIfForked(const Rank& rank, const char* error = "") {
  if (!rank.forked()) return;
  std::fprintf(stderr,
               "tvm_ipc: process %d, forked in a function of worker %d, came back from the function"
               " and ends here: it is no worker; end it with os._exit%s%s\n",
               getpid(), rank.id(), *error ? ". It had raised: " : "", error);
  _exit(1);
}

}  // namespace

bool ReportErrors(Rank& rank, const std::function<void()>& function) {
  try {
    function();
    LeaveIfForked(rank);
    return true;
  } catch (const ffi::Error& error) {
    LeaveIfForked(rank, error.get() == nullptr ? "an exception" : error.what());
    if (error.get() == nullptr) {
      ReportError(rank, kind::kRuntime,
                  "a Python exception whose text cannot be told: its __str__ raised, or returned"
                  " what cannot be encoded; the worker's own output above says more",
                  "");
      return false;
    }
    ReportRaised(rank, error);
  } catch (const Error& error) {
    LeaveIfForked(rank, error.what());
    ReportError(rank, error.kind(), error.what(), "");
  } catch (const std::bad_alloc&) {
    ReportError(rank, kind::kMemory, "the system has no memory for what was to be allocated", "");
  } catch (const std::exception& error) {
    ReportError(rank, kind::kRuntime, error.what(), "");
  } catch (...) {
    ReportError(rank, kind::kRuntime, "an exception that is not a std::exception", "");
  }
  return false;
}

}  // namespace tvm_ipc::worker
