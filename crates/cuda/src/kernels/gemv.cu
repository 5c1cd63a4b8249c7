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

// One block's terms, added to a lane.
template <int K>
D float add_block(const Matrix& m, const Codes& c, const Scale& s, const u8* codes, const u8* meta, float acc) {
    u32 kind = K >= 0 ? (u32)K : m.kind;
    uint4 x = load_16(codes), y = load_16(codes + 16);
    uint4 z = load_16(meta);  // scale, asum, first sum, last sum
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

// Dot products of row `row` with NR activation rows; lane `l` of eight. All eight threads get the sums.
template <int W, int K, int NR>
D void dot_rows(const Matrix& m, u32 row, const Acts& acts, u32 first, u32 l, float out[NR]) {
    float acc[NR];
    for (int r = 0; r < NR; r++) acc[r] = 0.0f;
    const u8* codes = acts.codes + first * acts.row_codes;
    const u8* meta = acts.meta + first * acts.row_meta;
#pragma unroll 4
    for (u32 b = l; b < m.blocks; b += 8) {
        Codes c = codes_of<W>(m, row, b);
        Scale s = scale_of<K>(m, row, b);
        for (int r = 0; r < NR; r++)
            acc[r] = add_block<K>(m, c, s, codes + r * acts.row_codes + 32 * b, meta + r * acts.row_meta + 16 * b, acc[r]);
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

template <int NR>
D void gemv_body(const GemvArgs& a) {
    u32 j = 0;
    while (j + 1 < a.n_jobs && blockIdx.x >= a.jobs[j + 1].first_block) j++;
    const GemvJob& job = a.jobs[j];
    u32 o = (blockIdx.x - job.first_block) * 16 + threadIdx.x / 8;
    u32 l = threadIdx.x & 7, first = blockIdx.y * NR;
    bool there = o < job.w.rows;
    u32 row = there ? o : job.w.rows - 1;
    float y[NR];
    let_next_start();
    wait_for_inputs();
    FOR_VARIANT(job.variant, (dot_rows<W, K, NR>(job.w, row, a.acts, first, l, y)))
    if (l != 0 || !there) return;
    for (int r = 0; r < NR; r++) {
        if (first + r >= a.rows) return;
        float v = job.bias ? y[r] + job.bias[o] : y[r];
        float* out = job.out + (u64)(first + r) * job.stride + o;
        *out = job.add ? *out + v : v;
    }
}

KERNEL(gemv_1, GemvArgs, 128, 6) { gemv_body<1>(a); }
KERNEL(gemv_2, GemvArgs, 128, 5) { gemv_body<2>(a); }
KERNEL(gemv_4, GemvArgs, 128, 4) { gemv_body<4>(a); }

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

// Block (32 inner rows, pair): hidden = act(gate x) * (up x), packed at once.
KERNEL(expert_up, ExpertUpArgs, 256, 3) {
    __shared__ float hidden[32];
    u32 pair = blockIdx.y, i = blockIdx.x * 32 + threadIdx.x / 8, l = threadIdx.x & 7;
    u32 inner = i < a.inter ? i : a.inter - 1;
    let_next_start();
    wait_for_inputs();
    u32 expert = a.ids[pair];
    u32 row = expert * a.inter + inner, first = pair / a.top_k;
    float g[1], u[1];
    FOR_VARIANT(a.variant_gate, (dot_rows<W, K, 1>(a.gate, row, a.acts, first, l, g)))
    FOR_VARIANT(a.variant_up, (dot_rows<W, K, 1>(a.up, row, a.acts, first, l, u)))
    if (l == 0) {
        float x = a.gate_bias ? g[0] + a.gate_bias[row] : g[0];
        float y = a.up_bias ? u[0] + a.up_bias[row] : u[0];
        float h = glu_(a.activation, a.alpha, a.limit, x, y);
        hidden[threadIdx.x / 8] = h;
        if (a.hidden && i < a.inter) a.hidden[(u64)pair * a.inter + i] = h;
    }
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

// Block (32 / top_k outputs, row): the chosen experts' outputs, summed in rank order.
KERNEL(expert_down, ExpertDownArgs, 256, 3) {
    __shared__ float part[32];
    u32 outs = 32 / a.top_k, group = threadIdx.x / 8, l = threadIdx.x & 7;
    u32 rank = group / outs, within = group % outs, row = blockIdx.y;
    u32 o = blockIdx.x * outs + within;
    bool works = rank < a.top_k && o < a.d;
    u32 pair = row * a.top_k + (works ? rank : 0);
    let_next_start();
    wait_for_inputs();
    u32 at = a.ids[pair] * a.d + (works ? o : 0);
    float y[1];
    FOR_VARIANT(a.variant, (dot_rows<W, K, 1>(a.down, at, a.acts, pair, l, y)))
    if (l == 0) part[group] = a.bias ? y[0] + a.bias[at] : y[0];
    block_barrier();
    u32 mine = blockIdx.x * outs + threadIdx.x;
    if (threadIdx.x >= outs || mine >= a.d) return;
    float sum = 0.0f;
    for (u32 k = 0; k < a.top_k; k++) sum = fma_(a.weights[row * a.top_k + k], part[k * outs + threadIdx.x], sum);
    float* out = a.out + (u64)row * a.d + mine;
    *out = a.add ? *out + sum : sum;
}
