// Row by row: norms, packing, rotary embedding, element-wise operations. Orders of sums as `crates/cpu/src/ops.rs`.
// Not here: attention, routing.

struct NormArgs {
    const float* src;      // [rows, width]
    const float* add;      // added to src first, the sum stored there; or null
    float* sum;            // where that sum goes (src itself)
    const float* weight;   // [width] or null
    float* dst;            // [rows, width] or null
    u8* codes[2];          // packed results, or null
    u8* meta[2];
    u64 row_codes[2], row_meta[2];
    u32 width, norm;       // norm 0: only packed
    float eps;
    u32 pad;
};

// A block per row; the row waits in shared memory.
KERNEL(norm_pack, NormArgs, 1024, 1) {
    DYNAMIC_SHARED(shared);
    float* x = (float*)shared;  // [width]
    __shared__ float scale;
    u32 n = blockDim.x;
    // The weight is nobody's output: it is there when the sum is.
    float weights[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 i = threadIdx.x + k * n;
        weights[k] = a.norm && a.weight && i < a.width ? a.weight[i] : 1.0f;
    }
    wait_for_inputs();
    u64 row = blockIdx.x;
    const float* src = a.src + row * a.width;
    for (u32 i = threadIdx.x; i < a.width; i += n) {
        float v = src[i];
        if (a.add) {
            v = v + a.add[row * a.width + i];
            a.sum[row * a.width + i] = v;
        }
        x[i] = v;
    }
    block_barrier();
    if (a.norm && threadIdx.x < 32) {
        float f = row_factor(x, a.width, a.eps);
        if (threadIdx.x == 0) scale = f;
    }
    block_barrier();
    u32 end = (a.width + 31) / 32 * 32;
#pragma unroll 4
    for (u32 k = 0, i = threadIdx.x; i < end; k++, i += n) {
        float v = i < a.width ? x[i] : 0.0f;
        if (a.norm && i < a.width) {
            v = v * scale;
            if (a.weight) v = v * (k == 0 ? weights[0] : k == 1 ? weights[1] : k == 2 ? weights[2] : k == 3 ? weights[3] : a.weight[i]);
        }
        if (a.dst && i < a.width) a.dst[row * a.width + i] = v;
        for (u32 p = 0; p < 2; p++)
            if (a.codes[p])
                pack_block(v, a.codes[p] + row * a.row_codes[p] + i / 32 * 32, a.meta[p] + row * a.row_meta[p] + i / 32 * 16);
    }
}

struct HeadNormArgs {
    float* x;              // [segments, dim]
    const float* weight;   // [dim] or null
    u32 dim, segments;
    float eps;
    u32 pad;
};

// RMSNorm of segments in place, a warp each.
KERNEL(head_norm, HeadNormArgs, 128, 1) {
    wait_for_inputs();
    u32 segment = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x & 31, l = lane & 15;
    bool there = segment < a.segments;
    float* x = a.x + (u64)(there ? segment : 0) * a.dim;
    float acc = 0.0f;
    for (u32 i = l; i < a.dim; i += 16) acc = fma_(x[i], x[i], acc);
    acc = join_16(acc);
    float scale = 1.0f / sqrtf(acc / (float)a.dim + a.eps);
    warp_barrier();
    if (!there) return;
    for (u32 i = lane; i < a.dim; i += 32) {
        float v = x[i] * scale;
        x[i] = a.weight ? v * a.weight[i] : v;
    }
}

struct AnglesArgs {
    const u32* positions;     // [rows]
    const float* inv_freq;    // [pairs]
    float* out;               // cos [rows, pairs], sin [rows, pairs]
    u32 rows, pairs;
    float factor;
    u32 pad;
};

KERNEL(rope_angles, AnglesArgs, 256, 1) {
    wait_for_inputs();
    u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= a.rows * a.pairs) return;
    float angle = (float)a.positions[i / a.pairs] * a.inv_freq[i % a.pairs];
    double s, c;
    sin_cos_64((double)angle, &s, &c);
    a.out[i] = (float)c * a.factor;
    a.out[(u64)a.rows * a.pairs + i] = (float)s * a.factor;
}

struct RopeArgs {
    float* x;              // [rows, heads, head_dim]
    const float* angles;   // as made by rope_angles
    u32 rows, heads, head_dim, half, adjacent, pad;
};

KERNEL(rope, RopeArgs, 256, 1) {
    wait_for_inputs();
    u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= a.rows * a.heads * a.half) return;
    u32 pair = i % a.half, head = i / a.half, row = head / a.heads;
    float* x = a.x + (u64)head * a.head_dim;
    float c = a.angles[row * a.half + pair], s = a.angles[a.rows * a.half + row * a.half + pair];
    u32 first = a.adjacent ? 2 * pair : pair, second = a.adjacent ? 2 * pair + 1 : pair + a.half;
    float p = x[first], q = x[second];
    x[first] = fma_(p, c, -(q * s));
    x[second] = fma_(q, c, p * s);
}

// One of the element-wise operations over n floats.
struct ElementArgs {
    float* x;              // in and out
    const float* y;
    const float* factor;   // one number, or null
    u64 n;
    u32 op, width, kind;   // width: of a row of x, where y has one number per row
    float constant, alpha, limit;
};
enum ElementOp { E_COPY, E_SCALE, E_ADD, E_GLU, E_SOFTCAP, E_SIGMOID, E_SILU, E_SIGMOID_ROW };

KERNEL(element, ElementArgs, 256, 1) {
    wait_for_inputs();
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i >= a.n) return;
    float x = a.x[i];
    switch (a.op) {
        case E_COPY: x = a.y[i]; break;
        case E_SCALE: x = x * (a.factor ? *a.factor : a.constant); break;
        case E_ADD: x = x + a.y[i]; break;
        case E_GLU: x = glu_(a.kind, a.alpha, a.limit, x, a.y[i]); break;
        case E_SOFTCAP: x = a.constant * tanh_(x / a.constant); break;
        case E_SIGMOID: x = x * sigmoid_(a.y[i]); break;
        case E_SILU: x = x * silu_(a.y[i]); break;
        case E_SIGMOID_ROW: x = x * sigmoid_(a.y[i / a.width]); break;
    }
    a.x[i] = x;
}

struct SplitArgs {
    const float* src;      // [rows * heads, 2 * dim]
    float* query;
    float* gate;
    u64 n;                 // rows * heads * dim
    u32 dim, pad;
};

KERNEL(split_heads, SplitArgs, 256, 1) {
    wait_for_inputs();
    u64 i = (u64)blockIdx.x * 256 + threadIdx.x;
    if (i >= a.n) return;
    u64 head = i / a.dim, e = i % a.dim;
    a.query[i] = a.src[head * 2 * a.dim + e];
    a.gate[i] = a.src[head * 2 * a.dim + a.dim + e];
}

// Gathers rows of the residual stream for the head.
struct GatherArgs {
    const float* src;      // [.., width]
    const u32* rows;       // [n]
    float* dst;            // [n, width]
    u32 width, pad;
};

KERNEL(gather, GatherArgs, 256, 1) {
    wait_for_inputs();
    u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i < a.width) a.dst[(u64)blockIdx.y * a.width + i] = a.src[(u64)a.rows[blockIdx.y] * a.width + i];
}
