// Runs the kernels on a CPU, for tests on machines without a GPU: every thread of a block is a coroutine; barriers and
// shuffles let the others run. Blocks run one after the other, so `__shared__` may be static. x86-64 only. Not fast.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define D static inline __attribute__((always_inline))
#define __shared__ static
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct Dim { unsigned x, y, z; };
static Dim threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {
extern "C" void emulated_switch(void** from, void* to);
asm(R"(
.text
.globl emulated_switch
emulated_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
)");
enum State { RUN, WARP, BLOCK, DONE };
struct Thread { void* sp; char* stack; State state; unsigned parity; };
static std::vector<Thread> threads;
static unsigned slots[32][2][32];
static void* scheduler;
static unsigned current;
static void (*body)(const void*);
static const void* args;
alignas(64) static unsigned char dynamic_shared[256 << 10];
constexpr size_t STACK = 128 << 10;

static void yield(State s) {
    threads[current].state = s;
    unsigned me = current;
    emulated_switch(&threads[me].sp, scheduler);
}
static void entry() {
    body(args);
    yield(DONE);
    abort();
}
static void run_block(unsigned n) {
    while (threads.size() < n) threads.push_back({nullptr, (char*)aligned_alloc(64, STACK), DONE, 0});
    for (unsigned i = 0; i < n; i++) {
        void** top = (void**)(threads[i].stack + STACK - 64);
        *--top = nullptr;
        *--top = (void*)entry;
        for (int k = 0; k < 6; k++) *--top = nullptr;
        threads[i].sp = top;
        threads[i].state = RUN;
        threads[i].parity = 0;
    }
    unsigned warps = (n + 31) / 32;
    for (;;) {
        bool live = false, all_block = true;
        for (unsigned w = 0; w < warps; w++) {
            unsigned lo = w * 32, hi = lo + 32 < n ? lo + 32 : n;
            for (;;) {
                for (unsigned i = lo; i < hi; i++) {
                    if (threads[i].state != RUN) continue;
                    current = i;
                    threadIdx.x = i;
                    emulated_switch(&scheduler, threads[i].sp);
                }
                bool any_warp = false, any_block = false;
                for (unsigned i = lo; i < hi; i++) {
                    any_warp |= threads[i].state == WARP;
                    any_block |= threads[i].state == BLOCK;
                }
                if (any_warp && any_block) {
                    fprintf(stderr, "emulator: threads of a warp wait at a barrier and at a shuffle\n");
                    abort();
                }
                if (!any_warp) {
                    live |= any_block;
                    break;
                }
                for (unsigned i = lo; i < hi; i++) {
                    if (threads[i].state == DONE) {
                        fprintf(stderr, "emulator: a thread left before its warp's shuffle\n");
                        abort();
                    }
                    threads[i].state = RUN;
                }
            }
        }
        (void)all_block;
        if (!live) return;
        for (unsigned i = 0; i < n; i++)
            if (threads[i].state == BLOCK) threads[i].state = RUN;
    }
}
static unsigned exchange(unsigned value, unsigned source) {
    Thread& t = threads[current];
    unsigned w = current / 32, parity = t.parity;
    t.parity ^= 1;
    slots[w][parity][current & 31] = value;
    yield(WARP);
    return slots[w][parity][source & 31];
}
}  // namespace emulated

