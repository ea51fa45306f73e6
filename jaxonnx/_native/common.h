// What the kernels of this package share: the instructions of the processor, threads, vectors.

#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#if defined(__x86_64__)
// Whether the processor and the system have the registers and instructions of a variant.
// __builtin_cpu_supports would say so, but not in what zig links.
bool HasVectors(bool wide) {
  unsigned eax, ebx, ecx, edx, low, high;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kFma = 1u << 12, kSaved = 1u << 27;
  if ((ecx & (kFma | kSaved)) != (kFma | kSaved)) return false;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  const unsigned registers = wide ? 0xe6 : 0x06;
  if ((low & registers) != registers) return false;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kAvx2 = 1u << 5, kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
  const unsigned wanted = wide ? kAvx2 | kAvx512 : kAvx2;
  return (ebx & wanted) == wanted;
}
#endif

// Calls `work(i)` for i in [0, count) in the threads of the pool and in this one, which waits only
// for what has begun: a pool whose threads all wait here does not hang.
template <typename Work>
void Parallel(ffi::ThreadPool& pool, int64_t threads, int64_t count, const Work& work) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
    std::mutex guard;
    std::condition_variable finished;
  };
  auto shared = std::make_shared<Shared>();
  auto run = [shared, count, &work] {
    int64_t mine = 0;
    for (int64_t i; (i = shared->next++) < count; ++mine) work(i);
    if (mine > 0 && (shared->done += mine) == count) {
      std::lock_guard<std::mutex> lock(shared->guard);
      shared->finished.notify_all();
    }
  };
  for (int64_t i = 1; i < std::min(threads, count); ++i) pool.Schedule(decltype(run)(run));
  run();
  std::unique_lock<std::mutex> lock(shared->guard);
  shared->finished.wait(lock, [&] { return shared->done == count; });
}

int64_t Divided(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace
