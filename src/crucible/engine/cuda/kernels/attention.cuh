// Attention over pages (docs/arithmetic.md, sections 3 and 5): one function for a chunk of 64 positions, one for
// merging, and two ways through the chunks.
//
//   attend_narrow   one row: each warp a chunk, merged in ascending order through shared memory.
//   attend_wide     many rows of a prompt: each warp 16 rows of (position, head), one chunk after the other.
//
// A tile is 16 rows that read the same keys and values. R = H / G query heads share a key/value head.
#pragma once
#include "epilogue.cuh"

constexpr int CHUNK = 64, PAGE = 16, CHUNK_PAGES = CHUNK / PAGE;

// Maximum, sum and weighted values of rows g and g + 8 over some positions; o as tiles of 8 dims.
template <int DIM>
struct Attended {
    float m[2], l[2];
    float o[DIM / 8][4];
};

// A row's chunk joined to what came before. `active` is false where the row may not read the chunk.
DEVICE void join_scales(float& m, float& l, float mc, float lc, bool active, float& before, float& now) {
    const float top = fmaxf(m, mc);
    before = exp_f32(m - top), now = exp_f32(mc - top);
    if (!active) return;
    l = __fmaf_rn(l, before, lc * now);
    m = top;
}
DEVICE float join(float o, float before, float oc, float now, bool active) {
    return active ? __fmaf_rn(o, before, oc * now) : o;
}

// One chunk. `limit[h]` is the last position of the chunk that row g + 8 h may read (negative: none), `last` the last
// one that is written; what lies behind it may be anything. `key(page, step)` and `value(page, unit)` give a lane's 16
// bytes; of pages without a written position zeros, which change no bit and need no branch. HALVES is 1 where rows 8
// to 15 are padding; WHOLE where every row may read every position.
template <int DIM, int HALVES, bool WHOLE, class Key, class Value>
DEVICE void attend_chunk(const uint4 (&q)[DIM / 16], const int (&limit)[2], int last, float scale, Key key, Value value,
                         Attended<DIM>& out) {
    constexpr int STEPS = DIM / 16;
    float s[2 * CHUNK_PAGES][4] = {};
    // Step by step, so that eight chains advance together.
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int page = 0; page < CHUNK_PAGES; page++) {
            const uint4 k = key(page, step);
            mma(s[2 * page], q[step], k.x, k.y);
            mma(s[2 * page + 1], q[step], k.z, k.w);
        }
    u32 p[2 * CHUNK_PAGES][2] = {};
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        float top = -INFINITY_F;
#pragma unroll
        for (int t = 0; t < 2 * CHUNK_PAGES; t++)
#pragma unroll
            for (int i = 2 * h; i < 2 * h + 2; i++) {
                const bool allowed = WHOLE || t * 8 + column() + i % 2 <= limit[h];
                s[t][i] = allowed ? s[t][i] * scale : -INFINITY_F;
                top = fmaxf(top, s[t][i]);
            }
        top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
        top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
        out.m[h] = top;
        float sum = 0.0f;
#pragma unroll
        for (int t = 0; t < 2 * CHUNK_PAGES; t++) {
            const int n = t * 8 + column();
            const float p0 = WHOLE || n <= limit[h] ? exp_f32(s[t][2 * h] - top) : 0.0f;
            const float p1 = WHOLE || n + 1 <= limit[h] ? exp_f32(s[t][2 * h + 1] - top) : 0.0f;
            p[t][h] = pack_f16(p0, p1);
            const float pair = low_f16(p[t][h]) + high_f16(p[t][h]);
            sum = t == 0 ? pair : sum + pair;
        }
        sum = sum + __shfl_xor_sync(ALL_LANES, sum, 1);
        out.l[h] = sum + __shfl_xor_sync(ALL_LANES, sum, 2);
    }
#pragma unroll
    for (int t = 0; t < DIM / 8; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) out.o[t][i] = 0.0f;
    const bool is_whole = WHOLE || last >= CHUNK - 1;
