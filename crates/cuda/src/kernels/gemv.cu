// Few activation rows: weights stream once, a warp per output row. A thread makes the terms of its blocks; shuffles bring
// them to the lanes of the contract in ascending order of blocks.
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

// What a block adds to its lane: acc = fma(x, y, acc) for each of up to four terms, in this order.
struct Terms { float x[4], y[4]; };

template <int K>
D constexpr int n_terms() { return K < 0 ? 4 : (has_halves(K) ? 2 : 1) * (has_bias(K) ? 2 : 1); }

template <int K>
D Terms terms_of(const Matrix& m, const Codes& c, const Scale& s, const uint4& a0, const uint4& a1, const uint4& z) {
    u32 kind = K >= 0 ? (u32)K : m.kind;
    // z: scale, asum, first sum, last sum
    u32 first[4] = {a0.x, a0.z, a1.x, a1.z}, last[4] = {a0.y, a0.w, a1.y, a1.w};
    int i = dot_half(c.first, first), j = dot_half(c.last, last);
    float scale = float_of(z.x);
    Terms t;
    if (has_halves(kind)) {
        t.x[0] = (float)(i + m.plus * (int)z.z);
        t.y[0] = s.ws[0] * scale;
        float x = (float)(j + m.plus * (int)z.w), y = s.ws[1] * scale;
        if (has_bias(kind)) {
            t.x[1] = s.wb[0];
            t.y[1] = scale * (float)(int)z.z;
            t.x[2] = x;
            t.y[2] = y;
            t.x[3] = s.wb[1];
            t.y[3] = scale * (float)(int)z.w;
        } else {
            t.x[1] = x;
            t.y[1] = y;
        }
    } else {
        t.x[0] = (float)(i + j + m.plus * (int)(z.z + z.w));
        t.y[0] = s.ws[0] * scale;
        t.x[1] = s.wb[0];
        t.y[1] = float_of(z.y);
    }
    return t;
}

// Weights of a row's blocks, one block per thread and step, as loaded: a row of 3072 columns is under way at once.
template <int W>
D constexpr int batch_of() { return W == W_6 ? 2 : W < 0 ? 1 : 3; }

template <int W, int K>
struct Batch {
    RawCodes codes[batch_of<W>()];
    RawScale scales[batch_of<W>()];
};

template <int W, int K>
D void load_batch(const Matrix& m, u32 row, u32 b, Batch<W, K>& batch) {
#pragma unroll
    for (int u = 0; u < batch_of<W>(); u++) {
        if (b + 32 * u >= m.blocks) break;
        batch.codes[u] = load_codes<W>(m, row, b + 32 * u);
        batch.scales[u] = load_scale<K>(m, row, b + 32 * u);
    }
}

