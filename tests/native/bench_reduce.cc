/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file bench_reduce.cc
 * \brief `test_reduce --bench`: bytes read and written a second, beside memcpy.
 */
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "shm/select_kernels_by_instruction_set.h"

using tvm_ipc::ReduceKind;

void BenchReduce(const std::vector<std::string>& sets);

namespace {

/*! \brief The best of several repetitions, in GB/s of `moved` bytes a call. */
template <typename Call>
double Measure(size_t moved, const Call& call) {
  using Clock = std::chrono::steady_clock;
  size_t calls = std::max<size_t>(1, (size_t{64} << 20) / moved);
  double best = 0;
  for (int repetition = 0; repetition < 15; ++repetition) {
    Clock::time_point start = Clock::now();
    for (size_t i = 0; i < calls; ++i) call();
    double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    best = std::max(best, static_cast<double>(moved * calls) / seconds * 1e-9);
  }
  return best;
}

}  // namespace

void BenchReduce(const std::vector<std::string>& sets) {
  constexpr size_t kLargest = size_t{64} << 20;
  struct Case {
    const char* name;
    tvm_ipc::ElementType type;
    ReduceKind kind;
    int sources;
  };
  const Case cases[] = {{"float32 sum 2", {2, 32}, ReduceKind::kSum, 2},
                        {"float32 sum 4", {2, 32}, ReduceKind::kSum, 4},
                        {"float32 max 2", {2, 32}, ReduceKind::kMax, 2},
                        {"bfloat16 sum 2", {4, 16}, ReduceKind::kSum, 2},
                        {"float16 sum 2", {2, 16}, ReduceKind::kSum, 2},
                        {"int8 sum 2", {0, 8}, ReduceKind::kSum, 2},
                        {"int32 avg 2", {0, 32}, ReduceKind::kAvg, 2}};
  const size_t sizes[] = {size_t{1} << 10, size_t{16} << 10, size_t{256} << 10, size_t{4} << 20,
                          size_t{64} << 20};
  std::vector<void*> buffers(5);
  for (void*& buffer : buffers) {
    if (posix_memalign(&buffer, 4096, kLargest) != 0) std::abort();
    std::memset(buffer, 0x3f, kLargest);  // an ordinary value in every float type
  }
  std::printf("GB/s, reads and writes counted; each buffer has the size above its column\n");
  std::printf("%-26s %-7s", "", "stream");
  for (size_t size : sizes) std::printf(" %8zuK", size >> 10);
  std::printf("\n");
  for (bool stream : {false, true}) {
    for (const std::string& set : sets) {
      tvm_ipc::UseInstructionSet(set);
      std::printf("%-9s%-17s %-7s", set.c_str(), "copy", stream ? "yes" : "no");
      for (size_t size : sizes) {
        double rate =
            Measure(size * 2, [&] { tvm_ipc::CopyBytes(buffers[0], buffers[1], size, stream); });
        std::printf(" %9.1f", rate);
      }
      std::printf("\n");
      for (const Case& c : cases) {
        tvm_ipc::ReduceFn fn = tvm_ipc::FindReduce(c.type, c.kind);
        std::printf("%-9s%-17s %-7s", set.c_str(), c.name, stream ? "yes" : "no");
        for (size_t size : sizes) {
          double rate = Measure(size * static_cast<size_t>(c.sources + 1), [&] {
            fn(buffers[0], buffers.data() + 1, c.sources, size / c.type.bytes(), stream);
          });
          std::printf(" %9.1f", rate);
        }
        std::printf("\n");
      }
    }
  }
  for (void* buffer : buffers) std::free(buffer);
}
