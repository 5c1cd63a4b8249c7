// Routed experts of a few (row, rank) pairs, and for one row the router in front of them: the norm with the router's
// product, then the choice, made by every block of the experts' first product for itself.
// Not here: many rows (gemm.cu, moe.cu).

struct RouterArgs {
    Matrix w;              // f32, [features, width]
    const float* x;        // [width]
    const float* weight;   // of the norm, or null
    const float* bias;     // [features] or null
    float* out;            // [features]
    float* dst;            // the norm's result [width], or null
    u8* codes[2];          // the same, packed, or null
    u8* meta[2];
    u32 width, features;
    float eps;
    u32 pad;
};

// Block: one output; the last one stores the row. 32 | width.
KERNEL(router, RouterArgs, 256, 3) {
    DYNAMIC_SHARED(shared);
    __shared__ float factor;
    float* x = (float*)shared;       // [width]
    float* w = x + a.width;          // [width]
    float* scale = w + a.width;      // [width]
    u32 o = blockIdx.x;
    bool product = o < a.features;
    share_floats(a.weight, a.width, scale);
    if (product) share_floats((const float*)a.w.codes + (u64)o * a.width, a.width, w);
    float bias = product ? ahead_4(a.bias, o) : 0.0f;
    wait_for_inputs();
    let_next_start();
    NormedRow row = norm_row(a.x, a.width, a.eps, x, scale, &factor);
    if (!product) {
        if (a.dst)
            for (u32 i = threadIdx.x; i < a.width / 4; i += blockDim.x) ((float4*)a.dst)[i] = normed(row, i);
        for (int p = 0; p < 2; p++)
            if (a.codes[p]) pack_row(row, a.width, a.codes[p], a.codes[p] + 16, a.meta[p], 32);
        return;
    }
    for (u32 i = threadIdx.x; i < a.width / 4; i += blockDim.x) {
        float4 v = normed(row, i);
        ((float4*)x)[i] = v;
    }
    block_barrier();
    if (threadIdx.x >= 32) return;
    float acc = dot_16(w, x, a.width);
    if (threadIdx.x == 0) a.out[o] = a.bias ? acc + bias : acc;
}

struct ExpertUpArgs {
    Matrix gate, up;           // [E * inter, d]
    Acts acts;                 // [rows], d wide
    const float* gate_bias;    // [E, inter] or null
    const float* up_bias;
    u16* ids;                  // [pairs]; written where `logits` are given
    u8* codes;                 // packed hidden [pairs][inter]
    u8* meta;
    float* hidden;             // instead, where down takes floats: [pairs, inter]
    const float* logits;       // one row: the choice is made here
    const float* expert_scale; // [E] or null
    float* weights;            // [pairs]
    u32* fault;
    Matrix down;               // what comes next: brought into the cache
    u64 row_codes, row_meta;
    u32 inter, top_k, activation, variant_gate, variant_up, experts, all, layer;
    float alpha, limit;
    u32 down_bytes, down_share;  // of an expert; of one of its blocks
};

// This block's part of an expert's down matrix, into the second-level cache.
D void prefetch_down(const ExpertUpArgs& a, u32 expert) {
    const Matrix& m = a.down;
    u32 from = blockIdx.x * a.down_share, end = from + a.down_share;
    end = end < a.down_bytes ? end : a.down_bytes;
    const u8* at = m.codes + (u64)expert * a.down_bytes;
#pragma unroll 1
    for (u32 i = from + 128 * threadIdx.x; i < end; i += 128 * 512) prefetch(at + i);
}

// Products of a block's 32 inner rows, four to a warp: with gate by the first half of the warps, with up by the others.
template <int W, int K>
D void expert_rows(const ExpertUpArgs& a, u32 expert, const u8* planes, float* sums) {
    u32 of_up = threadIdx.x >> 8, k = (threadIdx.x >> 5 & 7) * 4 + (threadIdx.x & 3), i = blockIdx.x * 32 + k;
    u32 most = a.inter - 1, row = expert * a.inter + (i < most ? i : most);
    const Matrix& m = of_up ? a.up : a.gate;
    Lane<W, K, depth_of<W>()> lane;
    load_lane(m, row, lane);
    if (a.logits) prefetch_down(a, expert);
    float y = lane_dot(m, row, lane, planes);
    if ((threadIdx.x & 28) == 0) sums[32 * of_up + k] = y;
}

