// What every kernel stands on: integer types, the few instructions that C++ has no name for, and the elementary
// functions, step by step those of `crates/cpu/src/vecmath.rs`. Compiled without contraction (-fmad=false): `a * b + c`
// is two roundings, `fma_` is one. Not here: any kernel.
//
// Under FOREBAY_EMULATED the same text is compiled by a C++ compiler and run thread by thread (emulator.hpp).

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef FOREBAY_EMULATED
#include "emulator.hpp"
#else
#define D __device__ __forceinline__
#define KERNEL(name, Args, threads, blocks) \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Args a)
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

D float fma_(float a, float b, float c) { return __fmaf_rn(a, b, c); }
D double fma_64(double a, double b, double c) { return __fma_rn(a, b, c); }
D u32 bits_of(float x) { return __float_as_uint(x); }
D float float_of(u32 x) { return __uint_as_float(x); }
D u64 bits_of_64(double x) { return (u64)__double_as_longlong(x); }
D double double_of(u64 x) { return __longlong_as_double((long long)x); }
// Bytes of b:a by the low four nibbles of `s`, each below eight: `__byte_perm` would mask them.
D u32 pick_bytes(u32 a, u32 b, u32 s) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(s));
    return r;
}
D u32 and_or(u32 a, u32 b, u32 c) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}
D u32 count_bits(u32 x) { return __popc(x); }
D int dot4(u32 w, u32 x, int sum) { return __dp4a((int)w, (int)x, sum); }
D float half_to_float(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
D u16 float_to_half(float f) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
D float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
D u32 shuffle_xor_bits(u32 x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
D float shuffle(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
// Over all threads of a warp, or (sum_16) of its half.
D u32 warp_max(u32 x) { return __reduce_max_sync(0xffffffffu, x); }
D u32 warp_min(u32 x) { return __reduce_min_sync(0xffffffffu, x); }
D int sum_16(int x) { return __reduce_add_sync(threadIdx.x & 16 ? 0xffff0000u : 0x0000ffffu, x); }
D u32 add_shared(u32* at, u32 x) { return atomicAdd(at, x); }
D void block_barrier() { __syncthreads(); }
D void warp_barrier() { __syncwarp(); }
// What an earlier kernel of the stream wrote may be read from here on; the next kernel may be launched before.
D void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
D void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Asks for a line of memory to be brought into the second-level cache.
D void prefetch(const u8* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// 16 x 32 (or 16 x 16) signed bytes times 32 x 8: exact sums of 32 (16) products, added to c.
D void mma_32(int c[4], const u32 a[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
D void mma_16(int c[4], u32 a0, u32 a1, u32 b0) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
}
D uint4 load_16(const u8* p) { return __ldg((const uint4*)p); }
D uint2 load_8(const u8* p) { return __ldg((const uint2*)p); }
D u32 load_4(const u8* p) { return __ldg((const u32*)p); }
D u16 load_2(const u8* p) { return __ldg((const u16*)p); }
D u8 load_1(const u8* p) { return __ldg(p); }
// The same where they stand, if `there`: the compiler would move plain ones to where their results are used, behind waiting
// for inputs. What is read once takes no room in the first-level cache.
#define EARLY(name, type, text, reg)                                                                       \
    D void name(const u8* p, bool there, type* v) {                                                        \
        asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.nc.L1::no_allocate." text " %0, [%1];}" \
                     : reg(*v) : "l"(p), "r"((u32)there));                                                 \
    }
EARLY(early_4, u32, "u32", "=r")
EARLY(early_2, u16, "u16", "=h")
EARLY(early_1, u16, "u8", "=h")
D void early_8(const u8* p, bool there, uint2* v) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];}"
                 : "=r"(v->x), "=r"(v->y) : "l"(p), "r"((u32)there));
}
D void early_16(const u8* p, bool there, uint4* v) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];}"
                 : "=r"(v->x), "=r"(v->y), "=r"(v->z), "=r"(v->w) : "l"(p), "r"((u32)there));
}
// 32 bytes by two loads, of which the second finds in the first-level cache what the first brought there.
D void early_32(const u8* p, bool there, uint4* v, uint4* w) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %9, 0; @p ld.global.nc.L1::evict_first.v4.u32 {%0,%1,%2,%3}, [%8]; "
                 "@p ld.global.nc.L1::evict_first.v4.u32 {%4,%5,%6,%7}, [%8+16];}"
                 : "=r"(v->x), "=r"(v->y), "=r"(v->z), "=r"(v->w), "=r"(w->x), "=r"(w->y), "=r"(w->z), "=r"(w->w)
                 : "l"(p), "r"((u32)there));
}
// What an earlier kernel wrote, where it stands.
D void fresh_16(const u8* p, bool there, uint4* v) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.v4.u32 {%0,%1,%2,%3}, [%4];}"
                 : "=r"(v->x), "=r"(v->y), "=r"(v->z), "=r"(v->w) : "l"(p), "r"((u32)there) : "memory");
}
// Copies 16 (8) bytes to shared memory behind the thread's back, zeroes unless `there`; all copies that were begun in front
// of the last but `n` marks are done after `copies_done<n>`, for the thread that began them.
D void copy_16(void* to, const u8* from, bool there) {
    u32 at = (u32)__cvta_generic_to_shared(to), bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
}
D void copy_8(void* to, const u8* from, bool there) {
    u32 at = (u32)__cvta_generic_to_shared(to), bytes = there ? 8 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
}
D void mark_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
D void copies_done() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
D float fresh_4(const float* p) {
    float v;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}
