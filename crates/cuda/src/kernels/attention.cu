// Softmax attention of few rows over paged keys and values: the order of `crates/cpu/src/attention/mod.rs`. Every block of
// 32 positions by itself (attend_blocks), then each query merges its blocks in ascending order (attend_merge).
// Not here: many rows (attention_tile.cu), writing pages (heads.cu).

struct AttendArgs {
    const float* q;           // [rows, n_heads, dim]
    float* out;               // [rows, n_heads, dim]
    const float* sinks;       // [n_heads] or null
    const u8* pages;
    const u32* tables;        // [sequences, table_len]
    const u32* positions;     // [rows]
    const u32* row_sequence;  // [rows]
    const u32* tiles;         // attend_tile: [tiles][2] {first row, rows}
    float* parts;             // attend_blocks: [rows, n_heads, max_blocks, dim]
    float* part_ml;           // [rows, n_heads, max_blocks, 2]
    const float* gate;        // attend_merge: multiplied by its sigmoid, or null
    u8* codes;                // attend_merge: packed output, or null
    u8* meta;
    u64 page_bytes, row_codes, row_meta;
    u32 rows, n_heads, n_kv_heads, dim, table_len, kv_type, window, max_blocks;  // window 0: none
    float scale;
    u32 group;                // heads of a kv head
};

D u32 first_visible(u32 position, u32 window) { return window && position + 1 > window ? position + 1 - window : 0; }

template <int TYPE>
D float kv_at(const u8* p, u32 i) {
    if (TYPE == 1) return half_to_float(((const u16*)p)[i]);
    if (TYPE == 0) return ((const float*)p)[i];
    return (float)((const i8*)p)[i];
}

// Two neighbouring positions of a key's dimension.
template <int TYPE>
D float2 kv_pair(const u8* p, u32 i) {
    float2 v;
    if (TYPE == 0) return *(const float2*)(p + 4 * i);
    if (TYPE == 1) {
        u32 x = *(const u32*)(p + 2 * i);
        v.x = half_to_float((u16)x);
        v.y = half_to_float((u16)(x >> 16));
    } else {
        u32 x = *(const u16*)(p + i);
        v.x = (float)(i8)(x & 0xff);
        v.y = (float)(i8)(x >> 8);
    }
    return v;
}

// Where a block of positions is, for one row and kv head.
struct Place { u32 row, head, position, lo, hi, slot; bool fresh; u8* page; };

// What waits in shared memory: queries of the group, a few numbers apart so that two heads lie in different banks;
// probabilities; keys, values and their scales as in the page.
struct Waiting { float* q; float* p; u8* kv; u32 stride; };

D Waiting waiting(const AttendArgs& a, u8* shared) {
    Waiting w;
    u32 group = a.group;
    w.stride = a.dim + 4;
    w.q = (float*)shared;                    // [group][stride]
    w.p = w.q + (group + 2) * w.stride;      // [group][32], behind room for the row's own key and value
    w.kv = (u8*)(w.p + group * 32);
    return w;
}

// False: nothing is visible in this block.
D bool find_place(const AttendArgs& a, Place& at) {
    at.row = blockIdx.z;
    at.head = blockIdx.y;
    at.position = a.positions[at.row];
    u32 seen = first_visible(at.position, a.window), b = seen / 32 + blockIdx.x;
    if (b > at.position / 32) return false;
    at.lo = seen > b * 32 ? seen - b * 32 : 0;
    at.hi = at.position + 1 - b * 32 < 32 ? at.position + 1 - b * 32 : 32;
    at.fresh = b == at.position / 32;
    at.slot = at.position & 31;
    u32 page = a.tables[a.row_sequence[at.row] * a.table_len + b];
    at.page = head_of_page((u8*)a.pages, a.page_bytes, page, at.head, a.dim, a.kv_type);
    return true;
}

