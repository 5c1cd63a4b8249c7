// Few activation rows: weights stream once, eight threads per output row, a thread is a lane of the contract. Blocks
// b = l mod 8 of a row are lane l's, in ascending order, so a thread's sum is the lane's.
// Not here: many rows (gemm.cu), float weights and precision f32 (float.cu).

// Packed activations: row r at codes + r * row_codes, meta + r * row_meta.
struct Acts {
    const u8* codes;
    const u8* meta;
    u64 row_codes, row_meta;  // bytes
};

D int dot_half(const u32 w[4], const u32 x[4]) {
    int i = dot4(w[0], x[0], 0);
    i = dot4(w[1], x[1], i);
    i = dot4(w[2], x[2], i);
    return dot4(w[3], x[3], i);
}

// A block's terms, added to a lane. Activations come from shared memory.
template <int K>
D float add_block(const Matrix& m, const Codes& c, const Scale& s, const u8* codes, const u8* meta, float acc) {
    u32 kind = K >= 0 ? (u32)K : m.kind;
    uint4 x = *(const uint4*)codes, y = *(const uint4*)(codes + 16);
    uint4 z = *(const uint4*)meta;  // scale, asum, first sum, last sum
    u32 first[4] = {x.x, x.z, y.x, y.z}, last[4] = {x.y, x.w, y.y, y.w};
    int i = dot_half(c.first, first), j = dot_half(c.last, last);
    float scale = float_of(z.x);
    if (has_halves(kind)) {
        i += m.plus * (int)z.z;
        j += m.plus * (int)z.w;
        acc = fma_((float)i, s.ws[0] * scale, acc);
        if (has_bias(kind)) acc = fma_(s.wb[0], scale * (float)(int)z.z, acc);
        acc = fma_((float)j, s.ws[1] * scale, acc);
        if (has_bias(kind)) acc = fma_(s.wb[1], scale * (float)(int)z.w, acc);
        return acc;
    }
    i = i + j + m.plus * (int)(z.z + z.w);
    acc = fma_((float)i, s.ws[0] * scale, acc);
    if (has_bias(kind)) acc = fma_(s.wb[0], float_of(z.y), acc);
    return acc;
}

// Weights of some blocks of one lane, as loaded: decoding waits until all loads are under way.
template <int W>
constexpr int batch_of() { return W == W_8 ? 2 : W < 0 ? 1 : W == W_6 ? 2 : 4; }

template <int W, int K>
struct Batch {
    RawCodes codes[batch_of<W>()];
    RawScale scales[batch_of<W>()];
};

template <int W, int K>
D void load_batch(const Matrix& m, u32 row, u32 b, Batch<W, K>& batch) {
#pragma unroll
    for (int u = 0; u < batch_of<W>(); u++) {
        u32 at = b + 8 * u < m.blocks ? b + 8 * u : m.blocks - 1;
        batch.codes[u] = load_codes<W>(m, row, at);
        batch.scales[u] = load_scale<K>(m, row, at);
    }
}

// The lane of row `row` and NR activation rows, which lie in shared memory `stride` bytes apart: codes, then meta.
template <int W, int K, int NR>
D void dot_rows(const Matrix& m, u32 row, Batch<W, K>& batch, const u8* codes, const u8* meta, u32 code_stride,
                u32 meta_stride, u32 l, float out[NR]) {
    float acc[NR];
    for (int r = 0; r < NR; r++) acc[r] = 0.0f;
    constexpr int U = batch_of<W>();
    for (u32 b = l; b < m.blocks; b += 8 * U) {
        Batch<W, K> now = batch;
        if (b + 8 * U < m.blocks) load_batch<W, K>(m, row, b + 8 * U, batch);
#pragma unroll
        for (int u = 0; u < U; u++) {
            u32 at = b + 8 * u;
            if (at >= m.blocks) break;
            Codes c = decode_codes<W>(m, now.codes[u]);
            Scale s = decode_scale<K>(m, now.scales[u]);
            for (int r = 0; r < NR; r++)
                acc[r] = add_block<K>(m, c, s, codes + r * code_stride + 32 * at, meta + r * meta_stride + 16 * at, acc[r]);
        }
    }
    for (int r = 0; r < NR; r++) out[r] = join_8(acc[r]);
}

