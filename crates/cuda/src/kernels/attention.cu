// Softmax attention over paged keys and values: the order of `crates/cpu/src/attention/mod.rs`. Few rows: every block of
// 32 positions by itself (attend_blocks), then each query merges its blocks in ascending order (attend_merge). Many rows:
// a tile of queries walks the blocks and merges as it goes (attend_tile). Not here: writing pages (heads.cu).

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

// Bytes of a page, as f32 in shared memory: 16 bytes per load, all under way at once.
D void widen(const u8* from, float* to, u32 n, u32 kv_type, u32 threads) {
    u32 per = kv_type == 0 ? 4 : kv_type == 1 ? 8 : 16;
    for (u32 i = threadIdx.x; i < n / per; i += threads) {
        uint4 x = *(const uint4*)(from + 16 * i);
        u32 words[4] = {x.x, x.y, x.z, x.w};
        float* out = to + i * per;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (kv_type == 0) out[k] = float_of(words[k]);
            if (kv_type == 1) {
                out[2 * k] = half_to_float((u16)words[k]);
                out[2 * k + 1] = half_to_float((u16)(words[k] >> 16));
            }
            if (kv_type == 2)
                for (int j = 0; j < 4; j++) out[4 * k + j] = (float)(i8)(words[k] >> (8 * j) & 0xff);
        }
    }
}

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
    u32 half, adjacent;
};

// The same for one row, whose heads are normed and turned here, by every block for itself; the block that the row's
// position is in stores its key and value. What earlier steps stored is read before the kernel in front has ended.
KERNEL(attend_row, AttendRowArgs, 256, 3) {
    DYNAMIC_SHARED(shared);
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

// Block (head, row), a thread per dimension (rounded up to warps): merges, sink, division, gate, packing.
KERNEL(attend_merge, AttendArgs, 512, 1) {
    DYNAMIC_SHARED(shared);
    u32 room = (a.max_blocks + 15) / 16 * 16;
    float* old_ = (float*)shared;    // [room]
    float* new_ = old_ + room;
    float* ls = new_ + room;
    float* ms = ls + room;           // maxima, then running maxima
    u32 row = blockIdx.y, head = blockIdx.x, d = threadIdx.x, position = a.positions[row];
    wait_for_inputs();
    u32 n = position / 32 - first_visible(position, a.window) / 32 + 1;
    u64 at = ((u64)row * a.n_heads + head) * a.max_blocks;
    const float* parts = a.parts + at * a.dim + (d < a.dim ? d : 0);
    float part[16];
#pragma unroll
    for (int i = 0; i < 16; i++) part[i] = parts[(u64)((u32)i < n ? i : n - 1) * a.dim];
    for (u32 b = threadIdx.x; b < n; b += blockDim.x) {
        float2 v = *(const float2*)(a.part_ml + 2 * (at + b));
        ms[b] = v.x;
        new_[b] = v.x;
        ls[b] = v.y;
    }
    block_barrier();
    if (threadIdx.x < 32) {
        // Running maxima by a scan, so that the exponentials do not wait for each other.
        float carry = -INF;
        for (u32 b0 = 0; b0 < n; b0 += 32) {
            u32 b = b0 + threadIdx.x;
            float m = b < n ? ms[b] : -INF;
            for (int k = 1; k < 32; k <<= 1) {
                float other = shuffle(m, (int)threadIdx.x - k < 0 ? (int)threadIdx.x : (int)threadIdx.x - k);
                m = other > m ? other : m;
            }
            m = carry > m ? carry : m;
            if (b < n) ms[b] = m;
            carry = shuffle(m, 31);
        }
    }
    block_barrier();
    for (u32 b = threadIdx.x; b < n; b += blockDim.x) {
        float m = ms[b], before = b ? ms[b - 1] : -INF;
        old_[b] = exp_(before - m);
        new_[b] = exp_(new_[b] - m);
    }
    block_barrier();
    float l = 0.0f, acc = 0.0f;
    for (u32 b = 0; b < n; b += 16) {
        float now[16], o[16], w[16], s[16];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            now[i] = part[i];
            o[i] = old_[b + i];
            w[i] = new_[b + i];
            s[i] = ls[b + i];
        }
        if (b + 16 < n) {
#pragma unroll
            for (int i = 0; i < 16; i++) part[i] = parts[(u64)(b + 16 + i < n ? b + 16 + i : n - 1) * a.dim];
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float x = fma_(l, o[i], s[i] * w[i]), y = fma_(acc, o[i], now[i] * w[i]);
            l = b + i < n ? x : l;
            acc = b + i < n ? y : acc;
        }
    }
    let_next_start();
    float last_m = ms[n - 1];
    if (a.sinks) {
        float sink = a.sinks[head], max = sink > last_m ? sink : last_m;
        float old = exp_(last_m - max);
        l = fma_(l, old, exp_(sink - max));
        acc = acc * old;
    }
    float v = acc / l;
    u64 place = (u64)row * a.n_heads * a.dim + head * a.dim + d;
    if (a.gate && d < a.dim) v = v * sigmoid_(a.gate[place]);
    if (d < a.dim) a.out[place] = v;
    if (a.codes) {
        u32 block = (head * a.dim + d) / 32;
        pack_block(v, a.codes + row * a.row_codes + 32 * block, a.meta + row * a.row_meta + 16 * block);
    }
}