#endif

// A number that is added at an end, asked for at the beginning; zero where there is none.
D float ahead_4(const float* from, u32 i) { return from ? fresh_4(from + i) : 0.0f; }

#define INF float_of(0x7f800000u)

D float load_f32(const u8* p) { return float_of(load_4(p)); }
D float bf16_to_float(u16 h) { return float_of((u32)h << 16); }

// ---- elementary functions ----

#define ROUND 12582912.0f
#define ROUND_64 6755399441055744.0

D float power_of_two(int n) { return float_of((u32)(n + 127) << 23); }

D float exp_(float x) {
    x = x < -105.0f ? -105.0f : x;
    x = x > 89.0f ? 89.0f : x;
    float shifted = fma_(x, 1.44269504088896340736f, ROUND);
    float n = shifted - ROUND;
    float r = fma_(n, -0.693147180559945309417f, x);
    r = fma_(n, 1.9046542e-9f, r);
    float p = 0.0013814318f;
    p = fma_(p, r, 0.008368852f);
    p = fma_(p, r, 0.0416684f);
    p = fma_(p, r, 0.1666652f);
    p = fma_(p, r, 0.49999994f);
    float e = fma_(p, r * r, r) + 1.0f;
    int i = (int)(bits_of(shifted) - bits_of(ROUND));
    int half = i >> 1;
    return e * power_of_two(half) * power_of_two(i - half);
}

D float abs_(float x) { return float_of(bits_of(x) & 0x7fffffffu); }

D float sigmoid_(float x) {
    float e = exp_(-abs_(x));
    float top = x < 0.0f ? e : 1.0f;
    return top / (1.0f + e);
}

D float silu_(float x) {
    x = x < -200.0f ? -200.0f : x;
    return x * sigmoid_(x);
}

D float tanh_(float x) {
    float a = abs_(x);
    float z = x * x;
    float p = -0.005717037f;
    p = fma_(p, z, 0.020650579f);
    p = fma_(p, z, -0.053743497f);
    p = fma_(p, z, 0.13331491f);
    p = fma_(p, z, -0.33333284f);
    float small = fma_(z * x, p, x);
    float large = 1.0f - 2.0f / (exp_(a + a) + 1.0f);
    float y = a < 0.625f ? small : large;
    return float_of((bits_of(y) & 0x7fffffffu) | (bits_of(x) & 0x80000000u));
}

D float gelu_(float x) {
    x = x < -30.0f ? -30.0f : x;
    float cube = x * x * x;
    return x * sigmoid_(1.5957692f * fma_(cube, 0.044715f, x));
}

D float softplus_(float x) {
    float positive = x < 0.0f ? 0.0f : x;
    float t = exp_(-abs_(x));
    float s = t / (t + 2.0f);
    float z = s * s;
    float p = 0.24308325f;
    p = fma_(p, z, 0.2142585f);
    p = fma_(p, z, 0.28617036f);
    p = fma_(p, z, 0.39998874f);
    p = fma_(p, z, 0.66666675f);
    return positive + fma_(z * s, p, s + s);
}

