// Softmax attention of many rows: a tile of queries walks the blocks of positions, and merges as it goes, in the order of
// `crates/cpu/src/attention/mod.rs`. Not here: few rows (attention.cu).

// Keys [dim][32] or values [32][dim] of a page, as f32 in shared memory, a key's rows `stride` numbers apart; 16 bytes per
// load. Neighbouring threads store different halves first, so that stores meet all banks.
D void widen(const u8* from, float* to, u32 dim, bool of_keys, u32 stride, u32 kv_type) {
    u32 per = 4 << kv_type, loads = 3 - kv_type;  // numbers of a load; log of a key row's loads
    fetch<4>(from, dim * 32 / per, threadIdx.x, 256, [=](u32 i, uint4 x) {
        u32 at = of_keys ? (i >> loads) * stride + (i & ((1 << loads) - 1)) * per : i * per;
        float4* out = (float4*)(to + at);
        if (kv_type == 0) {
            *(uint4*)out = x;
        } else if (kv_type == 1) {
            u32 words[4] = {x.x, x.y, x.z, x.w};
            float4 v[2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                v[k].x = half_to_float((u16)words[2 * k]);
                v[k].y = half_to_float((u16)(words[2 * k] >> 16));
                v[k].z = half_to_float((u16)words[2 * k + 1]);
                v[k].w = half_to_float((u16)(words[2 * k + 1] >> 16));
            }
            bool swap = threadIdx.x & 4;
            out[swap] = swap ? v[1] : v[0];
            out[!swap] = swap ? v[0] : v[1];
        } else {
            u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float4 v;
                v.x = (float)(i8)(words[k] & 0xff);
                v.y = (float)(i8)(words[k] >> 8 & 0xff);
                v.z = (float)(i8)(words[k] >> 16 & 0xff);
                v.w = (float)(i8)(words[k] >> 24);
                out[k] = v;
            }
        }
    });
}

// Where the score of query `x` and position `j` of a round lies: four queries together, and groups turned from row to row, so
// that neither a row's writers nor a query's readers meet in one bank.
template <int QT>
D u32 score_at(u32 j, u32 x) { return j * QT + ((x / 4 + j / 4) % (QT / 4)) * 4 + x % 4; }

