// Whole updates of optimizers in one pass over memory, and conversions. REAL: weights and slots; GRADIENT: the mean
// gradient, in its own type; WORKING: the rounded copy of the weights, which is written where `rounds`. All of n
// elements. What is clipped and unscaled is in `scale`.

#define WIDTH 4

template <int N>
__device__ __forceinline__ void stepped(REAL* weights, WORKING* working, long long i, const Pack<ACC, N>& w, bool rounds) {
  write<N>(weights + i, w);
  if (rounds) {
    Pack<typename Wide<WORKING>::type, N> copy;
#pragma unroll
    for (int j = 0; j < N; ++j) copy.v[j] = w.v[j];
    write<N>(working + i, copy);
  }
}

extern "C" __global__ void adam(REAL* weights, const GRADIENT* gradient, REAL* m, REAL* v, WORKING* working,
    long long n, long long rounds, ACC scale, ACC beta1, ACC rest1, ACC beta2, ACC rest2, ACC correct1, ACC correct2,
    ACC epsilon, ACC decay, ACC rate) {
  bool packed = aligned<WIDTH>(weights) && aligned<WIDTH>(gradient) && aligned<WIDTH>(m) && aligned<WIDTH>(v) &&
                aligned<WIDTH>(working);
  over_grid<WIDTH>(n, packed, [=](auto width, long long i) {
    auto w = read<width.value>(weights + i), mean = read<width.value>(m + i), square = read<width.value>(v + i);
    auto given = read<width.value>(gradient + i);
#pragma unroll
    for (int j = 0; j < width.value; ++j) {
      ACC g = ACC(given.v[j]) * scale;
      mean.v[j] = mean.v[j] * beta1 + g * rest1;
      square.v[j] = square.v[j] * beta2 + g * g * rest2;
      ACC u = mean.v[j] * correct1 / (root(square.v[j] * correct2) + epsilon) + decay * w.v[j];
      w.v[j] -= rate * u;
    }
    write<width.value>(m + i, mean);
    write<width.value>(v + i, square);
    stepped<width.value>(weights, working, i, w, rounds);
  });
}

// The step is own g + ahead velocity: (0, 1) is the heavy ball, (1, momentum) Nesterov's.
extern "C" __global__ void momentum(REAL* weights, const GRADIENT* gradient, REAL* velocity, WORKING* working,
    long long n, long long rounds, ACC scale, ACC keeps, ACC own, ACC ahead, ACC decay, ACC rate) {
  bool packed = aligned<WIDTH>(weights) && aligned<WIDTH>(gradient) && aligned<WIDTH>(velocity) &&
                aligned<WIDTH>(working);
  over_grid<WIDTH>(n, packed, [=](auto width, long long i) {
    auto w = read<width.value>(weights + i), fast = read<width.value>(velocity + i);
    auto given = read<width.value>(gradient + i);
#pragma unroll
    for (int j = 0; j < width.value; ++j) {
      ACC g = ACC(given.v[j]) * scale + decay * w.v[j];
      fast.v[j] = keeps * fast.v[j] + g;
      w.v[j] -= rate * (own * g + ahead * fast.v[j]);
    }
    write<width.value>(velocity + i, fast);
    stepped<width.value>(weights, working, i, w, rounds);
  });
}

extern "C" __global__ void plain(REAL* weights, const GRADIENT* gradient, WORKING* working, long long n,
    long long rounds, ACC scale, ACC decay, ACC rate) {
  bool packed = aligned<WIDTH>(weights) && aligned<WIDTH>(gradient) && aligned<WIDTH>(working);
  over_grid<WIDTH>(n, packed, [=](auto width, long long i) {
    auto w = read<width.value>(weights + i);
    auto given = read<width.value>(gradient + i);
#pragma unroll
    for (int j = 0; j < width.value; ++j) w.v[j] -= rate * (ACC(given.v[j]) * scale + decay * w.v[j]);
    stepped<width.value>(weights, working, i, w, rounds);
  });
}

// Writes or adds to partial (gridDim.x,): sums of squares in float64, in an order that n and the grid alone decide
extern "C" __global__ void __launch_bounds__(1024) squares(const GRADIENT* x, double* partial, long long n,
    long long adds) {
  double sum = 0;
  over_grid<WIDTH>(n, aligned<WIDTH>(x), [&](auto width, long long i) {
    auto values = read<width.value>(x + i);
#pragma unroll
    for (int j = 0; j < width.value; ++j) sum += (double)values.v[j] * (double)values.v[j];
  });
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = adds ? partial[blockIdx.x] + sum : sum;
}

// working = (adds ? working : 0) + x, in the type that REAL is computed in, rounded once
extern "C" __global__ void convert(const GRADIENT* x, WORKING* working, long long n, long long adds) {
  over_grid<WIDTH>(n, aligned<WIDTH>(x) && aligned<WIDTH>(working), [=](auto width, long long i) {
    auto values = read<width.value>(x + i);
    Pack<typename Wide<WORKING>::type, width.value> result = {};
    if (adds) result = read<width.value>(working + i);
#pragma unroll
    for (int j = 0; j < width.value; ++j) result.v[j] = adds ? result.v[j] + values.v[j] : values.v[j];
    write<width.value>(working + i, result);
  });
}
