// Products with f32 activations: float weights in both precisions, quantised ones in precision f32. Sixteen threads per
// output row, element e is lane e mod 16's. Not here: packed activations (gemv.cu, gemm.cu).

struct FloatJob {
    Matrix w;                // [out, cols]; of experts [E * out, cols]
    const float* x;          // [rows, x_stride]
    const float* bias;
    float* out;
    const u16* ids;          // expert of output row r, or null
    u32 x_stride, stride, add, divisor;  // input row = output row / divisor
    u32 rows, features, pad0, pad1;
};

template <int NR>
D void float_dots(const FloatJob& a, u32 row, u32 first, u32 l, float out[NR]) {
    float acc[NR];
    const float* x[NR];
    for (int r = 0; r < NR; r++) {
        acc[r] = 0.0f;
        u32 i = first + r < a.rows ? first + r : a.rows - 1;
        x[r] = a.x + (u64)(i / a.divisor) * a.x_stride;
    }
    const u8* w = a.w.codes;
    u64 at = (u64)row * a.w.cols;
    if (a.w.width == W_F32) {
#pragma unroll 16
        for (u32 e = l; e < a.w.cols; e += 16) {
            float v = load_f32(w + 4 * (at + e));
            for (int r = 0; r < NR; r++) acc[r] = fma_(v, x[r][e], acc[r]);
        }
    } else if (a.w.width == W_F16 || a.w.width == W_BF16) {
        bool half = a.w.width == W_F16;
#pragma unroll 16
        for (u32 e = l; e < a.w.cols; e += 16) {
            u16 h = load_2(w + 2 * (at + e));
            float v = half ? half_to_float(h) : bf16_to_float(h);
            for (int r = 0; r < NR; r++) acc[r] = fma_(v, x[r][e], acc[r]);
        }
    } else {
        for (u32 e = l; e < a.w.cols; e += 16) {
            float v = weight_at(a.w, row, e);
            for (int r = 0; r < NR; r++) acc[r] = fma_(v, x[r][e], acc[r]);
        }
    }
    for (int r = 0; r < NR; r++) out[r] = join_16(acc[r]);
}

template <int NR>
D void float_body(const FloatJob& a) {
    u32 o = blockIdx.x * 8 + threadIdx.x / 16, l = threadIdx.x & 15, first = blockIdx.y * NR;
    bool there = o < a.features;
    wait_for_inputs();
    u32 row = there ? o : a.features - 1;
    if (a.ids) row += a.ids[first] * a.features;
    float y[NR];
    float_dots<NR>(a, row, first, l, y);
    if (l != 0 || !there) return;
    for (int r = 0; r < NR; r++) {
        if (first + r >= a.rows) return;
        float v = a.bias ? y[r] + a.bias[row] : y[r];
        float* out = a.out + (u64)(first + r) * a.stride + o;
        *out = a.add ? *out + v : v;
    }
}

KERNEL(float_1, FloatJob, 128, 4) { float_body<1>(a); }

// One output per block, all of the row in flight at once: few outputs, as a router has. F32 weights, 4 | cols.
KERNEL(float_row, FloatJob, 256, 4) {
    DYNAMIC_SHARED(shared);
    float* w = (float*)shared;       // [cols]
    float* x = w + a.w.cols;         // [cols]
    u32 o = blockIdx.x, row = blockIdx.y;
    const float4* from = (const float4*)(a.w.codes + 4 * (u64)o * a.w.cols);
    for (u32 i = threadIdx.x; i < a.w.cols / 4; i += 256) ((float4*)w)[i] = from[i];
    wait_for_inputs();
    const float4* in = (const float4*)(a.x + (u64)row * a.x_stride);
    for (u32 i = threadIdx.x; i < a.w.cols / 4; i += 256) ((float4*)x)[i] = in[i];
    block_barrier();
    if (threadIdx.x >= 32) return;
    float acc = dot_16(w, x, a.w.cols);
    if (threadIdx.x == 0) {
        float v = a.bias ? acc + a.bias[o] : acc;
        float* out = a.out + (u64)row * a.stride + o;
        *out = a.add ? *out + v : v;
    }
}
KERNEL(float_8, FloatJob, 128, 4) { float_body<8>(a); }

struct EmbedArgs {
    Matrix w;              // [vocab, d]
    const u32* tokens;     // [rows]
    float* out;            // [rows, d]
    u32 d, pad;
};

KERNEL(embed, EmbedArgs, 256, 1) {
    wait_for_inputs();
    u32 e = blockIdx.x * 256 + threadIdx.x;
    if (e < a.d) a.out[(u64)blockIdx.y * a.d + e] = weight_at(a.w, a.tokens[blockIdx.y], e);
}