// Block (tile of rows, kv head), 256 threads; QT queries = rows x group. A round is NB blocks of positions: their scores are
// made at once, their softmax and sums one after the other. A thread keeps 4 queries x DT dimensions.
template <int QT, int DT, int NB>
D void tile_body(const AttendArgs& a, float* shared) {
    constexpr u32 P = 32 * NB;             // positions of a round
    constexpr u32 JT = QT * NB / 32;       // positions of a thread's scores
    constexpr u32 QUADS = QT / 4, LANES = 256 / QUADS;
    constexpr u32 PARTS = 256 / (QT * NB), EACH = 32 / PARTS;  // threads for a query and block, positions of one
    u32 group = a.n_heads / a.n_kv_heads, dim = a.dim;
    float* keys = shared;                  // [dim][P], then scores [P][QT]
    float* values = keys + (dim > QT ? dim : QT) * P;  // [P][dim]
    float* q = values + dim * P;           // [dim][QT]
    float* p = keys;
    float* old_ = q + dim * QT;            // [NB][QT]
    float* new_ = old_ + NB * QT;          // [NB][QT]
    float* m = new_ + NB * QT;             // [QT]
    float* l = m + QT;                     // [QT]
    float* scales = l + QT;                // [2][P]
    // Tiles that see most come first.
    u32 tile = gridDim.x - 1 - blockIdx.x;
    u32 row0 = a.tiles[2 * tile], n_rows = a.tiles[2 * tile + 1], head = blockIdx.y;
    u32 queries = n_rows * group;
    for (u32 i = threadIdx.x; i < QT * dim; i += 256) {
        u32 x = i / dim, d = i % dim;
        q[d * QT + x] = x < queries ? a.q[((u64)(row0 + x / group) * a.n_heads + head * group + x % group) * dim + d] : 0.0f;
    }
    for (u32 i = threadIdx.x; i < QT; i += 256) {
        m[i] = -INF;
        l[i] = 0.0f;
    }
    u32 end_position = a.positions[row0 + n_rows - 1] + 1;
    u32 first = first_visible(a.positions[row0], a.window) / 32, last = (end_position - 1) / 32;
    const u32* table = a.tables + a.row_sequence[row0] * a.table_len;
    u32 size = a.kv_type == 0 ? 4 : a.kv_type == 1 ? 2 : 1;
    u32 quad = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    // Of scores: queries and positions of this thread; of softmax: query, block, part.
    constexpr u32 JL = P / JT;
    u32 xs = threadIdx.x / JL * 4, j0 = threadIdx.x % JL * JT;
    u32 x = threadIdx.x / (PARTS * NB), nb = threadIdx.x / PARTS % NB, part = threadIdx.x % PARTS;
    u32 position = a.positions[row0 + (x < queries ? x / group : 0)], seen = first_visible(position, a.window);
    float acc[4][DT];
#pragma unroll
    for (int i = 0; i < 4 * DT; i++) acc[i / DT][i % DT] = 0.0f;
    for (u32 b0 = first; b0 <= last; b0 += NB) {
        block_barrier();
#pragma unroll 1
        for (u32 k = 0; k < NB && b0 + k <= last; k++) {
            const u8* kp = head_of_page((u8*)a.pages, a.page_bytes, table[b0 + k], head, dim, a.kv_type);
            const u8* vp = kp + (u64)dim * 32 * size;
            widen(kp, keys + 32 * k, dim, true, P, a.kv_type);
            widen(vp, values + 32 * k * dim, dim, false, 0, a.kv_type);
            if (a.kv_type == 2 && threadIdx.x < 64)
                scales[threadIdx.x / 32 * P + 32 * k + threadIdx.x % 32] = ((const float*)(vp + (u64)dim * 32 * size))[threadIdx.x];
        }
        block_barrier();
        float s[JT][4];
#pragma unroll
        for (int i = 0; i < 4 * JT; i++) s[i / 4][i % 4] = 0.0f;
#pragma unroll 4
        for (u32 d = 0; d < dim; d++) {
            float4 qs = *(const float4*)(q + d * QT + xs);
            float ks[JT];
            if (JT == 4) {
                float4 v = *(const float4*)(keys + d * P + j0);
                ks[0] = v.x;
                ks[1 % JT] = v.y;
                ks[2 % JT] = v.z;
                ks[3 % JT] = v.w;
            } else {
#pragma unroll
                for (u32 j = 0; j < JT; j++) ks[j] = keys[d * P + j0 + j];
            }
#pragma unroll
            for (u32 j = 0; j < JT; j++) {
                s[j][0] = fma_(qs.x, ks[j], s[j][0]);
                s[j][1] = fma_(qs.y, ks[j], s[j][1]);
                s[j][2] = fma_(qs.z, ks[j], s[j][2]);
                s[j][3] = fma_(qs.w, ks[j], s[j][3]);
            }
        }
        block_barrier();
#pragma unroll
        for (u32 j = 0; j < JT; j++) {
            float scale = a.kv_type == 2 ? scales[j0 + j] : 1.0f;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                float v = s[j][k];
                if (a.kv_type == 2) v = v * scale;
                s[j][k] = v * a.scale;
            }
            float4 v;
            v.x = s[j][0];
            v.y = s[j][1];
            v.z = s[j][2];
            v.w = s[j][3];
            *(float4*)(p + score_at<QT>(j0 + j, xs)) = v;
        }
        block_barrier();
        {
            // Softmax numerators of a query and block, by PARTS neighbouring threads; their sum goes from one to the next.
            float e[EACH], max = -INF, sum = 0.0f;
            u32 b = b0 + nb, from = part * EACH;
            u32 lo = seen > b * 32 ? seen - b * 32 : 0;
            u32 hi = position + 1 <= b * 32 ? 0 : position + 1 - b * 32 < 32 ? position + 1 - b * 32 : 32;
#pragma unroll
            for (u32 j = 0; j < EACH; j++) {
                e[j] = p[score_at<QT>(32 * nb + from + j, x)];
                bool sees = from + j >= lo && from + j < hi;
                if (sees && e[j] > -INF && e[j] > max) max = e[j];
            }
#pragma unroll
            for (u32 k = 1; k < PARTS; k <<= 1) {
                float other = shuffle_xor(max, k);
                max = other > max ? other : max;
            }
#pragma unroll
            for (u32 j = 0; j < EACH; j++) {
                bool sees = from + j >= lo && from + j < hi;
                e[j] = sees ? exp_(e[j] - max) : 0.0f;
            }
            u32 me = threadIdx.x & 31, base = me / PARTS * PARTS;
#pragma unroll
            for (u32 k = 0; k < PARTS; k++) {
                float mine = sum;
#pragma unroll
                for (u32 j = 0; j < EACH; j++) mine = mine + e[j];
                sum = shuffle(mine, (int)(base + k));
            }
#pragma unroll
            for (u32 j = 0; j < EACH; j++) {
                float v = e[j];
                if (a.kv_type == 2) v = v * scales[P + 32 * nb + from + j];
                p[score_at<QT>(32 * nb + from + j, x)] = v;
            }
            float m_now = m[x], l_now = l[x];
            warp_barrier();
            u32 group0 = me / (PARTS * NB) * (PARTS * NB);
#pragma unroll
            for (u32 k = 0; k < NB; k++) {
                float max_k = shuffle(max, (int)(group0 + k * PARTS)), sum_k = shuffle(sum, (int)(group0 + k * PARTS));
                u32 start = (b0 + k) * 32;
                float o = 0.0f, w = -1.0f;  // sees nothing of this block
                if (start <= position && start + 32 > seen) {
                    float now = max_k > m_now ? max_k : m_now;
                    o = exp_(m_now - now);
                    w = exp_(max_k - now);
                    m_now = now;
                    l_now = fma_(l_now, o, sum_k * w);
                }
                if (me == group0) {
                    old_[k * QT + x] = o;
                    new_[k * QT + x] = w;
                }
            }
            if (me == group0) {
                m[x] = m_now;
                l[x] = l_now;
            }
        }
        block_barrier();
#pragma unroll 1
        for (u32 k = 0; k < NB && b0 + k <= last; k++) {
            float sums[4][DT];
#pragma unroll
            for (int i = 0; i < 4 * DT; i++) sums[i / DT][i % DT] = 0.0f;
            u32 end = end_position - (b0 + k) * 32;
            end = end < 32 ? end : 32;
#pragma unroll 2
            for (u32 j = 0; j < end; j++) {
                float4 ps = *(const float4*)(p + score_at<QT>(32 * k + j, quad * 4));
#pragma unroll
                for (int i = 0; i < DT; i += 4) {
                    u32 d = lane * 4 + (i / 4) * LANES * 4;
                    if (d >= dim) continue;
                    float4 v = *(const float4*)(values + (32 * k + j) * dim + d);
                    float w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int y = 0; y < 4; y++) {
                        sums[0][i + y] = fma_(ps.x, w[y], sums[0][i + y]);
                        sums[1][i + y] = fma_(ps.y, w[y], sums[1][i + y]);
                        sums[2][i + y] = fma_(ps.z, w[y], sums[2][i + y]);
                        sums[3][i + y] = fma_(ps.w, w[y], sums[3][i + y]);
                    }
                }
            }
#pragma unroll
            for (int y = 0; y < 4; y++) {
                float o = old_[k * QT + quad * 4 + y], w = new_[k * QT + quad * 4 + y];
                if (w < 0.0f) continue;
#pragma unroll
                for (int i = 0; i < DT; i++) acc[y][i] = fma_(acc[y][i], o, sums[y][i] * w);
            }
        }
    }
#pragma unroll
    for (int y = 0; y < 4; y++) {
        u32 query = quad * 4 + y;
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
            float v = acc[y][k];
            if (a.sinks) v = v * factor;
            out[d] = v / sum;
        }
    }
}

KERNEL(attend_tile_64, AttendArgs, 256, 2) {
    DYNAMIC_SHARED(shared);
    wait_for_inputs();
    tile_body<64, 4, 2>(a, (float*)shared);
}
KERNEL(attend_tile_128, AttendArgs, 256, 2) {
    DYNAMIC_SHARED(shared);
    wait_for_inputs();
    tile_body<64, 8, 2>(a, (float*)shared);
}
KERNEL(attend_tile_256, AttendArgs, 256, 1) {
    DYNAMIC_SHARED(shared);
    wait_for_inputs();
    tile_body<64, 16, 2>(a, (float*)shared);
}
KERNEL(attend_tile_512, AttendArgs, 256, 1) {
    DYNAMIC_SHARED(shared);
    wait_for_inputs();
    tile_body<32, 16, 1>(a, (float*)shared);
}
