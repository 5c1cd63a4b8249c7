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
    wait_for_inputs();
    NormedRow row = norm_row(a.x, a.width, a.eps, x, scale, &factor);
    let_next_start();
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
    if (threadIdx.x == 0) a.out[o] = a.bias ? acc + a.bias[o] : acc;
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
};

// This block's part of an expert's down matrix, into the second-level cache.
D void prefetch_down(const ExpertUpArgs& a, u32 expert) {
    const Matrix& m = a.down;
    u64 per_expert = (u64)(m.rows / a.experts) * m.blocks * (m.width == W_8 ? 32 : 16);
    u64 share = (per_expert / gridDim.x + 127) / 128 * 128, from = blockIdx.x * share;
    const u8* at = m.codes + expert * per_expert + from;
    u64 n = from >= per_expert ? 0 : per_expert - from < share ? per_expert - from : share;
    for (u64 i = (u64)128 * threadIdx.x; i < n; i += (u64)128 * blockDim.x) prefetch(at + i);
}

// Hidden values of a block's 32 inner rows: four rows per warp, the weights of both products under way at once.
template <int W, int K>
D void expert_rows(const ExpertUpArgs& a, u32 expert, const u8* planes, float* hidden) {
    constexpr int U = half_depth_of<W>();
    u32 k = threadIdx.x / 32 * 4 + (threadIdx.x & 3), i = blockIdx.x * 32 + k, most = a.inter - 1;
    u32 row = expert * a.inter + (i < most ? i : most), pair = blockIdx.y;
    Lane<W, K, U> gates, ups;
    load_lane(a.gate, row, gates);
    load_lane(a.up, row, ups);
    if (a.logits) prefetch_down(a, expert);
    float g = lane_dot(a.gate, row, gates, planes);
    float u = lane_dot(a.up, row, ups, planes);
    if ((threadIdx.x & 28) == 0) {
        float x = a.gate_bias ? g + a.gate_bias[row] : g;
        float y = a.up_bias ? u + a.up_bias[row] : u;
        float h = glu_(a.activation, a.alpha, a.limit, x, y);
        hidden[k] = h;
        if (a.hidden && i < a.inter) a.hidden[(u64)pair * a.inter + i] = h;
    }
}

