// A linear layer in all its shapes. Definitions: WEIGHTS, the format (Int8 or F16); CHUNK_STEPS, 16-k steps per chunk;
// KIND, what becomes of the results (QKV, RESIDUAL, SWIGLU or LOGITS); HEAD_DIM for QKV.
//
//   narrow_1, _2, _4   a unit of 16 outputs per block, for up to 16, 32, 64 rows
//   normed_1           the same for up to 16 rows of the residual stream, which it norms
//   wide               tiles of 128 x 128
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

template <int TILES, class Operand, class Epilogue>
DEVICE void narrow(const Matrix& w, const Operand& operand, const Epilogue& epilogue) {
    let_next_start();
    linear_narrow<WEIGHTS, CHUNK_STEPS, TILES>(w, blockIdx.x, operand, epilogue, shared_memory);
}

constexpr int NARROW_THREADS = 512;

KERNEL __launch_bounds__(NARROW_THREADS, 1) narrow_1(const u16* a, MATRIX_ARGS, ARGS) {
    narrow<1>(MATRIX_VALUE, Halves{a, num_rows}, VALUE);
}
KERNEL __launch_bounds__(NARROW_THREADS, 1) narrow_2(const u16* a, MATRIX_ARGS, ARGS) {
    narrow<2>(MATRIX_VALUE, Halves{a, num_rows}, VALUE);
}
KERNEL __launch_bounds__(NARROW_THREADS, 1) narrow_4(const u16* a, MATRIX_ARGS, ARGS) {
    narrow<4>(MATRIX_VALUE, Halves{a, num_rows}, VALUE);
}
KERNEL __launch_bounds__(NARROW_THREADS, 1)
    normed_1(const float* from, const float* norm, int norm_width, float eps, MATRIX_ARGS, ARGS) {
    narrow<1>(MATRIX_VALUE, Normed{from, norm, norm_width, eps, saturations, num_rows, nullptr}, VALUE);
}
KERNEL __launch_bounds__(WIDE_THREADS, 1) wide(const u16* a, int num_units, MATRIX_ARGS, ARGS) {
    let_next_start();
    wait_for_previous();
    linear_wide<WEIGHTS, CHUNK_STEPS>(MATRIX_VALUE, a, blockIdx.y, blockIdx.x, num_units, VALUE, shared_memory);
}