D u32 kv_bytes(const AttendArgs& a) {
    u32 size = a.kv_type == 0 ? 4 : a.kv_type == 1 ? 2 : 1;
    return 2 * a.dim * 32 * size + (a.kv_type == 2 ? 256 : 0);
}

D void share_page(const u8* page, u8* to, u32 bytes) {
    fetch<4>(page, bytes / 16, threadIdx.x, 256, [=](u32 i, uint4 v) { ((uint4*)to)[i] = v; });
}

// Weighted values of a thread's dimension, for N heads `step` apart, which share its loads.
template <int TYPE, int N>
D void weigh(const u8* values, const float* p, u32 dim, u32 d, u32 step, u32 lo, u32 hi, float acc[N]) {
#pragma unroll
    for (int k = 0; k < N; k++) acc[k] = 0.0f;
    if (lo == 0 && hi == 32) {
#pragma unroll 4
        for (u32 j = 0; j < 32; j += 4) {
            float v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = kv_at<TYPE>(values, (j + i) * dim + d);
#pragma unroll
            for (int k = 0; k < N; k++) {
                float4 w = *(const float4*)(p + k * step * 32 + j);
                acc[k] = fma_(w.x, v[0], acc[k]);
                acc[k] = fma_(w.y, v[1], acc[k]);
                acc[k] = fma_(w.z, v[2], acc[k]);
                acc[k] = fma_(w.w, v[3], acc[k]);
            }
        }
    } else {
#pragma unroll 4
        for (u32 j = 0; j < 32; j++) {
            float v = kv_at<TYPE>(values, j * dim + d);
#pragma unroll
            for (int k = 0; k < N; k++) {
                float sum = fma_(p[k * step * 32 + j], v, acc[k]);
                acc[k] = j >= lo && j < hi ? sum : acc[k];
            }
        }
    }
}

// Probabilities of a head, with their largest score and sum; by a warp, a thread per position.
template <int TYPE>
D void head_scores(const AttendArgs& a, const Place& at, const Waiting& w, const float* scales, u32 h, u64 first) {
    u32 j = threadIdx.x & 31;
    const float* q = w.q + h * w.stride;
    float s = 0.0f;
#pragma unroll 4
    for (u32 d = 0; d < a.dim; d += 4) {
        float4 x = *(const float4*)(q + d);
        s = fma_(x.x, kv_at<TYPE>(w.kv, d * 32 + j), s);
        s = fma_(x.y, kv_at<TYPE>(w.kv, (d + 1) * 32 + j), s);
        s = fma_(x.z, kv_at<TYPE>(w.kv, (d + 2) * 32 + j), s);
        s = fma_(x.w, kv_at<TYPE>(w.kv, (d + 3) * 32 + j), s);
    }
    if (TYPE == 2) s = s * scales[j];
    s = s * a.scale;
    bool see = j >= at.lo && j < at.hi;
    float m = see && s > -INF ? s : -INF;
    for (int k = 16; k > 0; k >>= 1) {
        float other = shuffle_xor(m, k);
        m = other > m ? other : m;
    }
    float e = see ? exp_(s - m) : 0.0f;
    float* p = w.p + h * 32;
    p[j] = e;
    warp_barrier();
    if (j == 0) {
        float l = 0.0f;
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
            float4 x = *(const float4*)(p + i);
            l = l + x.x;
            l = l + x.y;
            l = l + x.z;
            l = l + x.w;
        }
        u64 to = (first + h) * a.max_blocks + blockIdx.x;
        a.part_ml[2 * to] = m;
        a.part_ml[2 * to + 1] = l;
    }
    if (TYPE == 2) {
        warp_barrier();
        p[j] = e * scales[32 + j];
    }
}