// Block (tile of rows, kv head), 256 threads; QT queries = rows x group. A thread keeps 4 queries x DT dimensions.
template <int QT, int DT>
D void tile_body(const AttendArgs& a, float* shared) {
    constexpr u32 JT = QT / 32;            // positions of a thread's scores
    constexpr u32 QUADS = QT / 4, LANES = 256 / QUADS;
    u32 group = a.n_heads / a.n_kv_heads, dim = a.dim;
    float* keys = shared;                  // [dim][32]
    float* values = keys + dim * 32;       // [32][dim]
    float* q = values + dim * 32;          // [dim][QT]
    float* p = q + dim * QT;               // [32][QT]
    float* old_ = p + 32 * QT;             // [QT]
    float* new_ = old_ + QT;
    float* m = new_ + QT;
    float* l = m + QT;
    float* scales = l + QT;                // [2][32]
    u32 row0 = a.tiles[2 * blockIdx.x], n_rows = a.tiles[2 * blockIdx.x + 1], head = blockIdx.y;
    u32 queries = n_rows * group;
    for (u32 i = threadIdx.x; i < QT * dim; i += 256) {
        u32 x = i / dim, d = i % dim;
        q[d * QT + x] = x < queries ? a.q[((u64)(row0 + x / group) * a.n_heads + head * group + x % group) * dim + d] : 0.0f;
    }
    for (u32 i = threadIdx.x; i < QT; i += 256) {
        m[i] = -INF;
        l[i] = 0.0f;
    }
    u32 first = first_visible(a.positions[row0], a.window) / 32, last = a.positions[row0 + n_rows - 1] / 32;
    const u32* table = a.tables + a.row_sequence[row0] * a.table_len;
    u32 size = a.kv_type == 0 ? 4 : a.kv_type == 1 ? 2 : 1;
    u32 quad = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    float acc[4][DT];
    for (int x = 0; x < 4; x++)
        for (int k = 0; k < DT; k++) acc[x][k] = 0.0f;
    for (u32 b = first; b <= last; b++) {
        const u8* kp = head_of_page((u8*)a.pages, a.page_bytes, table[b], head, dim, a.kv_type);
        const u8* vp = kp + (u64)dim * 32 * size;
        block_barrier();
        widen(kp, keys, dim * 32, a.kv_type, 256);
        widen(vp, values, dim * 32, a.kv_type, 256);
        if (a.kv_type == 2 && threadIdx.x < 64) scales[threadIdx.x] = ((const float*)(vp + (u64)dim * 32 * size))[threadIdx.x];
        block_barrier();
        {
            // Scores: 4 queries x JT positions per thread.
            constexpr u32 JL = 32 / JT;
            u32 xs = threadIdx.x / JL * 4, j0 = threadIdx.x % JL * JT;
            float s[4][JT];
            for (int x = 0; x < 4; x++)
                for (u32 j = 0; j < JT; j++) s[x][j] = 0.0f;
#pragma unroll 4
            for (u32 d = 0; d < dim; d++) {
                float4 qs = *(const float4*)(q + d * QT + xs);
                float ks[JT];
                for (u32 j = 0; j < JT; j++) ks[j] = keys[d * 32 + j0 + j];
                for (u32 j = 0; j < JT; j++) {
                    s[0][j] = fma_(qs.x, ks[j], s[0][j]);
                    s[1][j] = fma_(qs.y, ks[j], s[1][j]);
                    s[2][j] = fma_(qs.z, ks[j], s[2][j]);
                    s[3][j] = fma_(qs.w, ks[j], s[3][j]);
                }
            }
            for (int x = 0; x < 4; x++)
                for (u32 j = 0; j < JT; j++) {
                    float v = s[x][j];
                    if (a.kv_type == 2) v = v * scales[j0 + j];
                    p[(j0 + j) * QT + xs + x] = v * a.scale;
                }
        }
        block_barrier();
        // Softmax numerators: four threads per query, eight positions each; one of them sums.
        if (threadIdx.x < 4 * QT) {
            u32 x = threadIdx.x / 4, part = threadIdx.x & 3;
            u32 position = a.positions[row0 + (x < queries ? x / group : 0)];
            u32 seen = first_visible(position, a.window);
            u32 lo = seen > b * 32 ? seen - b * 32 : 0;
            u32 hi = position + 1 <= b * 32 ? 0 : position + 1 - b * 32 < 32 ? position + 1 - b * 32 : 32;
            float max = -INF;
            for (u32 j = part * 8; j < part * 8 + 8; j++) {
                float s = p[j * QT + x];
                if (j >= lo && j < hi && s > -INF && s > max) max = s;
            }
            float other = shuffle_xor(max, 1);
            max = other > max ? other : max;
            other = shuffle_xor(max, 2);
            max = other > max ? other : max;
            for (u32 j = part * 8; j < part * 8 + 8; j++) {
                float s = p[j * QT + x];
                p[j * QT + x] = j >= lo && j < hi ? exp_(s - max) : 0.0f;
            }
            warp_barrier();
            if (part == 0) {
                float sum = 0.0f;
                for (u32 j = 0; j < 32; j++) sum = sum + p[j * QT + x];
                if (lo < hi) {
                    float before = m[x], now = max > before ? max : before;
                    float o = exp_(before - now), w = exp_(max - now);
                    old_[x] = o;
                    new_[x] = w;
                    m[x] = now;
                    l[x] = fma_(l[x], o, sum * w);
                } else {
                    new_[x] = -1.0f;  // sees nothing of this block
                }
            }
            warp_barrier();
            if (a.kv_type == 2)
                for (u32 j = part * 8; j < part * 8 + 8; j++) p[j * QT + x] = p[j * QT + x] * scales[32 + j];
        }
        block_barrier();
        float sums[4][DT];
        for (int x = 0; x < 4; x++)
            for (int k = 0; k < DT; k++) sums[x][k] = 0.0f;
        u32 end = a.positions[row0 + n_rows - 1] + 1 - b * 32;
        end = end < 32 ? end : 32;
        for (u32 j = 0; j < end; j++) {
            float4 ps = *(const float4*)(p + j * QT + quad * 4);
#pragma unroll
            for (int k = 0; k < DT; k += 4) {
                u32 d = lane * 4 + (k / 4) * LANES * 4;
                if (d >= dim) continue;
                float4 v = *(const float4*)(values + j * dim + d);
                float w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int y = 0; y < 4; y++) {
                    sums[0][k + y] = fma_(ps.x, w[y], sums[0][k + y]);
                    sums[1][k + y] = fma_(ps.y, w[y], sums[1][k + y]);
                    sums[2][k + y] = fma_(ps.z, w[y], sums[2][k + y]);
                    sums[3][k + y] = fma_(ps.w, w[y], sums[3][k + y]);
                }
            }
        }
#pragma unroll
        for (int x = 0; x < 4; x++) {
            float o = old_[quad * 4 + x], w = new_[quad * 4 + x];
            if (w < 0.0f) continue;
#pragma unroll
            for (int k = 0; k < DT; k++) acc[x][k] = fma_(acc[x][k], o, sums[x][k] * w);
        }
    }
