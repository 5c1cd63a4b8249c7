// Many activation rows: int8 tensor cores. A block of 32 columns gives exact integer sums; each becomes one (or two) f32
// terms of its lane. Warp w of a block of threads *is* lane w: it works through the weight blocks b = w mod 8 in ascending
// order, so no sum is shared between warps until the lanes are joined in the fixed tree. Eight blocks of columns, one per warp,
// are a round; rounds are copied to shared memory two ahead, rows a few bytes apart so that a warp's reads meet all banks.
// Tile: 64 output features x 32 activation rows. Not here: few rows (gemv.cu), the sorting of rows by expert (moe.cu).

struct GemmArgs {
    Matrix w;                 // [out, cols]; of experts [E * out, cols]
    Acts acts;
    const float* bias;        // [out] or [E, out] or null
    float* out;               // [.., stride]
    // Rows by expert: tiles[i] = {expert, first, end} in `pairs`; null: all rows in order.
    const u32* tiles;
    const u32* n_tiles;
    const u32* pairs;
    u32 rows, features, stride, divisor, add, variant;
};

#define TILE_M 64
#define TILE_N 32

// Sums of a tile's outputs for this warp's lane: acc[m][n][c], fragment order of the tensor cores.
template <int W, int K>
D void lane_sums(const GemmArgs& a, u32 row0, u32 last_row, const u8* const codes[4], const u8* const metas[8], u32 lane_w,
                 float acc[4][4][4]) {
    const Matrix& m = a.w;
    u32 width = W >= 0 ? (u32)W : m.width, kind = K >= 0 ? (u32)K : m.kind;
    u32 t = threadIdx.x & 3, g = (threadIdx.x & 31) >> 2;
    for (u32 b = lane_w; b < m.blocks; b += 8) {
        u32 b0[4], b1[4];
        uint4 meta[8];
        for (int n = 0; n < 4; n++) {
            uint2 x = load_8(codes[n] + 32 * b + 8 * t);
            b0[n] = x.x;
            b1[n] = x.y;
        }
        for (int n = 0; n < 8; n++) meta[n] = load_16(metas[n] + 16 * b);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 frag[4];
            Scale s[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 row = row0 + 16 * i + 8 * h + g;
                row = row < last_row ? row : last_row;
                u64 at = (u64)row * m.blocks + b;
                if (width == W_8) {
                    uint2 x = load_8(m.codes + 32 * at + 8 * t);
                    frag[h] = x.x;
                    frag[2 + h] = x.y;
                } else {
                    uint2 high;
                    high.x = high.y = 0;
                    if (width == W_6) high = load_8(m.high + 8 * at);
                    words_of<W>(m, load_4(m.codes + 16 * at + 4 * t), 0, high.x, high.y, t, &frag[h], &frag[2 + h]);
                }
                s[h] = scale_of<K>(m, row, b);
            }
#pragma unroll
            for (int n = 0; n < 4; n++) {
                if (has_halves(kind)) {
                    int first[4] = {0, 0, 0, 0}, last[4] = {0, 0, 0, 0};
                    mma_16(first, frag[0], frag[1], b0[n]);
                    mma_16(last, frag[2], frag[3], b1[n]);
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        const uint4& z = meta[2 * n + (c & 1)];
                        float scale = float_of(z.x);
                        int x = first[c] + m.plus * (int)z.z, y = last[c] + m.plus * (int)z.w;
                        float sum = acc[i][n][c];
                        sum = fma_((float)x, s[c >> 1].ws[0] * scale, sum);
                        if (has_bias(kind)) sum = fma_(s[c >> 1].wb[0], scale * (float)(int)z.z, sum);
                        sum = fma_((float)y, s[c >> 1].ws[1] * scale, sum);
                        if (has_bias(kind)) sum = fma_(s[c >> 1].wb[1], scale * (float)(int)z.w, sum);
                        acc[i][n][c] = sum;
                    }
                } else {
                    // The sum starts at the bits of 1.5 * 2^23: as a float it is that plus the integer, exactly.
                    int sums[4] = {0x4b400000, 0x4b400000, 0x4b400000, 0x4b400000};
                    mma_32(sums, frag, b0[n], b1[n]);
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        const uint4& z = meta[2 * n + (c & 1)];
                        float x;
                        if (W < 0) {
                            x = (float)(sums[c] - 0x4b400000 + m.plus * (int)(z.z + z.w));
                        } else {
                            x = float_of((u32)sums[c]) - ROUND;
                        }
                        float sum = fma_(x, s[c >> 1].ws[0] * float_of(z.x), acc[i][n][c]);
                        if (has_bias(kind)) sum = fma_(s[c >> 1].wb[0], float_of(z.y), sum);
                        acc[i][n][c] = sum;
                    }
                }
            }
        }
    }
}

