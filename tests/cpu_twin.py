"""The CPU backend's arithmetic once more, in numpy and slowly: docs/arithmetic.md, section 6, read as a specification.

Every operation is on f32 and rounded once, in the order that the page gives, one row at a time. Nothing here knows of
tiles, blocks, pages or threads, so equal bits say that none of them matters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from crucible.config import ModelConfig
from crucible.engine.quant import F16Weight, Int8Weight, Weight, chunk_size
from crucible.engine.reference.positions import alibi_slopes
from crucible.engine.rope import rope_table

F32 = npt.NDArray[np.float32]

LANES = 16
CHUNK = 64


def f32(x: Any) -> F32:
    return np.float32(x)


def fma(a: F32, b: F32, c: F32) -> F32:
    """a * b + c rounded once, from float64: the product is exact there, and the sum is rounded to odd, which keeps the
    second rounding from seeing a tie that is none (Boldo and Melquiond 2008)."""
    product, addend = np.broadcast_arrays(np.multiply(a, b, dtype=np.float64), np.asarray(c, dtype=np.float64))
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64) if total.ndim else np.atleast_1d(total).view(np.int64)
    # An inexact sum whose last bit is even moves to its neighbour on the error's side, whose last bit is odd.
    toward = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where((error != 0) & (bits & 1 == 0) & np.isfinite(total), bits + toward, bits)
    return odd.view(np.float64).reshape(total.shape).astype(np.float32)


def tree(lanes: F32) -> F32:
    """The sum of sixteen lanes [..., 16]."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def in_lanes(x: F32) -> F32:
    """[N] as [N / 16, 16], padded with zeros."""
    padded = np.zeros(-(-len(x) // LANES) * LANES, dtype=np.float32)
    padded[: len(x)] = x
    return padded.reshape(-1, LANES)


def exp(x: F32) -> F32:
    shifted = fma(x, f32(math.log2(math.e)), f32(1.5 * 2**23))
    n = shifted - f32(1.5 * 2**23)
    high = float.fromhex("0x1.62e4p-1")
    r = fma(n, -f32(math.log(2) - high), fma(n, -f32(high), x))
    q = np.full_like(x, 1 / math.factorial(7))
    for degree in range(6, 1, -1):
        q = fma(q, r, f32(1 / math.factorial(degree)))
    y = fma(q, r * r, r) + f32(1)
    y = np.ldexp(y, np.clip(np.nan_to_num(n), -126, 127).astype(np.int32)).astype(np.float32)
    y = np.where(x < f32(-87.33), f32(0), y)
    return np.where(x > f32(88.02), f32(np.inf), y).astype(np.float32)


def silu(x: F32) -> F32:
    return x / (f32(1) + exp(f32(0) - x))


def gelu(x: F32) -> F32:
    u = f32(2 * math.sqrt(2 / math.pi)) * fma(f32(0.044715), x * x * x, x)
    return x / (f32(1) + exp(f32(0) - u))


def linear(weight: Weight, x_K: F32, chunk: int) -> F32:
    """[N], for a matrix in any format."""
    if isinstance(weight, Int8Weight):
        values_NK, scales_NC = weight.values.astype(np.float32), weight.scales
    elif isinstance(weight, F16Weight):
        values_NK, scales_NC = weight.values.astype(np.float32), weight.scales[:, None]
    else:
        values_NK, scales_NC = weight, np.ones((len(weight), 1), dtype=np.float32)
    y_N = np.zeros(len(values_NK), dtype=np.float32)
    for c, start in enumerate(range(0, len(x_K), chunk)):
        sums_N = np.zeros_like(y_N)
        for k in range(start, min(start + chunk, len(x_K))):
            sums_N = fma(values_NK[:, k], x_K[k], sums_N)
        scale_N = scales_NC[:, c if scales_NC.shape[1] > 1 else 0]
        y_N = sums_N * scale_N if c == 0 else fma(sums_N, scale_N, y_N)
    return y_N


def sum_of_squares(x: F32) -> F32:
    lanes = np.zeros(LANES, dtype=np.float32)
    for row in in_lanes(x):
        lanes = fma(row, row, lanes)
    return tree(lanes)


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    scale = f32(1) / np.sqrt(sum_of_squares(x) / f32(len(x)) + f32(eps))
    return x * scale * weight


def layer_norm(x: F32, weight: F32, bias: F32, eps: float) -> F32:
    lanes = np.zeros(LANES, dtype=np.float32)
    for row in in_lanes(x):
        lanes = lanes + row
    deviation = x - tree(lanes) / f32(len(x))
    scale = f32(1) / np.sqrt(sum_of_squares(deviation) / f32(len(x)) + f32(eps))
    return deviation * scale * weight + bias


def rotate(x: F32, cos: F32, sin: F32) -> F32:
    first, second = np.split(x, 2)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin])


