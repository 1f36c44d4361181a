// Attention between the products of its tiles, see hpcdist/models/attention/kernels.py. A tile is contiguous (pairs,
// rows, columns): scores of the queries from `first` on with some keys, of the pairs from `pair` on. What is known of a
// row lies at (pair, query) of arrays (all pairs, context).

// Whether row i of the tile sees column j: those from `low` + i on, before `high` + i.
__device__ __forceinline__ bool sees(long long i, long long j, long long low, long long high) {
  return low + i <= j && j < high + i;
}

// Scores become exp(scale (s - maximum)), hidden ones 0; a block of threads a row.
extern "C" __global__ void __launch_bounds__(1024) softmax_advance(REAL* s, ACC* top, ACC* total, ACC* shrink,
    long long rows, long long columns, long long context, long long pair, long long first, long long low, long long high,
    long long fresh, ACC scale) {
  long long r = blockIdx.x, i = r % rows, place = (pair + r / rows) * context + first + i;
  REAL* row = s + r * columns;
  ACC before = fresh ? ACC(-INFINITY) : top[place], most = before;
  for (long long j = threadIdx.x; j < columns; j += blockDim.x)
    if (sees(i, j, low, high)) most = larger(widen(row[j]), most);
  most = over_threads(most, ACC(-INFINITY), Larger());
  ACC base = most == ACC(-INFINITY) ? ACC(0) : most;  // of a row that has seen nothing
  ACC sum = 0;
  for (long long j = threadIdx.x; j < columns; j += blockDim.x) {
    ACC e = sees(i, j, low, high) ? exponential((widen(row[j]) - base) * scale) : ACC(0);
    sum += e;
    narrow(e, row[j]);
  }
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) {
    if (!fresh) {  // sums over earlier tiles were relative to a maximum that may be exceeded now
      shrink[r] = exponential((before - base) * scale);
      sum += total[place] * shrink[r];
    }
    top[place] = most;
    total[place] = sum;
  }
}

// Scores s become probabilities p, their gradient d becomes that of the scores.
extern "C" __global__ void softmax_gradient(REAL* s, REAL* d, const ACC* top, const ACC* total, const ACC* dots,
    long long n, long long rows, long long columns, long long context, long long pair, long long first,
    long long low, long long high, ACC scale) {
  over_grid<1>(n, false, [=](auto, long long at) {
    long long r = at / columns, i = r % rows, place = (pair + r / rows) * context + first + i;
    bool seen = sees(i, at % columns, low, high);
    ACC p = seen ? exponential((widen(s[at]) - top[place]) * scale) / total[place] : ACC(0);
    narrow(p * ((seen ? widen(d[at]) : ACC(0)) - dots[place]) * scale, d[at]);
    narrow(p, s[at]);
  });
}

// dots (batch heads, context): products of the rows of dy and y (batch, context, heads size). A warp a row, of all heads.
extern "C" __global__ void __launch_bounds__(128) row_dots(const REAL* dy, const REAL* y, ACC* dots, long long rows,
    long long context, long long size, long long heads) {
  long long i = (long long)blockIdx.x * 4 + threadIdx.x / 32;  // (sample, position, head)
  if (i >= rows) return;
  ACC sum = 0;
  for (long long j = threadIdx.x % 32; j < size; j += 32) sum += widen(dy[i * size + j]) * widen(y[i * size + j]);
  sum = over_warp(sum, Add());
  long long place = i / heads;
  if (threadIdx.x % 32 == 0) dots[(place / context * heads + i % heads) * context + place % context] = sum;
}

// Rows of heads in target (batch, context, columns), from `column` on, become the sum over `groups` of part (pairs
// groups, rows, size); what was there is added, times the `factors` (pairs, rows) where `scaled`. n counts elements there.
extern "C" __global__ void add_rows(const REAL* part, REAL* target, const ACC* factors, long long n, long long rows,
    long long size, long long groups, long long heads, long long pair, long long context, long long columns,
    long long column, long long first, long long adds, long long scaled) {
  over_grid<1>(n, false, [=](auto, long long at) {
    long long j = at % size, i = at / size % rows, p = at / size / rows, head = pair + p;
    REAL* to = target + (head / heads * context + first + i) * columns + column + head % heads * size + j;
    ACC sum = 0;
    for (long long g = 0; g < groups; ++g) sum += widen(part[((p * groups + g) * rows + i) * size + j]);
    if (adds) sum += scaled ? widen(*to) * factors[p * rows + i] : widen(*to);
    narrow(sum, *to);
  });
}

// Divide rows of heads of y (batch, context, heads size) by `total` (all pairs, context).
extern "C" __global__ void divide_rows(REAL* y, const ACC* total, long long n, long long rows, long long size,
    long long heads, long long pair, long long context, long long first) {
  over_grid<1>(n, false, [=](auto, long long at) {
    long long i = at / size % rows, head = pair + at / size / rows;
    REAL* to = y + (head / heads * context + first + i) * heads * size + head % heads * size + at % size;
    narrow(widen(*to) / total[head * context + first + i], *to);
  });
}
