"""GGUF files made byte by byte from the format's description, and a toy model in the names and row order of llama.cpp.

Nothing here goes through the package `gguf` or the code under test: this is the other side of the comparison.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from toy_tokenizers import TRAINING_TEXT

from crucible.config import ModelConfig
from crucible.tokenizer import Tokenizer

Metadata = dict[str, Any]
Tensors = dict[str, tuple[int, tuple[int, ...], bytes]]
"""By name: number of the type, shape in rows and columns, and the stored bytes."""

VOCAB_SIZE = 300
U8, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 5, 6, 7, 8, 9, 10
_PACK = {U8: "<B", U32: "<I", I32: "<i", F32: "<f", BOOL: "<?", U64: "<Q"}


class Raw(tuple[int, bytes]):
    """A value of metadata given as its type's number and its bytes, to be wrong in some way."""


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def element(value: Any) -> tuple[int, bytes]:
    """Type and bytes of a value; an int is a uint32 and in an array an int32, as the converter writes them."""
    if isinstance(value, Raw):
        return value
    if isinstance(value, str):
        return STRING, string(value)
    if isinstance(value, bool):
        return BOOL, struct.pack("<?", value)
    if isinstance(value, int):
        return U32, struct.pack("<I", value)
    if isinstance(value, float):
        return F32, struct.pack("<f", value)
    kind = I32 if isinstance(value[0], int) else element(value[0])[0]
    items = [struct.pack("<i", item) if kind == I32 else element(item)[1] for item in value]
    return ARRAY, struct.pack("<IQ", kind, len(value)) + b"".join(items)


def gguf_bytes(metadata: Mapping[str, Any], tensors: Tensors, *, version: int = 3, alignment: int = 32) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        kind, data = element(value)
        head += string(key) + struct.pack("<I", kind) + data
    offset, body = 0, b""
    for name, (kind, shape, data) in tensors.items():
        head += string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, offset)
        padded = data + bytes(-len(data) % alignment)
        body, offset = body + padded, offset + len(padded)
    return head + bytes(-len(head) % alignment) + body


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Tensors) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path


# ---- a toy model ------------------------------------------------------------------------------------------------


def toy_metadata(config: ModelConfig, architecture: str = "llama") -> Metadata:
    """What a converter writes of a model whose vocabulary is `Tokenizer.train([TRAINING_TEXT], VOCAB_SIZE)`, padded."""
    document = json.loads(Tokenizer.train([TRAINING_TEXT], VOCAB_SIZE).to_json())
    tokens = sorted(document["model"]["vocab"], key=document["model"]["vocab"].get)
    padding = [f"[PAD{i}]" for i in range(VOCAB_SIZE, config.vocab_size)]
    return {
        "general.architecture": architecture,
        "general.type": "model",
        "general.quantization_version": 2,
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.key_length": config.head_dim,
        f"{architecture}.attention.value_length": config.head_dim,
        f"{architecture}.rope.dimension_count": config.head_dim,
        f"{architecture}.rope.freq_base": config.rope_theta,
        f"{architecture}.attention.layer_norm_rms_epsilon": config.norm_eps,
        f"{architecture}.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens + padding,
        "tokenizer.ggml.token_type": [1] * (VOCAB_SIZE - 1) + [3] + [5] * len(padding),
        "tokenizer.ggml.merges": document["model"]["merges"],
        "tokenizer.ggml.bos_token_id": VOCAB_SIZE - 1,
        "tokenizer.ggml.eos_token_id": VOCAB_SIZE - 1,
        "tokenizer.chat_template": "{{ messages }}",
    }


_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def toy_tensors(
    config: ModelConfig, weights: Mapping[str, npt.NDArray[np.float32]], architecture: str = "llama"
) -> Tensors:
    """A model's weights as F32 tensors; a llama's queries and keys have their rows in neighbouring pairs."""
    tensors: Tensors = {}
    for name, weight in weights.items():
        if name.startswith("model.layers."):
            _, _, layer, *rest, kind = name.split(".")
            theirs = f"blk.{layer}.{_LAYER_NAMES['.'.join(rest)]}.{kind}"
        else:
            theirs = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}.get(
                name, "output.weight"
            )
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            weight = neighbours(weight, config.head_dim)
        tensors[theirs] = (0, weight.shape, weight.astype("<f4").tobytes())
    return tensors


def neighbours(rows: npt.NDArray[np.float32], head_dim: int) -> npt.NDArray[np.float32]:
    """Row i of each head's first half moved to 2i, row i of its second half to 2i + 1."""
    moved = np.empty_like(rows)
    half = head_dim // 2
    for head in range(0, len(rows), head_dim):
        for i in range(half):
            moved[head + 2 * i] = rows[head + i]
            moved[head + 2 * i + 1] = rows[head + half + i]
    return moved
