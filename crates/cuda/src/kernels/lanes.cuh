// What the kernels of a decode step share: rows in shared memory (their norm, packed or as loaded), and products in
// which a thread is a lane of the contract.
//
// Eight lanes of four rows make a warp: thread 4 l + r has blocks l, l + 8, .. of row r, so that a sum takes no shuffle but
// the last three, and the four rows read the same activations in one go. Activations lie in three planes in shared memory:
// first halves of blocks, second halves, scales and sums, 16 bytes each. Not here: any kernel.
//
// With FOREBAY_FREE_ORDER, which no release has, sums are made in whatever order is quickest: for measuring what the
// contract costs.

// Packed activations: row r at codes + r * row_codes, meta + r * row_meta.
struct Acts {
    const u8* codes;
    const u8* meta;
    u64 row_codes, row_meta;  // bytes
};

D int dot_half(const u32 w[4], const u32 x[4]) {
    int i = dot4(w[0], x[0], 0);
    i = dot4(w[1], x[1], i);
    i = dot4(w[2], x[2], i);
    return dot4(w[3], x[3], i);
}

// What a block adds to its lane: acc = fma(x, y, acc) for each of up to four terms, in this order.
struct Terms { float x[4], y[4]; };

template <int K>
D constexpr int n_terms() { return K < 0 ? 4 : (has_halves(K) ? 2 : 1) * (has_bias(K) ? 2 : 1); }

// The same of a matrix whose kind of scales is not known when this is compiled.
template <int K>
D int terms_in(const Matrix& m) { return K >= 0 ? n_terms<K>() : (has_halves(m.kind) ? 2 : 1) * (has_bias(m.kind) ? 2 : 1); }

template <int K>
D Terms terms_of(const Matrix& m, const Codes& c, const Scale& s, const uint4& a0, const uint4& a1, const uint4& z) {
    u32 kind = K >= 0 ? (u32)K : m.kind;
    // z: scale, asum, first sum, last sum
    u32 first[4] = {a0.x, a0.z, a1.x, a1.z}, last[4] = {a0.y, a0.w, a1.y, a1.w};
    int i = dot_half(c.first, first), j = dot_half(c.last, last);
    float scale = float_of(z.x);
    Terms t;
    if (has_halves(kind)) {
        t.x[0] = (float)(i + m.plus * (int)z.z);
        t.y[0] = s.ws[0] * scale;
        float x = (float)(j + m.plus * (int)z.w), y = s.ws[1] * scale;
        if (has_bias(kind)) {
            t.x[1] = s.wb[0];
            t.y[1] = scale * (float)(int)z.z;
            t.x[2] = x;
            t.y[2] = y;
            t.x[3] = s.wb[1];
            t.y[3] = scale * (float)(int)z.w;
        } else {
            t.x[1] = x;
            t.y[1] = y;
        }
    } else {
        t.x[0] = (float)(i + j + m.plus * (int)(z.z + z.w));
        t.y[0] = s.ws[0] * scale;
        t.x[1] = s.wb[0];
        t.y[1] = float_of(z.y);
    }
    return t;
}

// ---- rows in shared memory ----

// Calls put(i, 16 bytes at from + 16 i) for i = first, first + step, .. below n. N loads are under way at once: a loop of
// loads and stores waits for memory once per turn.
template <int N, class F>
D void fetch(const u8* from, u32 n, u32 first, u32 step, F put) {
#pragma unroll 1
    for (u32 i = first; i < n; i += N * step) {
        uint4 v[N];
#pragma unroll
        for (int k = 0; k < N; k++) fresh_16(from + 16 * (u64)(i + k * step), i + k * step < n, &v[k]);
#pragma unroll
        for (int k = 0; k < N; k++)
            if (i + k * step < n) put(i + k * step, v[k]);
    }
}

