// Rows at a time: embeddings, the norm as a phase of its own, and rows brought together for the output projection.
#pragma once
#include "functions.cuh"
#include "layout.cuh"

// Row `id` of the embedding: value * scale, rounded. A warp per row.
template <class Format>
DEVICE void embed_row(const void* weights, const float* scales, int n, int groups, int width, int id, float* x) {
    for (int k = lane_id(); k < width; k += WARP) {
        const float scale = scales[(Format::PER_CHUNK ? (size_t)(k / 128) * n : 0) + id];
        x[k] = Format::value(weights, weight_index<Format>(id, k, groups)) * scale;
    }
}

// rstd of a row, by a warp, which has it in all lanes.
DEVICE float row_rstd(const float* x, int width, float eps) {
    float ss = 0.0f;
    for (int first = 0; first < width; first += WARP) {
        const int k = first + lane_id();
        const float sum = sum_granule(k < width ? x[k] : 0.0f);
        ss = first == 0 ? sum : ss + sum;
    }
    return __fdiv_rn(1.0f, __fsqrt_rn(__fdiv_rn(ss, (float)width) + eps));
}

// The normed row as operand number `row` in A order. A warp per row.
DEVICE void norm_row(const float* x, const float* weight, int width, float eps, int row, u16* operand,
                     u32* saturations) {
    const float rstd = row_rstd(x, width, eps);
    for (int k = lane_id() * 2; k < width; k += 2 * WARP) {
        const float2 v = *(const float2*)(x + k), g = *(const float2*)(weight + k);
        const float a = saturate(normed(v.x, rstd, g.x), saturations);
        const float b = saturate(normed(v.y, rstd, g.y), saturations);
        *(u32*)(operand + a_index(row, k, width / 16)) = pack_f16(a, b);
    }
}
