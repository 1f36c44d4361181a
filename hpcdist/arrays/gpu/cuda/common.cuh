// What all kernels share: element types, packs of elements, sums over a block of threads.
//
// The loader (hpcdist/arrays/gpu/kernels.py) writes one line a type before this: `#define REAL float`, say. REAL is the type
// of elements in memory, ACC (float or double) the one they are computed and summed in. Integers are `long long`.

struct float16 {
  unsigned short bits;
};
struct bfloat16 {
  unsigned short bits;
};

#ifdef __CUDACC_RTC__  // which has no math.h
#define INFINITY __uint_as_float(0x7F800000u)
#define NAN __uint_as_float(0x7FC00000u)
#endif

#ifdef __CUDACC__  // who compiles this for another machine brings these two functions, in IEEE 754's own rounding
__device__ __forceinline__ float half_to_float(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ unsigned short float_to_half(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#endif

template <typename T>
struct Wide {
  typedef float type;
};
template <>
struct Wide<double> {
  typedef double type;
};

#ifdef REAL
typedef Wide<REAL>::type ACC;
#endif

__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(float16 x) { return half_to_float(x.bits); }
__device__ __forceinline__ float widen(bfloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }

__device__ __forceinline__ void narrow(double value, double& x) { x = value; }
__device__ __forceinline__ void narrow(float value, float& x) { x = value; }
__device__ __forceinline__ void narrow(float value, float16& x) { x.bits = float_to_half(value); }
__device__ __forceinline__ void narrow(float value, bfloat16& x) {  // to nearest, ties to even; a NaN stays one
  unsigned bits = __float_as_uint(value);
  unsigned even = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  x.bits = (unsigned short)((bits & 0x7FFFFFFFu) > 0x7F800000u ? (bits >> 16) | 0x40u : even);
}

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float logarithm(float x) { return logf(x); }
__device__ __forceinline__ double logarithm(double x) { return log(x); }
__device__ __forceinline__ float root(float x) { return sqrtf(x); }
__device__ __forceinline__ double root(double x) { return sqrt(x); }
template <typename T>
__device__ __forceinline__ T larger(T a, T b) {  // a NaN in a is dropped: what is computed with the maximum sees it
  return a > b ? a : b;
}

// N elements in one load or store, at an address that is a multiple of their bytes
template <typename T, int N>
struct alignas(N * sizeof(T)) Stored {
  T v[N];
};
template <typename A, int N>
struct Pack {
  A v[N];
};
template <int N>
struct Count {
  enum { value = N };
};

template <int N, typename T>
__device__ __forceinline__ Pack<typename Wide<T>::type, N> read(const T* from) {
  Stored<T, N> stored = *reinterpret_cast<const Stored<T, N>*>(from);
  Pack<typename Wide<T>::type, N> x;
#pragma unroll
  for (int j = 0; j < N; ++j) x.v[j] = widen(stored.v[j]);
  return x;
}

template <int N, typename T>
__device__ __forceinline__ void write(T* to, const Pack<typename Wide<T>::type, N>& x) {
  Stored<T, N> stored;
#pragma unroll
  for (int j = 0; j < N; ++j) narrow(x.v[j], stored.v[j]);
  *reinterpret_cast<Stored<T, N>*>(to) = stored;
}

template <int N, typename T>
__device__ __forceinline__ bool aligned(const T* where) {
  return reinterpret_cast<unsigned long long>(where) % (N * sizeof(T)) == 0;
}

// Call body(Count<N>(), i) for packs of N elements from i on and, where there are none, body(Count<1>(), i). Of `step`
// threads this is number `first`.
template <int N, typename F>
__device__ __forceinline__ void each(long long first, long long step, long long n, bool packed, F body) {
  long long packs = packed ? n / N : 0;
  for (long long i = first; i < packs; i += step) body(Count<N>(), i * N);
  for (long long i = packs * N + first; i < n; i += step) body(Count<1>(), i);
}

template <int N, typename F>
__device__ __forceinline__ void over_grid(long long n, bool packed, F body) {
  each<N>((long long)blockIdx.x * blockDim.x + threadIdx.x, (long long)gridDim.x * blockDim.x, n, packed, body);
}

template <int N, typename F>
__device__ __forceinline__ void over_block(long long n, bool packed, F body) {
  each<N>(threadIdx.x, blockDim.x, n, packed, body);
}

struct Add {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Larger {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return larger(a, b);
  }
};

template <typename T, typename F>
__device__ __forceinline__ T over_warp(T value, F join) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value = join(value, __shfl_xor_sync(0xFFFFFFFFu, value, distance));
  return value;
}

// Join the values of all threads of a block, for all of them. Blocks have a multiple of 32 threads. The order of the
// sum depends on the number of threads alone.
template <typename T, typename F>
__device__ __forceinline__ T over_threads(T value, T nothing, F join) {
  __shared__ T warps[32];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  value = over_warp(value, join);
  if (lane == 0) warps[warp] = value;
  __syncthreads();
  value = over_warp(lane < (int)blockDim.x / 32 ? warps[lane] : nothing, join);
  __syncthreads();  // the next call writes there
  return value;
}

template <typename T>
__device__ __forceinline__ T sum_of_block(T value) {
  return over_threads(value, T(0), Add());
}

// Philox4x32-10 (Salmon et al., SC'11)
__device__ __forceinline__ void philox(unsigned* c, unsigned key0, unsigned key1) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    unsigned high0 = __umulhi(0xD2511F53u, c[0]), low0 = 0xD2511F53u * c[0];
    unsigned high1 = __umulhi(0xCD9E8D57u, c[2]), low1 = 0xCD9E8D57u * c[2];
    c[0] = high1 ^ c[1] ^ key0, c[1] = low1, c[2] = high0 ^ c[3] ^ key1, c[3] = low0;
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
}
