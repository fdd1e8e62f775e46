"""A model's tensors as compiled functions read them: matrices in tiles, vectors padded, in few arrays.

A tile is 32 output rows of a matrix, [K, 32] with the rows side by side, so that a step over k reads the next 32
weights. Extra shape letters: N outputs, K inputs of a linear layer, C chunks of inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from crucible.config import ModelConfig
from crucible.engine.cpu.linear import TILE
from crucible.engine.cpu.state import F32, Linear, Model
from crucible.engine.host_backend import check_weights
from crucible.engine.quant import (
    F16Weight,
    Weight,
    WeightFormat,
    balance,
    chunk_size,
    convert_tensor,
    dense,
    num_chunks,
)
from crucible.engine.reference.positions import alibi_slopes
from crucible.engine.rope import rope_table
from crucible.hardware import usable_cores

Values = npt.NDArray[np.int8] | npt.NDArray[np.uint16] | F32
Ids = npt.NDArray[np.int64]

_DTYPES: Final = {"f32": np.float32, "f16": np.uint16, "int8": np.int8}
"""How the values of a weight format are held; f16 by its bits."""

_EMPTY: Final[F32] = np.empty(0, dtype=np.float32)


def round_up(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


class Packed(NamedTuple):
    """A model ready to run. `weights` holds all matrices but `embedding`, which is None where it is the head's."""

    weights: Values
    model: Model
    embedding: Weight | None
    positions: F32 | None


def pack(config: ModelConfig, weights: Mapping[str, Weight], weight_format: WeightFormat) -> Packed:
    """Lay out the tensors of `config.tensor_shapes()`, given by name, in a weight format.

    Raises:
        CrucibleError: a tensor is missing, unknown or of another shape; QuantError as `quant.convert`.
    """
    check_weights(config, weights)
    packer = _Packer(config, weights, weight_format)
    layers = [f"model.layers.{layer}." for layer in range(config.num_hidden_layers)]
    is_gated, is_tied = config.activation == "swiglu", config.tie_word_embeddings
    qkv = packer.linear(layers, [f"self_attn.{x}_proj" for x in "qkv"])
    norms = [layer + name for layer in layers for name in config.norm_names]
    cos, sin = rope_table(config) if config.pos_encoding == "rope" else (_EMPTY, _EMPTY)
    model = Model(
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        d=config.hidden_size,
        f=config.intermediate_size,
        k=config.head_dim,
        d_stride=round_up(config.hidden_size, TILE),
        f_stride=round_up(config.intermediate_size, TILE),
        qkv_stride=qkv.tiles * TILE,
        k_stride=round_up(config.head_dim, TILE),
        is_rmsnorm=config.norm == "rmsnorm",
        is_post=config.norm_placement == "post",
        is_gated=is_gated,
        eps=np.float32(config.norm_eps),
        softmax_scale=np.float32(config.head_dim**-0.5),
        qkv=qkv,
        o=packer.linear(layers, ["self_attn.o_proj"]),
        mlp_in=packer.linear(layers, ["mlp.gate_proj", "mlp.up_proj"] if is_gated else ["mlp.up_proj"], by_tile=True),
        mlp_out=packer.linear(layers, ["mlp.down_proj"]),
        head=packer.linear([""], ["model.embed_tokens" if is_tied else "lm_head"]),
        norms=packer.vectors(
            [[f"{norm}.{part}"] for norm in [*norms, "model.norm"] for part in ("weight", "bias")], TILE
        ),
        qkv_bias=packer.vectors([[f"{at}self_attn.{x}_proj.bias" for x in "qkv"] for at in layers], TILE),
        o_bias=packer.vectors([[f"{at}self_attn.o_proj.bias"] for at in layers], TILE),
        head_norms=packer.vectors([[f"{at}self_attn.{x}_norm.weight"] for at in layers for x in "qk"], TILE),
        cos=np.ascontiguousarray(cos).reshape(-1),
        sin=np.ascontiguousarray(sin).reshape(-1),
        slopes=alibi_slopes(config.num_attention_heads) if config.pos_encoding == "alibi" else _EMPTY,
    )
    embedding = None if is_tied else packer.converted("model.embed_tokens.weight")
    positions = weights.get("model.embed_positions.weight")
    assert packer.filled == len(packer.values), "the matrices fill their array"
    return Packed(packer.values, model, embedding, None if positions is None else dense(positions))


