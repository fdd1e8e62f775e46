// Linear layers on tensor cores (docs/arithmetic.md, section 5). Both functions here compute, for a 16 x 16 unit of
// results, the same chains: per chunk of k from zero, chunks joined by y = c0 s0, then y = fma(c, s, y), ascending.
//
//   linear_narrow   up to 64 rows: a block takes one unit of outputs, each warp a chunk of k. Bound by memory.
//   linear_wide     tiles of 128 x 128, operands through shared memory. Bound by arithmetic.
#pragma once
#include "epilogue.cuh"

// A weight in its shuffled form, and how its k is cut.
struct Matrix {
    const void* weights;
    const float* scales;  // f32 [chunks][n] or [n]
    int n;                // outputs, padded to 128
    int steps;            // K / 16
    int chunks;
    int last_steps;  // of the last chunk
};

template <class Format, int CUT_STEPS>
struct Chunking {
    static constexpr int SLOTS = ceil_div(CUT_STEPS, 4) * 4;       // steps that a chunk takes in memory
    static constexpr int GROUPS = SLOTS / Format::GROUP;             // 16-byte groups per lane
    static DEVICE int row_groups(const Matrix& w) {                  // groups of a row of tiles
        return (w.chunks - 1) * GROUPS + ceil_div(w.last_steps, 4) * 4 / Format::GROUP;
    }
    static DEVICE int steps_of(const Matrix& w, int chunk) { return chunk == w.chunks - 1 ? w.last_steps : CUT_STEPS; }
};

template <class Format>
DEVICE float2 scales_of(const Matrix& w, int chunk, int n) {
    return *(const float2*)(w.scales + (Format::PER_CHUNK ? (size_t)chunk * w.n : 0) + n);
}

DEVICE float joined(float c, float scale, float y, bool first) { return first ? c * scale : __fmaf_rn(c, scale, y); }

// ---- operands of linear_narrow ------------------------------------------------------------------------------------

// Rows that are f16 already, in A order in global memory.
struct Halves {
    const u16* a;
    int num_rows;
    DEVICE void prepare(char*) {}
    DEVICE uint4 fragment(const Matrix& w, int tile, int step) const {
        if (tile * 16 + lane_id() / 4 >= num_rows) return make_uint4(0, 0, 0, 0);
        return ((const uint4*)a)[((size_t)tile * w.steps + step) * WARP + lane_id()];
    }
};

// Rows of the residual stream, at most 16: normed here, in every block, into shared memory.
struct Normed {
    const float* x;       // [M, width], width a multiple of 16
    const float* weight;  // [width]
    int width;
    float eps;
    u32* saturations;
    int num_rows;
    const uint4* a;

    // Bytes of shared memory: the operand, the granules' sums, rstd of 16 rows.
    static DEVICE int num_granules(int width) { return ceil_div(width, 32); }

    DEVICE void prepare(char* shared) {
        const int granules = num_granules(width), warps = blockDim.x / WARP;
        u16* operand = (u16*)shared;
        float* sums = (float*)(shared + (size_t)width / 16 * 512);
        float* rstd = sums + 16 * granules;
        const int total = num_rows * granules;
        for (int first = warp_id(); first < total; first += 4 * warps) {
            float v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int index = first + i * warps, row = index / granules, k = index % granules * 32 + lane_id();
                v[i] = index < total && k < width ? x[(size_t)row * width + k] : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float sum = sum_granule(v[i]);
                if (lane_id() == 0 && first + i * warps < total) sums[first + i * warps] = sum;
            }
        }
        __syncthreads();
        for (int row = threadIdx.x; row < num_rows; row += blockDim.x)
            rstd[row] = rstd_of(sums + row * granules, granules, width, eps);
        __syncthreads();
        const int pairs = width / 2;
        for (int index = threadIdx.x; index < num_rows * pairs; index += blockDim.x) {
            int row = index / pairs, k = index % pairs * 2;
            float2 v = *(const float2*)(x + (size_t)row * width + k);
            float2 g = *(const float2*)(weight + k);
            float a0 = saturate(normed(v.x, rstd[row], g.x), saturations);
            float a1 = saturate(normed(v.y, rstd[row], g.y), saturations);
            *(u32*)(operand + a_index(row, k, width / 16)) = pack_f16(a0, a1);
        }
        __syncthreads();
        a = (const uint4*)operand;
    }
    DEVICE uint4 fragment(const Matrix&, int, int step) const {
        if (lane_id() / 4 >= num_rows) return make_uint4(0, 0, 0, 0);
        return a[step * WARP + lane_id()];
    }
};

