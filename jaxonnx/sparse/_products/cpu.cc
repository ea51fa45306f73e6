// y (b, n) = x (b, k) @ w (k, n), or @ w (n, k)^T, where at most two of each four numbers of w along
// the contraction are not zero: half of the multiplications are left out, with ordinary vector
// instructions. It is vectorized over rows of x: a panel of x is stored as [input][row], and each
// weight that is kept is broadcast and multiplied with the row of the panel that its place names.
//
// For few rows, where reading the weight takes the time, there is a kernel for weights that were
// packed before: half of the numbers, and two bits for the place of each.
//
// What is packed: x once, as panels of at most 8 vectors of rows, in memory that XLA gives; the
// weight in blocks that fit the second-level cache, for each 512 rows anew. Sums go to a buffer of
// the thread between blocks of inputs, so the order of additions is that of the inputs, whatever the
// number of threads.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "common.h"

namespace {

// The next block of the weight, fetched during the products of this one: so many cache lines in a
// row, at a stride, and so many for each output.
struct Ahead {
  const float* from;
  int64_t columns, stride, each;
};

using Pack = bool (*)(const float*, int64_t, int64_t, int64_t, int32_t, float*, int32_t*);

constexpr int64_t kTile = 16;  // outputs of a weight that was packed before

struct Kernels {
  int64_t lanes;
  void (*multiply_few[8])(const float*, int64_t, const float*, const uint32_t*, float*);
  void (*pack_rows)(const float*, int64_t, int64_t, int64_t, float*);
  void (*unpack_sums)(const float*, int64_t, int64_t, float*, int64_t, int64_t);
  Pack pack_columns, pack_transposed;
  void (*multiply[8])(const float*, int64_t, const float*, const int32_t*, int64_t, int64_t, bool,
                      float*, const Ahead&);
};

#define KERNEL "kernel.inc"
#include "variants.h"

constexpr int64_t kRows = 512;         // that use a packed block of the weight
constexpr int64_t kOutputs = 256;      // of a block
constexpr int64_t kInputs = 256;       // of a block, at most
constexpr int64_t kPanel = 24 * 1024;  // bytes of a panel's part, of a first-level cache of 32 KiB
constexpr int64_t kStep = 16;          // what the rows of a panel are a multiple of

struct alignas(64) Buffers {
  float sums[kRows * kOutputs];
  float values[kOutputs * kInputs / 2];
  int32_t places[kOutputs * kInputs / 4];
};

struct Product {
  const Kernels& kernels;
  const float *x, *w;
  float *y, *panels;
  int64_t b, k, n;
  bool transposed;
  int64_t height, count, depth, together, wide;
  std::atomic<bool> full{false};

  Product(const Kernels& kernels, const float* x, const float* w, float* y, float* panels, int64_t b,
          int64_t k, int64_t n, bool transposed, int64_t threads)
      : kernels(kernels), x(x), w(w), y(y), panels(panels), b(b), k(k), n(n),
        transposed(transposed) {
    // panels of equal height; what they and blocks hold depends on the shape alone, as the sums do
    count = Divided(b, 8 * kernels.lanes);
    height = Divided(Divided(b, count), kStep) * kStep;
    count = Divided(b, height);
    depth = std::min(kInputs, kPanel / (4 * height) / 16 * 16);
    together = std::max<int64_t>(1, kRows / height);
    // chunks of outputs of about equal work for each thread; they do not change a sum
    int64_t chunks = Divided(n, kOutputs);
    const int64_t parts = Divided(count, together);
    if (parts * chunks < 4 * threads) chunks = Divided(parts * chunks, threads) * threads / parts;
    chunks = std::max(chunks, Divided(n, kOutputs));
    wide = std::min(kOutputs, Divided(Divided(n, chunks), kernels.lanes) * kernels.lanes);
  }

  int64_t rows(int64_t p) const { return std::min(height, b - p * height); }

  const float* weight(int64_t input, int64_t output) const {
    return transposed ? w + output * k + input : w + input * n + output;
  }

  void PackPanel(int64_t p) const {
    kernels.pack_rows(x + p * height * k, rows(p), k, height, panels + p * height * k);
  }

  Ahead Next(int64_t input, int64_t output) const {
    if (input >= k) input = 0, output += wide;
    if (output >= n) return {w, 1, 0, 0};
    const int64_t rows = transposed ? wide : depth, columns = transposed ? depth : wide;
    const int64_t lines = Divided(columns, 16);
    return {weight(input, output), lines, transposed ? k : n, Divided(rows * lines, wide)};
  }

  void MultiplyChunk(int64_t task, Buffers& buffers) {
    const int64_t chunks = Divided(n, wide), output = task % chunks * wide;
    const int64_t from = task / chunks * together, to = std::min(count, from + together);
    const int64_t outputs = std::min(wide, n - output), lanes = kernels.lanes;
    const Pack pack = transposed ? kernels.pack_transposed : kernels.pack_columns;
    for (int64_t input = 0; input < k; input += depth) {
      const int64_t inputs = std::min(depth, k - input);
      const bool many = pack(weight(input, output), transposed ? k : n, inputs, outputs, 4 * height,
                             buffers.values, buffers.places);
      if (many) full = true;
      Ahead ahead = Next(input + depth, output);
      for (int64_t p = from; p < to; ++p, ahead.each = 0) {
        kernels.multiply[Divided(rows(p), lanes) - 1](
            panels + (p * k + input) * height, height, buffers.values, buffers.places, inputs / 4,
            outputs, input == 0, buffers.sums + (p - from) * height * wide, ahead);
      }
    }
    for (int64_t p = from; p < to; ++p) {
      kernels.unpack_sums(buffers.sums + (p - from) * height * wide, height, outputs,
                          y + p * height * n + output, n, rows(p));
    }
  }

