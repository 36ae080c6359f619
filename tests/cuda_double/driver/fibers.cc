// SPDX-License-Identifier: Apache-2.0
#include "fibers.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "memory.h"

// Saves the registers that a call keeps and the stack pointer, takes another stack, and gives its
// registers back. A fault handler enters at cuda_double_resume with the stack of whoever resumed
// the fiber.
extern "C" __attribute__((visibility("hidden"))) void cuda_double_switch(void** save, void* load);
extern "C" __attribute__((visibility("hidden"))) void cuda_double_resume();
asm(R"(
.text
.globl cuda_double_switch
.hidden cuda_double_switch
.type cuda_double_switch, @function
cuda_double_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
.globl cuda_double_resume
.hidden cuda_double_resume
.type cuda_double_resume, @function
cuda_double_resume:
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace cuda_double {
namespace {

constexpr size_t kStackBytes = 128 << 10;
constexpr size_t kGuardBytes = 4096;
constexpr size_t kAtOnce = 64;
/*! \brief At the end of a stack: it is another number where a fiber went beyond it. */
constexpr uint64_t kLeft = 0x5ac5ac5ac5ac5ac5;

/*!
 * \brief Stacks, many of them in one mapping: a process has 65,530 mappings at most, and a launch
 *        tens of thousands of threads.
 */
class Stacks {
 public:
  static Stacks& Global() {
    static auto* stacks = new Stacks;  // outlives whoever gives one back at the end
    return *stacks;
  }
  char* Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) Make();
    char* const stack = free_.back();
    free_.pop_back();
    return stack;
  }
  void Give(char* stack) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(stack);
  }

 private:
  void Make() {
    void* memory = mmap(nullptr, kAtOnce * kStackBytes + kGuardBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) {
      std::perror("cuda double: stacks for the threads of a block");
      std::abort();
    }
    for (size_t i = 0; i < kAtOnce; ++i) {
      free_.push_back(static_cast<char*>(memory) + kGuardBytes + i * kStackBytes);
    }
  }

  std::mutex mutex_;
  std::vector<char*> free_;
};

struct Running {
  Fiber* fiber = nullptr;
  void* resumer = nullptr;  // stack pointer
  bool faulted = false;
  void* address = nullptr;
};
thread_local Running running;
struct sigaction before[2];

void OnFault(int signal, siginfo_t* info, void* context) {
  if (running.fiber == nullptr) {  // not ours: let it happen again, as if we were not here
    static constexpr char kText[] = "cuda double: the host touches memory of a device\n";
    if (IsOfDevices(info->si_addr) && write(2, kText, sizeof(kText) - 1) < 0) std::abort();
    sigaction(signal, &before[signal == SIGBUS], nullptr);
    return;
  }
  running.faulted = true;
  running.address = info->si_addr;
  auto* machine = &static_cast<ucontext_t*>(context)->uc_mcontext;
  machine->gregs[REG_RSP] = reinterpret_cast<greg_t>(running.resumer);
  machine->gregs[REG_RIP] = reinterpret_cast<greg_t>(&cuda_double_resume);
}

}  // namespace

void CatchFaults() {
  static constexpr size_t kSignalStack = 64 << 10;
  stack_t stack{};
  stack.ss_sp = std::malloc(kSignalStack);
  stack.ss_size = kSignalStack;
  sigaltstack(&stack, nullptr);
  for (int signal : {SIGSEGV, SIGBUS}) {
    struct sigaction action{};
    action.sa_sigaction = OnFault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    struct sigaction old{};
    sigaction(signal, &action, &old);
    if (old.sa_sigaction != OnFault) before[signal == SIGBUS] = old;
  }
  running.fiber = nullptr;
}

Fiber::Fiber() : stack_(Stacks::Global().Take()) { *reinterpret_cast<uint64_t*>(stack_) = kLeft; }

Fiber::~Fiber() {
  if (*reinterpret_cast<uint64_t*>(stack_) != kLeft) {
    std::fprintf(stderr, "cuda double: a thread of a block used more than %zu bytes of stack\n",
                 kStackBytes);
    std::abort();
  }
  Stacks::Global().Give(stack_);
}

void Fiber::Begin(std::function<void()> body) {
  body_ = std::move(body);
  ended_ = false;
  // What cuda_double_resume takes from a stack: six registers, then the place to go to. The place
  // that Enter would return to is never used, but keeps the stack as a call aligns it.
  auto* top = reinterpret_cast<uint64_t*>(stack_ + kStackBytes);
  *--top = 0;
  *--top = reinterpret_cast<uint64_t>(&Fiber::Enter);
  for (int i = 0; i < 6; ++i) *--top = 0;
  pointer_ = top;
}

bool Fiber::Resume() {
  running.fiber = this;
  running.faulted = false;
  cuda_double_switch(&running.resumer, pointer_);
  running.fiber = nullptr;
  if (running.faulted) ended_ = true;
  return !running.faulted;
}

void Fiber::Enter() {
  running.fiber->body_();
  running.fiber->ended_ = true;
  Yield();
  std::abort();
}

void Fiber::Yield() { cuda_double_switch(&running.fiber->pointer_, running.resumer); }

void* Fiber::FaultAddress() { return running.address; }

}  // namespace cuda_double