// Queries, keys and values are waiting; 256 threads.
template <int TYPE>
D void blocks_body(const AttendArgs& a, const Place& at, const Waiting& w) {
    constexpr u32 SIZE = TYPE == 0 ? 4 : TYPE == 1 ? 2 : 1;
    u32 group = a.group, dim = a.dim, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const u8* values = w.kv + dim * 32 * SIZE;
    const float* scales = (const float*)(values + dim * 32 * SIZE);
    u64 first = (u64)at.row * a.n_heads + at.head * group;
    // A warp has a head, or, where heads are many, two, and a thread two positions.
    if (group <= 8 && warp < group) head_scores<TYPE>(a, at, w, scales, warp, first);
    u32 j = 2 * (lane & 15);
    for (u32 h0 = group <= 8 ? group : 2 * warp; h0 < group; h0 += 16) {
        u32 h = h0 + lane / 16;
        bool there = h < group;
        const float* q = w.q + (there ? h : group - 1) * w.stride;
        float s = 0.0f, t = 0.0f;
#ifdef FOREBAY_FREE_ORDER
        float s2 = 0.0f, t2 = 0.0f;
#endif
#pragma unroll 4
        for (u32 d = 0; d < dim; d += 4) {
            float4 x = *(const float4*)(q + d);
            float2 k0 = kv_pair<TYPE>(w.kv, d * 32 + j), k1 = kv_pair<TYPE>(w.kv, (d + 1) * 32 + j);
            float2 k2 = kv_pair<TYPE>(w.kv, (d + 2) * 32 + j), k3 = kv_pair<TYPE>(w.kv, (d + 3) * 32 + j);
#ifdef FOREBAY_FREE_ORDER
            s = fma_(x.x, k0.x, s); t = fma_(x.x, k0.y, t);
            s2 = fma_(x.y, k1.x, s2); t2 = fma_(x.y, k1.y, t2);
            s = fma_(x.z, k2.x, s); t = fma_(x.z, k2.y, t);
            s2 = fma_(x.w, k3.x, s2); t2 = fma_(x.w, k3.y, t2);
#else
            s = fma_(x.x, k0.x, s);
            t = fma_(x.x, k0.y, t);
            s = fma_(x.y, k1.x, s);
            t = fma_(x.y, k1.y, t);
            s = fma_(x.z, k2.x, s);
            t = fma_(x.z, k2.y, t);
            s = fma_(x.w, k3.x, s);
            t = fma_(x.w, k3.y, t);
#endif
        }
#ifdef FOREBAY_FREE_ORDER
        s = s + s2;
        t = t + t2;
#endif
        if (TYPE == 2) {
            s = s * scales[j];
            t = t * scales[j + 1];
        }
        s = s * a.scale;
        t = t * a.scale;
        bool see_s = j >= at.lo && j < at.hi, see_t = j + 1 >= at.lo && j + 1 < at.hi;
        float m = see_s && s > -INF ? s : -INF;
        m = see_t && t > m ? t : m;
        for (int k = 8; k > 0; k >>= 1) {
            float other = shuffle_xor(m, k);
            m = other > m ? other : m;
        }
        float e = see_s ? exp_(s - m) : 0.0f, f = see_t ? exp_(t - m) : 0.0f;
        float* p = w.p + h * 32;
        if (there) {
            p[j] = e;
            p[j + 1] = f;
        }
        warp_barrier();
#ifdef FOREBAY_FREE_ORDER
        float l = join_16(e + f);
#else
        float l = 0.0f;
        if (there && j == 0) {
            float v[32];
#pragma unroll
            for (int i = 0; i < 32; i += 4) {
                float4 x = *(const float4*)(p + i);
                v[i] = x.x;
                v[i + 1] = x.y;
                v[i + 2] = x.z;
                v[i + 3] = x.w;
            }
#pragma unroll
            for (int i = 0; i < 32; i++) l = l + v[i];
        }
#endif
        if (there && j == 0) {
            u64 to = (first + h) * a.max_blocks + blockIdx.x;
            a.part_ml[2 * to] = m;
            a.part_ml[2 * to + 1] = l;
        }
        warp_barrier();
        if (TYPE == 2 && there) {
            p[j] = e * scales[32 + j];
            p[j + 1] = f * scales[32 + j + 1];
        }
    }
    block_barrier();
    float* parts = a.parts + (first * a.max_blocks + blockIdx.x) * dim;
    u64 head_parts = (u64)a.max_blocks * dim;
    if (dim <= 256 && (dim & (dim - 1)) == 0) {
        u32 d = threadIdx.x & (dim - 1), shift = count_bits(dim - 1), step = 256 >> shift, h = threadIdx.x >> shift;
        if ((group & (4 * step - 1)) == 0) {
            for (; h < group; h += 4 * step) {
                float acc[4];
                weigh<TYPE, 4>(values, w.p + h * 32, dim, d, step, at.lo, at.hi, acc);
#pragma unroll
                for (int k = 0; k < 4; k++) parts[(h + k * step) * head_parts + d] = acc[k];
            }
        } else {
            for (; h < group; h += step) {
                float acc[1];
                weigh<TYPE, 1>(values, w.p + h * 32, dim, d, step, at.lo, at.hi, acc);
                parts[h * head_parts + d] = acc[0];
            }
        }
        return;
    }
    for (u32 i = threadIdx.x; i < group * dim; i += 256) {
        u32 h = i / dim, d = i % dim;
        float acc[1];
        weigh<TYPE, 1>(values, w.p + h * 32, dim, d, 0, at.lo, at.hi, acc);
        parts[h * head_parts + d] = acc[0];
    }
}