// Copies a packed row of `blocks` blocks into its three planes, by `step` threads, of which this one is `first`; N loads of a
// thread are under way at once.
template <int N>
D void share_row(const u8* codes, const u8* meta, u32 blocks, u8* planes, u32 first, u32 step) {
    uint4* to = (uint4*)planes;
    u32 halves = 2 * blocks, all = 3 * blocks;
#pragma unroll 1
    for (u32 i = first; i < all; i += N * step) {
        uint4 v[N];
#pragma unroll
        for (int k = 0; k < N; k++) {
            u32 j = i + k * step;
            fresh_16(j < halves ? codes + 16 * j : meta + 16 * (j - halves), j < all, &v[k]);
        }
#pragma unroll
        for (int k = 0; k < N; k++) {
            u32 j = i + k * step;
            if (j < all) to[j < halves ? (j & 1) * blocks + (j >> 1) : j] = v[k];
        }
    }
}

// The factor of a row's RMS norm, from shared memory; by one warp.
D float row_factor(const float* x, u32 width, float eps) {
#ifdef FOREBAY_FREE_ORDER
    float acc = 0.0f;
#pragma unroll 8
    for (u32 i = threadIdx.x & 31; i < width; i += 32) acc = fma_(x[i], x[i], acc);
    acc = acc + shuffle_xor(acc, 16);
#else
    u32 i = threadIdx.x & 15;
    float acc = 0.0f;
    for (; i + 15 * 16 < width; i += 16 * 16) {
        float v[16];
#pragma unroll
        for (int k = 0; k < 16; k++) v[k] = x[i + 16 * k];
#pragma unroll
        for (int k = 0; k < 16; k++) acc = fma_(v[k], v[k], acc);
    }
    for (; i < width; i += 16) acc = fma_(x[i], x[i], acc);
#endif
    acc = join_16(acc);
    return 1.0f / sqrtf(acc / (float)width + eps);
}

// Sum of products in 16 lanes, from shared memory; by one warp.
D float dot_16(const float* w, const float* x, u32 n) {
#ifdef FOREBAY_FREE_ORDER
    float acc = 0.0f;
#pragma unroll 8
    for (u32 i = threadIdx.x & 31; i < n; i += 32) acc = fma_(w[i], x[i], acc);
    acc = acc + shuffle_xor(acc, 16);
#else
    u32 i = threadIdx.x & 15;
    float acc = 0.0f;
    for (; i + 11 * 16 < n; i += 12 * 16) {
        float p[12], q[12];
#pragma unroll
        for (int k = 0; k < 12; k++) {
            p[k] = w[i + 16 * k];
            q[k] = x[i + 16 * k];
        }
#pragma unroll
        for (int k = 0; k < 12; k++) acc = fma_(p[k], q[k], acc);
    }
    for (; i < n; i += 16) acc = fma_(w[i], x[i], acc);
#endif
    return join_16(acc);
}

// Copies n numbers, 4 | n, by all threads of the block; with no source they are ones.
D void share_floats(const float* from, u32 n, float* to) {
    if (from) {
        fetch<6>((const u8*)from, n / 4, threadIdx.x, blockDim.x, [=](u32 i, uint4 v) { ((uint4*)to)[i] = v; });
    } else {
        for (u32 i = threadIdx.x; i < n; i += blockDim.x) to[i] = 1.0f;
    }
}

// A row waiting for its norm: all of it in shared memory.
struct NormedRow {
    const float* x;
    const float* weight;  // ones where the norm has none
    float factor;
};

D float4 normed(const NormedRow& r, u32 quad) {
    float4 v = ((const float4*)r.x)[quad], w = ((const float4*)r.weight)[quad];
    v.x = v.x * r.factor * w.x;
    v.y = v.y * r.factor * w.y;
    v.z = v.z * r.factor * w.z;
    v.w = v.w * r.factor * w.w;
    return v;
}

// Brings a row to shared memory and computes its factor; weights are there or on their way. All threads of the block.
D NormedRow norm_row(const float* src, u32 width, float eps, float* x, const float* weight, float* factor) {
    share_floats(src, width, x);
    block_barrier();
    if (threadIdx.x < 32) {
        float f = row_factor(x, width, eps);
        if (threadIdx.x == 0) *factor = f;
    }
    block_barrier();
    NormedRow r;
    r.x = x;
    r.weight = weight;
    r.factor = *factor;
    return r;
}

