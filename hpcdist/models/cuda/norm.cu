// Layer norm and RMS norm over the rows of (rows, hidden), a block of threads a row.
// statistics: (rows, 2), mean and 1 / deviation, of a layer norm (centred); (rows, 1), 1 / root mean square, of the other.

#define WIDTH 4
#define PASSES 4  // so many packs of a row has a thread at most, in the backward

// With `adds` x becomes x + residual before, rounded as it is written: from then on a row is in the cache.
extern "C" __global__ void __launch_bounds__(1024) norm_rows(REAL* x, const REAL* residual, const REAL* scale,
    const REAL* bias, ACC epsilon, REAL* y, ACC* statistics, long long hidden, long long adds, long long centred,
    long long biased) {
  REAL* row = x + blockIdx.x * hidden;
  const REAL* other = residual + blockIdx.x * hidden;
  REAL* out = y + blockIdx.x * hidden;
  bool packed = hidden % WIDTH == 0 && aligned<WIDTH>(x) && aligned<WIDTH>(residual) && aligned<WIDTH>(y) &&
                aligned<WIDTH>(scale) && aligned<WIDTH>(bias);
  if (adds) {  // a thread has the same columns in all loops
    over_block<WIDTH>(hidden, packed, [&](auto width, long long i) {
      auto values = read<width.value>(row + i), addend = read<width.value>(other + i);
#pragma unroll
      for (int j = 0; j < width.value; ++j) values.v[j] += addend.v[j];
      write<width.value>(row + i, values);
    });
  }
  ACC mean = 0;
  if (centred) {
    over_block<WIDTH>(hidden, packed, [&](auto width, long long i) {
      auto values = read<width.value>(row + i);
#pragma unroll
      for (int j = 0; j < width.value; ++j) mean += values.v[j];
    });
    mean = sum_of_block(mean) / ACC(hidden);
  }
  ACC square = 0;
  over_block<WIDTH>(hidden, packed, [&](auto width, long long i) {
    auto values = read<width.value>(row + i);
#pragma unroll
    for (int j = 0; j < width.value; ++j) square += (values.v[j] - mean) * (values.v[j] - mean);
  });
  ACC inverse = ACC(1) / root(sum_of_block(square) / ACC(hidden) + epsilon);
  over_block<WIDTH>(hidden, packed, [&](auto width, long long i) {
    auto values = read<width.value>(row + i), factor = read<width.value>(scale + i);
    decltype(values) shift = {};
    if (biased) shift = read<width.value>(bias + i);
#pragma unroll
    for (int j = 0; j < width.value; ++j) {
      values.v[j] = (values.v[j] - mean) * inverse * factor.v[j] + shift.v[j];
    }
    write<width.value>(out + i, values);
  });
  if (threadIdx.x == 0) {
    if (centred) statistics[2 * blockIdx.x] = mean;
    statistics[centred ? 2 * blockIdx.x + 1 : blockIdx.x] = inverse;
  }
}

