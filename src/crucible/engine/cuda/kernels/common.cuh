// What every kernel is built from: integer names, f16 by inline PTX, loads, the tensor-core instruction.
// NVRTC finds no headers on a user's machine, so nothing is included but files of this folder.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

constexpr int WARP = 32;
constexpr u32 ALL_LANES = 0xFFFFFFFFu;
#define INFINITY_F __int_as_float(0x7F800000)

DEVICE int lane_id() { return threadIdx.x & (WARP - 1); }
DEVICE int warp_id() { return threadIdx.x / WARP; }
DEVICE constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// ---- f16 --------------------------------------------------------------------------------------------------------

constexpr float F16_MAX = 65504.0f;

// Operands saturate, and the device counts how often: no model that is served should ever do it. NaN stays NaN.
DEVICE float saturate(float x, u32* saturations) {
    if (x > F16_MAX || x < -F16_MAX) {
        atomicAdd(saturations, 1u);
        return x > 0.0f ? F16_MAX : -F16_MAX;
    }
    return x;
}

DEVICE u32 pack_f16(float low, float high) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

DEVICE u16 to_f16(float x) {
    u16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return half;
}

DEVICE float from_f16(u16 half) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    return x;
}

DEVICE float low_f16(u32 packed) { return from_f16((u16)packed); }
DEVICE float high_f16(u32 packed) { return from_f16((u16)(packed >> 16)); }

// ---- loads ------------------------------------------------------------------------------------------------------

// Weights are read once per step: past L1, without waiting for what is queued before them.
DEVICE uint4 load_weights(const void* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}

DEVICE void copy_async(void* shared, const void* global) {
    u32 at = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(global) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
DEVICE void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// ---- order between kernels of one stream ------------------------------------------------------------------------

// A kernel launched with overlap starts early, touches nothing that others write, and then waits here for all of them.
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel start early.
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- mma.sync.m16n8k16 ------------------------------------------------------------------------------------------
// Lane = 4 g + j holds, of A [16 x 16]: rows g, g+8 and columns 2j, 2j+1, 2j+8, 2j+9; of B [16 x 8]: rows 2j, 2j+1,
// 2j+8, 2j+9 and column g; of C [16 x 8]: (g, 2j), (g, 2j+1), (g+8, 2j), (g+8, 2j+1).

DEVICE void mma(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
    asm(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