D void blocks_of_type(const AttendArgs& a, const Place& at, const Waiting& w) {
    if (a.kv_type == 1) blocks_body<1>(a, at, w);
    else if (a.kv_type == 0) blocks_body<0>(a, at, w);
    else blocks_body<2>(a, at, w);
}

// Block (block of positions from the first visible one, kv head, row). Keys and values of the block wait in shared
// memory; 16 | dim.
KERNEL(attend_blocks, AttendArgs, 256, 2) {
    DYNAMIC_SHARED(shared);
    wait_for_inputs();
    let_next_start();
    Place at;
    if (!find_place(a, at)) return;
    Waiting w = waiting(a, shared);
    share_page(at.page, w.kv, kv_bytes(a));
    u32 group = a.group;
    const float* src = a.q + ((u64)at.row * a.n_heads + at.head * group) * a.dim;
    for (u32 i = threadIdx.x; i < group * a.dim; i += 256) w.q[i / a.dim * w.stride + i % a.dim] = src[i];
    block_barrier();
    blocks_of_type(a, at, w);
}

struct AttendRowArgs {
    AttendArgs a;
    HeadPart parts[3];     // q, k, v as the products left them
    const float* angles;   // [2, half]
    Ahead ahead;
    u32 half, adjacent;
};

// The same for one row, whose heads are normed and turned here, by every block for itself; the block that the row's
// position is in stores its key and value. What earlier steps stored is read before the kernel in front has ended.
KERNEL(attend_row, AttendRowArgs, 256, 4) {
    DYNAMIC_SHARED(shared);
    prefetch_ahead(a.ahead);
    Place at;
    if (!find_place(a.a, at)) return;
    Waiting w = waiting(a.a, shared);
    u32 group = a.a.group, dim = a.a.dim, warp = threadIdx.x / 32;
    share_page(at.page, w.kv, kv_bytes(a.a));
    wait_for_inputs();
    let_next_start();
    // The page in shared memory is complete before the row's own key and value go into it.
    block_barrier();
    Angles angles;
    angles.cos = a.angles;
    angles.sin = a.angles + a.half;
    u32 heads = group + (at.fresh ? 2 : 0);
    // The row's own key and value are turned by second halves of warps where queries are few.
    for (u32 i0 = warp; i0 < heads; i0 += dim <= 128 ? 16 : 8) {
        u32 i = i0 + (dim <= 128 && threadIdx.x & 16 ? 8 : 0);
        bool there = i < heads;
        i = there ? i : i0;
        u32 which = i < group ? 0 : i - group + 1, head = which ? at.head : at.head * group + i;
        const HeadPart& part = a.parts[which];
        float* x = w.q + i * w.stride;
        if (dim <= 128) ready_half(part, part.x + head * dim, angles, dim, a.half, a.adjacent, there, x);
        else ready_head(part, part.x + head * dim, angles, dim, a.half, a.adjacent, x);
    }
    block_barrier();
    if (at.fresh) {
        const float* key = w.q + group * w.stride;
        if (a.a.kv_type < 2) {
            store_both(w.kv, at.slot, key, key + w.stride, dim, a.a.kv_type);
        } else if (warp < 2) {
            store_head(at.page, warp + 1, at.slot, key + warp * w.stride, dim, a.a.kv_type);
            store_head(w.kv, warp + 1, at.slot, key + warp * w.stride, dim, a.a.kv_type);
        }
        block_barrier();
    }
    blocks_of_type(a.a, at, w);
    // Nobody waits for what later steps read.
    if (at.fresh && a.a.kv_type < 2) {
        const float* key = w.q + group * w.stride;
        store_both(at.page, at.slot, key, key + w.stride, dim, a.a.kv_type);
    }
}

