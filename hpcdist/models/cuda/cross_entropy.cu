// Softmax and negative log likelihood over the rows of logits (tokens, classes), a block of threads a row.
// A negative target has no loss. One that is no class has the loss NaN, since nobody waits to raise an error.

#define WIDTH (16 / sizeof(REAL))

// statistics (tokens, 2): maximum, and sum of the exponentials of what is left of it; one pass over the logits
extern "C" __global__ void __launch_bounds__(1024) cross_entropy(const REAL* logits, const long long* targets,
    ACC* statistics, double* losses, long long classes) {
  const REAL* row = logits + blockIdx.x * classes;
  const ACC LOW = ACC(-INFINITY);
  ACC top = LOW, sum = 0;
  over_block<WIDTH>(classes, classes % WIDTH == 0 && aligned<WIDTH>(logits), [&](auto width, long long i) {
    auto values = read<width.value>(row + i);
    ACC most = top;
#pragma unroll
    for (int j = 0; j < width.value; ++j) most = larger(values.v[j], most);
    if (most != top) sum *= exponential(top - most);
    ACC from = most == LOW ? ACC(0) : most;  // -inf alone, so far, adds 0; a NaN shows
#pragma unroll
    for (int j = 0; j < width.value; ++j) sum += exponential(values.v[j] - from);
    top = most;
  });
  ACC most = over_threads(top, LOW, Larger());
  // A thread without elements, or with -inf alone, has nothing to add; if all are -inf the sum is 0, and the loss NaN.
  ACC share = sum == ACC(0) ? ACC(0) : sum * exponential(top - most);
  sum = sum_of_block(share);
  if (threadIdx.x == 0) {
    long long target = targets[blockIdx.x];
    statistics[2 * blockIdx.x] = most;
    statistics[2 * blockIdx.x + 1] = sum;
    double loss = 0;
    if (target >= classes) {
      loss = NAN;
    } else if (target >= 0) {
      loss = log((double)sum) - (double)(widen(row[target]) - most);
    }
    losses[blockIdx.x] = loss;
  }
}

// logits become (softmax - onehot) factor
extern "C" __global__ void __launch_bounds__(1024) cross_entropy_backward(REAL* logits, const long long* targets,
    const ACC* statistics, ACC factor, long long classes) {
  REAL* row = logits + blockIdx.x * classes;
  long long target = targets[blockIdx.x];
  ACC most = statistics[2 * blockIdx.x], own = target < 0 ? ACC(0) : factor;
  ACC share = own / statistics[2 * blockIdx.x + 1];
  over_block<WIDTH>(classes, classes % WIDTH == 0 && aligned<WIDTH>(logits), [&](auto width, long long i) {
    auto values = read<width.value>(row + i);
#pragma unroll
    for (int j = 0; j < width.value; ++j) {
      values.v[j] = exponential(values.v[j] - most) * share - (i + j == target ? own : ACC(0));
    }
    write<width.value>(row + i, values);
  });
}
