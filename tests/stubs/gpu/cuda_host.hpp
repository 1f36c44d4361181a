// CUDA C++ on a CPU: the threads of a block are fibres, which run one after the other from barrier to barrier.
//
// Lanes of a warp run in ascending and in descending order by turns, so that a missing barrier shows. What hangs or is
// undefined on a GPU (a barrier that some threads do not reach, a shuffle from a lane that has ended) ends the launch
// with a message instead. One block at a time; `__shared__` memory is static, and keeps what the last block left.
#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <ucontext.h>

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __shared__ static

struct Three {
  unsigned x, y, z;
};

namespace host {

constexpr int MOST = 1024, WARP = 32;
constexpr size_t STACK = 256 << 10;
enum State { IDLE, READY, AT_WARP, AT_BLOCK, ENDED };

struct Fibre {
  ucontext_t context;
  jmp_buf place;
  bool begun = false;
  State state = IDLE;
  Three thread;
};

inline Fibre fibres[MOST];
inline Fibre* self;
inline jmp_buf scheduler;
inline Three grid, block, number;
inline std::function<void()> body;
inline char slots[MOST][64];
inline bool wrote[MOST];
inline const char* wrong;

inline void leave(State state) {
  self->state = state;
  if (!_setjmp(self->place)) _longjmp(scheduler, 1);
}

inline void loop() {
  for (;;) {
    body();
    leave(ENDED);
  }
}

inline void resume(int index) {
  self = &fibres[index];
  self->state = READY;
  if (_setjmp(scheduler)) return;
  if (self->begun) _longjmp(self->place, 1);
  self->begun = true;
  getcontext(&self->context);
  self->context.uc_stack.ss_sp = malloc(STACK);
  self->context.uc_stack.ss_size = STACK;
  self->context.uc_link = nullptr;
  makecontext(&self->context, loop, 0);
  setcontext(&self->context);
}

inline void warp(int first, int count, unsigned turn) {
  for (;; ++turn) {
    for (int i = 0; i < count; ++i) {
      int index = first + (turn % 2 ? count - 1 - i : i);
      if (fibres[index].state == READY) resume(index);
    }
    int waiting = 0, ended = 0;
    for (int i = first; i < first + count; ++i) {
      waiting += fibres[i].state == AT_WARP;
      ended += fibres[i].state == ENDED;
    }
    if (!waiting) return;
    if (waiting < WARP) {
      wrong = ended ? "a warp exchanges values, and some of its lanes have ended or are none"
                    : "a warp exchanges values, and some of its lanes wait at a barrier of the block";
      return;
    }
    for (int i = first; i < first + count; ++i) fibres[i].state = READY;
  }
}

inline void run_block() {
  int threads = block.x * block.y * block.z;
  for (int i = 0; i < threads; ++i) {
    fibres[i].state = READY;
    fibres[i].thread = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
  }
  for (unsigned turn = number.x;; ++turn) {
    int warps = (threads + WARP - 1) / WARP;
    for (int i = 0; i < warps && !wrong; ++i) {
      int which = turn % 2 ? warps - 1 - i : i;
      warp(which * WARP, std::min(WARP, threads - which * WARP), turn);
    }
    if (wrong) return;
    int waiting = 0;
    for (int i = 0; i < threads; ++i) waiting += fibres[i].state == AT_BLOCK;
    if (!waiting) return;
    if (waiting < threads) {
      wrong = "a barrier of the block that some of its threads do not reach";
      return;
    }
    for (int i = 0; i < threads; ++i) fibres[i].state = READY;
  }
}

inline const char* run(const unsigned* blocks, const unsigned* threads, std::function<void()> kernel) {
  grid = {blocks[0], blocks[1], blocks[2]};
  block = {threads[0], threads[1], threads[2]};
  body = kernel;
  wrong = nullptr;
  for (number.z = 0; number.z < grid.z && !wrong; ++number.z)
    for (number.y = 0; number.y < grid.y && !wrong; ++number.y)
      for (number.x = 0; number.x < grid.x && !wrong; ++number.x) run_block();
  if (wrong)  // threads that never came back: their stacks begin anew
    for (auto& fibre : fibres) fibre.begun = false;
  return wrong;
}

inline int index() { return int(self - fibres); }
inline void at_warp() { leave(AT_WARP); }

template <typename T>
T exchanged(T value, int from) {  // from: a lane
  static_assert(sizeof(T) <= sizeof(slots[0]));
  int base = index() / WARP * WARP;
  std::memcpy(slots[index()], &value, sizeof(T));
  at_warp();
  T result;
  std::memcpy(&result, slots[base + from], sizeof(T));
  at_warp();
  return result;
}

}  // namespace host

#define threadIdx (host::self->thread)
#define blockIdx (host::number)
#define blockDim (host::block)
#define gridDim (host::grid)

inline void __syncthreads() { host::leave(host::AT_BLOCK); }
inline void __syncwarp(unsigned = 0xFFFFFFFFu) { host::at_warp(); }

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return host::exchanged(value, (host::index() % host::WARP) ^ mask);
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return host::exchanged(value, lane % host::WARP);
}
inline unsigned __ballot_sync(unsigned, bool yes) {
  unsigned bits = 0;
  for (int lane = 0; lane < host::WARP; ++lane) bits |= unsigned(host::exchanged(int(yes), lane)) << lane;
  return bits;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(int(bits)); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float half_to_float(unsigned short bits) {
  _Float16 half;
  std::memcpy(&half, &bits, 2);
  return float(half);
}
inline unsigned short float_to_half(float value) {
  _Float16 half = _Float16(value);
  unsigned short bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}

// d (16 x 8) += a (16 x 16) b (16 x 8) by a warp, as the PTX ISA lays the fragments of mma.m16n8k16 out. Lane 4 g + t
// has of a: rows g, g + 8 and columns 2 t, 2 t + 1, and the same of columns + 8; of b: rows 2 t, 2 t + 1 and + 8 of
// column g; of d: rows g, g + 8 and columns 2 t, 2 t + 1.
template <typename T>
void multiply_add(float* d, const unsigned* a, unsigned b0, unsigned b1, T) {
  struct Lane {
    unsigned a[4], b[2];
  };
  Lane own = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  int base = host::index() / host::WARP * host::WARP, lane = host::index() % host::WARP;
  std::memcpy(host::slots[host::index()], &own, sizeof(own));
  host::at_warp();
  auto element = [](unsigned pair, int high) {
    T x;
    x.bits = (unsigned short)(high ? pair >> 16 : pair);
    return (double)widen(x);
  };
  for (int e = 0; e < 4; ++e) {
    int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
    double sum = d[e];
    for (int k = 0; k < 16; ++k) {
      Lane left, right;
      std::memcpy(&left, host::slots[base + row % 8 * 4 + k % 8 / 2], sizeof(left));
      std::memcpy(&right, host::slots[base + column * 4 + k % 8 / 2], sizeof(right));
      sum += element(left.a[row / 8 + k / 8 * 2], k % 2) * element(right.b[k / 8], k % 2);
    }
    d[e] = (float)sum;
  }
  host::at_warp();
}
