// A linear layer in all its shapes. Definitions: WEIGHTS, the format (Int8 or F16); CHUNK_STEPS, 16-k steps per chunk;
// NARROW_WARPS, the most that a narrow block has; KIND, what becomes of the results (QKV, RESIDUAL, SWIGLU or LOGITS);
// HEAD_DIM for QKV.
//
//   narrow_1, _2, _4   a unit of 16 outputs per block, for up to 16, 32, 64 rows
//   wide_128x128, ...  tiles of so many rows and outputs
#include "kernel.cuh"
#include "linear.cuh"

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)

#define MATRIX_ARGS const void *weights, const float *scales, int n, int steps, int chunks, int last_steps
#define MATRIX_VALUE \
    Matrix { weights, scales, n, steps, chunks, last_steps }

#define QKV_ARGS                                                                                             \
    const int *position, const int *table, const int *pages, const float *cos, const float *sin,             \
        const float *bias, int num_heads, int num_kv_heads, u16 *q, u16 *keys, u16 *values, u32 *saturations, \
        int num_rows
#define QKV_VALUE                                                                                      \
    QkvOut<HEAD_DIM> {                                                                                 \
        q, keys, values, cos, sin, bias, {position, table, pages}, num_heads, num_kv_heads, saturations, num_rows \
    }
#define RESIDUAL_ARGS float *x, int width, const float *bias, u32 *saturations, int num_rows
#define RESIDUAL_VALUE \
    Residual { x, width, bias, num_rows }
#define SWIGLU_ARGS u16 *hidden, int hidden_steps, u32 *saturations, int num_rows
#define SWIGLU_VALUE \
    SwiGlu { hidden, hidden_steps, saturations, num_rows }
#define LOGITS_ARGS float *out, int width, u32 *saturations, int num_rows
#define LOGITS_VALUE \
    Logits { out, width, num_rows }

#define ARGS PASTE(KIND, _ARGS)
#define VALUE PASTE(KIND, _VALUE)

// Many warps share a unit's chunks where units are few; with fewer, more blocks fit a multiprocessor.
#define NARROW_KERNEL(BLOCKS) KERNEL __launch_bounds__(NARROW_WARPS* WARP, NARROW_WARPS > 8 ? 1 : BLOCKS)
#define WIDE_KERNEL(SHAPE) KERNEL __launch_bounds__(SHAPE::THREADS, SHAPE::BLOCKS_PER_SM)

template <int TILES, class Epilogue>
DEVICE void narrow(const Matrix& w, const u16* a, int num_rows, int num_units, const Epilogue& epilogue) {
    let_next_start();
    linear_narrow<WEIGHTS, CHUNK_STEPS, TILES>(w, a, num_rows, num_units, epilogue, shared_memory);
}

NARROW_KERNEL(3) narrow_1(const u16* a, int num_units, MATRIX_ARGS, ARGS) {
    narrow<1>(MATRIX_VALUE, a, num_rows, num_units, VALUE);
}
NARROW_KERNEL(3) narrow_2(const u16* a, int num_units, MATRIX_ARGS, ARGS) {
    narrow<2>(MATRIX_VALUE, a, num_rows, num_units, VALUE);
}
NARROW_KERNEL(2) narrow_4(const u16* a, int num_units, MATRIX_ARGS, ARGS) {
    narrow<4>(MATRIX_VALUE, a, num_rows, num_units, VALUE);
}

using Shape128x128 = Shape<2, 4, 4, 4>;
using Shape64x64 = Shape<2, 2, 2, 4>;

template <class Shape, class Epilogue>
DEVICE void wide(const Matrix& w, const u16* a, int num_units, const Epilogue& epilogue) {
    let_next_start();
    wait_for_previous();
    linear_wide<WEIGHTS, CHUNK_STEPS, Shape>(w, a, blockIdx.y, blockIdx.x, num_units, epilogue, shared_memory);
}

WIDE_KERNEL(Shape128x128) wide_128x128(const u16* a, int num_units, MATRIX_ARGS, ARGS) {
    wide<Shape128x128>(MATRIX_VALUE, a, num_units, VALUE);
}
WIDE_KERNEL(Shape64x64) wide_64x64(const u16* a, int num_units, MATRIX_ARGS, ARGS) {
    wide<Shape64x64>(MATRIX_VALUE, a, num_units, VALUE);
}
