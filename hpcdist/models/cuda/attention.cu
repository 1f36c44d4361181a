// Attention in tiles on the tensor cores of a GPU (Dao, arXiv:2307.08691), for 16-bit floats: nothing of the square of
// probabilities leaves the registers. Products of two 16-bit tiles are summed in float32; probabilities and their
// gradients are rounded to 16 bits for the next product. A block of 128 threads has 64 rows, a warp 16 of them.
//
// REAL is float16 or bfloat16. HEAD is the size of a head rounded up to a multiple of 16, at most 128. A head's rows
// lie `stride` elements apart. Sums of a row are kept as log2 of the sum of exponentials: the maximum is in it.
// Gradients are summed by one block each, in one order: no atomic additions.

#define THREADS 128
#define ROWS 64
#define STEPS (HEAD / 16)                 // of 16 columns of a head
#define SHORT (HEAD <= 64 ? 64 : 32)      // keys of a tile of `attention_queries`: shared memory is 48 KiB
#define BRIEF (HEAD <= 64 ? 32 : 16)      // queries of a tile of `attention_keys`, whose registers are counted there
#define LOG2E 1.4426950408889634f

#ifdef __CUDACC__
// d (16 x 8) += a (16 x 16) b (16 x 8), PTX ISA, mma.m16n8k16
__device__ __forceinline__ void multiply_add(float* d, const unsigned* a, unsigned b0, unsigned b1, bfloat16) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_add(float* d, const unsigned* a, unsigned b0, unsigned b1, float16) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

template <int N>
struct alignas(16) Plain {  // rows of a head; eight columns more keep the banks apart
  unsigned short v[N][HEAD + 8];
};
template <int N>
struct alignas(16) Turned {  // its columns
  unsigned short v[HEAD][N + 8];
};

// Where a head lies, and how far it goes: rows [0, context) of `size` columns. Rows are numbered by ints, of which a
// register is enough: a grid has at most 65535 blocks of ROWS of them.
struct Head {
  const REAL* first;
  long long stride;
  int context, size;
  bool packed;
  __device__ __forceinline__ Head(const REAL* first, long long stride, long long context, long long size)
      : first(first), stride(stride), context((int)context), size((int)size),
        packed(aligned<8>(first) && stride % 8 == 0 && size % 8 == 0) {}
  __device__ __forceinline__ unsigned short at(int row, int column) const {
    return row < context && column < size ? first[row * stride + column].bits : (unsigned short)0;
  }
};

template <int N>
__device__ __forceinline__ void fetch(const Head& head, int start, Plain<N>* plain, Turned<N>* turned) {
  for (int i = threadIdx.x; i < N * (HEAD / 8); i += THREADS) {
    int row = i / (HEAD / 8), column = i % (HEAD / 8) * 8;
    Stored<REAL, 8> found;
    if (head.packed && start + row < head.context && column < head.size) {
      found = *reinterpret_cast<const Stored<REAL, 8>*>(head.first + (start + row) * head.stride + column);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) found.v[j].bits = head.at(start + row, column + j);
    }
    if (plain) *reinterpret_cast<Stored<REAL, 8>*>(&plain->v[row][column]) = found;
    if (turned) {
#pragma unroll
      for (int j = 0; j < 8; ++j) turned->v[column + j][row] = found.v[j].bits;
    }
  }
}

__device__ __forceinline__ int group() { return threadIdx.x % 32 / 4; }  // rows group() and group() + 8 of a warp's 16
__device__ __forceinline__ int member() { return threadIdx.x % 4; }      // columns 2 member() and the next, of 8

__device__ __forceinline__ unsigned two(float low, float high) {
  REAL a, b;
  narrow(low, a);
  narrow(high, b);
  return a.bits | (unsigned)b.bits << 16;
}

// The left side of a product, from 16 rows of a head
__device__ __forceinline__ void rows_of(const Head& head, int start, unsigned (*a)[4]) {
#pragma unroll
  for (int k = 0; k < STEPS; ++k) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      int row = start + group() + part % 2 * 8, column = k * 16 + member() * 2 + part / 2 * 8;
      a[k][part] = head.at(row, column) | (unsigned)head.at(row, column + 1) << 16;
    }
  }
}

