/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_reduce.cc
 * \brief Every reduction of every instruction set of this machine against a reference, bit by
 *        bit. `--bench` measures instead, `--threads` tests what several do alone.
 */
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/software_float16_conversion.h"
#include "reduce_reference.h"
#include "shm/select_kernels_by_instruction_set.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

using reference::As;
using tvm_ipc::ElementType;
using tvm_ipc::ReduceFn;
using tvm_ipc::ReduceKind;

namespace {

int failures = 0;

#define EXPECT(condition, ...)               \
  do {                                       \
    if (!(condition)) {                      \
      if (++failures <= 20) {                \
        std::printf("FAILED: " __VA_ARGS__); \
        std::printf("\n");                   \
      }                                      \
    }                                        \
  } while (0)

const ElementType kTypes[] = {{2, 16}, {4, 16}, {2, 32}, {2, 64}, {0, 8},  {1, 8}, {0, 16},
                              {1, 16}, {0, 32}, {1, 32}, {0, 64}, {1, 64}, {6, 8}};
const ReduceKind kKinds[] = {ReduceKind::kSum, ReduceKind::kProd, ReduceKind::kMin,
                             ReduceKind::kMax, ReduceKind::kAvg,  ReduceKind::kBand,
                             ReduceKind::kBor, ReduceKind::kBxor, ReduceKind::kTreeSum};
const int kSources[] = {1, 2, 3, 4, 5, 8};
/*! \brief Numbers of sources of which trees differ in form, up to the most ranks. */
const int kTreeSources[] = {6, 7, 11, 16, 31, 63, 64};
const size_t kCounts[] = {0, 1, 3, 15, 16, 17, 63, 64, 65, 1000, 4097};
/*! \brief AddressSanitizer gets the draws in turn: all take the same way through memory. */
#ifdef __SANITIZE_ADDRESS__
constexpr bool kOneDraw = true;
#else
constexpr bool kOneDraw = false;
#endif

std::vector<std::string> InstructionSets() {
  std::vector<std::string> sets;
  for (const char* name : {"portable", "avx2", "avx512", "avx512bf16"}) {
    if (tvm_ipc::UseInstructionSet(name)) sets.push_back(name);
  }
  return sets;
}

/*! \brief How the elements of an input are drawn. */
enum class Draw { kOrdinary, kEdges, kWithNan };

uint64_t DrawElement(ElementType t, Draw draw, std::mt19937_64* random) {
  uint64_t all = t.bits == 64 ? ~0ull : (1ull << t.bits) - 1;
  uint64_t bits = (*random)() & all;
  uint64_t choice = (*random)() % 16;
  if (t.code == reference::kBool) return draw == Draw::kOrdinary ? bits & 1 : bits * (bits & 1);
  if (!reference::IsFloating(t)) {
    if (draw == Draw::kOrdinary || choice > 3) return bits;
    const uint64_t edges[] = {0, 1, all, reference::SignBit(t)};
    return edges[choice];
  }
  uint64_t sign = bits & reference::SignBit(t);
  uint64_t fraction = bits & ((1ull << reference::Mantissa(t)) - 1);
  uint64_t infinity = reference::Infinity(t);
  uint64_t one = infinity / 2 & ~((1ull << reference::Mantissa(t)) - 1);
  if (draw == Draw::kWithNan && choice < 2) return sign | infinity | fraction;
  if (draw != Draw::kOrdinary && choice < 8) {
    const uint64_t edges[] = {
        0, fraction, infinity, infinity - 1 - fraction % 3, 1 + infinity / 64, one + fraction % 3};
    return sign | edges[choice % 6];
  }
  // Near 1 with few exponents, so that roundings and ties occur.
  uint64_t exponent = one + (((bits >> 7) % 24) << reference::Mantissa(t)) / 2;
  if (draw == Draw::kOrdinary || choice < 12) return sign | ((exponent & infinity) + fraction);
  return reference::IsNan(t, bits) ? sign : bits;
}

uint64_t Element(ElementType t, const unsigned char* bytes, size_t i) {
  uint64_t bits = 0;
  std::memcpy(&bits, bytes + i * t.bytes(), t.bytes());
  return bits;
}

/*! \brief Memory of exactly the size asked for, at an offset from an aligned address. */
struct Buffer {
  Buffer(size_t offset, size_t bytes) : memory(nullptr, std::free) {
    void* p = nullptr;
    if (posix_memalign(&p, 64, offset + bytes + (offset + bytes == 0)) != 0) std::abort();
    memory.reset(static_cast<unsigned char*>(p));
    data = memory.get() + offset;
  }
  std::unique_ptr<unsigned char, void (*)(void*)> memory;
  unsigned char* data;
};

constexpr size_t kGuard = 72;
constexpr unsigned char kMark = 0xa5;

/*! \brief One call: dst at `offset`, in place with source `place` unless that is -1. */
void CheckCall(ReduceFn fn, const std::string& what, ElementType t,
               const std::vector<std::vector<unsigned char>>& inputs,
               const std::vector<unsigned char>& expected, size_t offset, int place, bool stream) {
  size_t bytes = expected.size();
  int n = static_cast<int>(inputs.size());
  Buffer out(0, kGuard + offset + bytes + kGuard);
  std::memset(out.data, kMark, kGuard + offset + bytes + kGuard);
  unsigned char* dst = out.data + kGuard - 8 + offset;
  std::vector<std::unique_ptr<Buffer>> sources;
  std::vector<const void*> pointers;
  for (int k = 0; k < n; ++k) {
    unsigned char* to = dst;
    if (k != place) {
      sources.emplace_back(new Buffer((offset * static_cast<size_t>(k + 1)) % 61, bytes));
      to = sources.back()->data;
    }
    if (bytes != 0) std::memcpy(to, inputs[k].data(), bytes);
    pointers.push_back(to);
  }
  fn(dst, pointers.data(), n, bytes / t.bytes(), stream);
  size_t wrong = 0;
  while (wrong < bytes && dst[wrong] == expected[wrong]) ++wrong;
  if (wrong < bytes) {
    size_t i = wrong / t.bytes();
    EXPECT(false, "%s, offset %zu, in place %d, stream %d: element %zu is %llx, not %llx",
           what.c_str(), offset, place, stream, i,
           static_cast<unsigned long long>(Element(t, dst, i)),
           static_cast<unsigned long long>(Element(t, expected.data(), i)));
  }
  bool guards = true;
  for (unsigned char* p = out.data; p < out.data + kGuard + offset + bytes + kGuard; ++p)
    guards = guards && ((p >= dst && p < dst + bytes) || *p == kMark);
  EXPECT(guards, "%s, offset %zu, in place %d, stream %d: wrote outside", what.c_str(), offset,
         place, stream);
  for (int k = 0, s = 0; k < n; ++k) {
    if (k == place) continue;
    bool kept = bytes == 0 || std::memcmp(sources[s]->data, inputs[k].data(), bytes) == 0;
    EXPECT(kept, "%s: wrote to source %d", what.c_str(), k);
    ++s;
  }
}

void TestReductions(const std::vector<std::string>& sets) {
  std::mt19937_64 random(1);
  int turn = 0;
  for (ElementType t : kTypes) {
    for (ReduceKind kind : kKinds) {
      if (t.code == reference::kBool && kind == ReduceKind::kAvg) continue;
      if (IsBitwise(kind) && t.code > reference::kUInt) {
        EXPECT(tvm_ipc::FindReduce(t, kind) == nullptr, "%s of %s", Name(kind), Name(t).c_str());
        continue;
      }
      std::vector<int> numbers(std::begin(kSources), std::end(kSources));
      if (kind == ReduceKind::kTreeSum)
        numbers.insert(numbers.end(), std::begin(kTreeSources), std::end(kTreeSources));
      for (int n : numbers) {
        for (size_t count : kCounts) {
          if (n > 16 && count > 65) continue;  // these take long
          ++turn;
          for (Draw draw : {Draw::kOrdinary, Draw::kEdges, Draw::kWithNan}) {
            if (kOneDraw && static_cast<int>(draw) != turn % 3) continue;
            size_t size = t.bytes();
            std::vector<std::vector<unsigned char>> inputs(n);
            std::vector<unsigned char> expected(count * size);
            for (auto& input : inputs) {
              input.resize(count * size);
              for (size_t i = 0; i < count; ++i) {
                uint64_t bits = DrawElement(t, draw, &random);
                std::memcpy(input.data() + i * size, &bits, size);
              }
            }
            for (size_t i = 0; i < count; ++i) {
              uint64_t x[64];
              for (int k = 0; k < n; ++k) x[k] = Element(t, inputs[k].data(), i);
              uint64_t bits = reference::Reduce(t, kind, x, n);
              std::memcpy(expected.data() + i * size, &bits, size);
            }
            for (const std::string& set : sets) {
              tvm_ipc::UseInstructionSet(set);
              ReduceFn fn = tvm_ipc::FindReduce(t, kind);
              std::string what = set + " " + Name(kind) + " of " + Name(t) + ", " +
                                 std::to_string(n) + " sources, " + std::to_string(count) +
                                 " elements, draw " + std::to_string(static_cast<int>(draw));
              EXPECT(fn != nullptr, "%s: no code", what.c_str());
              if (fn == nullptr) continue;
              for (bool stream : {false, true}) {
                for (int place = -1; place < n; ++place)
                  CheckCall(fn, what, t, inputs, expected, 0, place, stream);
                for (size_t offset : {size_t{1}, size, size_t{40}})
                  CheckCall(fn, what, t, inputs, expected, offset, n - 2, stream);
              }
            }
          }
        }
      }
    }
  }
}

/*! \brief Every 16-bit value alone and times others, through the public function. */
void TestEveryHalf(const std::vector<std::string>& sets) {
  for (ElementType t : {ElementType{2, 16}, ElementType{4, 16}}) {
    std::vector<uint16_t> values(65536), other(65536), out(65536);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(i);
    std::mt19937_64 random(2);
    for (int round = 0; round < 40; ++round) {
      for (uint16_t& x : other) x = static_cast<uint16_t>(random());
      for (ReduceKind kind : {ReduceKind::kSum, ReduceKind::kProd, ReduceKind::kAvg}) {
        int n = round == 0 ? 1 : 2;
        for (const std::string& set : sets) {
          tvm_ipc::UseInstructionSet(set);
          const void* src[] = {values.data(), other.data()};
          tvm_ipc::FindReduce(t, kind)(out.data(), src, n, values.size(), false);
          for (size_t i = 0; i < values.size(); ++i) {
            uint64_t x[] = {values[i], other[i]};
            uint64_t want = reference::Reduce(t, kind, x, n);
            EXPECT(out[i] == want, "%s %s of %s: %zx and %x give %x, not %llx", set.c_str(),
                   Name(kind), Name(t).c_str(), i, other[i], out[i],
                   static_cast<unsigned long long>(want));
          }
        }
      }
    }
  }
}

#if defined(__x86_64__)
__attribute__((target("avx,f16c"))) uint32_t HardwareWiden(uint32_t half) {
  return As<uint32_t>(_cvtsh_ss(static_cast<uint16_t>(half)));
}
__attribute__((target("avx,f16c"))) uint32_t HardwareNarrow(float value) {
  return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
}
#endif

/*! \brief The conversions in integer arithmetic, against ldexp and the processor's own. */
void TestSoftHalf([[maybe_unused]] bool hardware) {
  typedef uint32_t Words __attribute__((vector_size(16)));
  typedef int32_t Ints __attribute__((vector_size(16)));
  typedef float Floats __attribute__((vector_size(16)));
  const ElementType half = {2, 16};
  uint32_t checked = 0;
  auto narrow = [&](uint32_t bits) {
    float value = As<float>(bits);
    if (std::isnan(value)) return;
    ++checked;
    uint32_t got = tvm_ipc::SoftNarrowHalf<float, int32_t, uint32_t>(value);
    Floats values = {value, value, value, value};
    Words many = tvm_ipc::SoftNarrowHalf<Floats, Ints, Words>(values);
    bool ok = got == reference::Round16(half, value) && many[0] == got && many[3] == got;
#if defined(__x86_64__)
    if (hardware) ok = ok && HardwareNarrow(value) == got;
#endif
    EXPECT(ok, "float32 %x becomes the half %x", bits, got);
  };
  for (uint32_t h = 0; h < 65536; ++h) {
    if (reference::IsNan(half, h)) continue;
    uint32_t got = As<uint32_t>(tvm_ipc::SoftWidenHalf<float, int32_t>(h));
    Words words = {h, h, h, h};
    Floats many = tvm_ipc::SoftWidenHalf<Floats, Ints>(words);
    bool ok = got == As<uint32_t>(static_cast<float>(reference::Value(half, h))) &&
              As<uint32_t>(many[0]) == got && As<uint32_t>(many[3]) == got;
#if defined(__x86_64__)
    if (hardware) ok = ok && HardwareWiden(h) == got;
#endif
    EXPECT(ok, "the half %x becomes float32 %x", h, got);
    // At the half, and at the middle of it and the next, where rounding changes.
    uint32_t next = As<uint32_t>(
        static_cast<float>((reference::Value(half, h) + reference::Value(half, h ^ 1)) / 2));
    for (uint32_t d = 0; d < 7; ++d) {
      narrow(got - 3 + d);
      narrow(next - 3 + d);
    }
  }
  for (uint32_t d = 0; d < 64; ++d) {
    narrow(0x477fe000u + 0x1000u - 32 + d);  // where infinity begins
    narrow(0x33000000u - 32 + d);            // where zero ends
  }
  for (uint64_t bits = 0; bits < (1ull << 32); bits += 1021) narrow(static_cast<uint32_t>(bits));
  std::printf("%u roundings to float16\n", checked);
}

void TestCopy(const std::vector<std::string>& sets) {
  std::mt19937_64 random(3);
  for (const std::string& set : sets) {
    tvm_ipc::UseInstructionSet(set);
    tvm_ipc::CopyBytes(nullptr, nullptr, 0, false);
    tvm_ipc::CopyBytes(nullptr, nullptr, 0, true);
    for (size_t bytes : {1, 63, 64, 65, 127, 128, 255, 256, 257, 1000, 5000, 300000}) {
      for (size_t offset = 0; offset < 64; offset += 7) {
        for (bool stream : {false, true}) {
          Buffer from((offset * 3) % 64, bytes), to(0, offset + bytes + kGuard);
          for (size_t i = 0; i < bytes; ++i) from.data[i] = static_cast<unsigned char>(random());
          std::memset(to.data, kMark, offset + bytes + kGuard);
          tvm_ipc::CopyBytes(to.data + offset, from.data, bytes, stream);
          bool ok = std::memcmp(to.data + offset, from.data, bytes) == 0;
          for (size_t i = 0; i < offset; ++i) ok = ok && to.data[i] == kMark;
          for (size_t i = 0; i < kGuard; ++i) ok = ok && to.data[offset + bytes + i] == kMark;
          EXPECT(ok, "%s copy of %zu bytes to offset %zu, stream %d", set.c_str(), bytes, offset,
                 stream);
        }
      }
    }
  }
}

void TestChoice(const std::vector<std::string>& sets) {
  EXPECT(!sets.empty() && sets[0] == "portable", "no portable code");
  tvm_ipc::UseInstructionSet("portable");
  EXPECT(!tvm_ipc::UseInstructionSet("sse9"), "took an unknown instruction set");
  EXPECT(std::string(tvm_ipc::InstructionSet()) == "portable", "a refusal changed something");
  EXPECT(tvm_ipc::UseInstructionSet("auto"), "auto was refused");
  EXPECT(tvm_ipc::InstructionSet() == sets.back(), "auto is not the best one");
  for (ElementType t :
       {ElementType{10, 8}, ElementType{12, 8}, ElementType{2, 8}, ElementType{4, 32},
        ElementType{5, 64}, ElementType{0, 4}, ElementType{2, 32, 4}, ElementType{3, 64}}) {
    for (ReduceKind kind : kKinds)
      EXPECT(tvm_ipc::FindReduce(t, kind) == nullptr, "reduces %s", Name(t).c_str());
  }
  EXPECT(tvm_ipc::FindReduce({6, 8}, ReduceKind::kAvg) == nullptr, "averages bool");
  EXPECT(tvm_ipc::FindReduce({2, 32}, static_cast<ReduceKind>(9)) == nullptr, "took kind 9");
  EXPECT(!IsBitwise(ReduceKind::kTreeSum), "a tree sum is bitwise");
  EXPECT(Name(ElementType{4, 16}) == "bfloat16", "name of bfloat16");
  EXPECT(Name(ElementType{6, 8}) == "bool", "name of bool");
  EXPECT(Name(ElementType{10, 8}) == "float8_e4m3fn", "name of float8_e4m3fn");
  EXPECT(Name(ElementType{2, 32, 4}) == "float32x4", "name of float32x4");
  EXPECT(Name(ElementType{200, 8}) != "", "name of an unknown type");
}

/*! \brief Any thread may choose an instruction set while others look for their code. */
void TestThreads(const std::vector<std::string>& sets) {
  std::vector<std::thread> threads;
  std::atomic<bool> missing{false};
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&sets, &missing, i] {
      for (int k = 0; k < 1000; ++k) {
        tvm_ipc::UseInstructionSet(sets[static_cast<size_t>(i + k) % sets.size()]);
        if (tvm_ipc::FindReduce({2, 32}, ReduceKind::kSum) == nullptr) missing = true;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT(!missing, "threads lost the table");
}

}  // namespace

void BenchReduce(const std::vector<std::string>& sets);

int main(int argc, char** argv) {
  std::vector<std::string> sets = InstructionSets();
  if (argc > 1 && std::string(argv[1]) == "--bench") {
    BenchReduce(sets);
    return 0;
  }
  TestChoice(sets);
  TestThreads(sets);
  if (argc == 1) {
    bool hardware = false;
    for (const std::string& set : sets) hardware = hardware || set == "avx2";
    TestSoftHalf(hardware);
    TestEveryHalf(sets);
    TestCopy(sets);
    TestReductions(sets);
  }
  std::printf("instruction sets:");
  for (const std::string& set : sets) std::printf(" %s", set.c_str());
  std::printf("\n%s: %d failures\n", failures == 0 ? "passed" : "FAILED", failures);
  return failures == 0 ? 0 : 1;
}
