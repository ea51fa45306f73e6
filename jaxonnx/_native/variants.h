// Compiles the file KERNEL for each instruction set, and chooses among the results: KERNEL defines
// `constexpr Kernels kKernels` in namespace VARIANT, for vectors of LANES floats and the
// instructions of TARGET;
// a struct Kernels is declared before, in the namespace that includes this.

#if defined(__x86_64__)
#define VARIANT avx512
#define LANES 16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#include KERNEL
#undef VARIANT
#undef LANES
#undef TARGET
#define VARIANT avx2
#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#include KERNEL
#undef VARIANT
#undef LANES
#undef TARGET
#endif
// SSE2, NEON, or whatever every processor of the family has
#define VARIANT common
#define LANES 4
#define TARGET
#include KERNEL

const Kernels* Variant(int64_t number) {
#if defined(__x86_64__)
  if (number == 0) return HasVectors(true) ? &avx512::kKernels : nullptr;
  if (number == 1) return HasVectors(false) ? &avx2::kKernels : nullptr;
#endif
  return number == 2 ? &common::kKernels : nullptr;
}

// The kernels of a variant, or (-1) of the first that there is.
const Kernels* Choose(int64_t variant) {
  const Kernels* kernels = Variant(std::max<int64_t>(variant, 0));
  for (int64_t i = 1; variant < 0 && kernels == nullptr; ++i) kernels = Variant(i);
  return kernels;
}

ffi::Error NoVariant() {
  return ffi::Error::InvalidArgument("this processor lacks the variant of a kernel");
}