class _Packer:
    """Fills `values` with one linear layer after the other, several layers of the model at a time."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight], weight_format: WeightFormat) -> None:
        self.config, self.weight_format = config, weight_format
        self.weights = balance(config, weights, weight_format)
        self.values: Values = np.zeros(_num_values(config), dtype=_DTYPES[weight_format])
        self.filled = 0

    def converted(self, name: str) -> Weight:
        return convert_tensor(self.config, name, self.weights[name], self.weight_format)

    def linear(self, layers: Sequence[str], names: Sequence[str], *, by_tile: bool = False) -> Linear:
        """One linear layer of all layers: matrices one below the other, or taking turns tile by tile."""
        first = f"{layers[0]}{names[0]}.weight"
        chunk, num_inputs = chunk_size(self.config, first), self.weights[first].shape[1]
        num_rows = [self.weights[f"{layers[0]}{name}.weight"].shape[0] for name in names]
        tiles = len(names) * round_up(num_rows[0], TILE) // TILE if by_tile else round_up(sum(num_rows), TILE) // TILE
        num_scales = num_chunks(num_inputs, chunk) if self.weight_format == "int8" else 1
        start, end = self.filled, self.filled + len(layers) * tiles * num_inputs * TILE
        values_LTKR = self.values[start:end].reshape(len(layers), tiles, num_inputs, TILE)
        scales_LTCR = np.zeros((len(layers), tiles, num_scales, TILE), dtype=np.float32)

        def fill(layer: int) -> None:
            row = 0
            for index, name in enumerate(names):
                weight = self.converted(f"{layers[layer]}{name}.weight")
                own = slice(index, None, len(names)) if by_tile else slice(None)
                _fill(values_LTKR[layer, own], row, _values(weight))
                _fill(scales_LTCR[layer, own], row, _scales(weight))
                row += 0 if by_tile else num_rows[index]

        with ThreadPoolExecutor(usable_cores()) as pool:
            list(pool.map(fill, range(len(layers))))
        self.filled = end
        scale_step = TILE if self.weight_format == "int8" else 0
        return Linear(start, tiles, num_inputs, chunk, scales_LTCR.reshape(-1), scale_step)

    def vectors(self, rows: Iterable[Sequence[str]], multiple: int) -> F32:
        """Vectors by name, those of a row joined and padded with zeros to a multiple; nothing if the model has none.

        A vector that the model lacks beside others that it has, as RMSNorm's bias, is zero.
        """
        found = [[dense(self.weights[name]) for name in row if name in self.weights] for row in rows]
        sizes = {sum(map(len, row)) for row in found} - {0}
        if not sizes:
            return _EMPTY
        (size,) = sizes
        padded = np.zeros((len(found), round_up(size, multiple)), dtype=np.float32)
        for target, row in zip(padded, found, strict=True):
            if row:
                target[:size] = np.concatenate(row)
        return padded.reshape(-1)


def look_up(packed: Packed, ids_M: Ids) -> F32:
    """Rows [M, D] of the token embedding, which is the output projection where the model ties them."""
    if packed.embedding is not None:
        return packed.embedding.rows(ids_M) if not isinstance(packed.embedding, np.ndarray) else packed.embedding[ids_M]
    head = packed.model.head
    tile, lane = ids_M // TILE, ids_M % TILE
    stored = packed.weights[head.start :].reshape(head.tiles, head.inputs, TILE)[tile, :, lane]
    values_MD = (stored.view(np.float16) if stored.dtype == np.uint16 else stored).astype(np.float32)
    scales_MC = head.scales.reshape(head.tiles, -1, TILE)[tile, :, lane]
    num_inputs = head.inputs if head.scale_step == 0 else head.chunk
    return values_MD * np.repeat(scales_MC, num_inputs, axis=1)[:, : head.inputs]


def _num_values(config: ModelConfig) -> int:
    """Elements of all matrices but an untied embedding, each padded to whole tiles."""
    d, f, q = config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    gates = 2 if config.activation == "swiglu" else 1
    shapes = [(q + 2 * kv, d), (d, q), (d, f), *[(f, d)] * gates]
    per_layer = sum(round_up(n, TILE) * k for n, k in shapes)
    return config.num_hidden_layers * per_layer + round_up(config.vocab_size, TILE) * d


def _values(weight: Weight) -> Values:
    """[N, K]."""
    if isinstance(weight, np.ndarray):
        return weight
    return weight.values.view(np.uint16) if isinstance(weight, F16Weight) else weight.values


def _scales(weight: Weight) -> F32:
    """[N, C], with C = 1 where a row has one scale."""
    if isinstance(weight, np.ndarray):
        return np.ones((len(weight), 1), dtype=np.float32)
    return weight.scales.reshape(len(weight.scales), -1)


def _fill(tiles_TXR: npt.NDArray[Any], row: int, part_NX: npt.NDArray[Any]) -> None:
    """Write N rows, from the `row`-th on, to tiles of 32 rows side by side."""
    while len(part_NX):
        tile, lane = divmod(row, TILE)
        if lane == 0 and len(part_NX) >= TILE:
            length = len(part_NX) // TILE * TILE
            whole = part_NX[:length].reshape(-1, TILE, part_NX.shape[1])
            tiles_TXR[tile : tile + len(whole)] = whole.transpose(0, 2, 1)
        else:
            length = min(TILE - lane, len(part_NX))
            tiles_TXR[tile, :, lane : lane + length] = part_NX[:length].T
        row, part_NX = row + length, part_NX[length:]
