// Few activation rows: weights stream once. A warp has an output row; a thread makes the terms of its blocks, and shuffles
// bring them to their lanes in ascending order of blocks. One row: activations wait in shared memory (lanes.cuh), four threads
// keep each lane, a warp goes through several output rows, and the row's norm may be computed here, by every block for itself,
// instead of by a kernel in front.
// Not here: routed experts (experts.cu), many rows (gemm.cu), float weights and precision f32 (float.cu).

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
    u32 t = threadIdx.x & 31, l = t & 7;
    int n = terms_in<K>(m);
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
    const float* x;       // one row: this is normed and packed instead of reading `acts`
    const float* weight;  // of the norm, or null
    u32 n_jobs, rows;
    float eps;
    u32 passes;           // one row: outputs of a warp
};

D u32 job_of_block(const GemvArgs& a) {
    u32 j = 0;
    while (j + 1 < a.n_jobs && blockIdx.x >= a.jobs[j + 1].first_block) j++;
    return j;
}

// Step `u` from block `base` on: thread t has the t-th block.
template <int W, int K, int U>
D void load_blocks(const Matrix& m, u32 row, u32 base, bool there, int u, Lane<W, K, U>& s) {
    u32 b = base + (threadIdx.x & 31);
    u64 at = (u64)row * m.blocks + b, group = (u64)row * ((m.blocks + 7) >> 3) + b / 8;
    bool here = there && b + 32 * u < m.blocks;
    lane_codes<W>(m, at + 32 * u, here, s.codes[u]);
    lane_scale<K>(m, row, b + 32 * u, at + 32 * u, group + 4 * u, here, s.scales[u]);
}

// A warp's output rows: `first`, then `step` on, `passes` of them; beyond `last` stands `last`.
struct Rows { u32 first, step, last, passes; };

// Products of a warp's rows and the row in `planes`, with a bias and stored or added to what is there. The first steps of the first
// row are in `s`; those of the next row are asked for while one ends, and what is added to a sum while it is made.
template <int W, int K, int U>
D void warp_dots(const GemvJob& job, const Rows& rows, Lane<W, K, U>& s, const u8* planes) {
    const Matrix& m = job.w;
    u32 n = m.blocks, t = threadIdx.x & 31, l = t & 7;
    int terms = terms_in<K>(m);
    const uint4* acts = (const uint4*)planes;
    u32 row = rows.first < rows.last ? rows.first : rows.last;
#pragma unroll 1
    for (u32 pass = 0; pass < rows.passes; pass++) {
        u32 next_row = row + rows.step < rows.last ? row + rows.step : rows.last;
        float acc = 0.0f, bias = ahead_4(job.bias, row), old = ahead_4(job.add ? job.out : (const float*)0, row);
#pragma unroll 1
        for (u32 base = 0; base < n; base += 32 * U) {
            bool ends = base + 32 * U >= n, more = !ends || pass + 1 < rows.passes;
            u32 load_row = ends ? next_row : row, load_base = ends ? 0 : base + 32 * U;
#pragma unroll
            for (int u = 0; u < U; u++) {
                u32 b = base + 32 * u + t, i = b < n ? b : 0;
                bool any = u == 0 || base + 32 * u < n;
                Codes c;
                Scale scale;
                if (any) {
                    c = decode_codes<W>(m, s.codes[u]);
                    scale = decode_scale<K>(m, s.scales[u]);
                }
                load_blocks(m, load_row, load_base, more, u, s);
                if (!any) continue;
                Terms p = terms_of<K>(m, c, scale, acts[i], acts[n + i], acts[2 * n + i]);
#pragma unroll
                for (int q = 0; q < n_terms<K>(); q++) {
                    // What adds nothing, not even to a zero's sign.
                    p.x[q] = b < n ? p.x[q] : -0.0f;
                    p.y[q] = b < n ? p.y[q] : 0.0f;
                }
#pragma unroll
                for (int k = 0; k < 4; k++) {
#pragma unroll
                    for (int q = 0; q < n_terms<K>(); q++) {
                        if (q >= terms) break;
                        float x = shuffle(p.x[q], 8 * k + l), y = shuffle(p.y[q], 8 * k + l);
                        acc = fma_(x, y, acc);
                    }
                }
            }
        }
        float y = join_8(acc);
        u32 o = rows.first + pass * rows.step;
        if (o <= rows.last && t == 0) {
            y = job.bias ? y + bias : y;
            job.out[o] = job.add ? old + y : y;
        }
        row = next_row;
    }
}

template <int W, int K>
D void one_row(const GemvArgs& a, const GemvJob& job, u8* shared, float* factor) {
    constexpr int U = depth_of<W>();
    Lane<W, K, U> lane;
    u32 blocks = job.w.blocks, width = 32 * blocks;
    float* x = (float*)(shared + 48 * blocks);
    Rows rows;
    rows.step = blockDim.x / 32;
    rows.first = (blockIdx.x - job.first_block) * rows.step * a.passes + threadIdx.x / 32;
    rows.last = job.w.rows - 1;
    rows.passes = a.passes;
    // Weights are nobody's output: they may be read before the kernel in front has ended.
#pragma unroll
    for (int u = 0; u < U; u++) load_blocks(job.w, rows.first < rows.last ? rows.first : rows.last, 0, true, u, lane);
    if (a.x) share_floats(a.weight, width, x + width);
    wait_for_inputs();
    let_next_start();
    if (a.x) {
        NormedRow row = norm_row(a.x, width, a.eps, x, x + width, factor);
        pack_row(row, width, shared, shared + 16 * blocks, shared + 32 * blocks, 16);
    } else {
        share_row<3>(a.acts.codes, a.acts.meta, blocks, shared, threadIdx.x, blockDim.x);
    }
    block_barrier();
    warp_dots(job, rows, lane, shared);
}

// Blocks of 128 or 256 threads, `passes` outputs to a warp.
KERNEL(gemv_1, GemvArgs, 256, 4) {
    DYNAMIC_SHARED(shared);  // planes of the row; with a norm also the row and its weights
    __shared__ float factor;
    const GemvJob& job = a.jobs[job_of_block(a)];
    FOR_VARIANT(job.variant, (one_row<W, K>(a, job, shared, &factor)))
}

template <int W, int K, int NR>
D void gemv_job(const GemvArgs& a, const GemvJob& job, u32 row, u32 first, float y[NR]) {
    Batch<W, K> batch;
    load_batch<W, K>(job.w, row, threadIdx.x & 31, batch);
    wait_for_inputs();
    u32 rows = a.rows - first < NR ? a.rows - first : NR;
    dot_rows<W, K, NR>(job.w, row, batch, a.acts, first, rows, y);
}

KERNEL(gemv_2, GemvArgs, 256, 2) {
    const GemvJob& job = a.jobs[job_of_block(a)];
    u32 o = (blockIdx.x - job.first_block) * 8 + threadIdx.x / 32, first = blockIdx.y * 2;
    if (o >= job.w.rows) {
        wait_for_inputs();
        return;
    }
    float y[2];
    FOR_VARIANT(job.variant, (gemv_job<W, K, 2>(a, job, o, first, y)))
    if ((threadIdx.x & 31) != 0) return;
    for (int r = 0; r < 2; r++) {
        if (first + r >= a.rows) return;
        float v = job.bias ? y[r] + job.bias[o] : y[r];
        float* out = job.out + (u64)(first + r) * job.stride + o;
        *out = job.add ? *out + v : v;
    }
}