#pragma unroll
    for (int page = 0; page < CHUNK_PAGES; page++) {
        const uint4 a = make_uint4(p[2 * page][0], p[2 * page][1], p[2 * page + 1][0], p[2 * page + 1][1]);
        // Never written: zero, whatever is there.
        const int first = page * PAGE + column();
        const u32 early = is_whole || first + 1 <= last ? 0xFFFFFFFFu : first <= last ? 0xFFFFu : 0u;
        const u32 late = is_whole || first + 9 <= last ? 0xFFFFFFFFu : first + 8 <= last ? 0xFFFFu : 0u;
#pragma unroll
        for (int unit = 0; unit < STEPS; unit++) {
            const uint4 v = value(page, unit);
            mma(out.o[2 * unit], a, v.x & early, v.y & late);
            mma(out.o[2 * unit + 1], a, v.z & early, v.w & late);
        }
    }
}

// What both ways are given. q f16 [M, H, K]; out in A order of `steps` = H K / 16 steps.
struct Heads {
    const u16* q;
    const u16* keys;
    const u16* values;
    u16* out;
    const int* pages;
    int num_heads, num_kv_heads;
    float scale;
    u32* saturations;

    DEVICE int group() const { return num_heads / num_kv_heads; }
    DEVICE int steps(int head_dim) const { return num_heads * head_dim / 16; }
};

template <int DIM>
DEVICE uint4 page_words(const u16* cache, const Heads& heads, int page, int kv_head, int step) {
    const u16* at = cache + ((size_t)page * heads.num_kv_heads + kv_head) * (PAGE * DIM);
    return ((const uint4*)at)[step * WARP + lane_id()];
}

