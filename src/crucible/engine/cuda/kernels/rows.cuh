// Rows at a time: embeddings, the norm as a phase of its own, and rows brought together for the output projection.
#pragma once
#include "functions.cuh"
#include "layout.cuh"

// Row `id` of the embedding: value * scale, rounded. A warp per row.
template <class Format>
DEVICE void embed_row(const void* weights, const float* scales, int n, int groups, int width, int id, float* x) {
#pragma unroll 8
    for (int k = lane_id(); k < width; k += WARP) {
        const float scale = scales[(Format::PER_CHUNK ? (size_t)(k / 128) * n : 0) + id];
        x[k] = Format::value(weights, weight_index<Format>(id, k, groups)) * scale;
    }
}

// Norms one row with all threads of a block: `put(k, four numbers)` gets them. `sums` has room for width / 32 + 1.
template <class Put>
DEVICE void norm_row(const float* x, const float* weight, int width, float eps, float* sums, Put put) {
    constexpr int KEEP = 2;  // numbers of so many rounds stay in registers
    const int lane = lane_id(), step = blockDim.x * 4, first = threadIdx.x * 4;
    float4 kept[KEEP], gain[KEEP];
#pragma unroll
    for (int i = 0; i < KEEP; i++) {
        kept[i] = load_numbers(x, first + i * step, width);
        gain[i] = load_numbers(weight, first + i * step, width);
    }
    for (int i = 0, k = first; i * step < width; i++, k += step) {
        const float sum = sum_granules(i == 0 ? kept[0] : i == 1 ? kept[1] : load_numbers(x, k, width));
        if (lane % GRANULE_LANES == 0 && k < width) sums[k / GRANULE] = sum;
    }
    __syncthreads();
    const float rstd = rstd_of(sums, ceil_div(width, GRANULE), width, eps);
    auto finish = [&](int k, const float4& v, const float4& g) {
        if (k >= width) return;
        put(k, make_float4(normed(v.x, rstd, g.x), normed(v.y, rstd, g.y), normed(v.z, rstd, g.z),
                           normed(v.w, rstd, g.w)));
    };
#pragma unroll
    for (int i = 0; i < KEEP; i++) finish(first + i * step, kept[i], gain[i]);
    for (int k = first + KEEP * step; k < width; k += step)
        finish(k, load_numbers(x, k, width), load_numbers(weight, k, width));
}