// Copies packed rows to shared memory, all threads of a block.
D void stage_rows(const Acts& acts, u32 first, u32 rows, u32 blocks, u32 threads, u8* codes, u8* meta) {
    for (u32 i = threadIdx.x; i < rows * blocks * 2; i += threads) {
        u32 r = i / (blocks * 2), at = i % (blocks * 2);
        *(uint4*)(codes + 16 * i) = *(const uint4*)(acts.codes + (first + r) * acts.row_codes + 16 * at);
    }
    for (u32 i = threadIdx.x; i < rows * blocks; i += threads) {
        u32 r = i / blocks, at = i % blocks;
        *(uint4*)(meta + 16 * i) = *(const uint4*)(acts.meta + (first + r) * acts.row_meta + 16 * at);
    }
    block_barrier();
}

struct GemvJob {
    Matrix w;
    const float* bias;  // [out] or null
    float* out;         // [rows, stride]
    u32 stride;
    u32 add;            // 1: out += product
    u32 variant;
    u32 first_block;    // grid blocks before this job's
};

struct GemvArgs {
    GemvJob jobs[4];
    Acts acts;
    u32 n_jobs, rows, pad0, pad1;
};

template <int W, int K, int NR>
D void gemv_job(const GemvArgs& a, const GemvJob& job, u32 row, u32 first, u32 l, u8* shared, float y[NR]) {
    Batch<W, K> batch;
    // Weights are nobody's output: they may be read before the kernel in front has ended.
    load_batch<W, K>(job.w, row, l, batch);
    let_next_start();
    wait_for_inputs();
    u32 rows = a.rows - first < NR ? a.rows - first : NR, blocks = job.w.blocks;
    u8* meta = shared + NR * 32 * blocks;
    stage_rows(a.acts, first, rows, blocks, 128, shared, meta);
    dot_rows<W, K, NR>(job.w, row, batch, shared, meta, 32 * blocks, 16 * blocks, l, y);
}

template <int NR>
D void gemv_body(const GemvArgs& a, u8* shared) {
    u32 j = 0;
    while (j + 1 < a.n_jobs && blockIdx.x >= a.jobs[j + 1].first_block) j++;
    const GemvJob& job = a.jobs[j];
    u32 o = (blockIdx.x - job.first_block) * 16 + threadIdx.x / 8;
    u32 l = threadIdx.x & 7, first = blockIdx.y * NR;
    bool there = o < job.w.rows;
    u32 row = there ? o : job.w.rows - 1;
    float y[NR];
    FOR_VARIANT(job.variant, (gemv_job<W, K, NR>(a, job, row, first, l, shared, y)))
    if (l != 0 || !there) return;
    for (int r = 0; r < NR; r++) {
        if (first + r >= a.rows) return;
        float v = job.bias ? y[r] + job.bias[o] : y[r];
        float* out = job.out + (u64)(first + r) * job.stride + o;
        *out = job.add ? *out + v : v;
    }
}

KERNEL(gemv_1, GemvArgs, 128, 5) {
    DYNAMIC_SHARED(shared);
    gemv_body<1>(a, shared);
}
KERNEL(gemv_2, GemvArgs, 128, 4) {
    DYNAMIC_SHARED(shared);
    gemv_body<2>(a, shared);
}
KERNEL(gemv_4, GemvArgs, 128, 3) {
    DYNAMIC_SHARED(shared);
    gemv_body<4>(a, shared);
}

// ---- routed experts, a few (row, rank) pairs ----

struct ExpertUpArgs {
    Matrix gate, up;           // [E * inter, d]
    Acts acts;                 // [rows], d wide
    const float* gate_bias;    // [E, inter] or null
    const float* up_bias;
    const u16* ids;            // [pairs]
    u8* codes;                 // packed hidden [pairs][inter]
    u8* meta;
    float* hidden;             // instead, where down takes floats: [pairs, inter]
    u64 row_codes, row_meta;
    u32 inter, top_k, activation, variant_gate, variant_up, pad;
    float alpha, limit;
};

