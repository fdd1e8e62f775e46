"""Models of other makers: the engine's logits against the classes of `transformers` that define them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tokenizers
import torch
from cells import LINEAR, LLAMA3, toy
from tokenizers import processors
from toy_artifact import write_toy_artifact
from toy_tokenizers import TRAINING_TEXT
from toy_weights import toy_weights
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from crucible.config import UNTRAINED_FIELDS, ConfigError, ModelConfig, RopeScaling
from crucible.engine.reference import ReferenceBackend
from crucible.engine.rope import frequencies
from crucible.engine.runner import logits
from crucible.gguf.tokenizer import PRE_TOKENIZERS
from crucible.model.transformer import Transformer
from crucible.models import resolve
from crucible.tokenizer import Tokenizer

ROUNDING = 2.0**-24
"""Of f32, relative."""

BOUND = 512 * ROUNDING
"""3.1e-5 of the root mean square of a row of logits, as between this engine and the trainable model in f32: the other
side rounds every operation, and here the angles of RoPE as well. Observed: 9.4e-6 at most."""

CAUGHT = 1000 * BOUND
"""What leaving out any one of the fields exceeds."""

MODELS: dict[str, tuple[type[PreTrainedModel], ModelConfig]] = {
    "llama": (LlamaForCausalLM, toy()),
    "llama with biases": (LlamaForCausalLM, toy(qkv_bias=True, o_bias=True)),
    "llama, linear": (LlamaForCausalLM, toy(rope_scaling=LINEAR, rope_theta=500.0)),
    "llama 3": (LlamaForCausalLM, toy(rope_scaling=LLAMA3, head_dim=16, rope_theta=500.0, tie_word_embeddings=False)),
    "qwen2": (Qwen2ForCausalLM, toy(qkv_bias=True)),
    "qwen3": (Qwen3ForCausalLM, toy(qk_norm=True, tie_word_embeddings=False)),
    "qwen3 with biases": (Qwen3ForCausalLM, toy(qk_norm=True, qkv_bias=True, o_bias=True)),
}
CONFIGS = {LlamaForCausalLM: LlamaConfig, Qwen2ForCausalLM: Qwen2Config, Qwen3ForCausalLM: Qwen3Config}


def theirs(kind: type[PreTrainedModel], config: ModelConfig) -> PreTrainedModel:
    """Their model of a config of ours, made by their names and not through any code of ours."""
    torch.set_num_threads(1)
    sizes = (
        "vocab_size",
        "max_position_embeddings",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "tie_word_embeddings",
    )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if (scaling := config.rope_scaling) is not None:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
            }
    return kind(
        CONFIGS[kind](
            **{name: getattr(config, name) for name in sizes},
            rms_norm_eps=config.norm_eps,
            rope_parameters=rope,
            **({} if kind is Qwen2ForCausalLM else {"attention_bias": config.o_bias}),
            attn_implementation="eager",
        )
    ).eval()


def load(model: PreTrainedModel, weights: dict[str, npt.NDArray[np.float32]], *, tied: bool) -> None:
    missing, unexpected = model.load_state_dict({n: torch.from_numpy(w) for n, w in weights.items()}, strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if tied else [])
    model.tie_weights()


@torch.no_grad()
def their_logits(model: PreTrainedModel, ids: list[int]) -> npt.NDArray[np.float64]:
    return model(torch.tensor(ids)[None]).logits[0].double().numpy()


def draw_ids(config: ModelConfig, count: int) -> list[int]:
    return np.random.default_rng(7).integers(0, config.vocab_size, count).tolist()


def error(found: npt.NDArray[np.floating], expected: npt.NDArray[np.float64]) -> float:
    rms = np.sqrt(np.mean(expected**2, axis=-1, keepdims=True))
    return float(np.max(np.abs(found - expected) / rms))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str) -> None:
    kind, config = MODELS[name]
    config = config.vary(norm_eps=0.03)  # one that shows, of the norms of heads too
    weights = toy_weights(config)
    model = theirs(kind, config)
    load(model, weights, tied=config.tie_word_embeddings)
    backend = ReferenceBackend(config, weights)
    for length in (1, 2, 17, 64, 96):
        ids = draw_ids(config, length)
        assert error(logits(backend, ids), their_logits(model, ids)) < BOUND
    # Each field shows: without it the comparison would fail.
    for field in UNTRAINED_FIELDS:
        if getattr(config, field):
            plain = config.vary(**{field: None if field == "rope_scaling" else False})
            kept = {n: weights[n] for n in plain.tensor_shapes()}
            assert error(logits(ReferenceBackend(plain, kept), ids), their_logits(model, ids)) > CAUGHT


# ---- folders, theirs and ours ------------------------------------------------------------------------------------


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    """A folder as `transformers` writes it, with a tokenizer."""
    model.save_pretrained(folder, **options)
    Tokenizer.train([TRAINING_TEXT], 300).save(folder)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_that_transformers_wrote_is_read(name: str, tmp_path: Path) -> None:
    kind, config = MODELS[name]
    config = config.vary(vocab_size=320, norm_eps=0.03)
    weights = toy_weights(config)
    model = theirs(kind, config)
    load(model, weights, tied=config.tie_word_embeddings)
    found = resolve(save(model, tmp_path / "model"))
    assert found.config == config
    assert list(found.weights) == list(weights)
    for tensor, weight in weights.items():
        np.testing.assert_array_equal(found.weights[tensor], weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_shards_of_any_dtype_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    config = toy(vocab_size=320, tie_word_embeddings=False)
    weights = {name: torch.from_numpy(weight).to(dtype) for name, weight in toy_weights(config).items()}
    model = theirs(LlamaForCausalLM, config).to(dtype)
    model.load_state_dict(weights)
    folder = save(model, tmp_path / "model", max_shard_size="20KB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    found = resolve(folder)
    for name, weight in weights.items():
        np.testing.assert_array_equal(found.weights[name], weight.float().numpy())
    ids = draw_ids(config, 40)
    wide = theirs(LlamaForCausalLM, config)  # of its own: model.to() rounds the frequencies of RoPE as well
    wide.load_state_dict({name: weight.float() for name, weight in weights.items()})
    assert error(logits(ReferenceBackend(config, found.weights), ids), their_logits(wide, ids)) < BOUND


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_that_we_write_opens_in_transformers(name: str, tmp_path: Path) -> None:
    kind, config = MODELS[name]
    folder = write_toy_artifact(tmp_path / "model", **_changes(config))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert type(model) is kind
    found = resolve(folder)
    assert found.config == config.vary(vocab_size=320)
    ids = draw_ids(config, 96)
    assert error(logits(ReferenceBackend(found.config, found.weights), ids), their_logits(model, ids)) < BOUND


def _changes(config: ModelConfig) -> dict[str, Any]:
    plain = toy().to_dict()
    return {name: getattr(config, name) for name, value in config.to_dict().items() if value != plain[name]}


def test_ids_that_stand_before_a_text_are_those_of_transformers(tmp_path: Path) -> None:
    """A tokenizer.json that puts a beginning-of-text token first, read by both."""
    config = toy(vocab_size=400)
    folder = write_toy_artifact(tmp_path / "model", vocab_size=400, control=["<|begin|>"])
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = library.token_to_id("<|begin|>")
    library.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", begin)]),
        ]
    )
    library.save(str(folder / "tokenizer.json"))
    found = resolve(folder)
    assert found.config == config
    expected = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))("the cat sat").input_ids
    assert [*found.prefix_ids, *found.tokenizer.encode("the cat sat")] == expected
    assert found.prefix_ids == (begin,)


def test_the_rules_that_cut_words_are_those_of_transformers() -> None:
    rules = {rule.names[0]: rule for rule in PRE_TOKENIZERS}
    cut = {
        name: rule.pre_tokenizer["pretokenizers"][0]["pattern"]["Regex"]
        for name, rule in rules.items()
        if name in ("llama-bpe", "qwen2")
    }
    assert cut["qwen2"] == PRETOKENIZE_REGEX
    assert cut["llama-bpe"] == inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default


# ---- RoPE, and what cannot be trained ----------------------------------------------------------------------------


def test_the_frequencies_of_llama_3_2_are_those_of_transformers() -> None:
    """Which computes them in f32: 32 pairs of which some are kept, some divided and some in between."""
    scaling = RopeScaling(
        kind="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    config = toy(head_dim=64, rope_theta=500_000.0, rope_scaling=scaling)
    expected = theirs(LlamaForCausalLM, config).model.rotary_emb.inv_freq.numpy()
    found = frequencies(config)
    np.testing.assert_allclose(found, expected, rtol=8 * ROUNDING)
    unscaled = frequencies(config.vary(rope_scaling=None))
    kept, divided = found == unscaled, found == unscaled / 32
    assert kept.any()
    assert divided.any()
    assert not (kept | divided).all()


@pytest.mark.parametrize("field", UNTRAINED_FIELDS)
def test_what_cannot_be_trained_is_refused_by_name(field: str) -> None:
    config = toy(**{field: LINEAR if field == "rope_scaling" else True})
    with pytest.raises(ConfigError, match=f"^models with {field} run in the engine but cannot be trained$"):
        Transformer(config)
