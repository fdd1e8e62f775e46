// Everything in f32, for validation: no tensor cores, no shuffled operands, rows and matrices as they are. The order of
// every sum is that of docs/arithmetic.md; a linear layer is one chain per output and chunk, in one thread.
#pragma once
#include "functions.cuh"

constexpr int F32_CHUNK = 64, F32_PAGE = 16, F32_ROWS = 4;

// Outputs n of up to F32_ROWS rows from `row` on. weight [K][n_total], so that neighbours in a warp read neighbours.
DEVICE void linear_f32(const float* x, const float* weight, int k_total, int n_total, int chunk, int row, int num_rows,
                       int n, float (&y)[F32_ROWS]) {
    for (int first = 0; first < k_total; first += chunk) {
        float c[F32_ROWS] = {};
        const int end = min(first + chunk, k_total);
        for (int k = first; k < end; k++) {
            const float w = weight[(size_t)k * n_total + n];
#pragma unroll
            for (int i = 0; i < F32_ROWS; i++)
                c[i] = __fmaf_rn(w, x[(size_t)min(row + i, num_rows - 1) * k_total + k], c[i]);
        }
#pragma unroll
        for (int i = 0; i < F32_ROWS; i++) y[i] = first == 0 ? c[i] : __fmaf_rn(c[i], 1.0f, y[i]);
    }
}

// One (row, query head), by a warp. Pages hold [G][16][dim] per layer.
DEVICE void attend_f32(const float* q, const float* keys, const float* values, const int* table, int position,
                       int kv_head, int num_kv_heads, int dim, float scale, float* shared, float* out) {
    const int lane = lane_id();
    auto at = [&](int p) {
        return (((size_t)table[p / F32_PAGE] * num_kv_heads + kv_head) * F32_PAGE + p % F32_PAGE) * dim;
    };
    float m = 0.0f, l = 0.0f, o[4] = {};
    for (int start = 0; start <= position; start += F32_CHUNK) {
        const int count = min(F32_CHUNK, position + 1 - start);
        float s[2], mc = -INFINITY_F;
        for (int h = 0; h < 2; h++) {
            const int j = lane + h * WARP;
            s[h] = -INFINITY_F;
            if (j < count) {
                const float* key = keys + at(start + j);
                float dot = 0.0f;
                for (int i = 0; i < dim; i++) dot = __fmaf_rn(q[i], key[i], dot);
                s[h] = dot * scale;
            }
            mc = fmaxf(mc, s[h]);
        }
        for (int distance = 16; distance > 0; distance /= 2) mc = fmaxf(mc, __shfl_xor_sync(ALL_LANES, mc, distance));
        for (int h = 0; h < 2; h++) shared[lane + h * WARP] = lane + h * WARP < count ? exp_f32(s[h] - mc) : 0.0f;
        __syncwarp();
        float t[4];
        for (int j = 0; j < 4; j++) {
            t[j] = shared[2 * j] + shared[2 * j + 1];
            for (int n = 1; n < F32_CHUNK / 8; n++) t[j] = t[j] + (shared[8 * n + 2 * j] + shared[8 * n + 2 * j + 1]);
        }
        const float lc = (t[0] + t[1]) + (t[2] + t[3]);
        float oc[4] = {};
        for (int j = 0; j < count; j++) {
            const float* value = values + at(start + j);
            for (int i = 0; i < 4; i++)
                if (lane + i * WARP < dim) oc[i] = __fmaf_rn(shared[j], value[lane + i * WARP], oc[i]);
        }
        __syncwarp();
        if (start == 0) {
            m = mc, l = lc;
            for (int i = 0; i < 4; i++) o[i] = oc[i];
        } else {
            const float top = fmaxf(m, mc), before = exp_f32(m - top), now = exp_f32(mc - top);
            m = top, l = __fmaf_rn(l, before, lc * now);
            for (int i = 0; i < 4; i++) o[i] = __fmaf_rn(o[i], before, oc[i] * now);
        }
    }
    for (int i = 0; i < 4; i++)
        if (lane + i * WARP < dim) out[lane + i * WARP] = __fdiv_rn(o[i], l);
}