template <int W, int K>
D float expert_dot(const Matrix& m, u32 row, const Acts& acts, u32 first, u32 l, u8* shared, u32 threads) {
    Batch<W, K> batch;
    load_batch<W, K>(m, row, l, batch);
    stage_rows(acts, first, 1, m.blocks, threads, shared, shared + 32 * m.blocks);
    float y[1];
    dot_rows<W, K, 1>(m, row, batch, shared, shared + 32 * m.blocks, 0, 0, l, y);
    return y[0];
}

// Block (32 inner rows, pair): hidden = act(gate x) * (up x), packed at once. The first half of the threads computes
// gate, the other up.
KERNEL(expert_up, ExpertUpArgs, 512, 2) {
    DYNAMIC_SHARED(shared);
    __shared__ float dots[64];
    u32 pair = blockIdx.y, part = threadIdx.x / 256, i = blockIdx.x * 32 + (threadIdx.x & 255) / 8, l = threadIdx.x & 7;
    u32 inner = i < a.inter ? i : a.inter - 1;
    let_next_start();
    wait_for_inputs();
    u32 expert = a.ids[pair];
    u32 row = expert * a.inter + inner, first = pair / a.top_k;
    float y;
    const Matrix& m = part ? a.up : a.gate;
    FOR_VARIANT(part ? a.variant_up : a.variant_gate, (y = expert_dot<W, K>(m, row, a.acts, first, l, shared, 512)))
    const float* bias = part ? a.up_bias : a.gate_bias;
    if (l == 0) dots[threadIdx.x / 8] = bias ? y + bias[row] : y;
    block_barrier();
    if (threadIdx.x >= 32) return;
    u32 mine = blockIdx.x * 32 + threadIdx.x;
    float h = glu_(a.activation, a.alpha, a.limit, dots[threadIdx.x], dots[32 + threadIdx.x]);
    if (a.hidden && mine < a.inter) a.hidden[(u64)pair * a.inter + mine] = h;
    if (a.codes)
        pack_block(h, a.codes + pair * a.row_codes + 32 * blockIdx.x, a.meta + pair * a.row_meta + 16 * blockIdx.x);
}

struct ExpertDownArgs {
    Matrix down;         // [E * d, inter]
    Acts acts;           // [pairs], inter wide
    const float* bias;   // [E, d] or null
    const u16* ids;      // [rows, top_k]
    const float* weights;
    float* out;          // [rows, d]
    u32 d, top_k, add, variant;
};

template <int W, int K>
D float down_dot(const ExpertDownArgs& a, u32 at, u32 row, u32 rank, u32 l, u8* shared) {
    Batch<W, K> batch;
    load_batch<W, K>(a.down, at, l, batch);
    u32 blocks = a.down.blocks;
    u8* meta = shared + a.top_k * 32 * blocks;
    stage_rows(a.acts, row * a.top_k, a.top_k, blocks, 256, shared, meta);
    float y[1];
    dot_rows<W, K, 1>(a.down, at, batch, shared + rank * 32 * blocks, meta + rank * 16 * blocks, 0, 0, l, y);
    return y[0];
}

// Block (32 / top_k outputs, row): the chosen experts' outputs, summed in rank order.
KERNEL(expert_down, ExpertDownArgs, 256, 3) {
    DYNAMIC_SHARED(shared);
    __shared__ float part[32];
    u32 outs = 32 / a.top_k, group = threadIdx.x / 8, l = threadIdx.x & 7;
    u32 rank = group / outs, within = group % outs, row = blockIdx.y;
    u32 o = blockIdx.x * outs + within;
    bool works = rank < a.top_k && o < a.d;
    if (!works) rank = 0;
    let_next_start();
    wait_for_inputs();
    u32 at = a.ids[row * a.top_k + rank] * a.d + (works ? o : 0);
    float y;
    FOR_VARIANT(a.variant, (y = down_dot<W, K>(a, at, row, rank, l, shared)))
    if (l == 0) part[group] = a.bias ? y + a.bias[at] : y;
    block_barrier();
    u32 mine = blockIdx.x * outs + threadIdx.x;
    if (threadIdx.x >= outs || mine >= a.d) return;
    float sum = 0.0f;
    for (u32 k = 0; k < a.top_k; k++) sum = fma_(a.weights[row * a.top_k + k], part[k * outs + threadIdx.x], sum);
    float* out = a.out + (u64)row * a.d + mine;
    *out = a.add ? *out + sum : sum;
}