// ---- up to 64 rows ------------------------------------------------------------------------------------------------

// One unit of outputs for TILES tiles of 16 rows. Shared memory: for each warp 1 KB per tile and 64 bytes of scales;
// behind them, `operand_shared`, what the operand needs.
template <class Format, int CUT_STEPS, int TILES, class Operand, class Epilogue>
DEVICE void linear_narrow(const Matrix& w, int unit, Operand operand, Epilogue epilogue, char* shared) {
    using Cut = Chunking<Format, CUT_STEPS>;
    const int warps = blockDim.x / WARP, warp = warp_id(), lane = lane_id();
    const int row_groups = Cut::row_groups(w);
    float4* partials = (float4*)shared;                        // [warps][TILES][2][32]
    float4* scales = partials + warps * TILES * 2 * WARP;      // [warps][4]
    uint4 words[2][Cut::GROUPS];
    float4 scale;

    auto load = [&](int chunk) {
        if (chunk >= w.chunks) return;
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
            for (int i = 0; i < Cut::GROUPS; i++)
                if (chunk * Cut::GROUPS + i < row_groups) {
                    size_t group = (size_t)(unit * 2 + t) * row_groups + chunk * Cut::GROUPS + i;
                    words[t][i] = load_weights((const char*)w.weights + (group * WARP + lane) * 16);
                }
        float2 s0 = scales_of<Format>(w, chunk, unit * 16 + column());
        float2 s1 = scales_of<Format>(w, chunk, unit * 16 + 8 + column());
        scale = make_float4(s0.x, s0.y, s1.x, s1.y);
    };

    load(warp);
    wait_for_previous();
    if (warp < TILES) epilogue.begin(warp);
    operand.prepare((char*)(scales + warps * 4));
    float y[2][4];
    for (int first = 0; first < w.chunks; first += warps) {
        const int chunk = first + warp;
        if (first > 0) load(chunk);
        if (chunk < w.chunks) {
            float c[TILES][2][4] = {};
            const int steps = Cut::steps_of(w, chunk);
#pragma unroll
            for (int step = 0; step < CUT_STEPS; step++) {
                if (step >= steps) continue;
                u32 b[2][2];
#pragma unroll
                for (int t = 0; t < 2; t++)
                    Format::fragment(words[t][step / Format::GROUP], step % Format::GROUP, b[t][0], b[t][1]);
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    uint4 a = operand.fragment(w, tile, chunk * CUT_STEPS + step);
                    mma(c[tile][0], a, b[0][0], b[0][1]);
                    mma(c[tile][1], a, b[1][0], b[1][1]);
                }
            }
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    partials[((warp * TILES + tile) * 2 + h) * WARP + lane] =
                        make_float4(c[tile][0][2 * h], c[tile][0][2 * h + 1], c[tile][1][2 * h], c[tile][1][2 * h + 1]);
            if (lane < 4) scales[warp * 4 + lane] = scale;
        }
        __syncthreads();
        if (warp < TILES) {
            const int count = min(warps, w.chunks - first);
            for (int i = 0; i < count; i++) {
                const float4 s = scales[i * 4 + lane % 4];
                const bool start = first + i == 0;
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float4 c = partials[((i * TILES + warp) * 2 + h) * WARP + lane];
                    y[0][2 * h] = joined(c.x, s.x, y[0][2 * h], start);
                    y[0][2 * h + 1] = joined(c.y, s.y, y[0][2 * h + 1], start);
                    y[1][2 * h] = joined(c.z, s.z, y[1][2 * h], start);
                    y[1][2 * h + 1] = joined(c.w, s.w, y[1][2 * h + 1], start);
                }
            }
        }
        if (first + warps < w.chunks) __syncthreads();
    }
    if (warp < TILES) epilogue.finish(warp, unit, y);
}

// ---- many rows ----------------------------------------------------------------------------------------------------

constexpr int WIDE_M = 128, WIDE_N = 128, WIDE_STEPS = 4, WIDE_STAGES = 4, WIDE_THREADS = 256;

template <class Format>
struct WideStage {
    uint4 a[WIDE_M / 16][WIDE_STEPS][WARP];
    uint4 b[WIDE_N / 8][WIDE_STEPS / Format::GROUP][WARP];
};

