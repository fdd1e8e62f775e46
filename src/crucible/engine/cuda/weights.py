"""Matrices as the tensor-core kernels read them: in the order of the lanes of `mma.sync` (kernels/layout.cuh).

Extra shape letters: N outputs of a matrix, K its inputs, C its chunks of inputs. A *step* is 16 inputs, what one
instruction takes; a *unit* is 16 outputs, what one warp finishes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from crucible.config import ModelConfig
from crucible.engine.quant import F16Weight, Int8Weight, Weight
from crucible.errors import CrucibleError

F32: TypeAlias = npt.NDArray[np.float32]
Ids: TypeAlias = npt.NDArray[np.int64]

STEP: Final = 16
UNIT: Final = 16
TILE: Final = 8
"""Outputs of one instruction."""
PAD_OUTPUTS: Final = 128
"""Outputs are padded to a multiple, so that every shape of kernel reads whole tiles."""
STEPS_PER_GROUP: Final = {"int8": 4, "f16": 2}
"""Steps that a lane's 16 bytes hold."""


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A weight [N, K] ready to be uploaded.

    Attributes:
        words: [N padded / 8, groups, 32 lanes, 16 bytes] uint8.
        scales: f32 [C, N padded] for int8, [N padded] for f16.
        num_units: ceil(N / 16).
        steps: K / 16.
        chunk_steps: steps of a chunk.
        chunks: C.
        last_steps: steps of the last chunk.
    """

    words: npt.NDArray[np.uint8]
    scales: F32
    num_units: int
    steps: int
    chunk_steps: int
    chunks: int
    last_steps: int

    @property
    def padded(self) -> int:
        """N padded."""
        return int(self.words.shape[0]) * TILE

    @property
    def groups(self) -> int:
        """16-byte groups of a lane in a row of tiles."""
        return int(self.words.shape[1])


def pack(weights: Sequence[Weight], chunk: int, order: Ids | None = None) -> Matrix:
    """One matrix out of several with the same inputs, one below the other, its outputs in a given order.

    Args:
        weights: int8 or f16, each [N_i, K]; K a multiple of 16.
        chunk: inputs that are summed before they are scaled, a multiple of 16.
        order: output n of the matrix is row order[n] of the stack; by default as it comes.

    Raises:
        CrucibleError: an int8 weight was quantised in other chunks.
    """
    is_int8 = isinstance(weights[0], Int8Weight)
    stack, stacked_scales = [], []
    for weight in weights:
        assert isinstance(weight, Int8Weight | F16Weight), "f32 matrices are not packed"
        if isinstance(weight, Int8Weight) and weight.chunk != chunk:
            raise CrucibleError(f"backend 'cuda' needs a scale per {chunk} inputs, and the weights have {weight.chunk}")
        # One view for both formats: two neighbouring inputs, which never part, are one element.
        stack.append(np.ascontiguousarray(weight.values).view(np.uint16 if is_int8 else np.uint32))
        stacked_scales.append(weight.scales.T if is_int8 else weight.scales)
    pairs_NP = np.concatenate(stack) if len(stack) > 1 else stack[0]
    scales = np.concatenate(stacked_scales, axis=-1)
    if order is not None:
        pairs_NP, scales = pairs_NP[order], scales[..., order]
    num_outputs, steps = len(pairs_NP), pairs_NP.shape[1] * 2 // STEP
    chunk_steps = chunk // STEP
    chunks = -(-steps // chunk_steps)
    last_steps = steps - (chunks - 1) * chunk_steps
    slots = -(-chunk_steps // 4) * 4
    total = (chunks - 1) * slots + -(-last_steps // 4) * 4
    padded = -(-num_outputs // PAD_OUTPUTS) * PAD_OUTPUTS
    group = STEPS_PER_GROUP["int8" if is_int8 else "f16"]
    # [tiles, outputs, groups, steps, halves of 8 inputs, pairs] to [tiles, groups, outputs, pairs, steps, halves].
    words = np.zeros((padded // TILE, total // group, TILE, 4, group, 2), dtype=pairs_NP.dtype)
    source = _in_slots(pairs_NP, padded, chunk_steps, chunks, slots, total)
    words[...] = source.reshape(padded // TILE, TILE, total // group, group, 2, 4).transpose(0, 2, 1, 5, 3, 4)
    if is_int8:
        words ^= np.uint16(0x8080)  # value + 128 in each byte
    padded_scales = np.zeros((*scales.shape[:-1], padded), dtype=np.float32)
    padded_scales[..., :num_outputs] = scales
    return Matrix(
        words=words.view(np.uint8).reshape(padded // TILE, total // group, 32, 16),
        scales=padded_scales,
        num_units=-(-num_outputs // UNIT),
        steps=steps,
        chunk_steps=chunk_steps,
        chunks=chunks,
        last_steps=last_steps,
    )


def _in_slots(pairs_NP: npt.NDArray[Any], padded: int, chunk_steps: int, chunks: int, slots: int, total: int) -> Any:
    """The pairs with each chunk at the start of its slots, zero elsewhere."""
    if padded == len(pairs_NP) and pairs_NP.shape[1] == total * (STEP // 2):
        return pairs_NP
    placed = np.zeros((padded, total * (STEP // 2)), dtype=pairs_NP.dtype)
    if chunk_steps == slots:
        placed[: len(pairs_NP), : pairs_NP.shape[1]] = pairs_NP
        return placed
    for chunk in range(chunks):
        columns = pairs_NP[:, chunk * chunk_steps * (STEP // 2) : (chunk + 1) * chunk_steps * (STEP // 2)]
        start = chunk * slots * (STEP // 2)
        placed[: len(pairs_NP), start : start + columns.shape[1]] = columns
    return placed


def qkv_order(config: ModelConfig) -> Ids:
    """Order of the outputs of q, k and v, stacked: in a head of q or k the tiles of 8 of its first half take turns with
    those of its second half, so that both elements that RoPE turns stand in one unit."""
    tiles = np.arange(config.head_dim).reshape(2, -1, TILE).transpose(1, 0, 2).reshape(-1)
    turned = config.num_attention_heads + config.num_key_value_heads
    heads = np.arange(turned + config.num_key_value_heads) * config.head_dim
    natural = np.arange(config.head_dim)
    return np.concatenate([head + (tiles if index < turned else natural) for index, head in enumerate(heads)])


def gate_up_order(config: ModelConfig) -> Ids:
    """Order of the outputs of gate and up, stacked: tiles of 8 of both take turns."""
    return np.arange(2 * config.intermediate_size).reshape(2, -1, TILE).transpose(1, 0, 2).reshape(-1)
