// The product of a few rows with a matrix in 4 bits, (code - zero) * scale, as MatMulNBits has it.
//
// A byte has two codes of neighboring columns. The rows come as the columns of low codes and those
// of high ones, so that codes become vectors as they lie in memory. Each row of the matrix is read
// once for each row of x, and summed by one thread: bits do not depend on the number of threads.

#include "common.h"

namespace {

constexpr int64_t kWork = 1 << 16;  // multiplications of a part, at least
constexpr int64_t kAhead = 2048;    // bytes: the processor itself does not read ahead of a page's end

struct Product {
  int64_t count, rows, blocks, half;  // rows of x and of the matrix; bytes of a block: `half`
  const float* x;                     // (count, 2, blocks * half)
  const uint8_t* codes;               // (rows, blocks * half)
  const float *scales, *zeros;        // (rows, blocks); zeros: or null
  float middle;                       // the zero point where there are no others
  float* y;                           // (count, rows)
};

struct Kernels {
  void (*multiply)(const Product&, int64_t from, int64_t to);
};

#define KERNEL "few_bits.inc"
#include "variants.h"

ffi::Error Run(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U8> codes,
               ffi::Buffer<ffi::F32> scales, ffi::Buffer<ffi::F32> zeros,
               ffi::ResultBuffer<ffi::F32> y, float middle, int64_t variant, int64_t threads) {
  const auto shape = scales.dimensions();
  Product p{x.dimensions()[0], shape[0], shape[1], codes.dimensions()[1] / shape[1]};
  p.x = x.typed_data(), p.codes = codes.typed_data(), p.scales = scales.typed_data();
  p.zeros = zeros.element_count() == 0 ? nullptr : zeros.typed_data();
  p.middle = middle, p.y = y->typed_data();
  const Kernels* kernels = Choose(variant);
  if (kernels == nullptr) return NoVariant();
  if (threads == 0) threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t each = std::max<int64_t>(1, kWork / (2 * p.blocks * p.half * p.count));
  Parallel(pool, threads, Divided(p.rows, each), [&](int64_t part) {
    kernels->multiply(p, part * each, std::min(p.rows, (part + 1) * each));
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxonnxFewBits, Run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("middle")
                                  .Attr<int64_t>("variant")
                                  .Attr<int64_t>("threads"));
