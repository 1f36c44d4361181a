// Elementwise functions of a model: GELU (tanh form), ReLU, SwiGLU, sums in place. `n` counts elements, all contiguous.
// With `biased` x (rows, columns) becomes x + bias (columns,) before, rounded as it is written.

#define WIDTH (16 / sizeof(REAL))

// 1 / (1 + exp(-2 u)) = (1 + tanh u) / 2, with u = sqrt(2 / pi) (x + 0.044715 x^3)
__device__ __forceinline__ ACC gate(ACC x) {
  const ACC ROOT = ACC(0.7978845608028654), CUBIC = ACC(0.044715);
  return ACC(1) / (ACC(1) + exponential(ACC(-2) * ROOT * (x + CUBIC * x * x * x)));
}

// x[i], with bias[column] added where `biased`: in memory, and as it is there then
template <int N>
__device__ __forceinline__ Pack<ACC, N> shifted(REAL* x, const REAL* bias, long long i, long long column, bool biased) {
  auto values = read<N>(x + i);
  if (biased) {
    auto addend = read<N>(bias + column);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      REAL sum;
      narrow(values.v[j] + addend.v[j], sum);
      values.v[j] = widen(sum);
    }
    write<N>(x + i, values);
  }
  return values;
}

extern "C" __global__ void gelu(REAL* x, const REAL* bias, REAL* y, long long n, long long columns, long long biased) {
  bool packed = (!biased || columns % WIDTH == 0) && aligned<WIDTH>(x) && aligned<WIDTH>(bias) && aligned<WIDTH>(y);
  over_grid<WIDTH>(n, packed, [=](auto width, long long i) {
    auto values = shifted<width.value>(x, bias, i, i % columns, biased);
#pragma unroll
    for (int j = 0; j < width.value; ++j) values.v[j] *= gate(values.v[j]);
    write<width.value>(y + i, values);
  });
}

// x becomes dy gelu'(x)
extern "C" __global__ void gelu_backward(REAL* x, const REAL* dy, long long n) {
  const ACC ROOT = ACC(0.7978845608028654), SLOPE = ACC(3 * 0.044715);
  over_grid<WIDTH>(n, aligned<WIDTH>(x) && aligned<WIDTH>(dy), [=](auto width, long long i) {
    auto values = read<width.value>(x + i), d = read<width.value>(dy + i);
#pragma unroll
    for (int j = 0; j < width.value; ++j) {
      ACC v = values.v[j], s = gate(v);
      // From 32 on 1 - s or s is 0, whatever v is, and the square of v must not overflow. A NaN stays.
      v = v > ACC(32) ? ACC(32) : v < ACC(-32) ? ACC(-32) : v;
      values.v[j] = d.v[j] * (s + v * s * (1 - s) * (2 * ROOT) * (1 + SLOPE * v * v));
    }
    write<width.value>(x + i, values);
  });
}

extern "C" __global__ void relu(REAL* x, const REAL* bias, REAL* y, long long n, long long columns, long long biased) {
  bool packed = (!biased || columns % WIDTH == 0) && aligned<WIDTH>(x) && aligned<WIDTH>(bias) && aligned<WIDTH>(y);
  over_grid<WIDTH>(n, packed, [=](auto width, long long i) {
    auto values = shifted<width.value>(x, bias, i, i % columns, biased);
#pragma unroll
    for (int j = 0; j < width.value; ++j) values.v[j] = values.v[j] < 0 ? ACC(0) : values.v[j];  // a NaN stays
    write<width.value>(y + i, values);
  });
}

extern "C" __global__ void relu_backward(REAL* x, const REAL* dy, long long n) {
  over_grid<WIDTH>(n, aligned<WIDTH>(x) && aligned<WIDTH>(dy), [=](auto width, long long i) {
    auto values = read<width.value>(x + i), d = read<width.value>(dy + i);
#pragma unroll
    for (int j = 0; j < width.value; ++j) values.v[j] = d.v[j] * (values.v[j] > 0 ? ACC(1) : ACC(0));
    write<width.value>(x + i, values);
  });
}

// y (rows, w) = silu(gate) value for x (rows, 2 w), the gate in the first w columns; n = rows w
extern "C" __global__ void swiglu(REAL* x, const REAL* bias, REAL* y, long long n, long long w, long long biased) {
  bool packed = w % WIDTH == 0 && aligned<WIDTH>(x) && aligned<WIDTH>(bias) && aligned<WIDTH>(y);
  over_grid<WIDTH>(n, packed, [=](auto width, long long i) {
    long long column = i % w, first = i / w * 2 * w + column;
    auto g = shifted<width.value>(x, bias, first, column, biased);
    auto values = shifted<width.value>(x, bias, first + w, column + w, biased);
#pragma unroll
    for (int j = 0; j < width.value; ++j) values.v[j] *= g.v[j] / (ACC(1) + exponential(-g.v[j]));
    write<width.value>(y + i, values);
  });
}

// x becomes the gradient of both its halves, from dy (rows, w)
extern "C" __global__ void swiglu_backward(REAL* x, const REAL* dy, long long n, long long w) {
  bool packed = w % WIDTH == 0 && aligned<WIDTH>(x) && aligned<WIDTH>(dy);
  over_grid<WIDTH>(n, packed, [=](auto width, long long i) {
    REAL* row = x + i / w * 2 * w + i % w;
    auto g = read<width.value>(row), values = read<width.value>(row + w), d = read<width.value>(dy + i);
#pragma unroll
    for (int j = 0; j < width.value; ++j) {
      ACC s = ACC(1) / (ACC(1) + exponential(-g.v[j])), silu = g.v[j] * s;
      ACC slope = s * (1 + g.v[j] * (1 - s));
      g.v[j] = d.v[j] * values.v[j] * slope;
      values.v[j] = d.v[j] * silu;
    }
    write<width.value>(row, g);
    write<width.value>(row + w, values);
  });
}

// y += x[i % period]: a residual (period = n), or a bias of `period` columns
extern "C" __global__ void add_to(REAL* y, const REAL* x, long long n, long long period) {
  bool packed = period % WIDTH == 0 && aligned<WIDTH>(x) && aligned<WIDTH>(y);
  over_grid<WIDTH>(n, packed, [=](auto width, long long i) {
    auto sum = read<width.value>(y + i), addend = read<width.value>(x + i % period);
#pragma unroll
    for (int j = 0; j < width.value; ++j) sum.v[j] += addend.v[j];
    write<width.value>(y + i, sum);
  });
}
