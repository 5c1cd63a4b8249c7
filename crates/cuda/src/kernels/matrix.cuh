// Weight matrices as `layout.rs` lays them out, and the decoding of a block of 32.
//
// Codes are signed bytes `s` once decoded; the integer of the contract is `sum(s * a) + plus * sum(a)`.
// Widths: 4 bits (byte i holds elements i and i + 16; with a table dword t holds elements 4 t .. 4 t + 4, then 16 + 4 t .., a
// nibble each), 6 bits (the same and two dwords of high bits: bits
// 2t, 2t + 1 of byte k of dword h belong to element 16 h + 4 t + k), 8 bits (dwords 0 4 1 5 2 6 3 7).
// Not here: sums over blocks.

enum Width { W_F32, W_F16, W_BF16, W_4, W_4_TABLE, W_6, W_8 };
enum Kind { K_NONE, K_E8M0, K_F16, K_F16_BIAS, K_BF16_BIAS, K_F32_BIAS, K_SUPER, K_SUPER_HALVES, K_SUPER_BIAS,
            K_SUPER_BIAS_HALVES };

struct Matrix {
    const u8* codes;   // [rows][blocks][16 or 32], or floats [rows][cols]
    const u8* high;    // [rows][blocks][8]
    const u8* scales;  // [rows][..] by kind
    const u8* supers;  // [rows][groups][2 or 4]
    u32 rows, cols, blocks, width, kind, shift;
    int plus;
    float unit;
    u32 table[4];      // 16 signed codes
};

struct Scale { float ws[2], wb[2]; };
struct Codes { u32 first[4], last[4]; };  // elements 0..15 and 16..31, four to a dword

D constexpr bool has_bias(u32 k) { return (k >= K_F16_BIAS && k <= K_F32_BIAS) || k == K_SUPER_BIAS || k == K_SUPER_BIAS_HALVES; }
D constexpr bool has_halves(u32 k) { return k == K_SUPER_HALVES || k == K_SUPER_BIAS_HALVES; }

// Half of an E8M0 scale: 2^(s - 128).
D float e8m0_half(u32 s) {
    if (s == 255) return float_of(0x7fc00000u);
    return float_of(s < 2 ? 0x00200000u << s : (s - 1) << 23);
}

struct RawScale { u32 x, y; };

// The stored scales of block `b` of row `row`. With `KIND` known, only its branch is compiled.
template <int KIND>
D RawScale load_scale(const Matrix& m, u32 row, u32 b) {
    u32 kind = KIND >= 0 ? (u32)KIND : m.kind;
    u64 at = (u64)row * m.blocks + b, group = (u64)row * ((m.blocks + 7) >> 3) + (b >> 3);
    u64 shared = (u64)row * (m.blocks >> m.shift) + (b >> m.shift);
    RawScale r;
    r.x = r.y = 0;
    switch (kind) {
        case K_E8M0: r.x = load_1(m.scales + at); break;
        case K_F16: r.x = load_2(m.scales + 2 * at); break;
        case K_F16_BIAS:
        case K_BF16_BIAS: r.x = load_4(m.scales + 4 * shared); break;
        case K_F32_BIAS: {
            uint2 v = load_8(m.scales + 8 * shared);
            r.x = v.x;
            r.y = v.y;
            break;
        }
        case K_SUPER:
            r.x = load_1(m.scales + at);
            r.y = load_2(m.supers + 2 * group);
            break;
        case K_SUPER_HALVES:
            r.x = load_2(m.scales + 2 * at);
            r.y = load_2(m.supers + 2 * group);
            break;
        case K_SUPER_BIAS:
            r.x = load_2(m.scales + 2 * at);
            r.y = load_4(m.supers + 4 * group);
            break;
        case K_SUPER_BIAS_HALVES:
            r.x = load_4(m.scales + 4 * at);
            r.y = load_4(m.supers + 4 * group);
            break;
    }
    return r;
}

