// Many activation rows: int8 tensor cores. A block of 32 columns gives exact integer sums; each becomes one (or two) f32
// terms of its lane. Warp w of a block of threads *is* lane w: it works through the weight blocks b = w mod 8 in ascending
// order, so no sum is shared between warps until the lanes are joined in the fixed tree. Nothing has to be staged.
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

KERNEL(gemm, GemmArgs, 256, 1) {
    DYNAMIC_SHARED(shared);
    float* lanes = (float*)shared;  // [8][TILE_N][TILE_M]
    wait_for_inputs();
    u32 first = blockIdx.y * TILE_N, end = a.rows, expert = 0;
    if (a.tiles) {
        if (blockIdx.y >= *a.n_tiles) return;
        expert = a.tiles[3 * blockIdx.y];
        first = a.tiles[3 * blockIdx.y + 1];
        end = a.tiles[3 * blockIdx.y + 2];
    }
    end = end < first + TILE_N ? end : first + TILE_N;
    u32 lane = threadIdx.x & 31, w = threadIdx.x >> 5, t = lane & 3, g = lane >> 2;
    u32 base = expert * a.features, o0 = blockIdx.x * TILE_M;
    const u8* codes[4];
    const u8* metas[8];
    for (int n = 0; n < 4; n++) {
        u32 i = first + 8 * n + g;
        i = i < end ? i : end - 1;
        u32 row = (a.pairs ? a.pairs[i] : i) / a.divisor;
        codes[n] = a.acts.codes + row * a.acts.row_codes;
    }
    for (int n = 0; n < 8; n++) {
        u32 i = first + 8 * (n >> 1) + 2 * t + (n & 1);
        i = i < end ? i : end - 1;
        u32 row = (a.pairs ? a.pairs[i] : i) / a.divisor;
        metas[n] = a.acts.meta + row * a.acts.row_meta;
    }
    float acc[4][4][4];
    for (int i = 0; i < 4; i++)
        for (int n = 0; n < 4; n++)
            for (int c = 0; c < 4; c++) acc[i][n][c] = 0.0f;
    FOR_VARIANT(a.variant, (lane_sums<W, K>(a, base + o0, base + a.features - 1, codes, metas, w, acc)))
    for (int i = 0; i < 4; i++)
        for (int n = 0; n < 4; n++)
            for (int c = 0; c < 4; c++)
                lanes[(w * TILE_N + 8 * n + 2 * t + (c & 1)) * TILE_M + 16 * i + 8 * (c >> 1) + g] = acc[i][n][c];
    block_barrier();
    for (u32 i = threadIdx.x; i < TILE_M * TILE_N; i += 256) {
        u32 o = o0 + i % TILE_M, r = first + i / TILE_M;
        if (o >= a.features || r >= end) continue;
        float s[8];
        for (int k = 0; k < 8; k++) s[k] = lanes[k * TILE_M * TILE_N + i];
        float v = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
        if (a.bias) v = v + a.bias[base + o];
        u32 row = a.pairs ? a.pairs[r] : r;
        float* out = a.out + (u64)row * a.stride + o;
        *out = a.add ? *out + v : v;
    }
}