// The left side of a product, from the result of another
template <int K>
__device__ __forceinline__ void rounded(const float (*c)[4], unsigned (*a)[4]) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const float* from = c[2 * k + part / 2] + part % 2 * 2;
      a[k][part] = two(from[0], from[1]);
    }
  }
}

// The left side of 16 columns of a product, from 16 rows of a tile
template <int N>
__device__ __forceinline__ void rows_of(const Plain<N>& tile, int first, int k, unsigned* a) {
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    const unsigned short* from = tile.v[first + group() + part % 2 * 8] + k * 16 + member() * 2 + part / 2 * 8;
    a[part] = *reinterpret_cast<const unsigned*>(from);
  }
}

// c (16, 8 N) += a (16, 16 K) b, of which `b` has column n in row n, `pitch` elements apart. The N sums of a step are
// independent: one does not wait for another.
template <int N, int K>
__device__ __forceinline__ void product(float (*c)[4], const unsigned (*a)[4], const unsigned short* b, int pitch) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const unsigned* pair = reinterpret_cast<const unsigned*>(b + (n * 8 + group()) * pitch + k * 16 + member() * 2);
      multiply_add(c[n], a[k], pair[0], pair[4], REAL());
    }
  }
}

template <int N>
__device__ __forceinline__ void zero(float (*c)[4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0;
}

template <typename F>
__device__ __forceinline__ float over_row(float value, F join) {
  value = join(value, __shfl_xor_sync(0xFFFFFFFFu, value, 1));
  return join(value, __shfl_xor_sync(0xFFFFFFFFu, value, 2));
}

// What is dropped: see `Mask` of hpcdist.models.layers.dropout. The factor of probability (query, key) of a pair, whose
// rows are all of one sample: divisions are done once a pair. `on` is 0 where nothing is dropped, 1, or the address of
// the first sample and the step, which a CUDA graph reads when it runs.
struct Dropped {
  long long on, groups, pitch, rows_per_sample, first_row, blocks, first_sample, site, step, key0, key1, limit;
  float scale;
  unsigned counter, sample;
  __device__ __forceinline__ void begin(long long pair) {
    if (!on) return;
    if (on != 1) first_sample = ((const long long*)on)[0], step = ((const long long*)on)[1];
    long long row = pair / groups * rows_per_sample + pair % groups * pitch + first_row;
    counter = (unsigned)(row % rows_per_sample * blocks), sample = (unsigned)(row / rows_per_sample + first_sample);
  }
  __device__ __forceinline__ float factor(int query, int key) const {
    unsigned c[4] = {counter + (unsigned)query * (unsigned)blocks + key / 4, sample, (unsigned)site, (unsigned)step};
    philox(c, (unsigned)key0, (unsigned)key1);
    unsigned word = key % 4 == 0 ? c[0] : key % 4 == 1 ? c[1] : key % 4 == 2 ? c[2] : c[3];
    return word >= (unsigned)limit ? scale : 0.0f;
  }
};

// Documents of the sample of a block of threads: of row r, keys [range[2 r], range[2 r + 1]); all of them without any.
// Of those, row r sees keys from r - window + 1 on.
struct Documents {
  const long long* range;
  int context, window;
  __device__ __forceinline__ Documents(long long address, long long sample, long long context, long long window)
      : range(address ? (const long long*)address + 2 * sample * context : (const long long*)0),
        context((int)context), window((int)(window < context ? window : context)) {}
  __device__ __forceinline__ int first(int row) const {  // key of this query
    int begin = range ? (int)range[2 * row] : 0;
    return row - window + 1 > begin ? row - window + 1 : begin;
  }
  __device__ __forceinline__ int end(int row) const {  // behind the document of this row
    return range ? (int)range[2 * (row < context ? row : context - 1) + 1] : context;
  }
  __device__ __forceinline__ int stop(int key) const {  // behind the last query of this key
    return key + window < end(key) ? key + window : end(key);
  }
  __device__ __forceinline__ bool joins(int row, int key) const {
    if (key <= row - window) return false;
    return !range || (row < context && key >= range[2 * row] && key < range[2 * row + 1]);
  }
};

// y (batch, context, heads size) and sums (batch heads, context); grid (batch heads, blocks of queries)
extern "C" __global__ void __launch_bounds__(THREADS) attention(const REAL* queries, const REAL* keys, REAL* y,
    float* sums, long long context, long long size, long long heads, long long shared, long long q_stride,
    long long kv_stride, long long k_first, long long v_first, long long causal, long long window, long long documents,
    float scale, long long on, long long groups, long long pitch, long long rows_per_sample, long long first_row,
    long long blocks, long long first_sample, long long site, long long step, long long key0, long long key1,
    long long limit, float kept) {
  __shared__ Plain<64> k_tile;
  __shared__ Turned<64> v_tile;
  Dropped dropped = {on, groups, pitch, rows_per_sample, first_row, blocks, first_sample, site, step, key0, key1,
                           limit, kept};
  long long pair = blockIdx.x, sample = pair / heads, head = pair % heads, other = head / (heads / shared) * size;
  int begin = (int)blockIdx.y * ROWS, own = begin + (int)threadIdx.x / 32 * 16;
  Head q(queries + sample * context * q_stride + head * size, q_stride, context, size);
  Head k(keys + k_first + sample * context * kv_stride + other, kv_stride, context, size);
  Head v(keys + v_first + sample * context * kv_stride + other, kv_stride, context, size);
  Documents of(documents, sample, context, window);
  dropped.begin(pair);
  unsigned a[STEPS][4], p[4][4];
  float out[HEAD / 8][4], s[8][4], top[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
  rows_of(q, own, a);
  zero<HEAD / 8>(out);
  int end = causal && begin + ROWS < context ? begin + ROWS : of.end(begin + ROWS - 1);
  for (int start = of.first(begin) / 64 * 64; start < end; start += 64) {
    __syncthreads();
    fetch<64>(k, start, &k_tile, (Turned<64>*)0);
    fetch<64>(v, start, (Plain<64>*)0, &v_tile);
    __syncthreads();
    zero<8>(s);
    product<8, STEPS>(s, a, k_tile.v[0], HEAD + 8);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = own + group() + half * 8, last = causal && row < context ? row : (int)context - 1;
      float most = top[half];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          int key = start + n * 8 + member() * 2 + e % 2;
          bool seen = key <= last && (row >= context || of.joins(row, key));
          s[n][e] = seen ? s[n][e] * (scale * LOG2E) : -INFINITY;
          most = larger(s[n][e], most);
        }
      }
      most = over_row(most, Larger());
      float base = most == -INFINITY ? 0.0f : most;  // a row of a document that begins behind these keys
      float shrink = exp2f(top[half] - base);
      top[half] = most;
      total[half] *= shrink;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          s[n][e] = exp2f(s[n][e] - base);
          total[half] += s[n][e];
          if (dropped.on) s[n][e] *= dropped.factor(row, start + n * 8 + member() * 2 + e % 2);
        }
      }
