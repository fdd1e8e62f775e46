// Linear layers on tensor cores (docs/arithmetic.md, section 5). Both functions here compute, for a 16 x 16 unit of
// results, the same chains: per chunk of k from zero, chunks joined by y = c0 s0, then y = fma(c, s, y), ascending.
//
//   linear_narrow   up to 64 rows: a block takes one unit of outputs, each warp a chunk of k. Bound by memory.
//   linear_wide     tiles of up to 128 x 128, operands through shared memory. Bound by arithmetic.
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
    static constexpr int SLOTS = ceil_div(CUT_STEPS, 4) * 4;  // steps that a chunk takes in memory
    static constexpr int GROUPS = SLOTS / Format::GROUP;      // 16-byte groups per lane
    static DEVICE int row_groups(const Matrix& w) {           // groups of a row of tiles
        return (w.chunks - 1) * GROUPS + ceil_div(w.last_steps, 4) * 4 / Format::GROUP;
    }
    static DEVICE int steps_of(const Matrix& w, int chunk) { return chunk == w.chunks - 1 ? w.last_steps : CUT_STEPS; }
};

template <class Format>
DEVICE float2 scales_of(const Matrix& w, int chunk, int n) {
    return *(const float2*)(w.scales + (Format::PER_CHUNK ? (size_t)chunk * w.n : 0) + n);
}

DEVICE float joined(float c, float scale, float y, bool first) { return first ? c * scale : __fmaf_rn(c, scale, y); }

// ---- up to 64 rows ------------------------------------------------------------------------------------------------

// Units blockIdx.x, + gridDim.x, ... of outputs for TILES tiles of 16 rows, the operand in A order. The next weights
// are on their way while the chunks of this unit are joined. Shared memory: for each warp twice 1 KB per tile and 64
// bytes.
template <class Format, int CUT_STEPS, int TILES, class Epilogue>
DEVICE void linear_narrow(const Matrix& w, const u16* operand, int num_rows, int num_units, Epilogue epilogue,
                          char* shared) {
    using Cut = Chunking<Format, CUT_STEPS>;
    const int warps = blockDim.x / WARP, warp = warp_id(), lane = lane_id();
    constexpr int AHEAD = TILES == 1 ? 4 : 8 / TILES;  // steps whose operands are under way at once
    const int row_groups = Cut::row_groups(w);
    const int partials_size = warps * TILES * 2 * WARP;
    float4* const partials = (float4*)shared;             // [2][warps][TILES][2][32]
    float4* const scales = partials + 2 * partials_size;  // [2][warps][4]
    uint4 words[2][Cut::GROUPS] = {};
    float4 scale;

    auto load = [&](int unit, int chunk) {
        if (unit >= num_units || chunk >= w.chunks) return;
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

    int unit = blockIdx.x, first = 0, parity = 0;
    load(unit, warp);
    wait_for_previous();
    float y[2][4];
    while (unit < num_units) {
        const int chunk = first + warp;
        if (first == 0 && warp < TILES) epilogue.begin(warp, unit);
        if (chunk < w.chunks) {
            // Steps past the end of the last chunk multiply zeros, which changes no bit and needs no branch.
            float c[TILES][2][4] = {};
            uint4 a[AHEAD][TILES];
            auto fetch = [&](int i) {
                const int step = chunk * CUT_STEPS + i;
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    const bool exists = tile * 16 + lane / 4 < num_rows && step < w.steps;
                    const uint4* at = (const uint4*)operand + ((size_t)tile * w.steps + step) * WARP + lane;
                    a[i % AHEAD][tile] = exists ? *at : make_uint4(0, 0, 0, 0);
                }
            };
#pragma unroll
            for (int step = 0; step < AHEAD && step < CUT_STEPS; step++) fetch(step);
#pragma unroll
            for (int step = 0; step < CUT_STEPS; step++) {
                u32 b[2][2];
#pragma unroll
                for (int t = 0; t < 2; t++)
                    Format::fragment(words[t][step / Format::GROUP], step % Format::GROUP, b[t][0], b[t][1]);
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) {
                    mma(c[tile][0], a[step % AHEAD][tile], b[0][0], b[0][1]);
                    mma(c[tile][1], a[step % AHEAD][tile], b[1][0], b[1][1]);
                }
                if (step + AHEAD < CUT_STEPS) fetch(step + AHEAD);
            }
            float4* to = partials + parity * partials_size + warp * TILES * 2 * WARP + lane;
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    to[(tile * 2 + h) * WARP] =
                        make_float4(c[tile][0][2 * h], c[tile][0][2 * h + 1], c[tile][1][2 * h], c[tile][1][2 * h + 1]);
            if (lane < 4) scales[(parity * warps + warp) * 4 + lane] = scale;
        }
        const bool complete = first + warps >= w.chunks;
        const int next_unit = complete ? unit + gridDim.x : unit, next_first = complete ? 0 : first + warps;
        load(next_unit, next_first + warp);
        // One barrier is enough: who joins is done before it comes to the next one, and two sets of partials take
        // turns.
        __syncthreads();
        if (warp < TILES) {
            const int count = min(warps, w.chunks - first);
            const float4* from = partials + parity * partials_size + warp * 2 * WARP + lane;
#pragma unroll 4
            for (int i = 0; i < count; i++) {
                const float4 s = scales[(parity * warps + i) * 4 + lane % 4];
                const bool start = first + i == 0;
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float4 c = from[(i * TILES * 2 + h) * WARP];
                    y[0][2 * h] = joined(c.x, s.x, y[0][2 * h], start);
                    y[0][2 * h + 1] = joined(c.y, s.y, y[0][2 * h + 1], start);
                    y[1][2 * h] = joined(c.z, s.z, y[1][2 * h], start);
                    y[1][2 * h + 1] = joined(c.w, s.w, y[1][2 * h + 1], start);
                }
            }
            if (complete) epilogue.finish(warp, unit, y);
        }
        unit = next_unit, first = next_first, parity ^= 1;
    }
}