// A tile's rows: where they come from.
struct TileRows {
    u32 first, end;    // of `pairs`, or rows
    u32 weight0, last; // first and last row of the matrix that the tile may read
};

D u32 row_of(const GemmArgs& a, const TileRows& rows, u32 i) {
    i = rows.first + i < rows.end ? rows.first + i : rows.end - 1;
    return (a.pairs ? a.pairs[i] : i) / a.divisor;
}

// Where a round lies in shared memory: codes of weights, their high bits, activations, their scales; bytes, then
// bytes between rows. The matrix's decoded scales come last: [planes][8][SCALES].
template <int W>
struct Round {
    static constexpr u32 CODES = W == W_8 ? 256 : 128, STEP = CODES + 16, HIGH = W == W_6 ? 64 + 8 : 0;
    static constexpr u32 ACTS = 256 + 32, META = 128 + 16, SCALES = 68;
    static constexpr u32 AT_HIGH = TILE_M * STEP, AT_ACTS = AT_HIGH + TILE_M * HIGH, AT_META = AT_ACTS + TILE_N * ACTS;
    static constexpr u32 AT_SCALES = AT_META + TILE_N * META, BYTES = AT_SCALES + 2 * 8 * SCALES * 4;
};

// Begins to copy round `k`. Every thread copies the same columns of rows some apart.
template <int W>
D void copy_round(const GemmArgs& a, const TileRows& rows, u32 k, u8* to, const u8* const acts[2], const u8* meta) {
    using R = Round<W>;
    const Matrix& m = a.w;
    u32 t = threadIdx.x;
    constexpr u32 EACH = R::CODES / 16, BLOCK = W == W_8 ? 32 : 16;  // copies per row; bytes of a block
#pragma unroll
    for (u32 i = 0; i < TILE_M * EACH / 256; i++) {
        u32 r = i * (256 / EACH) + t / EACH, c = 16 * (t % EACH), row = rows.weight0 + r;
        row = row < rows.last ? row : rows.last;
        bool there = 8 * k + c / BLOCK < m.blocks;
        copy_16(to + r * R::STEP + c, m.codes + ((u64)row * m.blocks + 8 * k) * BLOCK + c, there);
    }
    if (W == W_6) {
#pragma unroll
        for (u32 i = 0; i < TILE_M * 8 / 256; i++) {
            u32 r = i * 32 + t / 8, b = t % 8, row = rows.weight0 + r;
            row = row < rows.last ? row : rows.last;
            copy_8(to + R::AT_HIGH + r * R::HIGH + 8 * b, m.high + ((u64)row * m.blocks + 8 * k + b) * 8, 8 * k + b < m.blocks);
        }
    }
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 r = i * 16 + t / 16, c = 16 * (t % 16);
        copy_16(to + R::AT_ACTS + r * R::ACTS + c, acts[i] + 256 * k + c, 8 * k + c / 32 < m.blocks);
    }
    u32 r = t / 8, b = t % 8;
    copy_16(to + R::AT_META + r * R::META + 16 * b, meta + 128 * k + 16 * b, 8 * k + b < m.blocks);
}

// Two of a round's 64 x 8 scales per thread, as stored and decoded.
template <int K>
D void load_scales(const Matrix& m, const TileRows& rows, u32 k, RawScale raw[2]) {
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 r = i * 32 + threadIdx.x / 8, b = 8 * k + threadIdx.x % 8, row = rows.weight0 + r;
        raw[i] = load_scale<K>(m, row < rows.last ? row : rows.last, b < m.blocks ? b : m.blocks - 1);
    }
}
template <int W, int K>
D void share_scales(const Matrix& m, const RawScale raw[2], u8* to) {
    using R = Round<W>;
    float* planes = (float*)(to + R::AT_SCALES);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 at = threadIdx.x % 8 * R::SCALES + i * 32 + threadIdx.x / 8;
        Scale s = decode_scale<K>(m, raw[i]);
        planes[at] = s.ws[0];
        if (has_halves(K)) planes[8 * R::SCALES + at] = s.ws[1];
        if (has_bias(K)) planes[8 * R::SCALES + at] = s.wb[0];
    }
}

