// Kernels that go row by row. Definitions: WEIGHTS, the weights' format (Int8 or F16).
#include "kernel.cuh"
#include "rows.cuh"

// A warp per row, 8 in a block.
constexpr int ROW_WARPS = 8;

KERNEL __launch_bounds__(ROW_WARPS* WARP) embed_rows(const int* ids, const void* weights, const float* scales, int n,
                                                     int groups, int width, int num_rows, float* x) {
    let_next_start();
    wait_for_previous();
    const int row = blockIdx.x * ROW_WARPS + warp_id();
    if (row < num_rows) embed_row<WEIGHTS>(weights, scales, n, groups, width, ids[row], x + (size_t)row * width);
}

// Operand row i is the norm of row index[i], or of row i where there is no index. A block per row; width / 32 + 1
// floats of shared memory.
KERNEL norm_rows(const float* x, const int* index, const float* weight, int width, float eps, u16* operand,
                 u32* saturations) {
    let_next_start();
    wait_for_previous();
    const int row = blockIdx.x;
    norm_row(x + (size_t)(index ? index[row] : row) * width, weight, width, eps, (float*)shared_memory,
             [&](int k, const float4& v) {
                 u16* at = operand + a_index(row, k, width / 16);
                 *(u32*)at = pack_f16(saturate(v.x, saturations), saturate(v.y, saturations));
                 // The next two numbers are the next lane's.
                 *(u32*)(at + 8) = pack_f16(saturate(v.z, saturations), saturate(v.w, saturations));
             });
}
