"""One update against written-out formulas: the loss it takes the gradient of, clipping, AdamW, what decays."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from cells import axis_cells, toy

from crucible.config import ConfigError
from crucible.train.config import TrainConfig
from crucible.train.optim import ADAM_EPS, decayed, load_state_tensors, state_tensors
from crucible.train.step import Learner, NonFiniteError, resolve_compile, resolve_device, resolve_precision


def make(**changes) -> TrainConfig:
    values = {
        "model": toy(),
        "data": Path("data"),
        "run": Path("run"),
        "context_length": 12,
        "steps": 200,
        "device": "cpu",
        "dtype": "f32",
        "grad_clip": 1e9,
    }
    return TrainConfig(**{**values, **changes})


def batch(rows: int, seed: int, *, padded: int = 0):
    draw = np.random.default_rng(seed)
    tokens_BT, targets_BT = draw.integers(0, 67, (2, rows, 12))
    if padded:
        tokens_BT[-1, -padded:], targets_BT[-1, -padded:] = 0, -1
    return tokens_BT, targets_BT


def parameters(learner: Learner) -> dict[str, np.ndarray]:
    return {name: p.detach().double().numpy().copy() for name, p in learner.model.named_parameters()}


def gradients(learner: Learner) -> dict[str, np.ndarray]:
    return {name: p.grad.double().numpy().copy() for name, p in learner.model.named_parameters()}


def test_accumulated_gradient_is_that_of_the_mean_over_all_valid_targets():
    pieces = [batch(3, 1, padded=7), batch(3, 2), batch(3, 3, padded=11)]
    whole = tuple(np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
    pieced, single = Learner(make()), Learner(make())
    a, b = pieced.update(pieces, 0.0), single.update([whole], 0.0)
    assert a.num_targets == b.num_targets == 9 * 12 - 18
    assert a.loss == pytest.approx(b.loss, rel=1e-6)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
    for name, gradient in gradients(single).items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(gradients(pieced)[name], gradient, atol=2e-6 * scale, err_msg=name)
    # The same by torch's own mean, which no line of the project computes.
    logits = single.model(torch.from_numpy(whole[0]))
    mean = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(whole[1]).flatten(), ignore_index=-1
    )
    assert a.loss == pytest.approx(mean.item(), rel=1e-6)


def test_gradients_are_scaled_to_the_clip_and_the_norm_is_the_one_before():
    free, clipped = Learner(make()), Learner(make(grad_clip=0.25))
    norm = free.update([batch(4, 1)], 0.0).grad_norm
    joint = np.sqrt(sum((g**2).sum() for g in gradients(free).values()))
    assert norm == pytest.approx(joint, rel=1e-6)
    assert norm > 0.25
    assert clipped.update([batch(4, 1)], 0.0).grad_norm == norm
    for name, gradient in gradients(clipped).items():
        np.testing.assert_allclose(gradient, gradients(free)[name] * 0.25 / norm, rtol=1e-4, atol=1e-12)


def test_three_updates_are_adamw_by_the_formula():
    """Loshchilov and Hutter 2019, algorithm 2, in float64, fed with the gradients that torch found."""
    learner = Learner(make(betas=(0.8, 0.9), weight_decay=0.3))
    expected, moments = parameters(learner), {}
    for step, rate in enumerate((0.01, 0.02, 0.005), start=1):
        learner.update([batch(4, step)], rate)
        for name, gradient in gradients(learner).items():
            first, second = moments.get(name, (0.0, 0.0))
            first, second = 0.8 * first + 0.2 * gradient, 0.9 * second + 0.1 * gradient**2
            moments[name] = first, second
            direction = (first / (1 - 0.8**step)) / (np.sqrt(second / (1 - 0.9**step)) + ADAM_EPS)
            decay = 0.3 if decayed(name, learner.model.get_parameter(name)) else 0.0
            expected[name] = expected[name] * (1 - rate * decay) - rate * direction
        for name, value in parameters(learner).items():
            np.testing.assert_allclose(value, expected[name], rtol=0, atol=3e-6, err_msg=f"{name} at step {step}")


@pytest.mark.parametrize("config", axis_cells())
def test_only_matrices_of_linear_layers_decay(config):
    model = Learner(make(model=config)).model
    linear = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert {name for name, p in model.named_parameters() if decayed(name, p)} == linear


def test_an_untied_output_projection_decays():
    model = Learner(make(model=toy(tie_word_embeddings=False))).model
    assert decayed("lm_head.weight", model.get_parameter("lm_head.weight"))


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_value_that_is_not_finite_stops_before_anything_changes(poison):
    learner = Learner(make())
    learner.update([batch(4, 1)], 0.01)
    if poison == "loss":
        with torch.no_grad():
            learner.model.layers[0].mlp.up_proj.weight[3, 5] = float("nan")
    else:
        learner.model.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
    before, state = parameters(learner), state_tensors(learner.model, learner.optimizer)
    state = {name: tensor.clone() for name, tensor in state.items()}
    with pytest.raises(NonFiniteError, match="loss nan" if poison == "loss" else "gradient norm (nan|inf)"):
        learner.update([batch(4, 2)], 0.01)
    for name, value in parameters(learner).items():
        np.testing.assert_array_equal(value, before[name])
    for name, tensor in state_tensors(learner.model, learner.optimizer).items():
        assert torch.equal(tensor, state[name])


def test_optimizer_state_survives_by_name_bit_for_bit():
    a, b = Learner(make()), Learner(make())
    for step in range(3):
        a.update([batch(4, step)], 0.01)
    b.model.load_state_dict(a.model.state_dict())
    load_state_tensors(b.model, b.optimizer, state_tensors(a.model, a.optimizer))
    for learner in (a, b):
        learner.update([batch(4, 9)], 0.01)
    for name, tensor in state_tensors(a.model, a.optimizer).items():
        assert torch.equal(tensor, state_tensors(b.model, b.optimizer)[name]), name
    for name, value in parameters(a).items():
        np.testing.assert_array_equal(value, parameters(b)[name])


def test_optimizer_state_of_another_model_is_refused():
    learner, other = Learner(make()), Learner(make(model=toy(intermediate_size=48)))
    other.update([batch(4, 1)], 0.01)
    state = state_tensors(other.model, other.optimizer)
    with pytest.raises(ValueError, match=r"mlp\.\w+\.weight \[.*fits no parameter"):
        load_state_tensors(learner.model, learner.optimizer, state)
    learner.update([batch(4, 1)], 0.01)
    state = state_tensors(learner.model, learner.optimizer)
    kept = {name: tensor for name, tensor in state.items() if not name.endswith(".norm.weight")}
    with pytest.raises(ValueError, match=r"no optimizer state for norm\.weight"):
        load_state_tensors(learner.model, learner.optimizer, kept)


def test_reset_is_a_new_start():
    learner = Learner(make(seed=5))
    fresh = parameters(learner)
    learner.update([batch(4, 1)], 0.01)
    learner.reset()
    assert state_tensors(learner.model, learner.optimizer) == {}
    for name, value in parameters(learner).items():
        np.testing.assert_array_equal(value, fresh[name])
    assert not np.array_equal(parameters(Learner(make(seed=6)))["embed_tokens.weight"], fresh["embed_tokens.weight"])


def test_evaluation_is_the_mean_over_valid_targets_and_changes_nothing():
    learner = Learner(make())
    learner.update([batch(4, 1)], 0.01)
    before = parameters(learner)
    batches = [batch(4, 2), batch(4, 3, padded=9)]
    found = learner.evaluate(batches)
    total, count = 0.0, 0
    for tokens_BT, targets_BT in batches:
        logits_BTV = learner.model(torch.from_numpy(tokens_BT)).detach().double().numpy()
        for logits_V, target in zip(logits_BTV.reshape(-1, 67), targets_BT.ravel(), strict=True):
            if target >= 0:
                total -= logits_V[target] - np.log(np.exp(logits_V).sum())
                count += 1
    assert count == 96 - 9
    assert found == pytest.approx(total / count, rel=1e-6)
    for name, value in parameters(learner).items():
        np.testing.assert_array_equal(value, before[name])


def test_bf16_on_the_processor_keeps_parameters_in_f32_and_comes_close():
    exact, rounded = Learner(make()), Learner(make(dtype="bf16"))
    a, b = exact.update([batch(4, 1)], 0.01), rounded.update([batch(4, 1)], 0.01)
    assert a.loss != b.loss
    assert a.loss == pytest.approx(b.loss, rel=2e-2)
    assert {p.dtype for p in rounded.model.parameters()} == {torch.float32}


def test_devices_and_precisions_resolve(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="device='cuda'"):
        resolve_device("cuda")
    for native in (False, True):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda native=native: {"avx512_bf16": native})
        assert resolve_precision("auto", torch.device("cpu")) == ("bf16" if native else "f32")
        assert resolve_precision("f32", torch.device("cpu")) == "f32"
        assert resolve_precision("bf16", torch.device("cpu")) == "bf16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old Card")
    assert resolve_precision("auto", torch.device("cuda", 0)) == "f32"
    with pytest.raises(ConfigError, match="Old Card has no native bf16"):
        resolve_precision("bf16", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert resolve_precision("auto", torch.device("cuda", 0)) == "bf16"


def test_auto_compiles_on_a_gpu_with_a_c_compiler(monkeypatch):
    card, processor = torch.device("cuda", 0), torch.device("cpu")
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/gcc" if name == "gcc" else None)
    assert resolve_compile("auto", card)
    assert not resolve_compile("auto", processor)
    assert resolve_compile(True, processor)
    assert not resolve_compile(False, card)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert not resolve_compile("auto", card)
