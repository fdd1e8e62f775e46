// Where operands lie in memory: in the order in which a lane of mma.sync holds them, 16 bytes at a time.
//
// Activations [M, K] f16 ("A order"): tiles of 16 rows x 16 k, [M/16][K/16][32 lanes][8]; a lane's 8 halves are its
// four registers. Rows are padded to 16, and what the padding holds does not matter. A result fragment of one layer,
// two 8-column tiles wide, is already the operand fragment of the next.
//
// Weights [N, K] (engine/cuda/weights.py writes them): tiles of 8 outputs, [N/8][K/64][32][16 bytes] for int8 (four
// steps of 16 k), [N/8][K/32][32][16 bytes] for f16 (two steps). Each natural group of 16 k stays in one instruction:
// storage is shuffled, the order of k is not.
//
// Keys and values f16: a page of 16 positions of one head is the B operand of attention's two products, K/16 times
// 32 lanes x 16 bytes. Keys: step of 16 dims; a lane has positions g and g + 8. Values: 16 dims; a lane has dims g and
// g + 8. A layer is [pages][G][16 K].
#pragma once
#include "common.cuh"

constexpr int STEP = 16;          // k of one instruction
constexpr int TILE_HALVES = 256;  // of a 16 x 16 tile in A order

// Index of element (m, k) in A order, `steps` = K / 16.
DEVICE size_t a_index(int m, int k, int steps) {
    size_t tile = (size_t)(m / 16) * steps + k / STEP;
    int lane = (m % 8) * 4 + (k % 8) / 2;
    int half = (k % 16) / 8 * 4 + (m % 16) / 8 * 2 + k % 2;
    return tile * TILE_HALVES + lane * 8 + half;
}

// ---- the formats of weights -------------------------------------------------------------------------------------

// int8 as value + 128 in a byte. 0x64 above a byte is the f16 number 1024 + byte; minus 1152 gives the value, exactly.
struct Int8 {
    static constexpr int GROUP = 4;        // steps of 16 k in a lane's 16 bytes
    static constexpr bool PER_CHUNK = true;  // scales: [chunks][N], else [N]

    static DEVICE void fragment(const uint4& words, int step, u32& b0, u32& b1) {
        u32 word = step == 0 ? words.x : step == 1 ? words.y : step == 2 ? words.z : words.w;
        b0 = minus_1152(__byte_perm(word, 0x64646464u, 0x4140));
        b1 = minus_1152(__byte_perm(word, 0x64646464u, 0x4342));
    }
    static DEVICE u32 minus_1152(u32 pair) {
        u32 value;
        asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(value) : "r"(pair), "r"(0x64806480u));
        return value;
    }
    static DEVICE float value(const void* weights, size_t index) {
        return (float)((int)((const u8*)weights)[index] - 128);
    }
};

struct F16 {
    static constexpr int GROUP = 2;
    static constexpr bool PER_CHUNK = false;

    static DEVICE void fragment(const uint4& words, int step, u32& b0, u32& b1) {
        b0 = step == 0 ? words.x : words.z;
        b1 = step == 0 ? words.y : words.w;
    }
    static DEVICE float value(const void* weights, size_t index) { return from_f16(((const u16*)weights)[index]); }
};

// Index of element (n, k) of a weight whose rows hold `groups` times 16 bytes per lane.
template <class Format>
DEVICE size_t weight_index(int n, int k, int groups) {
    int step = k / STEP, lane = (n % 8) * 4 + (k % 8) / 2, within = (k % 16) / 8 * 2 + k % 2;
    size_t at = ((size_t)(n / 8) * groups + step / Format::GROUP) * WARP + lane;
    return (at * Format::GROUP + step % Format::GROUP) * 4 + within;
}

// ---- pages of keys and values -----------------------------------------------------------------------------------

// Where dim d of the key at a page's position p stands within the page of its head.
DEVICE int key_index(int p, int d) {
    return (d / 16 * WARP + p % 8 * 4 + d % 8 / 2) * 8 + p / 8 * 4 + d % 16 / 8 * 2 + d % 2;
}
DEVICE int value_index(int p, int d) {
    return (d / 16 * WARP + d % 8 * 4 + p % 8 / 2) * 8 + d % 16 / 8 * 4 + p / 8 * 2 + p % 2;
}
