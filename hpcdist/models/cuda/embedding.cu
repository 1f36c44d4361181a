// Rows of a table by token and the sums back into them, rotary positions, dropout.

#define WIDTH (16 / sizeof(REAL))
#define LIST 256   // threads of a block of `scatter`
#define COLUMNS 4  // a thread of which has so many columns

// y (n, hidden) = rows of table (vocabulary, hidden) by token; `missing` for one that the table does not have
extern "C" __global__ void gather(const REAL* table, const long long* tokens, REAL* y, long long n, long long hidden,
    long long vocabulary, ACC missing) {
  bool packed = hidden % WIDTH == 0 && aligned<WIDTH>(table) && aligned<WIDTH>(y);
  over_grid<WIDTH>(n * hidden, packed, [=](auto width, long long i) {
    long long token = tokens[i / hidden];
    Pack<ACC, width.value> values;
#pragma unroll
    for (int j = 0; j < width.value; ++j) values.v[j] = missing;
    if (token >= 0 && token < vocabulary) values = read<width.value>(table + token * hidden + i % hidden);
    write<width.value>(y + i, values);
  });
}

// table (vocabulary, hidden) += rows (n, hidden) by token: the block of a token's first occurrence sums all rows of it
// in their order, in ACC, and rounds once. No atomic additions: the same bits in every run. That block reads all tokens,
// another one those up to the first occurrence: n^2 if no two are equal, from the cache.
extern "C" __global__ void __launch_bounds__(LIST) scatter(const REAL* rows, const long long* tokens, REAL* table,
    long long n, long long hidden, long long vocabulary) {
  __shared__ int found[LIST];
  __shared__ int counts[LIST / 32];
  __shared__ volatile int earlier;
  long long own = blockIdx.x, token = tokens[own];
  if (token < 0 || token >= vocabulary) return;
  if (threadIdx.x == 0) earlier = 0;
  __syncthreads();
  for (long long i = threadIdx.x; i < own && !earlier; i += LIST) {  // one thread that finds it stops the others
    if (tokens[i] == token) earlier = 1;
  }
  __syncthreads();
  if (earlier) return;
  long long column = (long long)blockIdx.y * LIST * COLUMNS + threadIdx.x;
  ACC sums[COLUMNS] = {};
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (long long first = own; first < n; first += LIST) {
    long long i = first + threadIdx.x;
    unsigned same = __ballot_sync(0xFFFFFFFFu, i < n && tokens[i] == token);
    if (lane == 0) counts[warp] = __popc(same);
    __syncthreads();
    int before = 0, all = 0;
#pragma unroll
    for (int w = 0; w < LIST / 32; ++w) {
      before += w < warp ? counts[w] : 0;
      all += counts[w];
    }
    if (same >> lane & 1u) found[before + __popc(same & ((1u << lane) - 1u))] = (int)(i - first);
    __syncthreads();
    for (int k = 0; k < all; ++k) {
      const REAL* row = rows + (first + found[k]) * hidden;
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        if (column + c * LIST < hidden) sums[c] += widen(row[column + c * LIST]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    long long j = column + c * LIST;
    if (j < hidden) narrow(widen(table[token * hidden + j]) + sums[c], table[token * hidden + j]);
  }
}

// Turn the heads in columns [0, rotated) of x (batch, context, columns), halves of a head as pairs, in place.
// turns (context, size): cosines, then sines. `sign` is 1, or -1 to turn back. n = batch context rotated / 2.
extern "C" __global__ void turn(REAL* x, const ACC* turns, long long n, long long context, long long columns,
    long long rotated, long long size, ACC sign) {
  long long half = size / 2;
  bool packed = half % WIDTH == 0 && columns % WIDTH == 0 && aligned<WIDTH>(x) && aligned<WIDTH>(turns);
  over_grid<WIDTH>(n, packed, [=](auto width, long long i) {
    long long row = i / (rotated / 2), pair = i % (rotated / 2), k = pair % half;
    const ACC* angle = turns + row % context * size;
    REAL* left = x + row * columns + pair / half * size + k;
    auto cosine = read<width.value>(angle + k), sine = read<width.value>(angle + half + k);
    auto one = read<width.value>(left), other = read<width.value>(left + half);
    auto turned = one;
#pragma unroll
    for (int j = 0; j < width.value; ++j) {
      turned.v[j] = one.v[j] * cosine.v[j] - sign * other.v[j] * sine.v[j];
      other.v[j] = other.v[j] * cosine.v[j] + sign * one.v[j] * sine.v[j];
    }
    write<width.value>(left, turned);
    write<width.value>(left + half, other);
  });
}

// Multiply rows [first, last) and columns [0, width) of x (all, rows, columns) by 0 or `factor`; a thread has the four
// columns of a counter. See `Mask.drop` of hpcdist.models.layers.dropout for the places; n counts threads. `words` is 0
// or the address of the first sample and the step, which a CUDA graph reads when it runs.
extern "C" __global__ void drop(REAL* x, long long n, long long rows, long long columns, long long first,
    long long last, long long width, long long groups, long long pitch, long long rows_per_sample, long long first_row,
    long long blocks, long long skipped, long long first_sample, long long site, long long step, long long key0, long long key1,
    long long limit, long long words, ACC factor) {
  if (words) first_sample = ((const long long*)words)[0], step = ((const long long*)words)[1];
  long long used = (width + 3) / 4, span = last - first;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (long long)gridDim.x * blockDim.x) {
    long long block = i % used, place = i / used % span + first, group = i / used / span;
    long long row = group / groups * rows_per_sample + group % groups * pitch + first_row + place;
    unsigned c[4] = {(unsigned)(row % rows_per_sample * blocks + skipped + block),
                     (unsigned)(row / rows_per_sample + first_sample), (unsigned)site, (unsigned)step};
    philox(c, (unsigned)key0, (unsigned)key1);
    REAL* values = x + (group * rows + place) * columns + 4 * block;
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // a product with 0 instead of a plain 0: NaN and infinity stay visible
      if (4 * block + j < width) narrow(widen(values[j]) * (c[j] >= (unsigned)limit ? factor : ACC(0)), values[j]);
    }
  }
}