// The hidden value of the thread's inner row, by a warp: stored, and packed with the others.
D void store_hidden(const ExpertUpArgs& a, u32 pair, float x, float y, float gate_bias, float up_bias) {
    u32 i = blockIdx.x * 32 + threadIdx.x;
    if (a.gate_bias) x = x + gate_bias;
    if (a.up_bias) y = y + up_bias;
    float h = glu_(a.activation, a.alpha, a.limit, x, y);
    if (a.hidden && i < a.inter) a.hidden[(u64)pair * a.inter + i] = h;
    if (a.codes) pack_block(h, a.codes + pair * a.row_codes + 32 * blockIdx.x, a.meta + pair * a.row_meta + 16 * blockIdx.x);
}

// Ordered like the floats, both zeros being one; all are between 0 and the largest number.
D u32 key_of(float x) {
    u32 bits = x == 0.0f ? 0 : bits_of(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Experts by rank of their logits: as many before one as its rank, ties going to the lower number. `keys` and `ranks`,
// zeros, have a place per expert in shared memory, up to a multiple of four, where keys are zeros; `chosen`, zeros, one per rank. By 512 threads.
D void choose(const ExpertUpArgs& a, const u32* keys, u32* ranks, u32* chosen) {
    // A warp compares all experts with its share of them.
    u32 n = a.experts, quads = (n + 3) / 4, share = (quads + 15) / 16, from = threadIdx.x / 32 * share;
    u32 end = from + share < quads ? from + share : quads;
#pragma unroll 1
    for (u32 e = threadIdx.x & 31; e < n && from < end; e += 32) {
        u32 mine = keys[e], before = 0;
#pragma unroll 1
        for (u32 q = from; q < end; q++) {
            uint4 v = ((const uint4*)keys)[q];
            before += v.x + (4 * q < e) > mine;
            before += v.y + (4 * q + 1 < e) > mine;
            before += v.z + (4 * q + 2 < e) > mine;
            before += v.w + (4 * q + 3 < e) > mine;
        }
        add_shared(ranks + e, before);
    }
    block_barrier();
    for (u32 e = threadIdx.x; e < n; e += blockDim.x)
        if (ranks[e] < a.top_k) chosen[ranks[e]] = e;
    block_barrier();
}

// Choice and weights, for the kernel that sums; by one warp of one block. As `route` computes them.
D void store_choice(const ExpertUpArgs& a, const float* logits, const u32* chosen) {
    u32 lane = threadIdx.x & 31, nan = 0;
    float max = logits[chosen[0]], sum = 0.0f;
    for (u32 e = lane; e < a.experts; e += 32) nan |= logits[e] != logits[e];
    nan = warp_max(nan);
    if (lane == 0 && (nan || max == INF || max == -INF)) *a.fault = a.layer + 1;
    if (a.all) {
        for (u32 e = lane & 15; e < a.experts; e += 16) sum = sum + exp_(logits[e] - max);
        sum = join_16(sum);
    } else {
        for (u32 k = 0; k < a.top_k; k++) sum = sum + exp_(logits[chosen[k]] - max);
    }
    for (u32 k = lane; k < a.top_k; k += 32) {
        float w = exp_(logits[chosen[k]] - max) / sum;
        if (a.expert_scale) w = w * a.expert_scale[chosen[k]];
        a.weights[k] = w;
        a.ids[k] = (u16)chosen[k];
    }
}

// Block (32 inner rows, pair), up to 512 experts: hidden = act(gate x) * (up x), packed at once.
KERNEL(expert_up, ExpertUpArgs, 512, 2) {
    DYNAMIC_SHARED(shared);
    __shared__ float sums[64];
    __shared__ u32 chosen[64];
    u32 room = (a.experts + 3) / 4 * 4, t = threadIdx.x;
    float* logits = (float*)shared;         // [E]
    u32* ranks = (u32*)(logits + room);     // [E]
    u32* keys = ranks + room;               // [E]
    u8* planes = (u8*)(keys + room);        // of the row
    u32 pair = blockIdx.y, variant = a.variant_gate == a.variant_up ? a.variant_gate : V_ANY, expert;
    if (t < 64) chosen[t] = 0;
    wait_for_inputs();
    let_next_start();
    u32 row = a.logits ? 0 : pair / a.top_k;
    // Logits and the row are under way together.
    float logit = -INF;
    if (a.logits && t < a.experts) logit = fresh_4(a.logits + t);
    share_row<1>(a.acts.codes + row * a.acts.row_codes, a.acts.meta + row * a.acts.row_meta, a.gate.blocks, planes, t, 512);
    if (a.logits) {
        if (t < room) {
            logits[t] = logit;
            keys[t] = t < a.experts ? key_of(logit) : 0;
            ranks[t] = 0;
        }
        block_barrier();
        choose(a, keys, ranks, chosen);
        expert = chosen[pair];
    } else {
        expert = a.ids[pair];
        block_barrier();
    }
    float gate_bias = 0.0f, up_bias = 0.0f;
    if (t < 32) {
        u32 i = blockIdx.x * 32 + t, most = a.inter - 1, at = expert * a.inter + (i < most ? i : most);
        gate_bias = ahead_4(a.gate_bias, at);
        up_bias = ahead_4(a.up_bias, at);
    }
    FOR_VARIANT(variant, (expert_rows<W, K>(a, expert, planes, sums)))
    block_barrier();
    if (t < 32) store_hidden(a, pair, sums[t], sums[32 + t], gate_bias, up_bias);
    if (a.logits && blockIdx.x == 0 && pair == 0 && t / 32 == 1) store_choice(a, logits, chosen);
}

struct ExpertDownArgs {
    Matrix down;         // [E * d, inter]
    Acts acts;           // [pairs], inter wide
    const float* bias;   // [E, d] or null
    const u16* ids;      // [rows, top_k]
    const float* weights;
    float* out;          // [rows, d]
    Ahead ahead;
    u32 d, top_k, add, variant;
    u32 shift;           // a rank has 1 << shift of the 16 warps
    u32 pad;
};

// A warp's four outputs of one expert.
template <int W, int K>
D void down_dots(const ExpertDownArgs& a, u32 expert, u32 o, const u8* codes, const u8* meta, u8* planes, u32 groups,
                 float* out) {
    u32 r = threadIdx.x & 3, row = expert * a.d + (o + r < a.d ? o + r : a.d - 1);
    Lane<W, K, depth_of<W>()> lane;
    load_lane(a.down, row, lane);
    float bias = ahead_4(a.bias, row);
    // Rows of all ranks, by the warps that need them.
    share_row<2>(codes, meta, a.down.blocks, planes, threadIdx.x & (32 * groups - 1), 32 * groups);
    block_barrier();
    float y = lane_dot(a.down, row, lane, planes);
    if ((threadIdx.x & 28) == 0) out[r] = a.bias ? y + bias : y;
}

// Block (4 << shift outputs, row): the chosen experts' outputs, summed in rank order. top_k <= 8.
KERNEL(expert_down, ExpertDownArgs, 512, 2) {
    DYNAMIC_SHARED(shared);
    __shared__ float part[128], weights[8];
    u32 groups = 1 << a.shift, warp = threadIdx.x / 32, outs = 4 * groups;
    u32 rank = warp >> a.shift, row = blockIdx.y, within = 4 * (warp & (groups - 1)), o = blockIdx.x * outs + within;
    prefetch_ahead(a.ahead);
    wait_for_inputs();
    let_next_start();
    // Warps beyond the last rank repeat its work into a place of their own.
    u32 safe = rank < a.top_k ? rank : a.top_k - 1, pair = row * a.top_k + safe;
    const u8* codes = a.acts.codes + pair * a.acts.row_codes;
    const u8* meta = a.acts.meta + pair * a.acts.row_meta;
    u8* planes = shared + 48 * a.down.blocks * rank;
    float* out = part + outs * rank + within;
    u32 mine = blockIdx.x * outs + threadIdx.x;
    float* to = a.out + (u64)row * a.d + mine;
    bool sums = threadIdx.x < outs && mine < a.d;
    if (threadIdx.x < a.top_k) weights[threadIdx.x] = fresh_4(a.weights + row * a.top_k + threadIdx.x);
    float old = sums && a.add ? fresh_4(to) : 0.0f;
    FOR_VARIANT(a.variant, (down_dots<W, K>(a, a.ids[pair], o, codes, meta, planes, groups, out)))
    block_barrier();
    if (!sums) return;
    float sum = 0.0f;
    for (u32 k = 0; k < a.top_k; k++) sum = fma_(weights[k], part[k * outs + threadIdx.x], sum);
    *to = a.add ? old + sum : sum;
}
