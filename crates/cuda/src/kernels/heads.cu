// What happens to q, k and v heads between their products and attention: norm, rotary embedding, and for keys and values
// the way into their page. One warp per head of a row. Not here: attention itself.

struct HeadPart {
    float* x;              // [rows, heads, dim], in place (queries)
    const float* weight;   // norm weight [dim] or null
    u32 heads, norm;       // norm 1: RMSNorm
    float eps;
    u32 rope;              // 1: rotate
};

struct HeadsArgs {
    HeadPart parts[3];     // q, k, v
    const float* angles;   // [2, rows, half]
    u8* pages;             // of the layer
    const u32* tables;     // [sequences, table_len]
    const u32* positions;  // [rows]
    const u32* row_sequence;
    u64 page_bytes;
    u32 rows, dim, half, adjacent, table_len, kv_type, store, pad;
};

// A page: per head keys [dim][32], values [32][dim], then for 8 bits k scales [32], v scales [32].
D u8* head_of_page(u8* pages, u64 page_bytes, u32 page, u32 head, u32 dim, u32 kv_type) {
    u32 size = kv_type == 0 ? 4 : kv_type == 1 ? 2 : 1;
    u64 head_bytes = (u64)2 * dim * 32 * size + (kv_type == 2 ? 256 : 0);
    return pages + page * page_bytes + head * head_bytes;
}

// Cosines and sines of a row: both [half].
struct Angles { const float* cos; const float* sin; };

D void turn(float* x, u32 i, u32 half, u32 adjacent, float c, float s) {
    u32 first = adjacent ? 2 * i : i, second = adjacent ? 2 * i + 1 : i + half;
    float p = x[first], q = x[second];
    x[first] = fma_(p, c, -(q * s));
    x[second] = fma_(q, c, p * s);
}

// A head into shared memory, normed and turned; by a warp. All that heads of up to 256 numbers need is under way at once.
D void ready_head(const HeadPart& part, const float* src, Angles angles, u32 dim, u32 half, u32 adjacent, float* x) {
    u32 lane = threadIdx.x & 31;
    float v[8], w[8], c[4], s[4];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        u32 i = 32 * k + lane;
        if (32 * k < dim) {
            v[k] = fresh_4(src + (i < dim ? i : dim - 1));
            w[k] = part.norm && part.weight ? part.weight[i < dim ? i : dim - 1] : 1.0f;
        }
        if (k < 4 && part.rope && 32 * k < half) {
            c[k] = fresh_4(angles.cos + (i < half ? i : half - 1));
            s[k] = fresh_4(angles.sin + (i < half ? i : half - 1));
        }
    }
#pragma unroll
    for (int k = 0; k < 8; k++)
        if (32 * k + lane < dim) x[32 * k + lane] = v[k];
    for (u32 i = 256 + lane; i < dim; i += 32) x[i] = src[i];
    warp_barrier();
    if (part.norm) {
        float acc = 0.0f;
        for (u32 i = lane & 15; i < dim; i += 16) acc = fma_(x[i], x[i], acc);
        acc = join_16(acc);
        warp_barrier();
        float scale = 1.0f / sqrtf(acc / (float)dim + part.eps);
#pragma unroll
        for (int k = 0; k < 8; k++)
            if (32 * k + lane < dim) x[32 * k + lane] = v[k] * scale * w[k];
        for (u32 i = 256 + lane; i < dim; i += 32) {
            float y = x[i] * scale;
            x[i] = part.weight ? y * part.weight[i] : y;
        }
        warp_barrier();
    }
    if (part.rope) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 i = 32 * k + lane;
            if (i < half) turn(x, i, half, adjacent, c[k], s[k]);
        }
        for (u32 i = 128 + lane; i < half; i += 32) turn(x, i, half, adjacent, angles.cos[i], angles.sin[i]);
        warp_barrier();
    }
}