// The tile of 128 rows from `tile_m` * 128 and 128 outputs from `tile_n` * 128. 8 warps, each 64 x 32.
template <class Format, int CUT_STEPS, class Epilogue>
DEVICE void linear_wide(const Matrix& w, const u16* a, int tile_m, int tile_n, int num_units, Epilogue epilogue,
                        char* shared) {
    using Cut = Chunking<Format, CUT_STEPS>;
    using Stage = WideStage<Format>;
    constexpr int PARTS = Cut::SLOTS / WIDE_STEPS, B_GROUPS = WIDE_STEPS / Format::GROUP;
    Stage* stages = (Stage*)shared;
    const int lane = lane_id(), warp_m = warp_id() / 4, warp_n = warp_id() % 4;
    const int row_groups = Cut::row_groups(w);
    const int iterations = (w.chunks - 1) * PARTS + ceil_div(w.last_steps, WIDE_STEPS);

    auto copy = [&](int iteration) {
        Stage& stage = stages[iteration % WIDE_STAGES];
        const int step = iteration / PARTS * CUT_STEPS + iteration % PARTS * WIDE_STEPS;
        // Steps past a chunk's end are copied and not used.
#pragma unroll
        for (int i = 0; i < WIDE_M / 16 * WIDE_STEPS * WARP / WIDE_THREADS; i++) {
            const int piece = i * WIDE_THREADS + threadIdx.x, row = piece / (WIDE_STEPS * WARP);
            const size_t tile = (size_t)(tile_m * (WIDE_M / 16) + row) * w.steps + step;
            copy_async(&stage.a[0][0][0] + piece, (const uint4*)a + tile * WARP + piece % (WIDE_STEPS * WARP));
        }
#pragma unroll
        for (int i = 0; i < WIDE_N / 8 * B_GROUPS * WARP / WIDE_THREADS; i++) {
            const int piece = i * WIDE_THREADS + threadIdx.x, row = piece / (B_GROUPS * WARP);
            const size_t group = (size_t)(tile_n * (WIDE_N / 8) + row) * row_groups + (size_t)iteration * B_GROUPS;
            copy_async(&stage.b[0][0][0] + piece, (const uint4*)w.weights + group * WARP + piece % (B_GROUPS * WARP));
        }
    };

    float y[4][4][4], c[4][4][4];
#pragma unroll
    for (int i = 0; i < 64; i++) (&c[0][0][0])[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < WIDE_STAGES - 1; i++) {
        if (i < iterations) copy(i);
        commit_copies();
    }
    for (int iteration = 0; iteration < iterations; iteration++) {
        wait_copies<WIDE_STAGES - 2>();
        __syncthreads();
        if (iteration + WIDE_STAGES - 1 < iterations) copy(iteration + WIDE_STAGES - 1);
        commit_copies();
        const Stage& stage = stages[iteration % WIDE_STAGES];
        const int chunk = iteration / PARTS, part = iteration % PARTS;
        const int steps = Cut::steps_of(w, chunk) - part * WIDE_STEPS;
        uint4 words[4][B_GROUPS];
#pragma unroll
        for (int t = 0; t < 4; t++)
#pragma unroll
            for (int i = 0; i < B_GROUPS; i++) words[t][i] = stage.b[warp_n * 4 + t][i][lane];
#pragma unroll
        for (int step = 0; step < WIDE_STEPS; step++) {
            if (step >= steps) continue;
            uint4 rows[4];
#pragma unroll
            for (int m = 0; m < 4; m++) rows[m] = stage.a[warp_m * 4 + m][step][lane];
#pragma unroll
            for (int t = 0; t < 4; t++) {
                u32 b0, b1;
                Format::fragment(words[t][step / Format::GROUP], step % Format::GROUP, b0, b1);
#pragma unroll
                for (int m = 0; m < 4; m++) mma(c[m][t], rows[m], b0, b1);
            }
        }
        if (steps > WIDE_STEPS) continue;
        // The chunk is complete.
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const float2 s = scales_of<Format>(w, chunk, tile_n * WIDE_N + warp_n * 32 + t * 8 + column());
#pragma unroll
            for (int m = 0; m < 4; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    y[m][t][i] = joined(c[m][t][i], i % 2 ? s.y : s.x, y[m][t][i], chunk == 0);
                    c[m][t][i] = 0.0f;
                }
        }
    }
#pragma unroll
    for (int m = 0; m < 4; m++) {
        const int tile = tile_m * 8 + warp_m * 4 + m;
        epilogue.begin(tile);
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const int unit = tile_n * 8 + warp_n * 2 + u;
            if (unit >= num_units) continue;
            const float pair[2][4] = {{y[m][2 * u][0], y[m][2 * u][1], y[m][2 * u][2], y[m][2 * u][3]},
                                      {y[m][2 * u + 1][0], y[m][2 * u + 1][1], y[m][2 * u + 1][2], y[m][2 * u + 1][3]}};
            epilogue.finish(tile, unit, pair);
        }
    }
}
