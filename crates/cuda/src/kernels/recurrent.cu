// The gated delta net: convolution over a sequence's rows, and the delta rule. Orders of sums as `crates/cpu/src/delta.rs`.

struct ConvArgs {
    const float* x;           // [rows, channels]
    const float* taps;        // [width, channels]
    float* state;             // [slots][slot_floats], the convolution's part first
    float* out;               // [rows, channels]
    const u32* spans;         // [sequences][4] {first row, rows, slot before, slot after}
    u64 slot_floats;
    u32 channels, width;
};

// Block (256 channels, span).
KERNEL(conv_silu, ConvArgs, 256, 1) {
    wait_for_inputs();
    u32 c = blockIdx.x * 256 + threadIdx.x;
    if (c >= a.channels) return;
    const u32* span = a.spans + 4 * blockIdx.y;
    u32 first = span[0], rows = span[1];
    if (rows == 0) return;
    const float* before = a.state + span[2] * a.slot_floats;
    float* after = a.state + span[3] * a.slot_floats;
    u32 w = a.width;
    // Input `r` of the span, rows before it being the state.
    for (u32 r = 0; r < rows; r++) {
        float acc = 0.0f;
        for (u32 i = 0; i < w; i++) {
            // Oldest first: input r - (w - 1) + i.
            u32 at = r + i;
            float x = at >= w - 1 ? a.x[(u64)(first + at - (w - 1)) * a.channels + c] : before[(u64)at * a.channels + c];
            acc = fma_(a.taps[i * a.channels + c], x, acc);
        }
        a.out[(u64)(first + r) * a.channels + c] = silu_(acc);
    }
    for (u32 i = 0; i + 1 < w; i++) {
        u32 at = rows + i;
        after[(u64)i * a.channels + c] =
            at >= w - 1 ? a.x[(u64)(first + at - (w - 1)) * a.channels + c] : before[(u64)at * a.channels + c];
    }
}

struct DeltaArgs {
    const float* qkv;         // [rows, channels]
    const float* a;           // [rows, v_heads]
    const float* b;
    const float* neg_exp_a;   // [v_heads]
    const float* dt_bias;
    float* state;             // [slots][slot_floats], the recurrent part at `offset`: [v_heads, k_dim, v_dim]
    float* out;               // [rows, v_heads * v_dim]
    const u32* spans;
    u64 slot_floats, offset;
    u32 k_heads, v_heads, k_dim, v_dim, tiled, channels;
    float inv_sqrt_k;
    u32 pad;
};

// Block (value head, span): a thread owns columns of the state; q and k of a row wait in shared memory.
KERNEL(delta_rule, DeltaArgs, 128, 1) {
    DYNAMIC_SHARED(shared);
    float* q = (float*)shared;      // [k_dim]
    float* k = q + a.k_dim;         // [k_dim]
    __shared__ float scales[2];
    wait_for_inputs();
    u32 h = blockIdx.x;
    const u32* span = a.spans + 4 * blockIdx.y;
    u32 first = span[0], rows = span[1], dk = a.k_dim, dv = a.v_dim;
    if (rows == 0) return;
    const float* before = a.state + span[2] * a.slot_floats + a.offset + (u64)h * dk * dv;
    float* s = a.state + span[3] * a.slot_floats + a.offset + (u64)h * dk * dv;
    for (u32 i = threadIdx.x; i < dk * dv; i += 128) s[i] = before[i];
    u32 key = (a.tiled ? h % a.k_heads : h / (a.v_heads / a.k_heads)) * dk;
    for (u32 r = 0; r < rows; r++) {
        const float* row = a.qkv + (u64)(first + r) * a.channels;
        block_barrier();
        for (u32 i = threadIdx.x; i < dk; i += 128) {
            q[i] = row[key + i];
            k[i] = row[a.k_heads * dk + key + i];
        }
        block_barrier();
        if (threadIdx.x < 32) {
            // Threads 0..15: lanes of q, 16..31: of k.
            u32 l = threadIdx.x & 15;
            const float* x = threadIdx.x < 16 ? q : k;
            float acc = 0.0f;
            for (u32 i = l; i < dk; i += 16) acc = fma_(x[i], x[i], acc);
            acc = join_16(acc);
            if (l == 0) scales[threadIdx.x / 16] = 1.0f / sqrtf(acc + 1e-6f);
        }
        block_barrier();
        float q_scale = scales[0] * a.inv_sqrt_k, k_scale = scales[1];
        u64 at = (u64)(first + r) * a.v_heads + h;
        float decay = exp_(a.neg_exp_a[h] * softplus_(a.a[at] + a.dt_bias[h]));
        float beta = sigmoid_(a.b[at]);
        for (u32 j = threadIdx.x; j < dv; j += 128) {
            float o = 0.0f;
            for (u32 i = 0; i < dk; i++) {
                float v = s[i * dv + j] * decay;
                s[i * dv + j] = v;
                o = fma_(v, k[i] * k_scale, o);
            }
            o = beta * (row[2 * a.k_heads * dk + h * dv + j] - o);
            float y = 0.0f;
            for (u32 i = 0; i < dk; i++) {
                float v = fma_(k[i] * k_scale, o, s[i * dv + j]);
                s[i * dv + j] = v;
                y = fma_(v, q[i] * q_scale, y);
            }
            a.out[(u64)(first + r) * a.v_heads * dv + h * dv + j] = y;
        }
    }
}