template <int KIND>
D Scale decode_scale(const Matrix& m, RawScale r) {
    u32 kind = KIND >= 0 ? (u32)KIND : m.kind;
    Scale s;
    s.ws[0] = s.ws[1] = s.wb[0] = s.wb[1] = 0.0f;
    switch (kind) {
        case K_E8M0: s.ws[0] = s.ws[1] = e8m0_half(r.x); break;
        case K_F16: s.ws[0] = s.ws[1] = half_to_float((u16)r.x); break;
        case K_F16_BIAS:
            s.ws[0] = s.ws[1] = half_to_float((u16)r.x);
            s.wb[0] = s.wb[1] = half_to_float((u16)(r.x >> 16));
            break;
        case K_BF16_BIAS:
            s.ws[0] = s.ws[1] = float_of(r.x << 16);
            s.wb[0] = s.wb[1] = float_of(r.x & 0xffff0000u);
            break;
        case K_F32_BIAS:
            s.ws[0] = s.ws[1] = float_of(r.x);
            s.wb[0] = s.wb[1] = float_of(r.y);
            break;
        case K_SUPER: s.ws[0] = s.ws[1] = half_to_float((u16)r.y) * m.unit * (float)(i8)(r.x & 0xff); break;
        case K_SUPER_HALVES: {
            float d = half_to_float((u16)r.y) * m.unit;
            s.ws[0] = d * (float)(i8)(r.x & 0xff);
            s.ws[1] = d * (float)(i8)(r.x >> 8 & 0xff);
            break;
        }
        case K_SUPER_BIAS:
            s.ws[0] = s.ws[1] = half_to_float((u16)r.y) * (float)(r.x & 0xff);
            s.wb[0] = s.wb[1] = -(half_to_float((u16)(r.y >> 16)) * (float)(r.x >> 8));
            break;
        case K_SUPER_BIAS_HALVES: {
            float scale = half_to_float((u16)r.y), minimum = half_to_float((u16)(r.y >> 16));
            s.ws[0] = scale * (float)(r.x & 0xff);
            s.wb[0] = -(minimum * (float)(r.x >> 8 & 0xff));
            s.ws[1] = scale * (float)(r.x >> 16 & 0xff);
            s.wb[1] = -(minimum * (float)(r.x >> 24));
            break;
        }
    }
    return s;
}

template <int KIND>
D Scale scale_of(const Matrix& m, u32 row, u32 b) { return decode_scale<KIND>(m, load_scale<KIND>(m, row, b)); }

// Eight nibbles through a table of 16 signed bytes: the low four and the high four.
D void look_up(const Matrix& m, u32 x, u32* first, u32* last) {
    // A selector takes three bits of a nibble; the fourth chooses between the halves of the table.
    u32 s = x & 0x77777777u, half = and_or(x >> 1, 0x44444444u, 0x32103210u);
    *first = pick_bytes(pick_bytes(m.table[0], m.table[1], s), pick_bytes(m.table[2], m.table[3], s), half);
    s >>= 16;
    half >>= 16;
    *last = pick_bytes(pick_bytes(m.table[0], m.table[1], s), pick_bytes(m.table[2], m.table[3], s), half);
}

// Dword `t` (0..3) of either half of a block.
template <int WIDTH>
D void words_of(const Matrix& m, u32 nibbles, u32 extra, u32 high0, u32 high1, u32 t, u32* first, u32* last) {
    u32 width = WIDTH >= 0 ? (u32)WIDTH : m.width;
    if (width == W_4_TABLE) {
        look_up(m, nibbles, first, last);
        return;
    }
    u32 lo = nibbles & 0x0f0f0f0fu, hi = nibbles >> 4 & 0x0f0f0f0fu;
    if (width == W_4) {
        *first = lo;
        *last = hi;
    } else if (width == W_6) {
        *first = lo | (high0 >> (2 * t) & 0x03030303u) << 4;
        *last = hi | (high1 >> (2 * t) & 0x03030303u) << 4;
    } else {
        *first = nibbles;
        *last = extra;
    }
}

struct RawCodes { uint4 x, y; };