// Adds this warp's block of a round to its lane.
template <int W, int K>
D void add_round(const Matrix& m, const u8* from, float acc[4][4][4]) {
    using R = Round<W>;
    static_assert(!(has_halves(K) && has_bias(K)), "two planes of scales");
    u32 w = threadIdx.x >> 5, t = threadIdx.x & 3, g = (threadIdx.x & 31) >> 2;
    const float* planes = (const float*)(from + R::AT_SCALES) + w * R::SCALES + g;
    uint2 b[4];
    uint4 z[8];
#pragma unroll
    for (int n = 0; n < 4; n++) b[n] = *(const uint2*)(from + R::AT_ACTS + (8 * n + g) * R::ACTS + 32 * w + 8 * t);
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const u8* at = from + R::AT_META + (8 * (n >> 1) + 2 * t + (n & 1)) * R::META + 16 * w;
        if (has_halves(K)) {
            z[n] = *(const uint4*)at;
        } else {
            uint2 x = *(const uint2*)at;
            z[n].x = x.x;
            z[n].y = x.y;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 frag[4];
        float ws[2], second[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 r = 16 * i + 8 * h + g;
            if (W == W_8) {
                uint2 x = *(const uint2*)(from + r * R::STEP + 32 * w + 8 * t);
                frag[h] = x.x;
                frag[2 + h] = x.y;
            } else {
                uint2 high = {0, 0};
                if (W == W_6) high = *(const uint2*)(from + R::AT_HIGH + r * R::HIGH + 8 * w);
                words_of<W>(m, *(const u32*)(from + r * R::STEP + 16 * w + 4 * t), 0, high.x, high.y, t, &frag[h], &frag[2 + h]);
            }
            ws[h] = planes[16 * i + 8 * h];
            second[h] = has_halves(K) || has_bias(K) ? planes[8 * R::SCALES + 16 * i + 8 * h] : 0.0f;
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (has_halves(K)) {
                int first[4] = {0, 0, 0, 0}, last[4] = {0, 0, 0, 0};
                mma_16(first, frag[0], frag[1], b[n].x);
                mma_16(last, frag[2], frag[3], b[n].y);
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const uint4& q = z[2 * n + (c & 1)];
                    float scale = float_of(q.x);
                    int x = first[c] + m.plus * (int)q.z, y = last[c] + m.plus * (int)q.w;
                    float sum = fma_((float)x, ws[c >> 1] * scale, acc[i][n][c]);
                    acc[i][n][c] = fma_((float)y, second[c >> 1] * scale, sum);
                }
            } else {
                // The sum starts at the bits of 1.5 * 2^23: as a float it is that plus the integer, exactly.
                int sums[4] = {0x4b400000, 0x4b400000, 0x4b400000, 0x4b400000};
                mma_32(sums, frag, b[n].x, b[n].y);
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const uint4& q = z[2 * n + (c & 1)];
                    float x = float_of((u32)sums[c]) - ROUND;
                    float sum = fma_(x, ws[c >> 1] * float_of(q.x), acc[i][n][c]);
                    if (has_bias(K)) sum = fma_(second[c >> 1], float_of(q.y), sum);
                    acc[i][n][c] = sum;
                }
            }
        }
    }
}

