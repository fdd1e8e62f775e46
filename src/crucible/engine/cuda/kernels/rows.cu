// Kernels that go row by row. Definitions: WEIGHTS, the weights' format (Int8 or F16).
#include "kernel.cuh"
#include "rows.cuh"

constexpr int ROW_WARPS = 8;

KERNEL __launch_bounds__(ROW_WARPS* WARP) embed_rows(const int* ids, const void* weights, const float* scales,
                                                int n, int groups, int width, int num_rows, float* x) {
    let_next_start();
    wait_for_previous();
    const int row = blockIdx.x * ROW_WARPS + warp_id();
    if (row < num_rows) embed_row<WEIGHTS>(weights, scales, n, groups, width, ids[row], x + (size_t)row * width);
}

// Operand row i is the norm of row index[i], or of row i where there is no index.
KERNEL __launch_bounds__(ROW_WARPS* WARP) norm_rows(const float* x, const int* index, const float* weight, int width,
                                               float eps, int num_rows, u16* operand, u32* saturations) {
    let_next_start();
    wait_for_previous();
    const int row = blockIdx.x * ROW_WARPS + warp_id();
    if (row >= num_rows) return;
    const float* from = x + (size_t)(index ? index[row] : row) * width;
    norm_row(from, weight, width, eps, row, operand, saturations);
}
