// Router of a mixture of experts, and the rows of its tokens; see hpcdist/models/experts. A warp has a token, a choice, or
// an expert in a run of tokens. Sums are in an order that does not change, and integers are counted without atomics.

#define WIDTH (16 / sizeof(REAL))
#define WARPS 4  // of a block

__device__ __forceinline__ long long own_warp() { return (long long)blockIdx.x * WARPS + threadIdx.x / 32; }

// The scores of a token: all lanes of its warp know the largest logit, and the sum of the exponentials of what is left.
struct Scores {
  const REAL* logits;
  ACC most, sum;
  bool sigmoid;
  __device__ __forceinline__ ACC soft(long long e) const { return exponential(widen(logits[e]) - most) / sum; }
  __device__ __forceinline__ ACC of(long long e) const {
    return sigmoid ? ACC(1) / (ACC(1) + exponential(-widen(logits[e]))) : soft(e);
  }
};

__device__ __forceinline__ Scores scores_of(const REAL* logits, long long experts, bool sigmoid) {
  ACC most = ACC(-INFINITY), sum = 0;
  for (long long e = threadIdx.x % 32; e < experts; e += 32) most = larger(widen(logits[e]), most);
  most = over_warp(most, Larger());
  for (long long e = threadIdx.x % 32; e < experts; e += 32) sum += exponential(widen(logits[e]) - most);
  Scores scores = {logits, most, over_warp(sum, Add()), sigmoid};
  return scores;
}

// chosen (tokens, each): the experts of the largest scores plus bias, of equal ones the first; gates: their scores, over
// the sum of these where each > 1. Those that are left are behind the last one in this order. A NaN is the largest.
extern "C" __global__ void __launch_bounds__(128) choose(const REAL* logits, const double* bias, int* chosen, REAL* gates,
    long long tokens, long long experts, long long each, long long sigmoid) {
  long long t = own_warp();
  if (t >= tokens) return;
  Scores scores = scores_of(logits + t * experts, experts, sigmoid);
  int lane = threadIdx.x % 32, last = -1;
  double limit = INFINITY;
  ACC total = 0;
  for (long long j = 0; j < each; ++j) {
    double best = -INFINITY;
    int own = (int)experts;
    for (int e = lane; e < experts; e += 32) {
      double value = scores.of(e) + bias[e];
      if (value != value) value = INFINITY;
      bool left = value < limit || (value == limit && e > last);
      if (left && (own == experts || value > best)) best = value, own = e;
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      double other = __shfl_xor_sync(0xFFFFFFFFu, best, distance);
      int there = __shfl_xor_sync(0xFFFFFFFFu, own, distance);
      if (there < experts && (own == experts || other > best || (other == best && there < own))) best = other, own = there;
    }
    limit = best, last = own;
    total += scores.of(own);
    if (lane == 0) chosen[t * each + j] = own;
  }
  if (lane != 0) return;
  for (long long j = 0; j < each; ++j) {
    ACC score = scores.of(chosen[t * each + j]);
    narrow(each > 1 ? score / total : score, gates[t * each + j]);
  }
}

// Whether, and as which choice, token `t` before `end` chose expert `e`: -1 for not at all.
__device__ __forceinline__ int choice_of(const int* chosen, long long t, long long end, long long each, int e) {
  int found = -1;
  if (t < end) {
    for (int j = 0; j < each; ++j) found = chosen[t * each + j] == e ? j : found;
  }
  return found;
}

// counts (runs, experts) of the choices; n = runs experts. A run is its first token, and the one behind the last.
extern "C" __global__ void __launch_bounds__(128) count_choices(const int* chosen, const long long* runs, int* counts,
    long long n, long long experts, long long each) {
  long long w = own_warp();
  if (w >= n) return;
  long long first = runs[w / experts * 2], end = runs[w / experts * 2 + 1];
  int lane = threadIdx.x % 32, total = 0;
  for (long long t = first; t < end; t += 32)
    total += __popc(__ballot_sync(0xFFFFFFFFu, choice_of(chosen, t + lane, end, each, (int)(w % experts)) >= 0));
  if (lane == 0) counts[w] = total;
}

