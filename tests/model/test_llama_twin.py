"""The plain cell is Hugging Face's Llama: same weights by name, same logits, loss and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cells import toy
from toy_weights import toy_weights
from transformers import LlamaConfig, LlamaForCausalLM

from crucible.config import ModelConfig
from crucible.model.transformer import Transformer


def twin(model: Transformer) -> LlamaForCausalLM:
    """The Llama of the same config and weights, computing attention step by step."""
    config = model.config
    assert config.is_llama
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rope_theta=config.rope_theta,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tie_word_embeddings,
            attn_implementation="eager",
        )
    )
    weights = {n if n.startswith("lm_head") else f"model.{n}": tensor for n, tensor in model.state_dict().items()}
    assert list(weights) == list(config.tensor_shapes())
    missing, unexpected = llama.load_state_dict(weights, strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if config.tie_word_embeddings else [])
    llama.tie_weights()
    return llama


def lively(config: ModelConfig) -> Transformer:
    """A model of weights of order 1, so that attention is far from uniform and no norm is the identity."""
    model = Transformer(config)
    weights = toy_weights(config)
    model.load_state_dict({name.removeprefix("model."): torch.from_numpy(weights[name]) for name in weights})
    return model


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "mha"},
        {"attention": "gqa"},
        {"attention": "mqa"},
        {"attention": "gqa", "num_attention_heads": 12, "num_key_value_heads": 3, "rope_theta": 500_000.0},
        {"attention": "gqa", "norm_eps": 0.1, "num_hidden_layers": 4},
    ],
    ids=["mha", "gqa", "mqa", "gqa 12:3 theta 5e5", "eps 0.1, 4 layers"],
)
def test_logits_loss_and_gradients_are_llamas(changes: dict[str, Any], tied: bool) -> None:
    """Both in f32, rotary angles too. Observed: 1.5e-6 of the largest logit, 8e-6 of a tensor's largest gradient."""
    config = toy(**changes, tie_word_embeddings=tied)
    model = lively(config)
    llama = twin(model)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(config.vocab_size, (2, config.max_position_embeddings), generator=generator)
    ours, theirs = model(tokens), llama(tokens).logits
    assert (ours - theirs).abs().max() <= 5e-6 * theirs.abs().max()

    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    log_probs = llama(tokens[:, :-1]).logits.log_softmax(dim=-1)
    (-log_probs.gather(2, tokens[:, 1:, None]).sum()).backward()
    their_gradients = dict(llama.named_parameters())
    for name, parameter in model.named_parameters():
        expected = their_gradients[name if name.startswith("lm_head") else f"model.{name}"].grad
        assert (parameter.grad - expected).abs().max() <= 3e-5 * expected.abs().max(), name
