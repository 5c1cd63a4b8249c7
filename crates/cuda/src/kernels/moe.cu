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
        // As integers the keys are ordered like the floats; both zeros are one.
        u32 bits = best == 0.0f ? 0 : bits_of(best);
        u32 key = at == 0xffffffffu ? 0 : bits >> 31 ? ~bits : bits | 0x80000000u;
        u32 top = warp_max(key);
        at = warp_min(key == top ? at : 0xffffffffu);
        best = float_of(warp_max(key == top && (at & 31) == lane ? bits_of(best) : 0));
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

// One block of threads. The order of an expert's pairs is whatever it is: every row is computed by itself.
KERNEL(sort_pairs, SortArgs, 1024, 1) {
    DYNAMIC_SHARED(shared);
    u32* count = (u32*)shared;         // [experts]
    u32* next = count + a.experts;     // [experts]: where an expert's next pair goes
    wait_for_inputs();
    for (u32 e = threadIdx.x; e < a.experts; e += 1024) count[e] = 0;
    block_barrier();
    for (u32 i = threadIdx.x; i < a.pairs; i += 1024) add_shared(count + a.ids[i], 1);
    block_barrier();
    if (threadIdx.x == 0) {
        u32 at = 0, tiles = 0;
        for (u32 e = 0; e < a.experts; e++) {
            u32 n = count[e];
            next[e] = at;
            for (u32 start = 0; start < n; start += a.tile) {
                u32* out = a.tiles + 3 * tiles++;
                out[0] = e;
                out[1] = at + start;
                out[2] = start + a.tile < n ? at + start + a.tile : at + n;
            }
            at += n;
        }
        *a.n_tiles = tiles;
    }
    block_barrier();
    for (u32 i = threadIdx.x; i < a.pairs; i += 1024) a.sorted[add_shared(next + a.ids[i], 1)] = i;
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