// places of the choices in runs: the `table` (runs, experts, 2) says the first row, and how many there are; then -1
extern "C" __global__ void __launch_bounds__(128) place_choices(const int* chosen, const long long* runs,
    const long long* table, int* places, long long n, long long experts, long long each) {
  long long w = own_warp();
  if (w >= n) return;
  long long first = runs[w / experts * 2], end = runs[w / experts * 2 + 1], row = table[2 * w], room = table[2 * w + 1];
  int lane = threadIdx.x % 32;
  long long before = 0;
  for (long long t = first; t < end; t += 32) {
    int j = choice_of(chosen, t + lane, end, each, (int)(w % experts));
    unsigned same = __ballot_sync(0xFFFFFFFFu, j >= 0);
    long long own = before + __popc(same & ((1u << lane) - 1u));
    if (j >= 0) places[(t + lane) * each + j] = own < room ? (int)(row + own) : -1;
    before += __popc(same);
  }
}

// logits (tokens, experts) become their gradient; 0 of tokens in no run. A sample has `context` tokens and `pieces` runs.
// table (samples, experts + 2): shares of the choices, and the coefficients of the balance and of the z loss of a token.
// figures (tokens, 3): entropy of the scores, balance loss and z loss, without coefficients
extern "C" __global__ void __launch_bounds__(128) choose_backward(REAL* logits, const int* chosen, const REAL* gates,
    const REAL* dgates, const long long* runs, const double* table, double* figures, long long tokens, long long experts,
    long long each, long long context, long long pieces, long long sigmoid) {
  long long t = own_warp();
  if (t >= tokens) return;
  long long s = t / context;
  int lane = threadIdx.x % 32;
  REAL* own = logits + t * experts;
  bool routed = false;
  for (long long p = s * pieces; p < (s + 1) * pieces; ++p) routed = routed || (runs[2 * p] <= t && t < runs[2 * p + 1]);
  if (!routed) {
    for (long long e = lane; e < experts; e += 32) narrow(ACC(0), own[e]);
    if (lane < 3) figures[3 * t + lane] = 0;
    return;
  }
  const double* shares = table + s * (experts + 2);
  ACC balance = ACC(shares[experts]) * ACC(experts), z = ACC(2 * shares[experts + 1]);
  Scores scores = scores_of(own, experts, sigmoid);
  ACC total = 0, inside = 0, entropy = 0, even = 0, dot = 0, of_gates = 0, sum_of_chosen = 0;
  for (long long e = lane; e < experts; e += 32) total += scores.of(e);
  total = over_warp(total, Add());
  for (long long e = lane; e < experts; e += 32) {
    ACC share = scores.of(e) / total;
    inside += balance * ACC(shares[e]) * share;
    if (share > ACC(0)) entropy -= share * logarithm(share);
    even += ACC(experts) * ACC(shares[e]) * share;
  }
  inside = over_warp(inside, Add()), entropy = over_warp(entropy, Add()), even = over_warp(even, Add());
  const int* choices = chosen + t * each;
  const REAL *gate = gates + t * each, *dgate = dgates + t * each;
  for (long long j = 0; j < each; ++j) {
    of_gates += widen(dgate[j]) * widen(gate[j]);
    sum_of_chosen += scores.of(choices[j]);
  }
  // Softmax scores are normalised already, and their sum of 1 does not depend on the logits.
  auto dscore = [&](long long e) {
    ACC d = balance * ACC(shares[e]);
    if (sigmoid) d = (d - inside) / total;
    for (long long j = 0; j < each; ++j) {
      if (choices[j] == e) d += each > 1 ? (widen(dgate[j]) - of_gates) / sum_of_chosen : widen(dgate[j]);
    }
    return d;
  };
  for (long long e = lane; e < experts; e += 32) dot += dscore(e) * scores.of(e);
  dot = over_warp(dot, Add());  // from here on a lane reads no logits but those that it overwrites
  ACC log_sum = scores.most + logarithm(scores.sum), slope = z * log_sum;
  for (long long e = lane; e < experts; e += 32) {
    ACC score = scores.of(e), d = dscore(e);
    narrow((sigmoid ? d * (ACC(1) - score) : d - dot) * score + slope * scores.soft(e), own[e]);
  }
  if (lane == 0) {
    figures[3 * t] = entropy;
    figures[3 * t + 1] = even;
    figures[3 * t + 2] = (double)log_sum * log_sum;
  }
}