D void sin_cos_64(double x, double* sin, double* cos) {
    double shifted = fma_64(x, 0.63661977236758134308, ROUND_64);
    double n = shifted - ROUND_64;
    double r = fma_64(n, -1.57079632679489661923, x);
    r = fma_64(n, -6.123233995736766e-17, r);
    double z = r * r;
    double s = 1.0 / 355687428096000.0;
    s = fma_64(z, s, -1.0 / 1307674368000.0);
    s = fma_64(z, s, 1.0 / 6227020800.0);
    s = fma_64(z, s, -1.0 / 39916800.0);
    s = fma_64(z, s, 1.0 / 362880.0);
    s = fma_64(z, s, -1.0 / 5040.0);
    s = fma_64(z, s, 1.0 / 120.0);
    s = fma_64(z, s, -1.0 / 6.0);
    s = fma_64(z * r, s, r);
    double c = 1.0 / 20922789888000.0;
    c = fma_64(z, c, -1.0 / 87178291200.0);
    c = fma_64(z, c, 1.0 / 479001600.0);
    c = fma_64(z, c, -1.0 / 3628800.0);
    c = fma_64(z, c, 1.0 / 40320.0);
    c = fma_64(z, c, -1.0 / 720.0);
    c = fma_64(z, c, 1.0 / 24.0);
    c = fma_64(z, c, -1.0 / 2.0);
    c = fma_64(z, c, 1.0);
    u64 q = bits_of_64(shifted);
    double si = (q & 1) == 0 ? s : c;
    double co = (q & 1) == 0 ? c : s;
    *sin = (q & 2) == 0 ? si : -si;
    *cos = ((q + 1) & 2) == 0 ? co : -co;
}

// ---- sums in the contract's orders ----

// Joins 16 lanes held by 16 neighbouring threads: (i, i + 8), (i, i + 4), (i, i + 2), (0, 1). All get the sum.
D float join_16(float x) {
    x = x + shuffle_xor(x, 8);
    x = x + shuffle_xor(x, 4);
    x = x + shuffle_xor(x, 2);
    return x + shuffle_xor(x, 1);
}

// The same for 8 lanes.
D float join_8(float x) {
    x = x + shuffle_xor(x, 4);
    x = x + shuffle_xor(x, 2);
    return x + shuffle_xor(x, 1);
}

// Gated activation; `kind` as in `args.rs`.
D float glu_(u32 kind, float alpha, float limit, float g, float u) {
    if (kind == 0) return silu_(g) * u;
    if (kind == 1) return gelu_(g) * u;
    g = g > limit ? limit : g;
    u = u > limit ? limit : u;
    u = u < -limit ? -limit : u;
    return (u + 1.0f) * (g * sigmoid_(alpha * g));
}

// Quantises one value per thread of a warp, a block of 32, and writes codes (dwords 0 4 1 5 2 6 3 7) and
// {scale, asum, sum of the first 16, sum of the last 16}.
D void pack_block(float x, u8* codes, u8* meta) {
    u32 lane = threadIdx.x & 31;
    u32 largest = warp_max(bits_of(x) & 0x7fffffffu);
    float amax = float_of(largest);
    float inverse = 127.0f / amax;
    bool finite = largest < 0x7f800000u;
    int code = 0;
    if (finite && inverse < INF) code = (i8)(bits_of(x * inverse + ROUND) & 0xff);
    int sum = sum_16(code);
    int other = (int)shuffle_xor_bits((u32)sum, 16);
    u32 dword = lane >> 2;
    u32 place = dword < 4 ? 2 * dword : 2 * dword - 7;
    codes[place * 4 + (lane & 3)] = (u8)code;
    if (lane == 0) {
        float scale = finite ? amax / 127.0f : float_of(0x7fc00000u);
        ((float*)meta)[0] = scale;
        ((float*)meta)[1] = scale * (float)(sum + other);
        ((int*)meta)[2] = sum;
        ((int*)meta)[3] = other;
    }
}
