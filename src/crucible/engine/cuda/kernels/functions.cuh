// exp, silu and the sum of squares: one definition each, from correctly rounded operations (docs/arithmetic.md).
#pragma once
#include "common.cuh"

// e^x within 2 ulp. Cody and Waite's reduction, Taylor to the seventh power; the same steps as the CPU backend's.
DEVICE float exp_f32(float x) {
    const float LOG2_E = 1.44269504088896340736f, SHIFT = 12582912.0f;  // 1.5 * 2^23
    const float LN2_HIGH = 0.693145751953125f;                         // 0x1.62e4p-1
    const float LN2_LOW = 1.42860682030941723212e-6f;                  // ln 2 - LN2_HIGH
    float shifted = __fmaf_rn(x, LOG2_E, SHIFT);
    float n = shifted - SHIFT;
    float r = __fmaf_rn(n, -LN2_LOW, __fmaf_rn(n, -LN2_HIGH, x));
    float q = 1.98412698412698412698e-4f;                // 1/7!
    q = __fmaf_rn(q, r, 1.38888888888888888889e-3f);     // 1/6!
    q = __fmaf_rn(q, r, 8.33333333333333333333e-3f);     // 1/5!
    q = __fmaf_rn(q, r, 4.16666666666666666667e-2f);     // 1/4!
    q = __fmaf_rn(q, r, 1.66666666666666666667e-1f);     // 1/3!
    q = __fmaf_rn(q, r, 0.5f);                           // 1/2!
    float y = __fmaf_rn(q, r * r, r) + 1.0f;
    // 2^n by its bits, n + 127 from 1 to 254 wherever the result is used. The last bits of `shifted` are those of n.
    y = y * __int_as_float((__float_as_int(shifted) + 127) << 23);
    if (x < -87.33f) y = 0.0f;
    if (x > 88.02f) y = INFINITY_F;
    return y;
}

DEVICE float silu_f32(float z) { return __fdiv_rn(z, 1.0f + exp_f32(0.0f - z)); }

// Sums of 32 consecutive squares by an xor butterfly of distances 16, 8, 4, 2, 1. A lane holds 4 numbers in a row, so
// that 8 lanes are a granule and a warp has four; distances 16, 8 and 4 are between lanes, 2 and 1 within one.
constexpr int GRANULE = 32, GRANULE_LANES = 8, WARP_NUMBERS = 128;

DEVICE float sum_granules(const float4& x) {
    float s[4] = {x.x * x.x, x.y * x.y, x.z * x.z, x.w * x.w};
#pragma unroll
    for (int distance = GRANULE_LANES / 2; distance > 0; distance /= 2)
#pragma unroll
        for (int i = 0; i < 4; i++) s[i] = s[i] + __shfl_xor_sync(ALL_LANES, s[i], distance);
    return (s[0] + s[2]) + (s[1] + s[3]);
}

// 1 / sqrt(ss / D + eps), ss the granules' sums added in ascending order.
DEVICE float rstd_of(const float* granules, int num_granules, int d, float eps) {
    float ss = granules[0];
    for (int i = 1; i < num_granules; i++) ss = ss + granules[i];
    return __fdiv_rn(1.0f, __fsqrt_rn(__fdiv_rn(ss, (float)d) + eps));
}

DEVICE float normed(float x, float rstd, float weight) { return (x * rstd) * weight; }

// Four numbers of a row from k on; zero past its end. Widths are multiples of 16.
DEVICE float4 load_numbers(const float* row, int k, int width) {
    return k < width ? *(const float4*)(row + k) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// (a, b) turned by an angle, each product rounded.
DEVICE void rotate(float& a, float& b, float cos, float sin) {
    float first = a * cos - b * sin;
    b = b * cos + a * sin;
    a = first;
}
