/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_heap.cc
 * \brief Who lends blocks of a heap ends with the last of its maker and the blocks, once, and after
 *        all that any of them did, in whatever threads they are.
 */
#include <atomic>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "core/heap_interface.h"
#include "expect.h"

namespace tvm_ipc {
namespace {

/*! \brief Has no lock: nothing but the lender's count puts what its users do in an order. */
class PlainHeap final : public Heap {
 public:
  explicit PlainHeap(std::atomic<int>* ended) : ended_(ended) {}
  ~PlainHeap() final { ended_->fetch_add(1, std::memory_order_relaxed); }
  void* Allocate(size_t bytes) final { return new char[bytes]; }
  void Free(void* data, size_t) final { delete[] static_cast<char*>(data); }
  void Trim() final {}
  ArenaStats stats() const final { return {}; }
  int64_t Offset(const void*) const final { return -1; }

 private:
  std::atomic<int>* ended_;
};

class TestLender final : public SharedAllocator {
 public:
  TestLender(std::shared_ptr<Heap> heap, std::atomic<int>* ended)
      : SharedAllocator(std::move(heap)), ended_(ended) {}
  /*! \brief Each user writes a place of its own, which the end reads. */
  int written[16] = {};

 private:
  ~TestLender() final {
    int sum = 0;
    for (int one : written) sum += one;
    EXPECT(sum == expected, sum);
    ended_->fetch_add(1, std::memory_order_relaxed);
  }
  std::atomic<int>* ended_;

 public:
  int expected = 0;
};

void TestLastUserEndsIt(int rounds) {
  std::mt19937 random(5);
  for (int round = 0; round < rounds; ++round) {
    std::atomic<int> heap_ended{0}, lender_ended{0};
    auto* lender = new TestLender(std::make_shared<PlainHeap>(&heap_ended), &lender_ended);
    constexpr int kBlocks = 8;
    void* blocks[kBlocks];
    for (void*& block : blocks) block = lender->AllocateBlock(100);
    lender->expected = kBlocks;
    std::vector<std::thread> threads;
    const int first = static_cast<int>(random() % kBlocks);
    for (int i = 0; i < kBlocks; ++i) {
      threads.emplace_back([&, i] {
        lender->written[i] = 1;
        lender->FreeBlock(blocks[i], 100);
      });
      if (i == first) lender->Release();  // the maker goes before some of the blocks
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT(lender_ended == 1 && heap_ended == 1);
  }
}

/*! \brief A block that comes back is free for the next, before the maker or another user goes. */
void TestArenaHeap() {
  std::vector<uint8_t> memory(4 << 20);
  auto arena = std::make_shared<Arena>(
      memory.size(), [](size_t, size_t) { return true; }, [](size_t, size_t) {});
  auto heap = std::make_shared<ArenaHeap>(arena, memory.data());
  std::atomic<int> ended{0};
  auto* lender = new TestLender(heap, &ended);
  void* first = lender->AllocateBlock(1000);
  EXPECT(heap->Offset(first) == 0 && first == memory.data());
  void* second = lender->AllocateBlock(10);
  EXPECT(heap->Offset(second) == 1024 && heap->stats().in_use == 1024 + 256);
  EXPECT(heap->Offset(&ended) == -1);
  lender->FreeBlock(first, 1000);
  EXPECT(heap->stats().in_use == 256 && ended == 0);
  lender->Release();
  EXPECT(ended == 0, "the lender went before a block");
  lender->FreeBlock(second, 10);
  EXPECT(ended == 1 && heap->stats().in_use == 0);
}

}  // namespace
}  // namespace tvm_ipc

int main() {
  tvm_ipc::TestArenaHeap();
  tvm_ipc::TestLastUserEndsIt(500);
  std::printf("passed\n");
  return 0;
}