// ---- many rows ----------------------------------------------------------------------------------------------------

constexpr int WIDE_STEPS = 4, WIDE_STAGES = 4;

// WARPS_M x WARPS_N warps, each M_TILES tiles of 16 rows by N_TILES tiles of 8 outputs.
template <int WARPS_M_, int WARPS_N_, int M_TILES_, int N_TILES_>
struct Shape {
    static constexpr int WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, M_TILES = M_TILES_, N_TILES = N_TILES_;
    static constexpr int BLOCK_M = WARPS_M * M_TILES, BLOCK_N = WARPS_N * N_TILES;  // in tiles
    static constexpr int THREADS = WARPS_M * WARPS_N * WARP;
    static constexpr int BLOCKS_PER_SM = M_TILES * N_TILES > 8 ? 256 / THREADS : 384 / THREADS;  // by registers
};

template <class Format, class Shape>
struct WideStage {
    uint4 a[Shape::BLOCK_M][WIDE_STEPS][WARP];
    uint4 b[Shape::BLOCK_N][WIDE_STEPS / Format::GROUP][WARP];
};

// Block (block_m, block_n) of the results.
template <class Format, int CUT_STEPS, class Shape, class Epilogue>
DEVICE void linear_wide(const Matrix& w, const u16* a, int block_m, int block_n, int num_units, Epilogue epilogue,
                        char* shared) {
    using Cut = Chunking<Format, CUT_STEPS>;
    using Stage = WideStage<Format, Shape>;
    constexpr int PARTS = Cut::SLOTS / WIDE_STEPS, B_GROUPS = WIDE_STEPS / Format::GROUP;
    constexpr int A_PIECES = Shape::BLOCK_M * WIDE_STEPS * WARP, B_PIECES = Shape::BLOCK_N * B_GROUPS * WARP;
    constexpr int M_TILES = Shape::M_TILES, N_TILES = Shape::N_TILES;
    static_assert(A_PIECES % Shape::THREADS == 0, "each thread copies as much");
    Stage* stages = (Stage*)shared;
    const int lane = lane_id(), warp_m = warp_id() / Shape::WARPS_N, warp_n = warp_id() % Shape::WARPS_N;
    const int row_groups = Cut::row_groups(w), last_row = w.n / 8 - 1;
    const int iterations = (w.chunks - 1) * PARTS + ceil_div(w.last_steps, WIDE_STEPS);

    auto copy = [&](int iteration) {
        Stage& stage = stages[iteration % WIDE_STAGES];
        const int step = iteration / PARTS * CUT_STEPS + iteration % PARTS * WIDE_STEPS;
        // Steps past a chunk's end and outputs past the last are copied and not used.
#pragma unroll
        for (int i = 0; i < A_PIECES / Shape::THREADS; i++) {
            const int piece = i * Shape::THREADS + threadIdx.x, row = piece / (WIDE_STEPS * WARP);
            const size_t tile = (size_t)(block_m * Shape::BLOCK_M + row) * w.steps + step;
            copy_async(&stage.a[0][0][0] + piece, (const uint4*)a + tile * WARP + piece % (WIDE_STEPS * WARP));
        }
#pragma unroll
        for (int i = 0; i < ceil_div(B_PIECES, Shape::THREADS); i++) {
            const int piece = i * Shape::THREADS + threadIdx.x, row = piece / (B_GROUPS * WARP);
            if (piece >= B_PIECES) continue;
            const size_t tile = min(block_n * Shape::BLOCK_N + row, last_row);
            const size_t group = tile * row_groups + iteration * B_GROUPS;
            copy_async(&stage.b[0][0][0] + piece, (const uint4*)w.weights + group * WARP + piece % (B_GROUPS * WARP));
        }
    };

    float y[M_TILES][N_TILES][4], c[M_TILES][N_TILES][4] = {};
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
        uint4 words[N_TILES][B_GROUPS];
#pragma unroll
        for (int t = 0; t < N_TILES; t++)
#pragma unroll
            for (int i = 0; i < B_GROUPS; i++) words[t][i] = stage.b[warp_n * N_TILES + t][i][lane];
        auto multiply = [&](int step) {
            uint4 rows[M_TILES];
#pragma unroll
            for (int m = 0; m < M_TILES; m++) rows[m] = stage.a[warp_m * M_TILES + m][step][lane];
#pragma unroll
            for (int t = 0; t < N_TILES; t++) {
                u32 b0, b1;
                Format::fragment(words[t][step / Format::GROUP], step % Format::GROUP, b0, b1);
#pragma unroll
                for (int m = 0; m < M_TILES; m++) mma(c[m][t], rows[m], b0, b1);
            }
        };
        if (steps >= WIDE_STEPS) {
            // No branch between steps, so that the next operands are fetched while these are multiplied.
#pragma unroll
            for (int step = 0; step < WIDE_STEPS; step++) multiply(step);
        } else {
#pragma unroll
            for (int step = 0; step < WIDE_STEPS - 1; step++)
                if (step < steps) multiply(step);
        }
        if (steps > WIDE_STEPS) continue;
        // The chunk is complete.
#pragma unroll
        for (int t = 0; t < N_TILES; t++) {
            const int tile = min(block_n * Shape::BLOCK_N + warp_n * N_TILES + t, last_row);
            const float2 s = scales_of<Format>(w, chunk, tile * 8 + column());
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    y[m][t][i] = joined(c[m][t][i], i % 2 ? s.y : s.x, y[m][t][i], chunk == 0);
                    c[m][t][i] = 0.0f;
                }
        }
    }
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        const int tile = block_m * Shape::BLOCK_M + warp_m * M_TILES + m;
#pragma unroll
        for (int u = 0; u < N_TILES / 2; u++) {
            const int unit = (block_n * Shape::BLOCK_N + warp_n * N_TILES) / 2 + u;
            if (unit >= num_units) continue;
            epilogue.begin(tile, unit);
            float pair[2][4];
#pragma unroll
            for (int i = 0; i < 8; i++) pair[i / 4][i % 4] = y[m][2 * u + i / 4][i % 4];
            epilogue.finish(tile, unit, pair);
        }
    }
}
