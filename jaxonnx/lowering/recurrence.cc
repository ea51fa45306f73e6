// The time loop of an LSTM or GRU in float32, or the loop of its gradient: all steps in one call.
//
// Weights come packed: one vector has units of a gate, and those of the other gates of the same
// units follow. A thread has the same units in every step, whose weights stay in its second-level
// cache; the product of a step and the functions of its gates are computed together, a few rows and
// units at a time. Between steps the threads wait for each other. The order of a sum does not
// depend on the number of threads.

#include <cstring>

#include "common.h"

namespace {

constexpr int64_t kTile = 16;       // units of a gate that are packed together
constexpr int64_t kDepth = 64;      // inputs of a product at a time: a first-level cache has them
constexpr int64_t kRows = 48;       // rows of the batch at a time, at most
constexpr int64_t kWork = 1 << 16;  // multiplications of a step for each thread, at least
constexpr int64_t kTurns = 20000;  // of waiting for another thread, before this one sleeps

struct Loop {
  int64_t steps, batch, inputs, units;
  bool lstm, reverse;
  const bool* valid;  // (steps, batch), or null
  const float *x, *weights, *bias, *start;
  float *hidden, *state;  // state: the cell of an LSTM; in the gradient, its cotangent
  // What the gradient reads of each step, (steps, batch, units) each, or null. Of an LSTM: the
  // derivatives of the cell (of the hidden state for gate 1) by the four gates before their
  // functions, of the cell by the one before it, of the hidden state by the cell. Of a GRU: the
  // derivatives of the state by the four gates, and by the state before it.
  float* partials[6];
  float* before;          // in the gradient, which has its gates in `hidden`: that of the state

  int64_t time(int64_t step) const { return reverse ? steps - 1 - step : step; }
  bool is_valid(int64_t row) const { return valid == nullptr || valid[row]; }
};

struct Part {
  int64_t step, block, from, rows;  // a block of units, and rows of the batch
};

struct Kernels {
  void (*forward)(const Loop&, const Part&);
  void (*back)(const Loop&, const Part&);
};

#define KERNEL "recurrence.inc"
#include "variants.h"

// Calls `work` for all parts of each step, after the last step has ended. Each thread has a share
// of its own, and takes that of a thread which has not come yet. A share is only waited for when it
// has begun, and what it waits for has begun before: it cannot hang.
template <typename Work>
void EachStep(ffi::ThreadPool& pool, int64_t threads, int64_t steps, int64_t blocks, int64_t batch,
              const Work& work) {
  const int64_t most = std::max(Divided(batch, kRows), std::min(threads / blocks, batch / 8));
  const int64_t tiles = std::max<int64_t>(1, most), parts = blocks * tiles;
  const int64_t shares = std::min(threads, parts);
  // The number of steps of which a share has begun: who raises it from `step` computes that share.
  std::unique_ptr<std::atomic<int64_t>[]> begun(new std::atomic<int64_t>[shares]());
  std::atomic<int64_t> finished{0};
  std::mutex guard;
  std::condition_variable ended;
  Parallel(pool, shares, shares, [&](int64_t thread) {
    for (int64_t step = 0; step < steps; ++step) {
      // its own share first, whose weights are in its cache, then what nobody has begun
      for (int64_t i = 0; i < shares; ++i) {
        const int64_t share = (thread + i) % shares;
        int64_t next = step;
        if (!begun[share].compare_exchange_strong(next, step + 1)) continue;
        for (int64_t p = parts * share / shares; p < parts * (share + 1) / shares; ++p) {
          const int64_t from = batch * (p % tiles) / tiles, to = batch * (p % tiles + 1) / tiles;
          work(Part{step, p / tiles, from, to - from});
        }
        if (++finished < shares * (step + 1)) continue;
        std::lock_guard<std::mutex> lock(guard);  // or who is about to sleep would miss it
        ended.notify_all();
      }
      const auto has_ended = [&] { return finished >= shares * (step + 1); };
      for (int64_t turn = 0; turn < kTurns && !has_ended(); ++turn) continue;
      if (has_ended()) continue;
      std::unique_lock<std::mutex> lock(guard);  // the processor is busy with other work
      ended.wait(lock, has_ended);
    }
  });
}

ffi::Error Run(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, bool lstm,
               bool reverse, bool back, int64_t variant, int64_t threads) {
  const auto in = [&](size_t i) { return *args.get<ffi::AnyBuffer>(i); };
  const auto from = [&](size_t i) { return static_cast<float*>(in(i).untyped_data()); };
  const auto to = [&](size_t i) {
    return static_cast<float*>((*rets.get<ffi::AnyBuffer>(i))->untyped_data());
  };
  const auto shape = in(1).dimensions();
  Loop loop{shape[0], shape[1], shape[2], in(3).dimensions()[1], lstm, reverse != back};
  loop.valid = in(0).element_count() == 0 ? nullptr : static_cast<bool*>(in(0).untyped_data());
  loop.x = from(1), loop.weights = from(2), loop.start = from(3);
  loop.hidden = to(0), loop.before = to(1), loop.state = to(2);
  std::memcpy(loop.state, from(4), in(4).size_bytes());
  const size_t kept = back ? args.size() - 5 : rets.size() - 3;
  for (size_t i = 0; i < kept; ++i) loop.partials[i] = back ? from(5 + i) : to(3 + i);
  const int64_t bytes = in(3).size_bytes(), blocks = Divided(loop.units, kTile * (back ? 4 : 1));
  if (back) {
    std::memcpy(loop.before, loop.start, bytes);
  } else {
    loop.bias = from(5);
  }
  const Kernels* kernels = Choose(variant);
  if (kernels == nullptr) return NoVariant();
  if (threads == 0) threads = std::max<int64_t>(1, pool.num_threads());
  threads = std::clamp<int64_t>(loop.batch * loop.units * loop.units * 4 / kWork, 1, threads);
  const auto work = back ? kernels->back : kernels->forward;
  // the gradient has one more product, for the state before the first step
  EachStep(pool, threads, loop.steps + back, blocks, loop.batch,
           [&](const Part& part) { work(loop, part); });
  const float* end = loop.hidden + loop.time(loop.steps - 1) * loop.batch * loop.units;
  if (!back) std::memcpy(loop.before, end, bytes);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxonnxRecurrence, Run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<bool>("lstm")
                                  .Attr<bool>("reverse")
                                  .Attr<bool>("back")
                                  .Attr<int64_t>("variant")
                                  .Attr<int64_t>("threads"));