// rows by place = tokens (tokens, hidden); places (tokens, each), n = tokens each hidden
extern "C" __global__ void spread(const REAL* tokens, const int* places, REAL* rows, long long n, long long each,
    long long hidden) {
  bool packed = hidden % WIDTH == 0 && aligned<WIDTH>(tokens) && aligned<WIDTH>(rows);
  over_grid<WIDTH>(n, packed, [=](auto width, long long i) {
    long long choice = i / hidden, column = i % hidden, place = places[choice];
    if (place >= 0)
      write<width.value>(rows + place * hidden + column, read<width.value>(tokens + choice / each * hidden + column));
  });
}

// y (tokens, hidden) = the sum of the rows of each token, times their gates where `gated`, added where `adds`
extern "C" __global__ void collect(const REAL* rows, const int* places, const REAL* gates, REAL* y, long long n,
    long long each, long long hidden, long long gated, long long adds) {
  bool packed = hidden % WIDTH == 0 && aligned<WIDTH>(rows) && aligned<WIDTH>(y);
  over_grid<WIDTH>(n, packed, [=](auto width, long long i) {
    long long t = i / hidden, column = i % hidden;
    Pack<ACC, width.value> sums = {};
    if (adds) sums = read<width.value>(y + i);
    for (long long j = t * each; j < (t + 1) * each; ++j) {
      long long place = places[j];
      if (place < 0) continue;
      auto values = read<width.value>(rows + place * hidden + column);
      ACC gate = gated ? widen(gates[j]) : ACC(1);
#pragma unroll
      for (int c = 0; c < width.value; ++c) sums.v[c] += gate * values.v[c];
    }
    write<width.value>(y + i, sums);
  });
}

// rows become their gradient for dy (tokens, hidden); dgates (tokens, each): 0 of dropped choices. n = tokens each
extern "C" __global__ void __launch_bounds__(128) collect_backward(const REAL* dy, const int* places, const REAL* gates,
    REAL* rows, REAL* dgates, long long n, long long each, long long hidden) {
  long long choice = own_warp();
  if (choice >= n) return;
  long long lane = threadIdx.x % 32, place = places[choice];
  ACC sum = 0;
  if (place >= 0) {
    bool packed = hidden % WIDTH == 0 && aligned<WIDTH>(rows) && aligned<WIDTH>(dy);
    const REAL* from = dy + choice / each * hidden;
    REAL* row = rows + place * hidden;
    ACC gate = widen(gates[choice]);
    ::each<WIDTH>(lane, 32, hidden, packed, [&](auto width, long long i) {
      auto d = read<width.value>(from + i), values = read<width.value>(row + i);
#pragma unroll
      for (int c = 0; c < width.value; ++c) {
        sum += values.v[c] * d.v[c];
        d.v[c] *= gate;
      }
      write<width.value>(row + i, d);
    });
    sum = over_warp(sum, Add());
  }
  if (lane == 0) narrow(sum, dgates[choice]);
}

// Copy blocks of rows: number blockIdx.y from row blocks[y][0] to row blocks[y][1], or back, blocks[y][2] of them.
extern "C" __global__ void move_blocks(const REAL* from, REAL* to, const long long* blocks, long long hidden,
    long long back) {
  const long long* own = blocks + 3 * (long long)blockIdx.y;
  const REAL* source = from + own[back ? 1 : 0] * hidden;
  REAL* target = to + own[back ? 0 : 1] * hidden;
  bool packed = hidden % WIDTH == 0 && aligned<WIDTH>(from) && aligned<WIDTH>(to);
  over_grid<WIDTH>(own[2] * hidden, packed, [=](auto width, long long i) {
    write<width.value>(target + i, read<width.value>(source + i));
  });
}