// Quantises a block of 32 held by eight neighbouring threads, four numbers each, as `pack_block` does. All threads of a
// warp call it; those that are not `there` write nothing.
D void pack_quad(float4 v, bool there, u8* first, u8* last, u8* meta) {
    u32 t = threadIdx.x & 7;
    float x[4] = {v.x, v.y, v.z, v.w};
    u32 largest = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 m = bits_of(x[k]) & 0x7fffffffu;
        largest = m > largest ? m : largest;
    }
#pragma unroll
    for (int k = 1; k < 8; k <<= 1) {
        u32 other = shuffle_xor_bits(largest, k);
        largest = other > largest ? other : largest;
    }
    float amax = float_of(largest);
    float inverse = 127.0f / amax;
    bool finite = largest < 0x7f800000u, codes = finite && inverse < INF;
    u32 word = 0;
    int sum = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        int code = codes ? (i8)(bits_of(x[k] * inverse + ROUND) & 0xff) : 0;
        word |= (u32)(u8)code << (8 * k);
        sum += code;
    }
    sum += (int)shuffle_xor_bits((u32)sum, 1);
    sum += (int)shuffle_xor_bits((u32)sum, 2);
    int other = (int)shuffle_xor_bits((u32)sum, 4);
    if (!there) return;
    // Dwords lie in the order 0 4 1 5, 2 6 3 7.
    ((u32*)(t & 2 ? last : first))[2 * (t & 1) + (t >> 2)] = word;
    if (t == 0) {
        float scale = finite ? amax / 127.0f : float_of(0x7fc00000u);
        ((float*)meta)[0] = scale;
        ((float*)meta)[1] = scale * (float)(sum + other);
        ((int*)meta)[2] = sum;
        ((int*)meta)[3] = other;
    }
}

// Packs a normed row into planes (`step` 16) or as packed rows lie in memory (`step` 32). 32 | width.
D void pack_row(const NormedRow& r, u32 width, u8* first, u8* last, u8* meta, u32 step) {
    u32 blocks = width / 32, per_round = blockDim.x / 8;
    for (u32 base = 0; base < blocks; base += per_round) {
        u32 b = base + threadIdx.x / 8;
        bool there = b < blocks;
        float4 v = normed(r, there ? 8 * b + (threadIdx.x & 7) : 0);
        pack_quad(v, there, first + step * b, last + step * b, meta + 16 * b);
    }
}

// Weights that a later kernel reads: up to three matrices, all planes of each.
struct Ahead { const u8* at[3]; u32 bytes[3]; u32 pad; };

// This block's part of them, into the second-level cache.
D void prefetch_ahead(const Ahead& a) {
    u32 first = (blockIdx.x + gridDim.x * blockIdx.y) * blockDim.x + threadIdx.x, step = gridDim.x * gridDim.y * blockDim.x;
#pragma unroll 1
    for (int k = 0; k < 3; k++) {
#pragma unroll 1
        for (u32 i = first; i < (a.bytes[k] + 127) / 128; i += step) prefetch(a.at[k] + (u64)128 * i);
    }
}

// ---- products ----

// U steps of eight blocks, as loaded.
template <int W, int K, int U>
struct Lane {
    RawCodes codes[U];
    RawScale scales[U];
};

// The codes of block `at` of the matrix.
template <int W>
D void lane_codes(const Matrix& m, u64 at, bool there, RawCodes& r) {
    u32 width = W >= 0 ? (u32)W : m.width;
    if (width == W_8) {
        early_32(m.codes + 32 * at, there, &r.x, &r.y);
        return;
    }
    early_16(m.codes + 16 * at, there, &r.x);
    if (width == W_6) {
        uint2 h;
        early_8(m.high + 8 * at, there, &h);
        r.y.x = h.x;
        r.y.y = h.y;
    }
}

