"""What llama.cpp calls the parts of a model, and how it orders the rows of queries and keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from crucible.config import ModelConfig

Architecture = Literal["llama", "qwen2", "qwen3"]
"""Value of general.architecture, and beginning of the keys that describe the model."""

ROPE_FREQS: Final = "rope_freqs.weight"
"""f32 [K/2]: what each frequency of RoPE is divided by. This is how a file states Llama 3's scaling."""

_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_OUTSIDE: Final[Mapping[str, str]] = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER: Final[Mapping[str, str]] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

_Number = TypeVar("_Number", bound=np.generic)


def gguf_name(name: str) -> str:
    """The name in a .gguf file of a tensor of `ModelConfig.tensor_shapes()`, for a model with Llama's axes."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    layer = _LAYER.fullmatch(name)
    assert layer is not None, name
    return f"blk.{layer[1]}.{_IN_LAYER[layer[2]]}.{layer[3]}"


def permuted_heads(name: str, config: ModelConfig, architecture: Architecture) -> int | None:
    """Number of heads whose rows llama.cpp reorders in a tensor, None where it leaves rows alone.

    Its kernel for the architecture `llama` rotates neighbours (0, 1), (2, 3) ...; so its converter moves row i of a
    head's first half to 2i, and row i of the second to 2i + 1. The other architectures are rotated in halves, as here.
    """
    if architecture != "llama":
        return None
    if ".q_proj." in name:
        return config.num_attention_heads
    return config.num_key_value_heads if ".k_proj." in name else None


def interleave(rows: npt.NDArray[_Number], heads: int) -> npt.NDArray[_Number]:
    """Rows of halves to rows of neighbours, [H * K] or [H * K, D]."""
    split = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(rows.shape))


def deinterleave(rows: npt.NDArray[_Number], heads: int) -> npt.NDArray[_Number]:
    """The inverse of `interleave`."""
    split = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(rows.shape))