// Blocks of positions whose sums wait in shared memory at a time while they are merged.
#define MERGED 128

// Sums of `n` blocks of positions from block `first` on, 32 dimensions of each, to shared memory; by 256 threads.
D void share_parts(const float* from, u32 dim, u32 first, u32 n, u32 quads, float* to) {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < n * 8; i += 4 * 256) {
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 j = i + 256 * k;
            fresh_16((const u8*)(from + (u64)(first + j / 8) * dim + 4 * (j & 7)), j < n * 8 && (j & 7) < quads, &v[k]);
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 j = i + 256 * k;
            if (j < n * 8 && (j & 7) < quads) ((uint4*)to)[j] = v[k];
        }
    }
}

// Largest scores and sums of 32 blocks of positions, a thread each, from block 32 c on, and the largest before those.
struct Chunk { float m, l, before; };

// All loads of what is in front of the first four chunks are under way at once.
D Chunk load_chunk(const float* ml, u32 n, u32 c) {
    u32 lane = threadIdx.x & 31, b = 32 * c + lane;
    Chunk k;
    k.m = k.before = -INF;
    k.l = 0.0f;
    float earlier[3];
    if (b < n) {
        k.m = fresh_4(ml + 2 * b);
        k.l = fresh_4(ml + 2 * b + 1);
    }
#pragma unroll
    for (u32 p = 0; p < 3; p++) earlier[p] = p < c && 32 * c < n ? fresh_4(ml + 2 * (32 * p + lane)) : -INF;
#pragma unroll
    for (int p = 0; p < 3; p++) k.before = earlier[p] > k.before ? earlier[p] : k.before;
    for (u32 p = 3; p < c; p++) {
        float m = fresh_4(ml + 2 * (32 * p + lane));
        k.before = m > k.before ? m : k.before;
    }
    return k;
}

// What each block of a chunk and the sum of those before it are multiplied by; by a warp. Running maxima by a scan, so that
// the exponentials do not wait for each other.
D void merge_factors(Chunk k, u32 n, u32 c, float2* factors, float* ls, float* ms) {
    u32 lane = threadIdx.x & 31, b = 32 * c + lane;
    float m = k.m, carry = k.before;
    for (int i = 16; i > 0; i >>= 1) {
        float other = shuffle_xor(carry, i);
        carry = other > carry ? other : carry;
    }
    for (int i = 1; i < 32; i <<= 1) {
        float other = shuffle(m, (int)lane - i < 0 ? (int)lane : (int)lane - i);
        m = other > m ? other : m;
    }
    m = carry > m ? carry : m;
    float before = shuffle(m, lane ? (int)lane - 1 : 0);
    before = lane ? before : carry;
    if (b >= n) return;
    float2 f;
    f.x = exp_(before - m);
    f.y = exp_(k.m - m);
    factors[b] = f;
    ls[b] = k.l;
    ms[b] = m;
}

