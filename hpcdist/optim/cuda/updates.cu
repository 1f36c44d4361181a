// Whole updates of optimizers in one pass over memory, and conversions. REAL: weights and slots; GRADIENT: the mean
// gradient, in its own type; WORKING: the rounded copy of the weights, which is written where `rounds`. All of n
// elements. What is clipped and unscaled is in `scale`.
//
// An update is one launch for all tensors of a flat space, of which the buffers have n elements from `start` on.
// bounds (tensors, 2): where each begins and ends; options (tensors, 2): its weight decay and the factor of its rate.
// Layer-wise optimizers take two launches, one for directions and the sums of squares, one for the steps.

#define WIDTH 4
#define TILE 4096  // elements that a block takes at a time, so that few blocks look for a tensor

// Call body(width, i, decay, factor) for the elements i of all tensors, in packs where packed(i), and then
// joined(place) once all threads have done those of a tensor in a tile. Padding between tensors is left out. Tiles are
// those of the flat space, wherever the buffers begin, and `place` is another number for each tensor in each of them:
// from one to the next, in ascending order, the tile or the tensor grows.
template <typename P, typename F, typename G>
__device__ __forceinline__ void over_tensors(const long long* bounds, const double* options, long long tensors,
    long long start, long long n, P packed, F body, G joined) {
  for (long long tile = start / TILE + blockIdx.x; tile * TILE < start + n; tile += gridDim.x) {
    long long first = tile * TILE - start, last = first + TILE < n ? first + TILE : n, tensor = 0, beyond = tensors;
    first = first > 0 ? first : 0;
    while (tensor < beyond) {  // of those that end behind `first`, the first
      long long middle = (tensor + beyond) / 2;
      if (bounds[2 * middle + 1] - start > first) {
        beyond = middle;
      } else {
        tensor = middle + 1;
      }
    }
    for (; tensor < tensors && bounds[2 * tensor] - start < last; ++tensor) {
      long long from = bounds[2 * tensor] - start, to = bounds[2 * tensor + 1] - start;
      from = from > first ? from : first, to = to < last ? to : last;
      ACC decay = ACC(options[2 * tensor]), factor = ACC(options[2 * tensor + 1]);
      over_block<WIDTH>(to - from, packed(from), [&](auto width, long long i) { body(width, from + i, decay, factor); });
      joined(tile + tensor);
    }
  }
}

template <typename P, typename F>
__device__ __forceinline__ void over_tensors(const long long* bounds, const double* options, long long tensors,
    long long start, long long n, P packed, F body) {
  over_tensors(bounds, options, tensors, start, n, packed, body, [](long long) {});
}

// Add the sums of squares of a block to those of its `place` in partial (places, 2), and begin new ones.
__device__ __forceinline__ void join_squares(double* partial, long long place, double& weights, double& step) {
  double w = sum_of_block(weights), u = sum_of_block(step);
  if (threadIdx.x == 0) partial[2 * place] += w, partial[2 * place + 1] += u;
  weights = step = 0;
}

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

extern "C" __global__ void __launch_bounds__(256) adam(REAL* weights, const GRADIENT* gradient, REAL* m, REAL* v,
    WORKING* working, const long long* bounds, const double* options, long long tensors, long long start, long long n,
    long long rounds, ACC scale, ACC beta1, ACC rest1, ACC beta2, ACC rest2, ACC correct1, ACC correct2, ACC epsilon,
    ACC rate) {
  auto packed = [=](long long i) {
    return aligned<WIDTH>(weights + i) && aligned<WIDTH>(gradient + i) && aligned<WIDTH>(m + i) &&
           aligned<WIDTH>(v + i) && aligned<WIDTH>(working + i);
  };
  over_tensors(bounds, options, tensors, start, n, packed, [=](auto width, long long i, ACC decay, ACC factor) {
    auto w = read<width.value>(weights + i), mean = read<width.value>(m + i), square = read<width.value>(v + i);
    auto given = read<width.value>(gradient + i);
#pragma unroll
    for (int j = 0; j < width.value; ++j) {
      ACC g = ACC(given.v[j]) * scale;
      mean.v[j] = mean.v[j] * beta1 + g * rest1;
      square.v[j] = square.v[j] * beta2 + g * g * rest2;
      ACC u = mean.v[j] * correct1 / (root(square.v[j] * correct2) + epsilon) + decay * w.v[j];
      w.v[j] -= rate * factor * u;
    }
    write<width.value>(m + i, mean);
    write<width.value>(v + i, square);
    stepped<width.value>(weights, working, i, w, rounds);
  });
}

