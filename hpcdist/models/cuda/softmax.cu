// Softmax over rows [first, last) of x (all, rows, columns), a block of threads a row: grid (last - first, all).
// Row i has min(width, i + 1 + ahead) valid columns. Columns from `width` on are not touched.

// Subtract the maximum of the valid columns and multiply by `factor`; the others become -inf.
extern "C" __global__ void __launch_bounds__(1024) shift(REAL* x, long long rows, long long columns, long long first,
    long long width, long long ahead, ACC factor) {
  long long i = first + blockIdx.x, valid = i + 1 + ahead < width ? i + 1 + ahead : width;
  REAL* row = x + (blockIdx.y * rows + i) * columns;
  ACC top = ACC(-INFINITY);
  for (long long j = threadIdx.x; j < valid; j += blockDim.x) top = larger(widen(row[j]), top);
  top = over_threads(top, ACC(-INFINITY), Larger());
  for (long long j = threadIdx.x; j < width; j += blockDim.x) {
    narrow(j < valid ? (widen(row[j]) - top) * factor : ACC(-INFINITY), row[j]);
  }
}

// Divide by the sum of the row, which goes to sums (all, rows).
extern "C" __global__ void __launch_bounds__(1024) normalise(REAL* x, REAL* sums, long long rows, long long columns,
    long long first, long long width) {
  long long i = first + blockIdx.x;
  REAL* row = x + (blockIdx.y * rows + i) * columns;
  ACC total = 0;
  for (long long j = threadIdx.x; j < width; j += blockDim.x) total += widen(row[j]);
  total = sum_of_block(total);
  if (threadIdx.x == 0) narrow(total, sums[blockIdx.y * rows + i]);
  for (long long j = threadIdx.x; j < width; j += blockDim.x) narrow(widen(row[j]) / total, row[j]);
}

// Overwrite d, the gradient of the probabilities p, with that of the scores: p (d - sum(p d)) factor.
extern "C" __global__ void __launch_bounds__(1024) softmax_backward(const REAL* p, REAL* d, long long rows,
    long long columns, long long first, long long width, ACC factor) {
  long long start = (blockIdx.y * rows + first + blockIdx.x) * columns;
  const REAL* chances = p + start;
  REAL* row = d + start;
  ACC total = 0;
  for (long long j = threadIdx.x; j < width; j += blockDim.x) total += widen(chances[j]) * widen(row[j]);
  total = sum_of_block(total);
  for (long long j = threadIdx.x; j < width; j += blockDim.x) {
    narrow(widen(chances[j]) * (widen(row[j]) - total) * factor, row[j]);
  }
}
