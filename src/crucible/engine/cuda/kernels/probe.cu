// What the tensor cores allow: chains of the one instruction that all linear layers and attention are made of.
#include "kernel.cuh"

constexpr int CHAINS = 16;

// Each warp computes `rounds` times CHAINS independent multiply-adds of 16 x 8 x 16, on numbers that are no zeros.
KERNEL __launch_bounds__(256) multiply_add(int rounds, float* out) {
    float c[CHAINS][4] = {};
    const u32 seed = blockIdx.x * blockDim.x + threadIdx.x;
    u32 bits = seed * 2654435761u;
    const uint4 a = make_uint4(0x3C003800u ^ (bits & 0x03FF03FFu), 0x34003A00u ^ (bits >> 7 & 0x03FF03FFu),
                               0xB8003C00u ^ (bits >> 13 & 0x03FF03FFu), 0x3800B400u ^ (bits >> 3 & 0x03FF03FFu));
    for (int round = 0; round < rounds; round++)
#pragma unroll
        for (int i = 0; i < CHAINS; i++) mma(c[i], a, a.x ^ (i * 0x00110011u), a.w ^ (i * 0x01010101u));
    float sum = 0.0f;
    for (int i = 0; i < CHAINS; i++) sum = sum + c[i][0] + c[i][1] + c[i][2] + c[i][3];
    out[seed] = sum;
}