#pragma unroll
      for (int n = 0; n < HEAD / 8; ++n) out[n][2 * half] *= shrink, out[n][2 * half + 1] *= shrink;
    }
    rounded<4>(s, p);
    product<HEAD / 8, 4>(out, p, v_tile.v[0], 64 + 8);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int row = own + group() + half * 8;
    float all = over_row(total[half], Add());
    if (row >= context) continue;
    if (member() == 0) sums[pair * context + row] = top[half] + log2f(all);
    REAL* to = y + (sample * context + row) * heads * size + head * size;
#pragma unroll
    for (int n = 0; n < HEAD / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int column = n * 8 + member() * 2 + e;
        if (column < size) narrow(out[n][2 * half + e] / all, to[column]);
      }
    }
  }
}

// dq, of the shape and the stride of the queries; grid (batch heads, blocks of queries)
extern "C" __global__ void __launch_bounds__(THREADS) attention_queries(const REAL* queries, const REAL* keys,
    const REAL* dy, const float* sums, const float* dots, REAL* dq, long long context, long long size,
    long long heads, long long shared, long long q_stride, long long kv_stride, long long k_first, long long v_first,
    long long causal, long long window, long long documents, float scale, long long on, long long groups,
    long long pitch, long long rows_per_sample, long long first_row, long long blocks, long long first_sample,
    long long site, long long step, long long key0, long long key1, long long limit, float kept) {
  __shared__ Plain<SHORT> k_tile, v_tile;
  __shared__ Turned<SHORT> k_turned;
  Dropped dropped = {on, groups, pitch, rows_per_sample, first_row, blocks, first_sample, site, step, key0, key1,
                           limit, kept};
  long long pair = blockIdx.x, sample = pair / heads, head = pair % heads, other = head / (heads / shared) * size;
  int begin = (int)blockIdx.y * ROWS, own = begin + (int)threadIdx.x / 32 * 16;
  Head q(queries + sample * context * q_stride + head * size, q_stride, context, size);
  Head k(keys + k_first + sample * context * kv_stride + other, kv_stride, context, size);
  Head v(keys + v_first + sample * context * kv_stride + other, kv_stride, context, size);
  Head g(dy + sample * context * heads * size + head * size, heads * size, context, size);
  Documents of(documents, sample, context, window);
  dropped.begin(pair);
  unsigned a[STEPS][4], b[STEPS][4], ds[SHORT / 16][4];
  float out[HEAD / 8][4], s[SHORT / 8][4], d[SHORT / 8][4], sum[2], dot[2];
  rows_of(q, own, a);
  rows_of(g, own, b);
  zero<HEAD / 8>(out);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int row = own + group() + half * 8;
    sum[half] = row < context ? sums[pair * context + row] : 0.0f;
    dot[half] = row < context ? dots[pair * context + row] : 0.0f;
  }
  int end = causal && begin + ROWS < context ? begin + ROWS : of.end(begin + ROWS - 1);
  for (int start = of.first(begin) / SHORT * SHORT; start < end; start += SHORT) {
    __syncthreads();
    fetch<SHORT>(k, start, &k_tile, &k_turned);
    fetch<SHORT>(v, start, &v_tile, (Turned<SHORT>*)0);
    __syncthreads();
    zero<SHORT / 8>(s);
    zero<SHORT / 8>(d);
    product<SHORT / 8, STEPS>(s, a, k_tile.v[0], HEAD + 8);
    product<SHORT / 8, STEPS>(d, b, v_tile.v[0], HEAD + 8);
#pragma unroll
    for (int n = 0; n < SHORT / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        int row = own + group() + e / 2 * 8, key = start + n * 8 + member() * 2 + e % 2;
        bool seen = key < context && (!causal || key <= row) && of.joins(row, key);
        float chance = seen ? exp2f(s[n][e] * (scale * LOG2E) - sum[e / 2]) : 0.0f;
        float slope = dropped.on ? d[n][e] * dropped.factor(row, key) : d[n][e];
        s[n][e] = seen ? chance * (slope - dot[e / 2]) * scale : 0.0f;
      }
    }
    rounded<SHORT / 16>(s, ds);
    product<HEAD / 8, SHORT / 16>(out, ds, k_turned.v[0], SHORT + 8);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    int row = own + group() + e / 2 * 8;
    if (row >= context) continue;
    REAL* to = dq + (sample * context + row) * q_stride + head * size;