#define KERNEL(name, Args, threads_, blocks_)                                                              \
    static void name##_body(const Args& a);                                                                \
    extern "C" void emulated_##name(const void* p, const unsigned* grid, const unsigned* block) {          \
        emulated::body = [](const void* q) { name##_body(*(const Args*)q); };                              \
        emulated::args = p;                                                                                \
        gridDim = {grid[0], grid[1], grid[2]};                                                             \
        blockDim = {block[0], 1, 1};                                                                       \
        if (block[0] > threads_) { fprintf(stderr, "emulator: too many threads for " #name "\n"); abort(); } \
        for (unsigned z = 0; z < grid[2]; z++)                                                             \
            for (unsigned y = 0; y < grid[1]; y++)                                                         \
                for (unsigned x = 0; x < grid[0]; x++) {                                                   \
                    blockIdx = {x, y, z};                                                                  \
                    emulated::run_block(block[0]);                                                         \
                }                                                                                          \
    }                                                                                                      \
    extern "C" unsigned emulated_size_##name() { return sizeof(Args); }                                    \
    static void name##_body(const Args& a)
#define DYNAMIC_SHARED(name) unsigned char* name = emulated::dynamic_shared

D float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
D double fma_64(double a, double b, double c) { return __builtin_fma(a, b, c); }
template <class T, class F> D T bits_as(F x) { T y; static_assert(sizeof(T) == sizeof(F)); memcpy(&y, &x, sizeof y); return y; }
D u32 bits_of(float x) { return bits_as<u32>(x); }
D float float_of(u32 x) { return bits_as<float>(x); }
D u64 bits_of_64(double x) { return bits_as<u64>(x); }
D double double_of(u64 x) { return bits_as<double>(x); }
D u32 pick_bytes(u32 a, u32 b, u32 s) {
    u64 all = (u64)b << 32 | a;
    u32 r = 0;
    for (int i = 0; i < 4; i++) r |= (u32)(all >> (8 * (s >> (4 * i) & 7)) & 0xff) << (8 * i);
    return r;
}
D u32 and_or(u32 a, u32 b, u32 c) { return (a & b) | c; }
D u32 count_bits(u32 x) { return (u32)__builtin_popcount(x); }
D int dot4(u32 w, u32 x, int sum) {
    for (int i = 0; i < 4; i++) sum += (i8)(w >> (8 * i)) * (i8)(x >> (8 * i));
    return sum;
}
D float half_to_float(u16 h) {
    u32 m = (u32)(h & 0x7fff) << 13;
    u32 finite = bits_of(float_of(m) * float_of((127u + 112u) << 23));
    u32 bits = (h & 0x7c00) == 0x7c00 ? m | 0x7f800000u : finite;
    return float_of(bits | (u32)(h & 0x8000) << 16);
}
D u16 float_to_half(float f) { return bits_as<u16>((_Float16)f); }
D float shuffle_xor(float x, int mask) { return float_of(emulated::exchange(bits_of(x), emulated::current ^ mask)); }
D u32 shuffle_xor_bits(u32 x, int mask) { return emulated::exchange(x, emulated::current ^ mask); }
D float shuffle(float x, int lane) { return float_of(emulated::exchange(bits_of(x), lane)); }
D u32 warp_max(u32 x) {
    for (int m = 16; m > 0; m >>= 1) { u32 o = shuffle_xor_bits(x, m); x = o > x ? o : x; }
    return x;
}
D u32 warp_min(u32 x) {
    for (int m = 16; m > 0; m >>= 1) { u32 o = shuffle_xor_bits(x, m); x = o < x ? o : x; }
    return x;
}
D int sum_16(int x) {
    for (int m = 8; m > 0; m >>= 1) x += (int)shuffle_xor_bits((u32)x, m);
    return x;
}
D u32 add_shared(u32* at, u32 x) { u32 old = *at; *at += x; return old; }
D void block_barrier() { emulated::yield(emulated::BLOCK); }
D void warp_barrier() { emulated::exchange(0, 0); }
D void wait_for_inputs() {}
D void let_next_start() {}
D void prefetch(const u8*) {}
template <class T> D T load_as(const u8* p) { T x; memcpy(&x, p, sizeof x); if ((size_t)p % sizeof(T)) { fprintf(stderr, "emulator: unaligned load\n"); abort(); } return x; }
D uint4 load_16(const u8* p) { return load_as<uint4>(p); }
D uint2 load_8(const u8* p) { return load_as<uint2>(p); }
D u32 load_4(const u8* p) { return load_as<u32>(p); }
D u16 load_2(const u8* p) { return load_as<u16>(p); }
D u8 load_1(const u8* p) { return *p; }
D void early_16(const u8* p, bool there, uint4* v) { if (there) *v = load_16(p); }
D void fresh_16(const u8* p, bool there, uint4* v) { if (there) *v = load_16(p); }
D void early_32(const u8* p, bool there, uint4* v, uint4* w) {
    early_16(p, there, v);
    early_16(p + 16, there, w);
}
D float fresh_4(const float* p) { return *p; }
D void copy_16(void* to, const u8* from, bool there) { if (there) *(uint4*)to = load_16(from); else memset(to, 0, 16); }
D void copy_8(void* to, const u8* from, bool there) { if (there) *(uint2*)to = load_8(from); else memset(to, 0, 8); }
D void mark_copies() {}
template <int N> D void copies_done() {}
D void early_8(const u8* p, bool there, uint2* v) { if (there) *v = load_8(p); }
D void early_4(const u8* p, bool there, u32* v) { if (there) *v = load_4(p); }
D void early_2(const u8* p, bool there, u16* v) { if (there) *v = load_2(p); }
D void early_1(const u8* p, bool there, u16* v) { if (there) *v = load_1(p); }
// The tensor cores' fragments: thread 4 g + t holds rows g, g + 8 of a and columns g of b, dwords t and t + 4.
D void mma_parts(int c[4], const u32* a_first, const u32* a_last, u32 b0, u32 b1, bool wide) {
    u32 lane = emulated::current & 31, g = lane / 4, t = lane % 4;
    for (u32 k = 0; k < 4; k++) {
        for (int half = 0; half < (wide ? 2 : 1); half++) {
            const u32* a = half ? a_last : a_first;
            u32 b = half ? b1 : b0;
            u32 a0 = emulated::exchange(a[0], 4 * g + k), a1 = emulated::exchange(a[1], 4 * g + k);
            u32 x = emulated::exchange(b, 4 * (2 * t) + k), y = emulated::exchange(b, 4 * (2 * t + 1) + k);
            c[0] = dot4(a0, x, c[0]);
            c[1] = dot4(a0, y, c[1]);
            c[2] = dot4(a1, x, c[2]);
            c[3] = dot4(a1, y, c[3]);
        }
    }
}
D void mma_32(int c[4], const u32 a[4], u32 b0, u32 b1) { mma_parts(c, a, a + 2, b0, b1, true); }
D void mma_16(int c[4], u32 a0, u32 a1, u32 b0) {
    u32 a[2] = {a0, a1};
    mma_parts(c, a, a, b0, b0, false);
}