// As `adam`, but the step u goes to `step`, which may be the gradient's memory, and the weights stay.
extern "C" __global__ void __launch_bounds__(256) adam_direction(const REAL* weights, const GRADIENT* gradient, REAL* m,
    REAL* v, REAL* step, double* partial, const long long* bounds, const double* options, long long tensors,
    long long start, long long n, ACC scale, ACC beta1, ACC rest1, ACC beta2, ACC rest2, ACC correct1, ACC correct2,
    ACC epsilon) {
  double of_weights = 0, of_step = 0;
  auto packed = [=](long long i) {
    return aligned<WIDTH>(weights + i) && aligned<WIDTH>(gradient + i) && aligned<WIDTH>(m + i) &&
           aligned<WIDTH>(v + i) && aligned<WIDTH>(step + i);
  };
  auto direct = [&](auto width, long long i, ACC decay, ACC) {
    auto w = read<width.value>(weights + i), mean = read<width.value>(m + i), square = read<width.value>(v + i);
    auto given = read<width.value>(gradient + i);
    auto u = w;
#pragma unroll
    for (int j = 0; j < width.value; ++j) {
      ACC g = ACC(given.v[j]) * scale;
      mean.v[j] = mean.v[j] * beta1 + g * rest1;
      square.v[j] = square.v[j] * beta2 + g * g * rest2;
      u.v[j] = mean.v[j] * correct1 / (root(square.v[j] * correct2) + epsilon) + decay * w.v[j];
      of_weights += (double)w.v[j] * (double)w.v[j], of_step += (double)u.v[j] * (double)u.v[j];
    }
    write<width.value>(m + i, mean);
    write<width.value>(v + i, square);
    write<width.value>(step + i, u);
  };
  over_tensors(bounds, options, tensors, start, n, packed, direct,
      [&](long long place) { join_squares(partial, place, of_weights, of_step); });
}

// step = scale gradient, in the gradient's memory or elsewhere
extern "C" __global__ void __launch_bounds__(256) scaled_direction(const REAL* weights, const GRADIENT* gradient,
    REAL* step, double* partial, const long long* bounds, const double* options, long long tensors, long long start,
    long long n, ACC scale) {
  double of_weights = 0, of_step = 0;
  auto packed = [=](long long i) {
    return aligned<WIDTH>(weights + i) && aligned<WIDTH>(gradient + i) && aligned<WIDTH>(step + i);
  };
  auto direct = [&](auto width, long long i, ACC, ACC) {
    auto w = read<width.value>(weights + i);
    auto given = read<width.value>(gradient + i);
    auto u = w;
#pragma unroll
    for (int j = 0; j < width.value; ++j) {
      u.v[j] = ACC(given.v[j]) * scale;
      of_weights += (double)w.v[j] * (double)w.v[j], of_step += (double)u.v[j] * (double)u.v[j];
    }
    write<width.value>(step + i, u);
  };
  over_tensors(bounds, options, tensors, start, n, packed, direct,
      [&](long long place) { join_squares(partial, place, of_weights, of_step); });
}

// sums (tensors, 2) of what directions have left in partial: a block adds up the tiles of a tensor, in one order
extern "C" __global__ void __launch_bounds__(256) tensor_sums(const double* partial, double* sums,
    const long long* bounds) {
  long long tensor = blockIdx.x, from = bounds[2 * tensor], to = bounds[2 * tensor + 1];
  double of_weights = 0, of_step = 0;
  for (long long tile = from / TILE + threadIdx.x; tile * TILE < to; tile += blockDim.x) {
    of_weights += partial[2 * (tile + tensor)], of_step += partial[2 * (tile + tensor) + 1];
  }
  of_weights = sum_of_block(of_weights), of_step = sum_of_block(of_step);
  if (threadIdx.x == 0) sums[2 * tensor] = of_weights, sums[2 * tensor + 1] = of_step;
}

