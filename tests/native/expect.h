/* SPDX-License-Identifier: Apache-2.0 */
/*! \file expect.h
 *  \brief A check that ends the test program, and says which one it was.
 */
#ifndef TVM_IPC_TESTS_EXPECT_H_
#define TVM_IPC_TESTS_EXPECT_H_

#include <cstdio>
#include <cstdlib>
#include <string>

#include "core/error.h"

template <typename... Args>
std::string ExpectationText(const Args&... args) {
  return tvm_ipc::Text("", args...);
}

/*! \brief EXPECT(condition, what else the reader of the failure needs...) */
#define EXPECT(condition, ...)                                               \
  do {                                                                       \
    if (!(condition)) {                                                      \
      std::printf("FAILED: %s:%d: %s; %s\n", __FILE__, __LINE__, #condition, \
                  ExpectationText(__VA_ARGS__).c_str());                     \
      std::fflush(stdout);                                                   \
      std::_Exit(1);                                                         \
    }                                                                        \
  } while (0)

/*! \brief The error that the call ends in; none is an error of the test. */
template <typename Function>
tvm_ipc::Error ErrorOf(Function function) {
  try {
    function();
  } catch (const tvm_ipc::Error& error) {
    return error;
  }
  EXPECT(false, "no error was thrown");
  std::abort();
}

inline bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

#endif  // TVM_IPC_TESTS_EXPECT_H_
