// Routing: top-k and weights of every row, the sorting of (row, rank) pairs by expert for many rows, and the weighted sum of
// the experts' outputs. Nothing is read back. Not here: the experts' products (gemv.cu, gemm.cu).

struct RouteArgs {
    const float* logits;       // [rows, E]
    const float* expert_scale; // [E] or null
    u16* ids;                  // [rows, top_k]
    float* weights;            // [rows, top_k]
    u32* fault;                // layer + 1 of a row whose logits are not numbers
    u32 rows, experts, top_k, all, layer, pad;  // all: softmax over all experts
};

// A warp per row, up to 1024 experts: 32 per thread.
KERNEL(route, RouteArgs, 32, 1) {
    __shared__ float chosen[64];
    let_next_start();
    wait_for_inputs();
    u32 row = blockIdx.x, lane = threadIdx.x;
    const float* logits = a.logits + (u64)row * a.experts;
    u16* ids = a.ids + row * a.top_k;
    float v[32];
    u32 nan = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        u32 e = i * 32 + lane;
        v[i] = -INF;
        if (i * 32 < a.experts && e < a.experts) v[i] = logits[e];
        nan |= v[i] != v[i];
    }
    u32 taken = 0;  // bit i: v[i] was chosen
    float max = 0.0f;
    for (u32 k = 0; k < a.top_k; k++) {
        float best = -INF;
        u32 at = 0xffffffffu;
#pragma unroll
        for (int i = 0; i < 32; i++) {
            if (i * 32 >= a.experts) break;
            u32 e = i * 32 + lane;
            bool free = !(taken >> i & 1) && e < a.experts;
            if (free && (at == 0xffffffffu || v[i] > best)) {
                best = v[i];
                at = e;
            }
        }
        for (int m = 16; m > 0; m >>= 1) {
            float other = shuffle_xor(best, m);
            u32 there = shuffle_xor_bits(at, m);
            if (there != 0xffffffffu && (at == 0xffffffffu || other > best || (other == best && there < at))) {
                best = other;
                at = there;
            }
        }
        if (at == 0xffffffffu) at = 0;
        if ((at & 31) == lane) taken |= 1u << (at >> 5);
        if (k == 0) max = best;
        if (lane == 0) {
            ids[k] = (u16)at;
            chosen[k] = exp_(best - max);
        }
    }
    for (int m = 16; m > 0; m >>= 1) nan |= shuffle_xor_bits(nan, m);
    if (lane == 0 && (nan || max == INF || max == -INF)) *a.fault = a.layer + 1;
    warp_barrier();
    float sum = 0.0f;
    if (a.all) {
        u32 l = lane & 15;
        for (u32 e = l; e < a.experts; e += 16) sum = sum + exp_(logits[e] - max);
        sum = join_16(sum);
    } else {
        for (u32 k = 0; k < a.top_k; k++) sum = sum + chosen[k];
    }
    for (u32 k = lane; k < a.top_k; k += 32) {
        float w = chosen[k] / sum;
        if (a.expert_scale) w = w * a.expert_scale[ids[k]];
        a.weights[row * a.top_k + k] = w;
    }
}

struct SortArgs {
    const u16* ids;   // [pairs]
    u32* sorted;      // [pairs]: pairs by expert, ascending within one
    u32* tiles;       // [][3] {expert, first, end}: up to 32 of `sorted` each
    u32* n_tiles;
    u32 pairs, experts, tile, pad;
};

// One block of 1024 threads: thread e owns experts e, e + 1024, .. and reads all ids: pairs stay in order.
KERNEL(sort_pairs, SortArgs, 1024, 1) {
    DYNAMIC_SHARED(shared);
    u32* count = (u32*)shared;            // [experts], then where an expert's pairs start
    u32* tile_start = count + a.experts;  // [experts + 1]
    wait_for_inputs();
    for (u32 e = threadIdx.x; e < a.experts; e += 1024) count[e] = 0;
    block_barrier();
    u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    // A warp counts the pairs of its experts, 32 ids at a time.
    for (u32 e = warp; e < a.experts; e += 32) {
        u32 n = 0;
        for (u32 i = lane; i < a.pairs; i += 32) n += a.ids[i] == e;
        for (int m = 16; m > 0; m >>= 1) n += shuffle_xor_bits(n, m);
        if (lane == 0) count[e] = n;
    }
    block_barrier();
    if (threadIdx.x == 0) {
        u32 at = 0, tiles = 0;
        for (u32 e = 0; e < a.experts; e++) {
            u32 n = count[e];
            count[e] = at;
            tile_start[e] = tiles;
            at += n;
            tiles += (n + a.tile - 1) / a.tile;
        }
        tile_start[a.experts] = tiles;
        *a.n_tiles = tiles;
    }
    block_barrier();
    for (u32 e = warp; e < a.experts; e += 32) {
        u32 at = count[e], first = at;
        for (u32 i0 = 0; i0 < a.pairs; i0 += 32) {
            u32 i = i0 + lane;
            u32 mine = i < a.pairs && a.ids[i] == e ? 1 : 0;
            u32 mask = mine << lane;
            for (int m = 16; m > 0; m >>= 1) mask |= shuffle_xor_bits(mask, m);
            u32 before = mask & ((1u << lane) - 1), n = 0, all = 0;
            for (u32 x = before; x; x &= x - 1) n++;
            for (u32 x = mask; x; x &= x - 1) all++;
            if (mine) a.sorted[at + n] = i;
            at += all;
        }
        u32 t = tile_start[e];
        for (u32 start = first + lane * a.tile; start < at; start += 32 * a.tile) {
            u32* out = a.tiles + 3 * (t + (start - first) / a.tile);
            out[0] = e;
            out[1] = start;
            out[2] = start + a.tile < at ? start + a.tile : at;
        }
    }
}

struct CombineArgs {
    const float* parts;    // [rows, top_k, d]
    const float* weights;  // [rows, top_k]
    float* out;            // [rows, d]
    u32 d, top_k, add, pad;
};

KERNEL(combine, CombineArgs, 256, 1) {
    wait_for_inputs();
    u32 i = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    if (i >= a.d) return;
    float sum = 0.0f;
    for (u32 k = 0; k < a.top_k; k++)
        sum = fma_(a.weights[row * a.top_k + k], a.parts[((u64)row * a.top_k + k) * a.d + i], sum);
    float* out = a.out + (u64)row * a.d + i;
    *out = a.add ? *out + sum : sum;
}