// The steps of layer-wise optimizers, whose factor is the whole rate of a tensor: along u,
extern "C" __global__ void __launch_bounds__(256) descend(REAL* weights, const GRADIENT* step, WORKING* working,
    const long long* bounds, const double* options, long long tensors, long long start, long long n, long long rounds) {
  auto packed = [=](long long i) {
    return aligned<WIDTH>(weights + i) && aligned<WIDTH>(step + i) && aligned<WIDTH>(working + i);
  };
  over_tensors(bounds, options, tensors, start, n, packed, [=](auto width, long long i, ACC, ACC rate) {
    auto w = read<width.value>(weights + i);
    auto u = read<width.value>(step + i);
#pragma unroll
    for (int j = 0; j < width.value; ++j) w.v[j] -= rate * ACC(u.v[j]);
    stepped<width.value>(weights, working, i, w, rounds);
  });
}

// or along a velocity that has rates inside: velocity = keeps velocity + rate (u + decay w).
extern "C" __global__ void __launch_bounds__(256) descend_with_velocity(REAL* weights, const GRADIENT* step,
    REAL* velocity, WORKING* working, const long long* bounds, const double* options, long long tensors,
    long long start, long long n, long long rounds, ACC keeps) {
  auto packed = [=](long long i) {
    return aligned<WIDTH>(weights + i) && aligned<WIDTH>(step + i) && aligned<WIDTH>(velocity + i) &&
           aligned<WIDTH>(working + i);
  };
  over_tensors(bounds, options, tensors, start, n, packed, [=](auto width, long long i, ACC decay, ACC rate) {
    auto w = read<width.value>(weights + i), fast = read<width.value>(velocity + i);
    auto u = read<width.value>(step + i);
#pragma unroll
    for (int j = 0; j < width.value; ++j) {
      fast.v[j] = keeps * fast.v[j] + rate * (ACC(u.v[j]) + decay * w.v[j]);
      w.v[j] -= fast.v[j];
    }
    write<width.value>(velocity + i, fast);
    stepped<width.value>(weights, working, i, w, rounds);
  });
}

// The step is own g + ahead velocity: (0, 1) is the heavy ball, (1, momentum) Nesterov's.
extern "C" __global__ void __launch_bounds__(256) momentum(REAL* weights, const GRADIENT* gradient, REAL* velocity,
    WORKING* working, const long long* bounds, const double* options, long long tensors, long long start, long long n,
    long long rounds, ACC scale, ACC keeps, ACC own, ACC ahead, ACC rate) {
  auto packed = [=](long long i) {
    return aligned<WIDTH>(weights + i) && aligned<WIDTH>(gradient + i) && aligned<WIDTH>(velocity + i) &&
           aligned<WIDTH>(working + i);
  };
  over_tensors(bounds, options, tensors, start, n, packed, [=](auto width, long long i, ACC decay, ACC factor) {
    auto w = read<width.value>(weights + i), fast = read<width.value>(velocity + i);
    auto given = read<width.value>(gradient + i);
#pragma unroll
    for (int j = 0; j < width.value; ++j) {
      ACC g = ACC(given.v[j]) * scale + decay * w.v[j];
      fast.v[j] = keeps * fast.v[j] + g;
      w.v[j] -= rate * factor * (own * g + ahead * fast.v[j]);
    }
    write<width.value>(velocity + i, fast);
    stepped<width.value>(weights, working, i, w, rounds);
  });
}

extern "C" __global__ void __launch_bounds__(256) plain(REAL* weights, const GRADIENT* gradient, WORKING* working,
    const long long* bounds, const double* options, long long tensors, long long start, long long n, long long rounds,
    ACC scale, ACC rate) {
  auto packed = [=](long long i) {
    return aligned<WIDTH>(weights + i) && aligned<WIDTH>(gradient + i) && aligned<WIDTH>(working + i);
  };
  over_tensors(bounds, options, tensors, start, n, packed, [=](auto width, long long i, ACC decay, ACC factor) {
    auto w = read<width.value>(weights + i);
    auto given = read<width.value>(gradient + i);
#pragma unroll
    for (int j = 0; j < width.value; ++j) w.v[j] -= rate * factor * (ACC(given.v[j]) * scale + decay * w.v[j]);
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