def attend(q_K: F32, keys_TK: F32, values_TK: F32, slope: F32 | None) -> F32:
    """The output [K] of one head whose row is the last of T positions."""
    position = len(keys_TK) - 1
    merged: tuple[F32, F32, F32] | None = None
    for start in range(0, position + 1, CHUNK):
        keys, values = keys_TK[start : start + CHUNK], values_TK[start : start + CHUNK]
        scores = np.zeros(len(keys), dtype=np.float32)
        for k, factor in enumerate(q_K):
            scores = fma(keys[:, k], factor, scores)
        scores = scores * f32(len(q_K) ** -0.5)
        if slope is not None:
            scores = scores - slope * (f32(position - start) - np.arange(len(keys), dtype=np.float32))
        highest = scores.max()
        weights = np.zeros(CHUNK, dtype=np.float32)
        weights[: len(keys)] = exp(scores - highest)
        a, b, c, d = weights.reshape(4, LANES)
        total = tree((a + b) + (c + d))
        output = np.zeros_like(q_K)
        for weight, value in zip(weights, values, strict=False):
            output = fma(value, weight, output)
        merged = (highest, total, output) if merged is None else merge(merged, (highest, total, output))
    assert merged is not None
    return merged[2] / merged[1]


def merge(earlier: tuple[F32, F32, F32], later: tuple[F32, F32, F32]) -> tuple[F32, F32, F32]:
    highest = max(earlier[0], later[0])
    scale, later_scale = exp(np.array([earlier[0] - highest, later[0] - highest], dtype=np.float32))
    total, output = (fma(earlier[i], scale, later[i] * later_scale) for i in (1, 2))
    return highest, total, output


class Twin:
    """One request, one row after another."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight]) -> None:
        self.config, self.weights = config, weights
        layers = range(config.num_hidden_layers)
        self.keys: list[list[list[F32]]] = [[[] for _ in range(config.num_key_value_heads)] for _ in layers]
        self.values: list[list[list[F32]]] = [[[] for _ in range(config.num_key_value_heads)] for _ in layers]
        self.position = 0

    def feed(self, token_id: int) -> F32:
        """The logits [V] after a token."""
        config, weights = self.config, self.weights
        embedding = weights["model.embed_tokens.weight"]
        row = np.array([token_id])
        x = (embedding[row] if isinstance(embedding, np.ndarray) else embedding.rows(row))[0]
        if config.pos_encoding == "learned":
            x = x + weights["model.embed_positions.weight"][self.position]
        for layer in range(config.num_hidden_layers):
            attention_norm, mlp_norm = (f"model.layers.{layer}.{name}" for name in config.norm_names)
            if config.norm_placement == "pre":
                x = x + self.attention(layer, self.norm(attention_norm, x))
                x = x + self.mlp(layer, self.norm(mlp_norm, x))
            else:
                x = self.norm(attention_norm, x + self.attention(layer, x))
                x = self.norm(mlp_norm, x + self.mlp(layer, x))
        if config.norm_placement == "pre":
            x = self.norm("model.norm", x)
        self.position += 1
        return self.linear("model.embed_tokens" if config.tie_word_embeddings else "lm_head", x)

    def linear(self, name: str, x: F32) -> F32:
        weight = self.weights[f"{name}.weight"]
        y = linear(weight, x, chunk_size(self.config, f"{name}.weight"))
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def norm(self, name: str, x: F32) -> F32:
        weight, eps = self.weights[f"{name}.weight"], self.config.norm_eps
        if self.config.norm == "rmsnorm":
            return rms_norm(x, weight, eps)
        return layer_norm(x, weight, self.weights[f"{name}.bias"], eps)

    def attention(self, layer: int, x: F32) -> F32:
        config, at = self.config, f"model.layers.{layer}.self_attn"
        q, k, v = (self.linear(f"{at}.{name}_proj", x).reshape(-1, config.head_dim) for name in "qkv")
        if config.qk_norm:
            q = [rms_norm(head, self.weights[f"{at}.q_norm.weight"], config.norm_eps) for head in q]
            k = [rms_norm(head, self.weights[f"{at}.k_norm.weight"], config.norm_eps) for head in k]
        if config.pos_encoding == "rope":
            cos, sin = (table[self.position] for table in rope_table(config, self.position + 1))
            q, k = [rotate(head, cos, sin) for head in q], [rotate(head, cos, sin) for head in k]
        slopes = alibi_slopes(config.num_attention_heads) if config.pos_encoding == "alibi" else None
        for head in range(config.num_key_value_heads):
            self.keys[layer][head].append(k[head])
            self.values[layer][head].append(v[head])
        outputs = []
        for head, query in enumerate(q):
            own = head // config.group_size
            slope = None if slopes is None else slopes[head]
            outputs.append(attend(query, np.array(self.keys[layer][own]), np.array(self.values[layer][own]), slope))
        return self.linear(f"{at}.o_proj", np.concatenate(outputs))

    def mlp(self, layer: int, x: F32) -> F32:
        at = f"model.layers.{layer}.mlp"
        up = self.linear(f"{at}.up_proj", x)
        hidden = silu(self.linear(f"{at}.gate_proj", x)) * up if self.config.activation == "swiglu" else gelu(up)
        return self.linear(f"{at}.down_proj", hidden)