// The expert of rank `rank` by the logits: as many before it as its rank, ties going to the lower number. `logits` and
// `ranks` have a place per expert in shared memory; `chosen` one per rank. Every thread of the block.
D void choose(const ExpertUpArgs& a, float* logits, u32* ranks, u32* chosen) {
    u32 n = a.experts, room = (n + 3) / 4 * 4;
    for (u32 e = threadIdx.x; e < room; e += blockDim.x) {
        logits[e] = e < n ? a.logits[e] : -INF;
        ranks[e] = 0;
    }
    if (threadIdx.x < a.top_k) chosen[threadIdx.x] = 0;
    block_barrier();
    // With more threads than experts, some share an expert, each looking at a part of the others.
    u32 parts = n <= blockDim.x ? blockDim.x / n : 1, share = (room / 4 + parts - 1) / parts;
    for (u32 i = threadIdx.x; i < n * parts; i += blockDim.x) {
        u32 e = i % n, from = i / n * share, end = from + share < room / 4 ? from + share : room / 4, before = 0;
        float mine = logits[e];
#pragma unroll 4
        for (u32 q = from; q < end; q++) {
            float4 v = ((const float4*)logits)[q];
            before += v.x > mine || (v.x == mine && 4 * q < e);
            before += v.y > mine || (v.y == mine && 4 * q + 1 < e);
            before += v.z > mine || (v.z == mine && 4 * q + 2 < e);
            before += v.w > mine || (v.w == mine && 4 * q + 3 < e);
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

// Block (32 inner rows, pair): hidden = act(gate x) * (up x), packed at once.
KERNEL(expert_up, ExpertUpArgs, 256, 4) {
    DYNAMIC_SHARED(shared);
    __shared__ float hidden[32];
    __shared__ u32 chosen[64];
    float* logits = (float*)shared;                                      // [E], then ranks [E]
    u8* planes = (u8*)(logits + 2 * ((a.experts + 3) / 4 * 4));          // of the row
    u32 pair = blockIdx.y, variant = a.variant_gate == a.variant_up ? a.variant_gate : V_ANY, expert;
    wait_for_inputs();
    u32 row = pair / a.top_k;
    share_row(a.acts.codes + row * a.acts.row_codes, a.acts.meta + row * a.acts.row_meta, a.gate.blocks, planes,
              threadIdx.x, blockDim.x);
    if (a.logits) {
        choose(a, logits, (u32*)(logits + (a.experts + 3) / 4 * 4), chosen);
        expert = chosen[pair];
    } else {
        expert = a.ids[pair];
        block_barrier();
    }
    FOR_VARIANT(variant, (expert_rows<W, K>(a, expert, planes, hidden)))
    let_next_start();
    block_barrier();
    if (a.codes && threadIdx.x < 32)
        pack_block(hidden[threadIdx.x], a.codes + pair * a.row_codes + 32 * blockIdx.x,
                   a.meta + pair * a.row_meta + 16 * blockIdx.x);
    if (a.logits && blockIdx.x == 0 && pair == 0 && threadIdx.x / 32 == 1) store_choice(a, logits, chosen);
}

struct ExpertDownArgs {
    Matrix down;         // [E * d, inter]
    Acts acts;           // [pairs], inter wide
    const float* bias;   // [E, d] or null
    const u16* ids;      // [rows, top_k]
    const float* weights;
    float* out;          // [rows, d]
    Ahead ahead;
    u32 d, top_k, add, variant, passes, pad;
};

// A warp's outputs of one expert: four, or eight in two passes that are under way together.
template <int W, int K>
D void down_dots(const ExpertDownArgs& a, u32 expert, u32 o, const u8* codes, const u8* meta, u8* planes, u32 groups,
                 float* out) {
    constexpr int U = half_depth_of<W>();
    u32 r = threadIdx.x & 3, last = a.d - 1, most = expert * a.d + last;
    u32 row = expert * a.d + o + r, next = row + 4;
    row = row < most ? row : most;
    next = next < most ? next : most;
    Lane<W, K, U> p, q;
    load_lane(a.down, row, p);
    if (a.passes == 2) load_lane(a.down, next, q);
    // Rows of all ranks, by the warps that need them.
    share_row(codes, meta, a.down.blocks, planes, threadIdx.x % (32 * groups), 32 * groups);
    block_barrier();
    float y = lane_dot(a.down, row, p, planes);
    if ((threadIdx.x & 28) == 0) out[r] = a.bias ? y + a.bias[row] : y;
    if (a.passes == 2) {
        y = lane_dot(a.down, next, q, planes);
        if ((threadIdx.x & 28) == 0) out[4 + r] = a.bias ? y + a.bias[next] : y;
    }
}

// Block (4 * passes * (8 / top_k) outputs, row): the chosen experts' outputs, summed in rank order. top_k <= 8.
KERNEL(expert_down, ExpertDownArgs, 256, 4) {
    DYNAMIC_SHARED(shared);
    __shared__ float part[64];
    u32 groups = 8 / a.top_k, warp = threadIdx.x / 32, each = 4 * a.passes, outs = each * groups;
    u32 rank = warp / groups, row = blockIdx.y, within = each * (warp % groups), o = blockIdx.x * outs + within;
    prefetch_ahead(a.ahead);
    wait_for_inputs();
    // Warps beyond the last rank repeat its work into a place of their own.
    u32 safe = rank < a.top_k ? rank : a.top_k - 1, pair = row * a.top_k + safe;
    const u8* codes = a.acts.codes + pair * a.acts.row_codes;
    const u8* meta = a.acts.meta + pair * a.acts.row_meta;
    u8* planes = shared + 48 * a.down.blocks * rank;
    float* out = part + outs * rank + within;
    FOR_VARIANT(a.variant, (down_dots<W, K>(a, a.ids[pair], o, codes, meta, planes, groups, out)))
    let_next_start();
    block_barrier();
    u32 mine = blockIdx.x * outs + threadIdx.x;
    if (threadIdx.x >= outs || mine >= a.d) return;
    float sum = 0.0f;
    for (u32 k = 0; k < a.top_k; k++) sum = fma_(a.weights[row * a.top_k + k], part[k * outs + threadIdx.x], sum);
    float* to = a.out + (u64)row * a.d + mine;
    *to = a.add ? *to + sum : sum;
}