// Sums of a tile's outputs for this warp's lane, in rounds.
template <int W, int K>
D void rounds(const GemmArgs& a, const TileRows& rows, u8* shared, float acc[4][4][4]) {
    using R = Round<W>;
    const Matrix& m = a.w;
    u32 t = threadIdx.x, n = (m.blocks + 7) / 8;
    const u8* acts[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) acts[i] = a.acts.codes + row_of(a, rows, i * 16 + t / 16) * a.acts.row_codes;
    const u8* meta = a.acts.meta + row_of(a, rows, t / 8) * a.acts.row_meta;
    RawScale raw[2];
    load_scales<K>(m, rows, 0, raw);
    copy_round<W>(a, rows, 0, shared, acts, meta);
    mark_copies();
    if (n > 1) copy_round<W>(a, rows, 1, shared + R::BYTES, acts, meta);
    mark_copies();
    share_scales<W, K>(m, raw, shared);
    if (n > 1) load_scales<K>(m, rows, 1, raw);
    u32 now = 0, next = 1, after = 2;
#pragma unroll 1
    for (u32 k = 0; k < n; k++) {
        copies_done<1>();
        block_barrier();
        if (k + 2 < n) copy_round<W>(a, rows, k + 2, shared + after * R::BYTES, acts, meta);
        mark_copies();
        if (k + 1 < n) share_scales<W, K>(m, raw, shared + next * R::BYTES);
        if (k + 2 < n) load_scales<K>(m, rows, k + 2, raw);
        if (8 * k + (t >> 5) < m.blocks) add_round<W, K>(m, shared + now * R::BYTES, acc);
        u32 free = now;
        now = next;
        next = after;
        after = free;
    }
    block_barrier();
}

// Formats without rounds of their own: read where they lie.
D void lanes_of_any(const GemmArgs& a, const TileRows& rows, float acc[4][4][4]) {
    u32 lane = threadIdx.x & 31, t = lane & 3, g = lane >> 2;
    const u8* codes[4];
    const u8* metas[8];
    for (int n = 0; n < 4; n++) codes[n] = a.acts.codes + row_of(a, rows, 8 * n + g) * a.acts.row_codes;
    for (int n = 0; n < 8; n++) metas[n] = a.acts.meta + row_of(a, rows, 8 * (n >> 1) + 2 * t + (n & 1)) * a.acts.row_meta;
    lane_sums<-1, -1>(a, rows.weight0, rows.last, codes, metas, threadIdx.x >> 5, acc);
}

KERNEL(gemm, GemmArgs, 256, 1) {
    DYNAMIC_SHARED(shared);  // three rounds, then [8][TILE_N][TILE_M]
    wait_for_inputs();
    u32 first = blockIdx.y * TILE_N, end = a.rows, expert = 0;
    if (a.tiles) {
        if (blockIdx.y >= *a.n_tiles) return;
        expert = a.tiles[3 * blockIdx.y];
        first = a.tiles[3 * blockIdx.y + 1];
        end = a.tiles[3 * blockIdx.y + 2];
    }
    u32 lane = threadIdx.x & 31, w = threadIdx.x >> 5, t = lane & 3, g = lane >> 2;
    u32 base = expert * a.features, o0 = blockIdx.x * TILE_M;
    TileRows rows = {first, end < first + TILE_N ? end : first + TILE_N, base + o0, base + a.features - 1};
    float acc[4][4][4];
#pragma unroll
    for (int i = 0; i < 64; i++) acc[i / 16][i / 4 % 4][i % 4] = 0.0f;
    switch (a.variant) {
        case V_MXFP4: rounds<W_4_TABLE, K_E8M0>(a, rows, shared, acc); break;
        case V_Q8_0: rounds<W_8, K_F16>(a, rows, shared, acc); break;
        case V_Q4_K: rounds<W_4, K_SUPER_BIAS>(a, rows, shared, acc); break;
        case V_Q6_K: rounds<W_6, K_SUPER_HALVES>(a, rows, shared, acc); break;
        case V_MLX4: rounds<W_4, K_BF16_BIAS>(a, rows, shared, acc); break;
        default: lanes_of_any(a, rows, acc);
    }
    float* lanes = (float*)shared;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                lanes[(w * TILE_N + 8 * n + 2 * t + (c & 1)) * TILE_M + 16 * i + 8 * (c >> 1) + g] = acc[i][n][c];
    block_barrier();
    for (u32 i = threadIdx.x; i < TILE_M * TILE_N; i += 256) {
        u32 o = o0 + i % TILE_M, r = first + i / TILE_M;
        if (o >= a.features || r >= rows.end) continue;
        float s[8];
        for (int k = 0; k < 8; k++) s[k] = lanes[k * TILE_M * TILE_N + i];
        float v = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
        if (a.bias) v = v + a.bias[base + o];
        u32 row = a.pairs ? a.pairs[r] : r;
        float* out = a.out + (u64)row * a.stride + o;
        *out = a.add ? *out + v : v;
    }
}
