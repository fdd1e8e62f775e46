// What becomes of a linear layer's results. A *unit* is 16 rows x 16 outputs: two tiles of 8 outputs, y[tile][c], c as
// a lane of mma.sync holds C. The order of outputs within a matrix is chosen (engine/cuda/weights.py) so that what
// belongs together meets in one lane: gate and up of one element, and both elements of a pair that RoPE turns.
//
// `begin` loads what a unit needs besides, early; `finish` takes the unit. Rows from `num_rows` on are padding.
#pragma once
#include "functions.cuh"
#include "layout.cuh"

// Rows g and g + 8 of 16-row tile `tile`.
struct RowPair {
    int row[2];
    DEVICE RowPair(int tile) { row[0] = tile * 16 + lane_id() / 4, row[1] = row[0] + 8; }
};
// First of the lane's two columns within a tile of 8.
DEVICE int column() { return lane_id() % 4 * 2; }

// x = x + (y + bias).
struct Residual {
    float* x;  // [M, width]
    int width;
    const float* bias;  // [width] or null
    int num_rows;
    float2 old[2][2], b[2];

    DEVICE float2* at(int row, int unit, int t) {
        return (float2*)(x + (size_t)row * width + unit * 16 + t * 8 + column());
    }
    DEVICE void begin(int tile, int unit) {
        RowPair rows(tile);
        for (int t = 0; t < 2; t++) {
            if (bias) b[t] = *(const float2*)(bias + unit * 16 + t * 8 + column());
            for (int h = 0; h < 2; h++)
                if (rows.row[h] < num_rows) old[t][h] = *at(rows.row[h], unit, t);
        }
    }
    DEVICE void finish(int tile, int unit, const float (&y)[2][4]) {
        RowPair rows(tile);
        for (int t = 0; t < 2; t++)
            for (int h = 0; h < 2; h++) {
                if (rows.row[h] >= num_rows) continue;
                float y0 = y[t][2 * h], y1 = y[t][2 * h + 1];
                if (bias) y0 = y0 + b[t].x, y1 = y1 + b[t].y;
                *at(rows.row[h], unit, t) = make_float2(old[t][h].x + y0, old[t][h].y + y1);
            }
    }
};

// silu(gate) * up as the operand of the next layer, A order of `steps` steps. A unit is 8 gates and their 8 ups.
struct SwiGlu {
    u16* hidden;
    int steps;
    u32* saturations;
    int num_rows;

    DEVICE void begin(int, int) {}
    DEVICE void finish(int tile, int unit, const float (&y)[2][4]) {
        RowPair rows(tile);
        for (int h = 0; h < 2; h++) {
            if (rows.row[h] >= num_rows) continue;
            float h0 = saturate(silu_f32(y[0][2 * h]) * y[1][2 * h], saturations);
            float h1 = saturate(silu_f32(y[0][2 * h + 1]) * y[1][2 * h + 1], saturations);
            *(u32*)(hidden + a_index(rows.row[h], unit * 8 + column(), steps)) = pack_f16(h0, h1);
        }
    }
};

// f32 rows [M, width], width a multiple of 16.
struct Logits {
    float* out;
    int width;
    int num_rows;

    DEVICE void begin(int, int) {}
    DEVICE void finish(int tile, int unit, const float (&y)[2][4]) {
        RowPair rows(tile);
        for (int t = 0; t < 2; t++)
            for (int h = 0; h < 2; h++) {
                if (rows.row[h] >= num_rows) continue;
                size_t at = (size_t)rows.row[h] * width + unit * 16 + t * 8 + column();
                *(float2*)(out + at) = make_float2(y[t][2 * h], y[t][2 * h + 1]);
            }
    }
};

// Where rows stand and where their keys and values go.
struct Rows {
    const int* position;  // [M]
    const int* table;     // [M]: where in `pages` the row's request begins
    const int* pages;
};

// q, k and v: bias, RoPE, rounding; q to rows [M, H * K], k and v to the cache.
template <int DIM>
struct QkvOut {
    u16* q;
    u16* keys;  // this layer's pages, laid out as attention.cuh says
    u16* values;
    const float* cos;  // [T, K / 2]
    const float* sin;
    const float* bias;  // in the matrix's order of outputs, or null
    Rows rows;
    int num_heads, num_kv_heads;
    u32* saturations;
    int num_rows;
    int position[2], page[2];
    float2 c[2], s[2], b[2];

    static constexpr int UNITS = DIM / 16;

    DEVICE bool turns(int unit) const { return unit / UNITS < num_heads + num_kv_heads; }

    DEVICE void begin(int tile, int unit) {
        RowPair pair(tile);
        for (int h = 0; h < 2; h++) {
            position[h] = 0, page[h] = 0;
            if (pair.row[h] >= num_rows) continue;
            position[h] = rows.position[pair.row[h]];
            page[h] = rows.pages[rows.table[pair.row[h]] + position[h] / 16];
            // Tile 0 holds dims 8 part.., tile 1 the same of the head's second half.
            const size_t at = (size_t)position[h] * (DIM / 2) + unit % UNITS * 8 + column();
            if (turns(unit)) c[h] = *(const float2*)(cos + at), s[h] = *(const float2*)(sin + at);
        }
        if (bias)
            for (int t = 0; t < 2; t++) b[t] = *(const float2*)(bias + unit * 16 + t * 8 + column());
    }

    DEVICE void finish(int tile, int unit, const float (&y)[2][4]) {
        RowPair pair(tile);
        const int head = unit / UNITS, part = unit % UNITS;
        for (int h = 0; h < 2; h++) {
            if (pair.row[h] >= num_rows) continue;
            float v[4] = {y[0][2 * h], y[0][2 * h + 1], y[1][2 * h], y[1][2 * h + 1]};
            if (bias) v[0] = v[0] + b[0].x, v[1] = v[1] + b[0].y, v[2] = v[2] + b[1].x, v[3] = v[3] + b[1].y;
            if (turns(unit)) {
                rotate(v[0], v[2], c[h].x, s[h].x);
                rotate(v[1], v[3], c[h].y, s[h].y);
            }
            for (int i = 0; i < 4; i++) v[i] = saturate(v[i], saturations);
            if (head < num_heads)
                store_q(pair.row[h], head, part, v);
            else if (head < num_heads + num_kv_heads)
                store_key(h, head - num_heads, part, v);
            else
                store_value(h, head - num_heads - num_kv_heads, part, v);
        }
    }

    DEVICE void store_q(int row, int head, int part, const float (&v)[4]) {
        u16* at = q + ((size_t)row * num_heads + head) * DIM + part * 8 + column();
        *(u32*)at = pack_f16(v[0], v[1]);
        *(u32*)(at + DIM / 2) = pack_f16(v[2], v[3]);
    }
    DEVICE void store_key(int h, int head, int part, const float (&v)[4]) {
        u16* at = keys + ((size_t)page[h] * num_kv_heads + head) * (16 * DIM);
        for (int i = 0; i < 2; i++) {
            int d = i * (DIM / 2) + part * 8 + column();
            *(u32*)(at + key_index(position[h] % 16, d)) = pack_f16(v[2 * i], v[2 * i + 1]);
        }
    }
    DEVICE void store_value(int h, int head, int part, const float (&v)[4]) {
        u16* at = values + ((size_t)page[h] * num_kv_heads + head) * (16 * DIM);
        for (int i = 0; i < 4; i++) {
            int d = part * 16 + i / 2 * 8 + column() + i % 2;
            at[value_index(position[h] % 16, d)] = to_f16(v[i]);
        }
    }
};