#pragma unroll
    for (int n = 0; n < HEAD / 8; ++n) {
      int column = n * 8 + member() * 2 + e % 2;
      if (column < size) narrow(out[n][e], to[column]);
    }
  }
}

// dk and dv, of the shape and the stride of the keys; grid (batch shared, blocks of keys).
//
// A thread has 255 registers. Of a head of 128 the sums dk and dv take 128 of them, the own values 32, and of tiles of
// 16 queries the scores and their slopes 16 and their rounded form 4: 180, beside some 60 for places and the random
// numbers of a dropped element. The own keys, 32 more, stay in shared memory (38.4 KB with the tiles, of 48), and tiles
// of 32 queries would take 20 more.
extern "C" __global__ void __launch_bounds__(THREADS) attention_keys(const REAL* queries, const REAL* keys,
    const REAL* dy, const float* sums, const float* dots, REAL* dkv, long long context, long long size,
    long long heads, long long shared, long long q_stride, long long kv_stride, long long k_first, long long v_first,
    long long causal, long long window, long long documents, float scale, long long on, long long groups,
    long long pitch, long long rows_per_sample, long long first_row, long long blocks, long long first_sample,
    long long site, long long step, long long key0, long long key1, long long limit, float kept) {
  __shared__ Plain<BRIEF> q_tile, g_tile;
  __shared__ Turned<BRIEF> q_turned, g_turned;
  __shared__ Plain<ROWS> k_tile;
  Dropped dropped = {on, groups, pitch, rows_per_sample, first_row, blocks, first_sample, site, step, key0, key1,
                           limit, kept};
  long long sample = blockIdx.x / shared, other = blockIdx.x % shared, many = heads / shared;
  int begin = (int)blockIdx.y * ROWS, own = begin + (int)threadIdx.x / 32 * 16;
  Head k(keys + k_first + sample * context * kv_stride + other * size, kv_stride, context, size);
  Head v(keys + v_first + sample * context * kv_stride + other * size, kv_stride, context, size);
  Documents of(documents, sample, context, window);
  unsigned a[1][4], b[STEPS][4], left[BRIEF / 16][4];
  float dk[HEAD / 8][4], dv[HEAD / 8][4], s[BRIEF / 8][4], d[BRIEF / 8][4];
  fetch<ROWS>(k, begin, &k_tile, (Turned<ROWS>*)0);
  rows_of(v, own, b);
  zero<HEAD / 8>(dk);
  zero<HEAD / 8>(dv);
  for (long long head = other * many; head < (other + 1) * many; ++head) {
    long long pair = sample * heads + head;
    dropped.begin(pair);
    Head q(queries + sample * context * q_stride + head * size, q_stride, context, size);
    Head g(dy + sample * context * heads * size + head * size, heads * size, context, size);
    int stop = of.stop(begin + ROWS - 1);
    for (int start = causal ? begin : of.first(begin) / BRIEF * BRIEF; start < stop; start += BRIEF) {
      __syncthreads();
      fetch<BRIEF>(q, start, &q_tile, &q_turned);
      fetch<BRIEF>(g, start, &g_tile, &g_turned);
      __syncthreads();
      zero<BRIEF / 8>(s);
      zero<BRIEF / 8>(d);
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {  // scores and their slopes, keys down, queries across
        rows_of(k_tile, own - begin, step, a[0]);
        product<BRIEF / 8, 1>(s, a, q_tile.v[0] + step * 16, HEAD + 8);
      }
      product<BRIEF / 8, STEPS>(d, b, g_tile.v[0], HEAD + 8);
#pragma unroll
      for (int n = 0; n < BRIEF / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          int key = own + group() + e / 2 * 8, row = start + n * 8 + member() * 2 + e % 2;
          bool seen = row < context && key < context && (!causal || key <= row) && of.joins(row, key);
          float chance = seen ? exp2f(s[n][e] * (scale * LOG2E) - sums[pair * context + row]) : 0.0f;
          float factor = dropped.on && seen ? dropped.factor(row, key) : 1.0f;
          d[n][e] = seen ? chance * (d[n][e] * factor - dots[pair * context + row]) * scale : 0.0f;
          s[n][e] = chance * factor;
        }
      }
      rounded<BRIEF / 16>(s, left);
      product<HEAD / 8, BRIEF / 16>(dv, left, g_turned.v[0], BRIEF + 8);
      rounded<BRIEF / 16>(d, left);
      product<HEAD / 8, BRIEF / 16>(dk, left, q_turned.v[0], BRIEF + 8);
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    int row = own + group() + e / 2 * 8;
    if (row >= context) continue;
    REAL* to = dkv + (sample * context + row) * kv_stride + other * size;
#pragma unroll
    for (int n = 0; n < HEAD / 8; ++n) {
      int column = n * 8 + member() * 2 + e % 2;
      if (column < size) {
        narrow(dk[n][e], to[k_first + column]);
        narrow(dv[n][e], to[v_first + column]);
      }
    }
  }
}