  // Judges groups of more than two weights: a NaN among them makes the output NaN, as in a dense
  // product; without one the weight is not 2:4.
  ffi::Error Judge() const {
    for (int64_t o = 0; o < n; ++o) {
      for (int64_t i = 0; i < k; i += 4) {
        int found = 0;
        bool nan = false;
        for (int64_t j = i; j < i + 4; ++j) {
          found += *weight(j, o) != 0;
          nan |= std::isnan(*weight(j, o));
        }
        if (found > 2 && !nan) {
          return ffi::Error::InvalidArgument(
              "a sparse product has a weight that is not 2:4: its inputs " + std::to_string(i) +
              " to " + std::to_string(i + 3) + " of output " + std::to_string(o) + " have " +
              std::to_string(found) + " nonzeros; sparse.prune makes it 2:4");
        }
        for (int64_t r = 0; found > 2 && r < b; ++r) {
          y[r * n + o] = std::numeric_limits<float>::quiet_NaN();
        }
      }
    }
    return ffi::Error::Success();
  }
};

ffi::Error MultiplyPacked(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x,
                          ffi::Buffer<ffi::F32> values, ffi::Buffer<ffi::U32> places,
                          ffi::Result<ffi::Buffer<ffi::F32>> y, int64_t variant,
                          int64_t threads) {
  const int64_t b = x.dimensions()[0], k = x.dimensions()[1], n = y->dimensions()[1];
  const Kernels* kernels = Choose(variant);
  if (kernels == nullptr) return NoVariant();
  if (threads == 0) threads = std::max<int64_t>(1, pool.num_threads());
  const int64_t tiles = Divided(n, kTile), lanes = kernels->lanes;
  const int64_t words = Divided(k / 4, 8);
  const int64_t part = Divided(tiles, 4 * threads);
  const float *rows = x.typed_data(), *numbers = values.typed_data();
  const uint32_t* bits = places.typed_data();
  float* out = y->typed_data();
  Parallel(pool, threads, Divided(tiles, part), [&](int64_t task) {
    for (int64_t t = task * part; t < std::min(tiles, (task + 1) * part); ++t) {
      for (int64_t r = 0; r < b; r += 8) {
        const int64_t here = std::min<int64_t>(8, b - r);
        for (int64_t o = t * kTile; o < std::min(n, (t + 1) * kTile); o += lanes) {
          float sums[8 * kTile];
          const int64_t lane = o - t * kTile;
          kernels->multiply_few[here - 1](rows + r * k, k, numbers + t * (k / 2) * kTile + lane,
                                          bits + t * words * kTile + lane, sums);
          for (int64_t i = 0; i < here; ++i) {
            std::memcpy(out + (r + i) * n + o, sums + i * lanes, 4 * std::min(lanes, n - o));
          }
        }
      }
    }
  });
  return ffi::Error::Success();
}

ffi::Error Multiply(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> w,
                    ffi::Result<ffi::Buffer<ffi::F32>> y,
                    ffi::Result<ffi::Buffer<ffi::F32>> panels, int64_t axis, int64_t variant,
                    int64_t threads) {
  const int64_t b = x.dimensions()[0], k = x.dimensions()[1], n = y->dimensions()[1];
  const Kernels* kernels = Choose(variant);
  if (kernels == nullptr) return NoVariant();
  if (threads == 0) threads = std::max<int64_t>(1, pool.num_threads());
  Product product(*kernels, x.typed_data(), w.typed_data(), y->typed_data(), panels->typed_data(),
                  b, k, n, axis == 1, threads);
  if (static_cast<int64_t>(panels->element_count()) < product.count * product.height * k) {
    return ffi::Error::Internal("a sparse product has no room for its panels");
  }
  Parallel(pool, threads, product.count, [&](int64_t p) { product.PackPanel(p); });
  const int64_t tasks = Divided(product.count, product.together) * Divided(n, product.wide);
  Parallel(pool, threads, tasks, [&](int64_t task) {
    static thread_local const std::unique_ptr<Buffers> buffers(new Buffers);
    product.MultiplyChunk(task, *buffers);
  });
  return product.full ? product.Judge() : ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxonnxSparseProduct, Multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("axis")
                                  .Attr<int64_t>("variant")
                                  .Attr<int64_t>("threads"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxonnxPackedProduct, MultiplyPacked,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("variant")
                                  .Attr<int64_t>("threads"));

// Returns the variants that this processor has, a bit for each.
extern "C" int64_t JaxonnxSparseVariants() {
  int64_t found = 0;
  for (int64_t i = 0; i < 3; ++i) found |= Variant(i) == nullptr ? 0 : int64_t{1} << i;
  return found;
}