// Block (32 dimensions of a head, row): merges, sink, division, gate, packing. 256 threads bring what is merged to shared
// memory; a warp, a thread per dimension, makes the sums of values, another that of probabilities.
KERNEL(attend_merge, AttendArgs, 256, 1) {
    DYNAMIC_SHARED(shared);
    u32 most = a.max_blocks, slices = (a.dim + 31) / 32, room = most < MERGED ? most : MERGED;
    float* parts = (float*)shared;                    // [room][32]
    float2* factors = (float2*)(parts + 32 * room);  // [most]: of what is before a block, of the block
    float* ls = (float*)(factors + most);             // [most]
    float* ms = ls + most;                            // [most], running maxima
    __shared__ float total;
    u32 row = blockIdx.y, head = blockIdx.x / slices, d0 = (blockIdx.x - head * slices) * 32, position = a.positions[row];
    u32 dims = a.dim - d0 < 32 ? a.dim - d0 : 32, lane = threadIdx.x & 31;
    u32 n = position / 32 - first_visible(position, a.window) / 32 + 1;
    u64 at = ((u64)row * a.n_heads + head) * most;
    const float* from = a.parts + at * a.dim + d0;
    float sink = ahead_4(a.sinks, head);
    wait_for_inputs();
    let_next_start();
    u32 warp = threadIdx.x / 32;
    Chunk chunk = load_chunk(a.part_ml + 2 * at, n, warp);
    float acc = 0.0f;
    for (u32 b0 = 0; b0 < n; b0 += MERGED) {
        u32 here = n - b0 < MERGED ? n - b0 : MERGED;
        if (b0) block_barrier();
        share_parts(from, a.dim, b0, here, dims / 4, parts);
        if (b0 == 0 && 32 * warp < n) {
            merge_factors(chunk, n, warp, factors, ls, ms);
            for (u32 c = warp + 8; 32 * c < n; c += 8)
                merge_factors(load_chunk(a.part_ml + 2 * at, n, c), n, c, factors, ls, ms);
        }
        block_barrier();
        if (warp > 1) continue;
        // Eight at a time, so that the sums do not wait for shared memory.
        const float* terms = warp ? ls + b0 : parts + lane;
        u32 apart = warp ? 1 : 32;
#pragma unroll 1
        for (u32 b = 0; b < here; b += 8) {
            float o[8], x[8];
#pragma unroll
            for (int k = 0; k < 8; k++) {
                u32 i = b + k < here ? b + k : b;
                float2 f = factors[b0 + i];
                o[k] = f.x;
                x[k] = terms[i * apart] * f.y;
            }
#pragma unroll
            for (int k = 0; k < 8; k++) {
                float next = fma_(acc, o[k], x[k]);
                acc = b + k < here ? next : acc;
            }
        }
    }
    if (threadIdx.x == 32) total = acc;
    block_barrier();
    if (warp) return;
    float l = total;
    float last_m = ms[n - 1];
    if (a.sinks) {
        float max = sink > last_m ? sink : last_m;
        float old = exp_(last_m - max);
        l = fma_(l, old, exp_(sink - max));
        acc = acc * old;
    }
    float v = acc / l;
    u32 d = d0 + lane;
    u64 place = (u64)row * a.n_heads * a.dim + head * a.dim + d;
    if (a.gate && lane < dims) v = v * sigmoid_(a.gate[place]);
    if (lane < dims) a.out[place] = v;
    if (a.codes) {
        u32 b = (head * a.dim + d0) / 32;
        pack_block(v, a.codes + row * a.row_codes + 32 * b, a.meta + row * a.row_meta + 16 * b);
    }
}