template <int WIDTH>
D RawCodes load_codes(const Matrix& m, u32 row, u32 b) {
    u32 width = WIDTH >= 0 ? (u32)WIDTH : m.width;
    u64 at = (u64)row * m.blocks + b;
    RawCodes r;
    r.y.x = r.y.y = r.y.z = r.y.w = 0;
    if (width == W_8) {
        r.x = load_16(m.codes + 32 * at);
        r.y = load_16(m.codes + 32 * at + 16);
        return r;
    }
    r.x = load_16(m.codes + 16 * at);
    if (width == W_6) {
        uint2 h = load_8(m.high + 8 * at);
        r.y.x = h.x;
        r.y.y = h.y;
    }
    return r;
}

template <int WIDTH>
D Codes decode_codes(const Matrix& m, const RawCodes& r) {
    u32 width = WIDTH >= 0 ? (u32)WIDTH : m.width;
    Codes c;
    if (width == W_8) {
        c.first[0] = r.x.x; c.last[0] = r.x.y; c.first[1] = r.x.z; c.last[1] = r.x.w;
        c.first[2] = r.y.x; c.last[2] = r.y.y; c.first[3] = r.y.z; c.last[3] = r.y.w;
        return c;
    }
    words_of<WIDTH>(m, r.x.x, 0, r.y.x, r.y.y, 0, &c.first[0], &c.last[0]);
    words_of<WIDTH>(m, r.x.y, 0, r.y.x, r.y.y, 1, &c.first[1], &c.last[1]);
    words_of<WIDTH>(m, r.x.z, 0, r.y.x, r.y.y, 2, &c.first[2], &c.last[2]);
    words_of<WIDTH>(m, r.x.w, 0, r.y.x, r.y.y, 3, &c.first[3], &c.last[3]);
    return c;
}

// Element `e` of row `row` as f32: for the embedding and for precision f32.
D float weight_at(const Matrix& m, u32 row, u32 e) {
    if (m.width == W_F32) return load_f32(m.codes + 4 * ((u64)row * m.cols + e));
    if (m.width == W_F16) return half_to_float(load_2(m.codes + 2 * ((u64)row * m.cols + e)));
    if (m.width == W_BF16) return bf16_to_float(load_2(m.codes + 2 * ((u64)row * m.cols + e)));
    u32 b = e >> 5, i = e & 31, half = i >> 4, t = (i >> 2) & 3, k = i & 3;
    u64 at = (u64)row * m.blocks + b;
    int code;
    if (m.width == W_8) {
        code = (i8)load_1(m.codes + 32 * at + 8 * t + 4 * half + k);
    } else {
        u32 nibble = load_1(m.codes + 16 * at + (i & 15)) >> (4 * half) & 15;
        if (m.width == W_4_TABLE) nibble = load_4(m.codes + 16 * at + 4 * t) >> (16 * half + 4 * k) & 15;
        code = (int)nibble;
        if (m.width == W_4_TABLE) code = (i8)(m.table[nibble >> 2] >> (8 * (nibble & 3)) & 0xff);
        if (m.width == W_6) code |= (load_1(m.high + 8 * at + 4 * half + k) >> (2 * t) & 3) << 4;
    }
    Scale s = scale_of<-1>(m, row, b);
    float w = s.ws[half] * (float)(code + m.plus);
    return has_bias(m.kind) ? w + s.wb[half] : w;
}

// The combinations that have kernels of their own; all others run through the last.
enum Variant { V_MXFP4, V_Q8_0, V_Q4_K, V_Q6_K, V_MLX4, V_ANY };

#define FOR_VARIANT(variant, call)                                       \
    switch (variant) {                                                   \
        case V_MXFP4: { constexpr int W = W_4_TABLE, K = K_E8M0; call; } break; \
        case V_Q8_0: { constexpr int W = W_8, K = K_F16; call; } break;  \
        case V_Q4_K: { constexpr int W = W_4, K = K_SUPER_BIAS; call; } break; \
        case V_Q6_K: { constexpr int W = W_6, K = K_SUPER_HALVES; call; } break; \
        case V_MLX4: { constexpr int W = W_4, K = K_BF16_BIAS; call; } break; \
        default: { constexpr int W = -1, K = -1; call; } break;          \
    }
