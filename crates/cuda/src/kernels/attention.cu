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
    u32 pad;
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
    u32 group = a.n_heads / a.n_kv_heads;
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
        for (u32 j = lo; j < hi; j++) {
            float v = kv_at<TYPE>(values, j * dim + d);
#pragma unroll
            for (int k = 0; k < N; k++) acc[k] = fma_(p[k * step * 32 + j], v, acc[k]);
        }
    }
}

// Queries, keys and values are waiting; 256 threads.
template <int TYPE>
D void blocks_body(const AttendArgs& a, const Place& at, const Waiting& w) {
    constexpr u32 SIZE = TYPE == 0 ? 4 : TYPE == 1 ? 2 : 1;
    u32 group = a.n_heads / a.n_kv_heads, dim = a.dim, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    const u8* values = w.kv + dim * 32 * SIZE;
    const float* scales = (const float*)(values + dim * 32 * SIZE);
    u64 first = (u64)at.row * a.n_heads + at.head * group;
    // A warp has two heads, a thread two positions.
    u32 j = 2 * (lane & 15);
    for (u32 h0 = 2 * warp; h0 < group; h0 += 16) {
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
    let_next_start();
    block_barrier();
    float* parts = a.parts + (first * a.max_blocks + blockIdx.x) * dim;
    u64 head_parts = (u64)a.max_blocks * dim;
    if (dim <= 256 && 256 % dim == 0) {
        u32 d = threadIdx.x % dim, step = 256 / dim, h = threadIdx.x / dim;
        if (group % (4 * step) == 0) {
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
    Place at;
    if (!find_place(a, at)) return;
    Waiting w = waiting(a, shared);
    share_page(at.page, w.kv, kv_bytes(a));
    u32 group = a.n_heads / a.n_kv_heads;
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
    u32 group = a.a.n_heads / a.a.n_kv_heads, dim = a.a.dim, warp = threadIdx.x / 32;
    share_page(at.page, w.kv, kv_bytes(a.a));
    wait_for_inputs();
    // The page in shared memory is complete before the row's own key and value go into it.
    block_barrier();
    Angles angles;
    angles.cos = a.angles;
    angles.sin = a.angles + a.half;
    for (u32 i = warp; i < group + (at.fresh ? 2 : 0); i += 8) {
        u32 which = i < group ? 0 : i - group + 1, head = which ? at.head : at.head * group + i;
        const HeadPart& part = a.parts[which];
        float* x = w.q + i * w.stride;
        ready_head(part, part.x + head * dim, angles, dim, a.half, a.adjacent, x);
        if (which) {
            store_head(at.page, which, at.slot, x, dim, a.a.kv_type);
            store_head(w.kv, which, at.slot, x, dim, a.a.kv_type);
        }
    }
    block_barrier();
    blocks_of_type(a.a, at, w);
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

// What each of `n` blocks and the sum of those before it are multiplied by; by one warp. Running maxima by a scan, so
// that the exponentials do not wait for each other.
D void merge_factors(const float* ml, u32 n, float* old_, float* new_, float* ls, float* ms) {
    u32 lane = threadIdx.x & 31;
    float carry = -INF;
    for (u32 b0 = 0; b0 < n; b0 += 32) {
        u32 b = b0 + lane;
        bool there = b < n;
        float mine = there ? fresh_4(ml + 2 * b) : -INF, l = there ? fresh_4(ml + 2 * b + 1) : 0.0f, m = mine;
        for (int k = 1; k < 32; k <<= 1) {
            float other = shuffle(m, (int)lane - k < 0 ? (int)lane : (int)lane - k);
            m = other > m ? other : m;
        }
        m = carry > m ? carry : m;
        float before = shuffle(m, lane ? (int)lane - 1 : 0);
        before = lane ? before : carry;
        if (there) {
            ms[b] = m;
            ls[b] = l;
            old_[b] = exp_(before - m);
            new_[b] = exp_(mine - m);
        }
        carry = shuffle(m, 31);
    }
}

// Block (32 dimensions of a head, row): merges, sink, division, gate, packing. 256 threads bring what is merged to shared
// memory; a warp, a thread per dimension, makes the sums.
KERNEL(attend_merge, AttendArgs, 256, 1) {
    DYNAMIC_SHARED(shared);
    u32 most = a.max_blocks, slices = (a.dim + 31) / 32, room = most < MERGED ? most : MERGED;
    float* parts = (float*)shared;          // [room][32]
    float* old_ = parts + 32 * room;        // [most], as the three after it
    float* new_ = old_ + most;
    float* ls = new_ + most;
    float* ms = ls + most;                  // running maxima
    u32 row = blockIdx.y, head = blockIdx.x / slices, d0 = blockIdx.x % slices * 32, position = a.positions[row];
    u32 dims = a.dim - d0 < 32 ? a.dim - d0 : 32, lane = threadIdx.x & 31;
    u32 n = position / 32 - first_visible(position, a.window) / 32 + 1;
    u64 at = ((u64)row * a.n_heads + head) * most;
    const float* from = a.parts + at * a.dim + d0;
    wait_for_inputs();
    float l = 0.0f, acc = 0.0f;
    for (u32 b0 = 0; b0 < n; b0 += MERGED) {
        u32 here = n - b0 < MERGED ? n - b0 : MERGED;
        if (b0) block_barrier();
        share_parts(from, a.dim, b0, here, dims / 4, parts);
        if (b0 == 0 && threadIdx.x < 32) merge_factors(a.part_ml + 2 * at, n, old_, new_, ls, ms);
        block_barrier();
        if (threadIdx.x >= 32) continue;
        // Eight at a time, so that the sums do not wait for shared memory.
#pragma unroll 1
        for (u32 b = 0; b < here; b += 8) {
            float o[8], x[8], y[8];
#pragma unroll
            for (int k = 0; k < 8; k++) {
                u32 i = b + k < here ? b + k : b;
                float w = new_[b0 + i];
                o[k] = old_[b0 + i];
                x[k] = ls[b0 + i] * w;
                y[k] = parts[32 * i + lane] * w;
            }
#pragma unroll
            for (int k = 0; k < 8; k++) {
                float next_l = fma_(l, o[k], x[k]), next = fma_(acc, o[k], y[k]);
                l = b + k < here ? next_l : l;
                acc = b + k < here ? next : acc;
            }
        }
    }
    let_next_start();
    if (threadIdx.x >= 32) return;
    float last_m = ms[n - 1];
    if (a.sinks) {
        float sink = a.sinks[head], max = sink > last_m ? sink : last_m;
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