// A warp computes row `row` times NR activation rows. Thread t has blocks t, t + 32, ..; terms go to lane t mod 8 in
// ascending order of blocks, by shuffles; each lane is kept four times. All threads get the sums.
template <int W, int K, int NR>
D void dot_rows(const Matrix& m, u32 row, Batch<W, K>& batch, const Acts& acts, u32 first, u32 rows, float out[NR]) {
    constexpr int U = batch_of<W>();
    u32 kind = K >= 0 ? (u32)K : m.kind;
    u32 t = threadIdx.x & 31, l = t & 7;
    int n = K >= 0 ? n_terms<K>() : (has_halves(kind) ? 2 : 1) * (has_bias(kind) ? 2 : 1);
    float acc[NR];
    for (int r = 0; r < NR; r++) acc[r] = 0.0f;
    for (u32 base = 0; base < m.blocks; base += 32 * U) {
#pragma unroll
        for (int u = 0; u < U; u++) {
            u32 b = base + 32 * u + t;
            if (base + 32 * u >= m.blocks) break;
            bool there = b < m.blocks;
            Codes c = decode_codes<W>(m, batch.codes[u]);
            Scale s = decode_scale<K>(m, batch.scales[u]);
#pragma unroll
            for (int r = 0; r < NR; r++) {
                u32 i = first + (r < rows ? r : rows - 1);
                u32 at = there ? b : m.blocks - 1;
                const u8* codes = acts.codes + i * acts.row_codes + 32 * at;
                uint4 a0 = *(const uint4*)codes, a1 = *(const uint4*)(codes + 16);
                uint4 z = *(const uint4*)(acts.meta + i * acts.row_meta + 16 * at);
                Terms p = terms_of<K>(m, c, s, a0, a1, z);
#pragma unroll
                for (int k = 0; k < 4; k++) {
#pragma unroll
                    for (int q = 0; q < n_terms<K>(); q++) {
                        if (q >= n) break;
                        float x = shuffle(p.x[q], 8 * k + l), y = shuffle(p.y[q], 8 * k + l);
                        float sum = fma_(x, y, acc[r]);
                        acc[r] = base + 32 * u + 8 * k + l < m.blocks ? sum : acc[r];
                    }
                }
            }
        }
        if (base + 32 * U < m.blocks) load_batch<W, K>(m, row, base + 32 * U + t, batch);
    }
    for (int r = 0; r < NR; r++) out[r] = join_8(acc[r]);
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
D void gemv_job(const GemvArgs& a, const GemvJob& job, u32 row, u32 first, float y[NR]) {
    Batch<W, K> batch;
    // Weights are nobody's output: they may be read before the kernel in front has ended.
    load_batch<W, K>(job.w, row, threadIdx.x & 31, batch);
    let_next_start();
    wait_for_inputs();
    u32 rows = a.rows - first < NR ? a.rows - first : NR;
    dot_rows<W, K, NR>(job.w, row, batch, a.acts, first, rows, y);
}

template <int NR>
D void gemv_body(const GemvArgs& a) {
    u32 j = 0;
    while (j + 1 < a.n_jobs && blockIdx.x >= a.jobs[j + 1].first_block) j++;
    const GemvJob& job = a.jobs[j];
    u32 o = (blockIdx.x - job.first_block) * 8 + threadIdx.x / 32, first = blockIdx.y * NR;
    if (o >= job.w.rows) {
        wait_for_inputs();
        return;
    }
    float y[NR];
    FOR_VARIANT(job.variant, (gemv_job<W, K, NR>(a, job, o, first, y)))
    if ((threadIdx.x & 31) != 0) return;
    for (int r = 0; r < NR; r++) {
        if (first + r >= a.rows) return;
        float v = job.bias ? y[r] + job.bias[o] : y[r];
        float* out = job.out + (u64)(first + r) * job.stride + o;
        *out = job.add ? *out + v : v;
    }
}

KERNEL(gemv_1, GemvArgs, 256, 3) { gemv_body<1>(a); }
KERNEL(gemv_2, GemvArgs, 256, 2) { gemv_body<2>(a); }

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

// Hidden values of a block's 32 inner rows: a warp per row, the weights of both products under way at once.
template <int W, int K>
D void expert_rows(const ExpertUpArgs& a, u32 pair, float* hidden) {
    u32 first = pair / a.top_k, base = a.ids[pair] * a.inter;
    u32 t = threadIdx.x & 31, k = threadIdx.x / 32, most = a.inter - 1;
    Batch<W, K> gates, ups;
    u32 row = blockIdx.x * 32 + k;
    load_batch<W, K>(a.gate, base + (row < most ? row : most), t, gates);
    load_batch<W, K>(a.up, base + (row < most ? row : most), t, ups);
    for (; k < 32; k += 8) {
        // Weights of the next row are on their way while this one is computed.
        u32 i = blockIdx.x * 32 + k, next = i + 8 < most ? i + 8 : most;
        row = base + (i < most ? i : most);
        float g[1], u[1];
        dot_rows<W, K, 1>(a.gate, row, gates, a.acts, first, 1, g);
        if (k + 8 < 32) load_batch<W, K>(a.gate, base + next, t, gates);
        dot_rows<W, K, 1>(a.up, row, ups, a.acts, first, 1, u);
        if (k + 8 < 32) load_batch<W, K>(a.up, base + next, t, ups);
        if (t == 0) {
            float x = a.gate_bias ? g[0] + a.gate_bias[row] : g[0];
            float y = a.up_bias ? u[0] + a.up_bias[row] : u[0];
            float h = glu_(a.activation, a.alpha, a.limit, x, y);
            hidden[k] = h;
            if (a.hidden && i < a.inter) a.hidden[(u64)pair * a.inter + i] = h;
        }
    }
}

// Block (32 inner rows, pair): hidden = act(gate x) * (up x), packed at once.
KERNEL(expert_up, ExpertUpArgs, 256, 2) {
    __shared__ float hidden[32];
    u32 pair = blockIdx.y, variant = a.variant_gate == a.variant_up ? a.variant_gate : V_ANY;
    let_next_start();
    wait_for_inputs();
    FOR_VARIANT(variant, (expert_rows<W, K>(a, pair, hidden)))
    block_barrier();
    if (a.codes && threadIdx.x < 32)
        pack_block(hidden[threadIdx.x], a.codes + pair * a.row_codes + 32 * blockIdx.x,
                   a.meta + pair * a.row_meta + 16 * blockIdx.x);
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

// Outputs of one expert, one after the other; weights of the next are on their way while one is computed.
template <int W, int K>
D void down_dots(const ExpertDownArgs& a, u32 at, u32 n, u32 pair, float* out, const float* bias) {
    u32 t = threadIdx.x & 31;
    Batch<W, K> p, q;
    load_batch<W, K>(a.down, at, t, p);
    load_batch<W, K>(a.down, at + (n > 1 ? 1 : 0), t, q);
    float y[1];
    for (u32 k = 0; k < n; k += 2) {
        dot_rows<W, K, 1>(a.down, at + k, p, a.acts, pair, 1, y);
        if (k + 2 < n) load_batch<W, K>(a.down, at + k + 2, t, p);
        if (t == 0) out[k] = bias ? y[0] + bias[k] : y[0];
        if (k + 1 >= n) break;
        dot_rows<W, K, 1>(a.down, at + k + 1, q, a.acts, pair, 1, y);
        if (k + 3 < n) load_batch<W, K>(a.down, at + k + 3, t, q);
        if (t == 0) out[k + 1] = bias ? y[0] + bias[k + 1] : y[0];
    }
}

// Outputs of a warp.
#define DOWN 4

// Block (DOWN * 8 / top_k outputs, row): the chosen experts' outputs, summed in rank order.
KERNEL(expert_down, ExpertDownArgs, 256, 2) {
    __shared__ float part[8 * DOWN];
    u32 groups = 8 / a.top_k, warp = threadIdx.x / 32, outs = DOWN * groups;
    u32 rank = warp / groups, row = blockIdx.y, within = DOWN * (warp % groups), o = blockIdx.x * outs + within;
    let_next_start();
    wait_for_inputs();
    if (rank < a.top_k && o < a.d) {
        u32 pair = row * a.top_k + rank, at = a.ids[pair] * a.d + o, n = a.d - o < DOWN ? a.d - o : DOWN;
        float* out = part + outs * rank + within;
        FOR_VARIANT(a.variant, (down_dots<W, K>(a, at, n, pair, out, a.bias ? a.bias + at : a.bias)))
    }
    block_barrier();
    u32 mine = blockIdx.x * outs + threadIdx.x;
    if (threadIdx.x >= outs || mine >= a.d) return;
    float sum = 0.0f;
    for (u32 k = 0; k < a.top_k; k++) sum = fma_(a.weights[row * a.top_k + k], part[k * outs + threadIdx.x], sum);
    float* out = a.out + (u64)row * a.d + mine;
    *out = a.add ? *out + sum : sum;
}
