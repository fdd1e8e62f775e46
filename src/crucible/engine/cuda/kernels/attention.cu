// Attention in f16. Definitions: HEAD_DIM.
#include "kernel.cuh"
#include "attention.cuh"

#define HEADS_ARGS                                                                                             \
    const u16 *q, const u16 *keys, const u16 *values, u16 *out, const int *pages, int num_heads, int num_kv_heads, \
        float scale, u32 *saturations
#define HEADS_VALUE \
    Heads { q, keys, values, out, pages, num_heads, num_kv_heads, scale, saturations }

// One row per block, key/value head and 16 query heads of its group: grid [M, G, R / 16].
template <int HALVES>
DEVICE void attend_row(const Heads& heads, const int* position, const int* table) {
    let_next_start();
    wait_for_previous();
    const int row = blockIdx.x;
    attend_narrow<HEAD_DIM, HALVES>(heads, row, position[row], heads.pages + table[row], blockIdx.y, blockIdx.z,
                                    shared_memory);
}
KERNEL __launch_bounds__(MOST_WARPS* WARP, 1) attend_rows_8(HEADS_ARGS, const int* position, const int* table) {
    attend_row<1>(HEADS_VALUE, position, table);
}
KERNEL __launch_bounds__(MOST_WARPS* WARP, 1) attend_rows_16(HEADS_ARGS, const int* position, const int* table) {
    attend_row<2>(HEADS_VALUE, position, table);
}

// 64 rows of (position, query head) per block. `items` [blocks][2]: span and first row; `spans` [][4]: row, start,
// length, table. Grid [blocks, G].
KERNEL __launch_bounds__(WIDE_WARPS* WARP, HEAD_DIM == 64 ? 3 : 2)
    attend_spans(HEADS_ARGS, const int* items, const int* spans) {
    let_next_start();
    wait_for_previous();
    const int* at = spans + 4 * items[2 * blockIdx.x];
    const Span span = {at[0], at[1], at[2], pages + at[3]};
    attend_wide<HEAD_DIM>(HEADS_VALUE, span, items[2 * blockIdx.x + 1], blockIdx.y, shared_memory);
}