// The stored scales of block `b` of row `row`, which is block `at` of the matrix and of group `group`.
template <int K>
D void lane_scale(const Matrix& m, u32 row, u32 b, u64 at, u64 group, bool there, RawScale& r) {
    u32 kind = K >= 0 ? (u32)K : m.kind;
    u16 x = 0, y = 0;
    switch (kind) {
        case K_E8M0: early_1(m.scales + at, there, &x); r.x = x; return;
        case K_F16: early_2(m.scales + 2 * at, there, &x); r.x = x; return;
        case K_SUPER:
            early_1(m.scales + at, there, &x);
            early_2(m.supers + 2 * group, there, &y);
            break;
        case K_SUPER_HALVES:
            early_2(m.scales + 2 * at, there, &x);
            early_2(m.supers + 2 * group, there, &y);
            break;
        case K_SUPER_BIAS:
            early_2(m.scales + 2 * at, there, &x);
            early_4(m.supers + 4 * group, there, &r.y);
            r.x = x;
            return;
        case K_SUPER_BIAS_HALVES:
            early_4(m.scales + 4 * at, there, &r.x);
            early_4(m.supers + 4 * group, there, &r.y);
            return;
        default:
            if (there) r = load_scale<K>(m, row, b);
            return;
    }
    r.x = x;
    r.y = y;
}

// Steps from block `base` on, a multiple of eight, into `s` from its step `from` on.
template <int W, int K, int U>
D void load_step(const Matrix& m, u32 row, u32 base, int u, Lane<W, K, U>& s) {
    u32 l = (threadIdx.x & 31) >> 2;
    // Sums of 64 bits, so that steps differ by a constant in the address.
    u64 at = (u64)row * m.blocks + l + base, group = (u64)row * ((m.blocks + 7) >> 3) + base / 8;
    bool there = base + 8 * u + l < m.blocks;
    lane_codes<W>(m, at + 8 * u, there, s.codes[u]);
    lane_scale<K>(m, row, base + 8 * u + l, at + 8 * u, group + u, there, s.scales[u]);
}

template <int W, int K, int U>
D void load_lane(const Matrix& m, u32 row, Lane<W, K, U>& s) {
#pragma unroll
    for (int u = 0; u < U; u++) load_step(m, row, 0, u, s);
}

// The product of `row` and the row in `planes`, behind which 128 bytes may be read; its first steps are in `s`. All
// threads of a row's lanes get it. Code is short on purpose: a kernel that runs for a few microseconds waits for its
// instructions too.
template <int W, int K, int U>
D float lane_dot(const Matrix& m, u32 row, Lane<W, K, U>& s, const u8* planes) {
    u32 n = m.blocks, l = (threadIdx.x & 31) >> 2;
    int terms = terms_in<K>(m);
    const uint4* acts = (const uint4*)planes + l;
    float acc = 0.0f;
#pragma unroll 1
    for (u32 base = 0; base < n; base += 8 * U) {
#pragma unroll
        for (int u = 0; u < U; u++) {
            Codes c = decode_codes<W>(m, s.codes[u]);
            Scale scale = decode_scale<K>(m, s.scales[u]);
            load_step(m, row, base + 8 * U, u, s);
            bool there = base + 8 * u + l < n;
            u32 at = base + 8 * u < n ? base + 8 * u : 0;
            Terms t = terms_of<K>(m, c, scale, acts[at], acts[n + at], acts[2 * n + at]);
#pragma unroll
            for (int q = 0; q < n_terms<K>(); q++) {
                if (q >= terms) break;
                float sum = fma_(t.x[q], t.y[q], acc);
                acc = there ? sum : acc;
            }
        }
    }
    // The contract's tree: lanes (i, i + 4), (i, i + 2), (0, 1).
    acc = acc + shuffle_xor(acc, 16);
    acc = acc + shuffle_xor(acc, 8);
    return acc + shuffle_xor(acc, 4);
}

// Steps under way at once; more make code longer, which takes longer to come than what they would hide.
template <int W>
D constexpr int depth_of() { return W < 0 ? 1 : 2; }