// The lane's registers of q as operand A: row g + 8 h is (row[h], head[h]), or zero where row[h] is negative.
template <int DIM>
DEVICE void load_q(const Heads& heads, const int (&row)[2], const int (&head)[2], uint4 (&q)[DIM / 16]) {
    const u32* at[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
        at[h] = (const u32*)(heads.q + ((size_t)max(row[h], 0) * heads.num_heads + head[h]) * DIM + column());
#pragma unroll
    for (int step = 0; step < DIM / 16; step++) {
        q[step].x = row[0] < 0 ? 0 : at[0][step * 8];
        q[step].y = row[1] < 0 ? 0 : at[1][step * 8];
        q[step].z = row[0] < 0 ? 0 : at[0][step * 8 + 4];
        q[step].w = row[1] < 0 ? 0 : at[1][step * 8 + 4];
    }
}

// o / l of row g + 8 h, columns of tile t.
template <int DIM>
DEVICE void store_out(const Heads& heads, int row, int head, int t, float o0, float o1, float l) {
    const float a = saturate(__fdiv_rn(o0, l), heads.saturations), b = saturate(__fdiv_rn(o1, l), heads.saturations);
    const size_t at = a_index(row, head * DIM + t * 8 + column(), heads.steps(DIM));
    *(u32*)(heads.out + at) = pack_f16(a, b);
}

// ---- one row ------------------------------------------------------------------------------------------------------

constexpr int LEAST_WARPS = 4, MOST_WARPS = 8;

// Of each warp.
template <int DIM>
struct NarrowShared {
    float m[16], l[16];
    float4 o[DIM / 8][WARP];
};

// Row `row` at `position`, key/value head `kv_head`, query heads 16 `tile`.. of its group. 4 to 8 warps; with few, more
// blocks fit a multiprocessor. HALVES is 1 where a group has at most 8 heads.
template <int DIM, int HALVES>
DEVICE void attend_narrow(const Heads& heads, int row, int position, const int* table, int kv_head, int tile,
                          char* memory) {
    constexpr int TILES = DIM / 8, STEPS = DIM / 16, OWN = ceil_div(TILES, LEAST_WARPS);
    NarrowShared<DIM>* shared = (NarrowShared<DIM>*)memory;
    const int warps = blockDim.x / WARP, warp = warp_id(), lane = lane_id(), group = heads.group();
    int rows[2], head[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = tile * 16 + lane / 4 + 8 * h;
        rows[h] = r < group ? row : -1;
        head[h] = kv_head * group + min(r, group - 1);
    }
    uint4 q[STEPS];
    load_q<DIM>(heads, rows, head, q);
    const int num_chunks = position / CHUNK + 1;
    float m[HALVES], l[HALVES], o[OWN][2 * HALVES];
    for (int first = 0; first < num_chunks; first += warps) {
        const int chunk = first + warp;
        if (chunk < num_chunks) {
            const int last = position - chunk * CHUNK, limit[2] = {last, last};
            int page[CHUNK_PAGES];
#pragma unroll
            for (int i = 0; i < CHUNK_PAGES; i++) page[i] = i * PAGE <= last ? table[chunk * CHUNK_PAGES + i] : -1;
            // All values are on their way before the first key is used, as far as there are registers.
            constexpr int EARLY = DIM == 64 ? 4 : HALVES == 2 ? 0 : 2;
            uint4 values[CHUNK_PAGES][STEPS];
            auto word = [&](const u16* cache, int i, int step) {
                return page[i] < 0 ? make_uint4(0, 0, 0, 0) : page_words<DIM>(cache, heads, page[i], kv_head, step);
            };
#pragma unroll
            for (int i = 0; i < EARLY; i++)
#pragma unroll
                for (int unit = 0; unit < STEPS; unit++) values[i][unit] = word(heads.values, i, unit);
            Attended<DIM> part;
            attend_chunk<DIM, HALVES, false>(
                q, limit, last, heads.scale, [&](int i, int step) { return word(heads.keys, i, step); },
                [&](int i, int unit) { return i < EARLY ? values[i][unit] : word(heads.values, i, unit); },
                part);
#pragma unroll
            for (int h = 0; h < HALVES; h++)
                if (lane % 4 == 0) {
                    shared[warp].m[lane / 4 + 8 * h] = part.m[h];
                    shared[warp].l[lane / 4 + 8 * h] = part.l[h];
                }
#pragma unroll
            for (int t = 0; t < TILES; t++)
                shared[warp].o[t][lane] = make_float4(part.o[t][0], part.o[t][1], part.o[t][2], part.o[t][3]);
        }
        __syncthreads();
        // Each warp merges its own dims.
        for (int i = 0; i < min(warps, num_chunks - first); i++) {
            float before[HALVES], now[HALVES];
#pragma unroll
            for (int h = 0; h < HALVES; h++) {
                const float mc = shared[i].m[lane / 4 + 8 * h], lc = shared[i].l[lane / 4 + 8 * h];
                if (first + i == 0)
                    m[h] = mc, l[h] = lc;
                else
                    join_scales(m[h], l[h], mc, lc, true, before[h], now[h]);
            }
#pragma unroll
            for (int t = 0; t < OWN; t++) {
                if (t * warps + warp >= TILES) continue;
                const float4 v = shared[i].o[t * warps + warp][lane];
                const float oc[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int e = 0; e < 2 * HALVES; e++)
                    o[t][e] = first + i == 0 ? oc[e] : join(o[t][e], before[e / 2], oc[e], now[e / 2], true);
            }
        }
        if (first + warps < num_chunks) __syncthreads();
    }
#pragma unroll
    for (int t = 0; t < OWN; t++)
#pragma unroll
        for (int h = 0; h < HALVES; h++)
            if (t * warps + warp < TILES && rows[h] >= 0)
                store_out<DIM>(heads, row, head[h], t * warps + warp, o[t][2 * h], o[t][2 * h + 1], l[h]);
}

// ---- many rows ----------------------------------------------------------------------------------------------------

constexpr int WIDE_WARPS = 4, WIDE_ROWS = WIDE_WARPS * 16;

template <int DIM>
struct ChunkShared {
    uint4 keys[CHUNK_PAGES][DIM / 16][WARP];
    uint4 values[CHUNK_PAGES][DIM / 16][WARP];
};

// Consecutive rows of one request: M-rows from `row`, at positions from `start`.
struct Span {
    int row, start, length;
    const int* table;
};

// Rows `first`.. `first` + 63 of the span's (position, query head of the group) rows, heads innermost.
template <int DIM>
DEVICE void attend_wide(const Heads& heads, const Span& span, int first, int kv_head, char* memory) {
    using Shared = ChunkShared<DIM>;
    constexpr int STEPS = DIM / 16, PIECES = STEPS * WARP;
    Shared* shared = (Shared*)memory;
    const int lane = lane_id(), group = heads.group();
    int rows[2], head[2], position[2];
    for (int h = 0; h < 2; h++) {
        const int f = first + warp_id() * 16 + lane / 4 + 8 * h, t = f / group;
        rows[h] = t < span.length ? span.row + t : -1;
        position[h] = t < span.length ? span.start + t : -1;
        head[h] = kv_head * group + f % group;
    }
    uint4 q[STEPS];
    load_q<DIM>(heads, rows, head, q);
    const int last_of_block = span.start + min((first + WIDE_ROWS - 1) / group, span.length - 1);
    const int first_of_warp = span.start + (first + warp_id() * 16) / group;
    const int last_of_warp = span.start + min((first + warp_id() * 16 + 15) / group, span.length - 1);
    const bool warp_has_rows = (first + warp_id() * 16) / group < span.length;
    const int written = span.start + span.length - 1;
    const int num_chunks = last_of_block / CHUNK + 1;

    auto copy = [&](int chunk) {
        Shared& target = shared[chunk % 2];
        for (int piece = threadIdx.x; piece < CHUNK_PAGES * PIECES; piece += WIDE_WARPS * WARP) {
            const int i = piece / PIECES, within = piece % PIECES;
            if (chunk * CHUNK + i * PAGE > written) continue;
            const size_t at = ((size_t)span.table[chunk * CHUNK_PAGES + i] * heads.num_kv_heads + kv_head) * PIECES;
            copy_async(&target.keys[i][0][0] + within, (const uint4*)heads.keys + at + within);
            copy_async(&target.values[i][0][0] + within, (const uint4*)heads.values + at + within);
        }
        commit_copies();
    };

    Attended<DIM> sum;
    copy(0);
    for (int chunk = 0; chunk < num_chunks; chunk++) {
        if (chunk + 1 < num_chunks) {
            copy(chunk + 1);
            wait_copies<1>();
        } else {
            wait_copies<0>();
        }
        __syncthreads();
        if (warp_has_rows && chunk * CHUNK <= last_of_warp) {
            const Shared& now = shared[chunk % 2];
            const int limit[2] = {position[0] - chunk * CHUNK, position[1] - chunk * CHUNK};
            // Pages that were not copied hold what was there: keys are masked, values zeroed.
            auto key = [&](int i, int step) { return now.keys[i][step][lane]; };
            auto value = [&](int i, int unit) { return now.values[i][unit][lane]; };
            const bool whole = chunk * CHUNK + CHUNK - 1 <= first_of_warp;
            if (chunk == 0) {
                attend_chunk<DIM, 2, false>(q, limit, written, heads.scale, key, value, sum);
            } else {
                Attended<DIM> part;
                if (whole)
                    attend_chunk<DIM, 2, true>(q, limit, written - chunk * CHUNK, heads.scale, key, value, part);
                else
                    attend_chunk<DIM, 2, false>(q, limit, written - chunk * CHUNK, heads.scale, key, value, part);
                float before[2], after[2];
#pragma unroll
                for (int h = 0; h < 2; h++)
                    join_scales(sum.m[h], sum.l[h], part.m[h], part.l[h], limit[h] >= 0, before[h], after[h]);
#pragma unroll
                for (int t = 0; t < DIM / 8; t++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        sum.o[t][e] = join(sum.o[t][e], before[e / 2], part.o[t][e], after[e / 2], limit[e / 2] >= 0);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int t = 0; t < DIM / 8; t++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (rows[h] >= 0)
                store_out<DIM>(heads, rows[h], head[h], t, sum.o[t][2 * h], sum.o[t][2 * h + 1], sum.l[h]);
}
