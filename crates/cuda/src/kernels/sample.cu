// What choosing a token needs of a row of logits, so that the row stays here: the largest and the sum of exponentials of every
// line of 1024, as `forebay_program::LogitLines` defines them. Not here: the choice, which is the sampler's.

#define LOGIT_LINE 1024

struct LinesArgs {
    const float* logits;  // [n]
    float* largest;       // [lines]
    double* sums;         // [lines]
    double* own_sums;     // [lines], of differences times t; or null
    u32 n, lines;
    float t;
    u32 pad;
};

// Of a block's 256 threads, each with one number; NaN is passed over. All threads get it.
D float block_max(float m, float* tops) {
    for (int k = 16; k > 0; k >>= 1) {
        float other = shuffle_xor(m, k);
        m = other > m ? other : m;
    }
    if ((threadIdx.x & 31) == 0) tops[threadIdx.x / 32] = m;
    block_barrier();
    m = -INF;
#pragma unroll
    for (int k = 0; k < 8; k++) m = tops[k] > m ? tops[k] : m;
    return m;
}

// Block: a line.
KERNEL(line_max, LinesArgs, 256, 1) {
    __shared__ float tops[8], bad[8];
    wait_for_inputs();
    float m = -INF, nan = 0.0f;
#pragma unroll
    for (u32 k = 0; k < LOGIT_LINE / 256; k++) {
        u32 i = blockIdx.x * LOGIT_LINE + threadIdx.x + 256 * k;
        float v = i < a.n ? a.logits[i] : -INF;
        m = v > m ? v : m;
        nan = v != v ? 1.0f : nan;
    }
    m = block_max(m, tops);
    nan = block_max(nan, bad);
    if (threadIdx.x == 0) a.largest[blockIdx.x] = nan == 1.0f ? float_of(0x7fc00000u) : m;
}

// Block: a line. The sums are made by eight threads, a lane each.
KERNEL(line_sums, LinesArgs, 256, 1) {
    __shared__ float tops[8], e[2][LOGIT_LINE];
    __shared__ double lanes[2][8];
    wait_for_inputs();
    float max = -INF;
    for (u32 i = threadIdx.x; i < a.lines; i += 256) {
        float v = a.largest[i];
        max = v > max ? v : max;
    }
    max = block_max(max, tops);
    u32 start = blockIdx.x * LOGIT_LINE, count = a.n - start < LOGIT_LINE ? a.n - start : LOGIT_LINE;
    for (u32 i = threadIdx.x; i < count; i += 256) {
        float x = a.logits[start + i] - max, y = x * a.t;
        e[0][i] = exp_(x < -80.0f ? -80.0f : x);
        if (a.own_sums) e[1][i] = exp_(y < -80.0f ? -80.0f : y);
    }
    block_barrier();
    // The second warp makes the second sums.
    u32 which = threadIdx.x / 32, lane = threadIdx.x & 31, whole = count / 8 * 8;
    bool mine = which == 0 || (which == 1 && a.own_sums);
    if (mine && lane < 8) {
        double sum = 0.0;
#pragma unroll 8
        for (u32 i = lane; i < whole; i += 8) sum = sum + (double)e[which][i];
        lanes[which][lane] = sum;
    }
    block_barrier();
    if (!mine || lane != 0) return;
    double sum = 0.0, rest = 0.0;
    for (u32 i = 0; i < 8; i++) sum = sum + lanes[which][i];
    for (u32 i = whole; i < count; i++) rest = rest + (double)e[which][i];
    (which ? a.own_sums : a.sums)[blockIdx.x] = sum + rest;
}