// The same for heads of up to 128 numbers, 16 | dim, two to a warp: a half of it each, numbers in registers until they are turned.
// Halves that are not `there` write nothing.
D void ready_half(const HeadPart& part, const float* src, Angles angles, u32 dim, u32 half, u32 adjacent, bool there, float* x) {
    u32 l = threadIdx.x & 15;
    const float* weight = part.norm ? part.weight : (const float*)0;
    float v[8], w[8], c[4], s[4];
#pragma unroll
    for (int k = 0; k < 8; k++)
        if (16 * k < dim) v[k] = fresh_4(src + 16 * k + l);
#pragma unroll
    for (int k = 0; k < 8; k++)
        if (16 * k < dim) w[k] = weight ? fresh_4(weight + 16 * k + l) : 1.0f;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 i = 16 * k + l < half ? 16 * k + l : 0;
        if (16 * k < half) {
            c[k] = fresh_4(angles.cos + i);
            s[k] = fresh_4(angles.sin + i);
        }
    }
    float acc = 0.0f;
#pragma unroll
    for (int k = 0; k < 8; k++)
        if (16 * k < dim) acc = fma_(v[k], v[k], acc);
    acc = join_16(acc);
    float scale = part.norm ? 1.0f / sqrtf(acc / (float)dim + part.eps) : 1.0f;
#pragma unroll
    for (int k = 0; k < 8; k++)
        if (there && 16 * k < dim) x[16 * k + l] = v[k] * scale * w[k];
    warp_barrier();
    if (there && part.rope) {
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (16 * k + l < half) turn(x, 16 * k + l, half, adjacent, c[k], s[k]);
    }
    warp_barrier();
}

// Stores a key (which 1) or value (2) of one position, in a head of a page; by a warp.
D void store_head(u8* to, u32 which, u32 slot, const float* x, u32 dim, u32 kv_type) {
    u32 lane = threadIdx.x & 31, largest = 0;
    for (u32 i = lane; i < dim; i += 32) {
        u32 m = bits_of(x[i]) & 0x7fffffffu;
        largest = m > largest ? m : largest;
    }
    float amax = float_of(warp_max(largest));
    float scale = amax < 1e-30f ? 0.0f : amax / 127.0f, factor = amax < 1e-30f ? 0.0f : 127.0f / amax;
    u32 value = which == 2 ? dim * 32 : 0;
    for (u32 i = lane; i < dim; i += 32) {
        u32 at = value + (which == 2 ? slot * dim + i : i * 32 + slot);
        if (kv_type == 0) ((float*)to)[at] = x[i];
        if (kv_type == 1) ((u16*)to)[at] = float_to_half(x[i]);
        if (kv_type == 2) {
            float c = x[i] * factor;
            to[at] = (u8)(c == c ? (int)rintf(c) : 0);
        }
    }
    if (kv_type == 2 && lane == 0) ((float*)(to + 2 * dim * 32))[(which == 2 ? 32 : 0) + slot] = scale;
}

// The same for a key and a value as floats or halves; by 256 threads.
D void store_both(u8* to, u32 slot, const float* key, const float* value, u32 dim, u32 kv_type) {
    for (u32 t = threadIdx.x; t < 2 * dim; t += 256) {
        u32 i = t < dim ? t : t - dim, at = t < dim ? i * 32 + slot : dim * 32 + slot * dim + i;
        float x = t < dim ? key[i] : value[i];
        if (kv_type == 0) ((float*)to)[at] = x;
        else ((u16*)to)[at] = float_to_half(x);
    }
}

KERNEL(heads, HeadsArgs, 128, 1) {
    DYNAMIC_SHARED(shared);
    u32 warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    float* x = (float*)shared + warp * a.dim;
    wait_for_inputs();
    u32 per_row = a.parts[0].heads + a.parts[1].heads + a.parts[2].heads;
    u32 index = blockIdx.x * 4 + warp;
    if (index >= per_row * a.rows) return;
    u32 row = index / per_row, head = index % per_row, which = 0;
    while (head >= a.parts[which].heads) head -= a.parts[which++].heads;
    const HeadPart& part = a.parts[which];
    float* src = part.x + ((u64)row * part.heads + head) * a.dim;
    Angles angles;
    angles.cos = a.angles + row * a.half;
    angles.sin = angles.cos + a.rows * a.half;
    ready_head(part, src, angles, a.dim, a.half, a.adjacent, x);
    if (which == 0 || !a.store) {
        for (u32 i = lane; i < a.dim; i += 32) src[i] = x[i];
        return;
    }
    u32 position = a.positions[row];
    u32 page = a.tables[a.row_sequence[row] * a.table_len + position / 32];
    u8* to = head_of_page(a.pages, a.page_bytes, page, head, a.dim, a.kv_type);
    store_head(to, which, position & 31, x, a.dim, a.kv_type);
}
