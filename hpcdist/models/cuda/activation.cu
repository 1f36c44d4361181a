// Elementwise functions of a model: GELU (tanh form), ReLU, SwiGLU, sums in place. `n` counts elements, all contiguous.

#define WIDTH (16 / sizeof(REAL))

// 1 / (1 + exp(-2 u)) = (1 + tanh u) / 2, with u = sqrt(2 / pi) (x + 0.044715 x^3)
__device__ __forceinline__ ACC gate(ACC x) {
  const ACC ROOT = ACC(0.7978845608028654), CUBIC = ACC(0.044715);
  return ACC(1) / (ACC(1) + exponential(ACC(-2) * ROOT * (x + CUBIC * x * x * x)));
}

extern "C" __global__ void gelu(const REAL* x, REAL* y, long long n) {
  over_grid<WIDTH>(n, aligned<WIDTH>(x) && aligned<WIDTH>(y), [=](auto width, long long i) {
    auto values = read<width.value>(x + i);
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

extern "C" __global__ void relu(const REAL* x, REAL* y, long long n) {
  over_grid<WIDTH>(n, aligned<WIDTH>(x) && aligned<WIDTH>(y), [=](auto width, long long i) {
    auto values = read<width.value>(x + i);
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
extern "C" __global__ void swiglu(const REAL* x, REAL* y, long long n, long long w) {
  bool packed = w % WIDTH == 0 && aligned<WIDTH>(x) && aligned<WIDTH>(y);
  over_grid<WIDTH>(n, packed, [=](auto width, long long i) {
    const REAL* row = x + i / w * 2 * w + i % w;
    auto g = read<width.value>(row), values = read<width.value>(row + w);
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