#pragma unroll
    for (int x = 0; x < 4; x++) {
        u32 query = quad * 4 + x;
        if (query >= queries) continue;
        u32 h = head * group + query % group;
        float sum = l[query], factor = 1.0f;
        if (a.sinks) {
            float sink = a.sinks[h], before = m[query], max = sink > before ? sink : before;
            factor = exp_(before - max);
            sum = fma_(sum, factor, exp_(sink - max));
        }
        float* out = a.out + ((u64)(row0 + query / group) * a.n_heads + h) * dim;
#pragma unroll
        for (int k = 0; k < DT; k++) {
            u32 d = lane * 4 + (k / 4) * LANES * 4 + (k & 3);
            if (d >= dim) continue;
            float v = acc[x][k];
            if (a.sinks) v = v * factor;
            out[d] = v / sum;
        }
    }
}

KERNEL(attend_tile_64, AttendArgs, 256, 2) {
    DYNAMIC_SHARED(shared);
    wait_for_inputs();
    tile_body<64, 4>(a, (float*)shared);
}
KERNEL(attend_tile_128, AttendArgs, 256, 2) {
    DYNAMIC_SHARED(shared);
    wait_for_inputs();
    tile_body<64, 8>(a, (float*)shared);
}
KERNEL(attend_tile_256, AttendArgs, 256, 1) {
    DYNAMIC_SHARED(shared);
    wait_for_inputs();
    tile_body<64, 16>(a, (float*)shared);
}
KERNEL(attend_tile_512, AttendArgs, 256, 1) {
    DYNAMIC_SHARED(shared);
    wait_for_inputs();
    tile_body<32, 16>(a, (float*)shared);
}