// Writes (adds == 0) or adds dx. A block goes through rows blockIdx.x, blockIdx.x + gridDim.x, ...; its threads keep
// the columns they have in all of them, and so their sums: partial (blocks, 2, hidden), of scale and bias. These are
// of columns from `start` on; a row that is longer than the threads can keep takes more launches, the first makes dx.
extern "C" __global__ void __launch_bounds__(512) norm_rows_backward(const REAL* dy, const REAL* x, const REAL* scale,
    const ACC* statistics, REAL* dx, ACC* partial, long long rows, long long hidden, long long start,
    long long centred, long long adds) {
  bool packed = hidden % WIDTH == 0 && aligned<WIDTH>(x) && aligned<WIDTH>(dy) && aligned<WIDTH>(dx) &&
                aligned<WIDTH>(scale);
  long long end = start + (long long)blockDim.x * PASSES * WIDTH;
  ACC dscale[PASSES * WIDTH] = {}, dbias[PASSES * WIDTH] = {};
  for (long long r = blockIdx.x; r < rows; r += gridDim.x) {
    ACC mean = centred ? statistics[2 * r] : ACC(0), inverse = statistics[centred ? 2 * r + 1 : r];
    ACC sum = 0, product = 0;
    const REAL *values = x + r * hidden, *d = dy + r * hidden;
    REAL* out = dx + r * hidden;
#pragma unroll
    for (int k = 0; k < PASSES; ++k) {
      long long i = start + ((long long)k * blockDim.x + threadIdx.x) * WIDTH;
      Pack<ACC, WIDTH> v = {}, g = {}, s = {};
      if (packed && i < hidden) {
        v = read<WIDTH>(values + i), g = read<WIDTH>(d + i), s = read<WIDTH>(scale + i);
      } else {
        for (int j = 0; j < WIDTH && i + j < hidden; ++j) {
          v.v[j] = widen(values[i + j]), g.v[j] = widen(d[i + j]), s.v[j] = widen(scale[i + j]);
        }
      }
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) {
        ACC normal = (v.v[j] - mean) * inverse;
        if (i + j < hidden) {
          dscale[k * WIDTH + j] += g.v[j] * normal;
          dbias[k * WIDTH + j] += g.v[j];
          sum += g.v[j] * s.v[j];
          product += g.v[j] * s.v[j] * normal;
        }
      }
    }
    if (start) continue;
    for (long long i = end + threadIdx.x; i < hidden; i += blockDim.x) {
      ACC g = widen(d[i]) * widen(scale[i]);
      sum += g;
      product += g * (widen(values[i]) - mean) * inverse;
    }
    sum = centred ? sum_of_block(sum) / ACC(hidden) : ACC(0);
    product = sum_of_block(product) / ACC(hidden);
    over_block<WIDTH>(hidden, packed, [&](auto width, long long i) {
      auto v = read<width.value>(values + i), g = read<width.value>(d + i), s = read<width.value>(scale + i);
      decltype(v) result = {};
      if (adds) result = read<width.value>(out + i);
#pragma unroll
      for (int j = 0; j < width.value; ++j) {
        result.v[j] += (g.v[j] * s.v[j] - sum - (v.v[j] - mean) * inverse * product) * inverse;
      }
      write<width.value>(out + i, result);
    });
  }
#pragma unroll
  for (int k = 0; k < PASSES; ++k) {
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
      long long i = start + ((long long)k * blockDim.x + threadIdx.x) * WIDTH + j;
      if (i < hidden) {
        partial[2 * blockIdx.x * hidden + i] = dscale[k * WIDTH + j];
        partial[(2 * blockIdx.x + 1) * hidden + i] = dbias[k * WIDTH + j];
      }
    }
  }
}

// Sum `parts` partial sums, `pitch` elements apart, for each of `columns`; write them to `into`, or add.
extern "C" __global__ void join_columns(const ACC* partial, REAL* into, long long parts, long long pitch,
    long long columns, long long adds) {
  over_grid<1>(columns, false, [=](auto, long long i) {
    ACC total = 0;
    for (long long part = 0; part < parts; ++part) total += partial[part * pitch + i];
    narrow(adds ? total + widen(into[i]) : total, into[i]);
  });
}

// partial (gridDim.y, columns): the sums of x (rows, columns) over as many parts of its rows
extern "C" __global__ void sum_columns(const REAL* x, ACC* partial, long long rows, long long columns) {
  long long each = (rows + gridDim.y - 1) / gridDim.y, first = blockIdx.y * each;
  long long last = first + each < rows ? first + each : rows;
  over_grid<1>(columns, false, [=](auto, long long i) {
    ACC total = 0;
#pragma unroll 8
    for (long long row = first; row < last; ++row) total += widen(x[row * columns + i]);
    partial[blockIdx.y * columns + i] = total;
  });
}
