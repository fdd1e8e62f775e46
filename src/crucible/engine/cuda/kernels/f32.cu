// The kernels of a model with f32 weights. No definitions.
#include "f32.cuh"
#include "kernel.cuh"
#include "rows.cuh"

constexpr int THREADS = 128;

KERNEL embed_f32(const int* ids, const float* weight, int row_stride, int column_stride, int width, float* x) {
    const int row = blockIdx.x;
    for (int k = threadIdx.x; k < width; k += blockDim.x)
        x[(size_t)row * width + k] = weight[(size_t)ids[row] * row_stride + (size_t)k * column_stride];
}

// A block per row; width / 32 + 1 floats of shared memory.
KERNEL norm_f32(const float* x, const int* index, const float* weight, int width, float eps, float* out) {
    const int row = blockIdx.x;
    norm_row(x + (size_t)(index ? index[row] : row) * width, weight, width, eps, (float*)shared_memory,
             [&](int k, const float4& v) { *(float4*)(out + (size_t)row * width + k) = v; });
}

// out = x W^T + bias, or out = out + (x W^T + bias). Grid [N / THREADS, M / F32_ROWS].
KERNEL __launch_bounds__(THREADS) linear_rows_f32(const float* x, const float* weight, const float* bias, int k, int n,
                                                  int chunk, int add, int num_rows, float* out) {
    const int column = blockIdx.x * THREADS + threadIdx.x, row = blockIdx.y * F32_ROWS;
    if (column >= n) return;
    float y[F32_ROWS];
    linear_f32(x, weight, k, n, chunk, row, num_rows, column, y);
    for (int i = 0; i < F32_ROWS && row + i < num_rows; i++) {
        float* at = out + (size_t)(row + i) * n + column;
        const float v = bias ? y[i] + bias[column] : y[i];
        *at = add ? *at + v : v;
    }
}

// RoPE on q and k of qkv [M, (H + 2 G) dim]; q stays, turned, k and v go to the cache. Grid [M, H + 2 G], dim / 2
// threads.
KERNEL place_f32(float* qkv, const int* position, const int* table, const int* pages, const float* cos,
                 const float* sin, int num_heads, int num_kv_heads, int dim, float* keys, float* values) {
    const int row = blockIdx.x, head = blockIdx.y, i = threadIdx.x, half = dim / 2, p = position[row];
    float* at = qkv + ((size_t)row * gridDim.y + head) * dim;
    float a = at[i], b = at[i + half];
    if (head < num_heads + num_kv_heads) rotate(a, b, cos[(size_t)p * half + i], sin[(size_t)p * half + i]);
    float* to = at;
    if (head >= num_heads) {
        const bool is_key = head < num_heads + num_kv_heads;
        const int kv_head = head - num_heads - (is_key ? 0 : num_kv_heads);
        const int page = pages[table[row] + p / F32_PAGE];
        to = (is_key ? keys : values) + (((size_t)page * num_kv_heads + kv_head) * F32_PAGE + p % F32_PAGE) * dim;
    }
    to[i] = a, to[i + half] = b;
}

// Grid [M, H], one warp.
KERNEL attend_rows_f32(const float* qkv, const float* keys, const float* values, const int* position, const int* table,
                       const int* pages, int num_heads, int num_kv_heads, int dim, float scale, float* out) {
    __shared__ float p[F32_CHUNK];
    const int row = blockIdx.x, head = blockIdx.y;
    const float* q = qkv + ((size_t)row * (num_heads + 2 * num_kv_heads) + head) * dim;
    const int kv_head = head / (num_heads / num_kv_heads);
    attend_f32(q, keys, values, pages + table[row], position[row], kv_head, num_kv_heads, dim, scale, p,
               out + ((size_t)row * num_heads + head) * dim);
}

// silu(gate) * up of [M, 2 F], gates first.
KERNEL swiglu_f32(const float* gate_up, int width, float* hidden) {
    const size_t row = blockIdx.y;
    const int k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k >= width) return;
    const float* at = gate_up + row * 2 * width + k;
    hidden[row * width + k] = silu_f32(at[0]) * at[width];
}
