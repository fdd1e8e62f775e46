"""TrainConfig: what it refuses, its JSON form, time budgets and what may change on resume."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from cells import toy

from crucible.config import PRESETS, ConfigError
from crucible.train.config import MAY_CHANGE_ON_RESUME, RECIPES, TrainConfig, TrainError, recipe


def make(**changes) -> TrainConfig:
    values = {"model": toy(), "data": Path("data"), "run": Path("run"), "context_length": 16, "steps": 200}
    return TrainConfig(**{**values, **changes})


def test_survives_json_with_every_field_changed():
    config = make(
        steps=None,
        max_minutes=2.5,
        context_length=32,
        batch_size=3,
        grad_accumulation=2,
        lr=1e-3,
        warmup_steps=7,
        schedule="trapezoid",
        weight_decay=0.01,
        betas=(0.8, 0.99),
        grad_clip=0.5,
        eval_every=10,
        eval_tokens=100,
        save_every=20,
        seed=5,
        device="cpu",
        dtype="bf16",
        compile=True,
    )
    unchanged = {"model", "data", "run"}
    for field in dataclasses.fields(config):
        if field.name not in unchanged and field.default is not dataclasses.MISSING and field.name != "steps":
            assert getattr(config, field.name) != field.default, f"the test leaves {field.name} at its default"
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("context_length", 0),
        ("context_length", 97),
        ("context_length", 16.0),
        ("steps", 0),
        ("steps", True),
        ("batch_size", 0),
        ("batch_size", "8"),
        ("grad_accumulation", -1),
        ("lr", 0),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("warmup_steps", -1),
        ("warmup_steps", 201),
        ("schedule", "linear"),
        ("weight_decay", -0.1),
        ("betas", (0.9, 1.0)),
        ("betas", (0.9,)),
        ("betas", 0.9),
        ("grad_clip", 0.0),
        ("eval_every", 0),
        ("eval_tokens", 0),
        ("save_every", 251),
        ("seed", -1),
        ("device", "tpu"),
        ("dtype", "f16"),
        ("compile", 1),
        ("compile", "yes"),
        ("model", {}),
        ("data", "data"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(field, value):
    with pytest.raises(ConfigError, match=f"^{field} "):
        make(**{field: value})


@pytest.mark.parametrize("minutes", [0, -1, float("inf"), "2"])
def test_a_bad_time_budget_is_refused(minutes):
    with pytest.raises(ConfigError, match=r"^max_minutes "):
        make(steps=None, max_minutes=minutes)


@pytest.mark.parametrize("changes", [{"steps": None}, {"max_minutes": 1.0}])
def test_exactly_one_length_is_given(changes):
    with pytest.raises(ConfigError, match="exactly one of steps and max_minutes"):
        make(**changes)


def test_unknown_and_missing_keys_are_named():
    values = make().to_dict()
    with pytest.raises(ConfigError, match="unknown key dropout"):
        TrainConfig.from_dict({**values, "dropout": 0.1})
    with pytest.raises(ConfigError, match="missing keys: data, run"):
        TrainConfig.from_dict({key: value for key, value in values.items() if key not in ("data", "run")})
    with pytest.raises(ConfigError, match="unknown key heads"):
        TrainConfig.from_dict({**values, "model": {**values["model"], "heads": 4}})


def test_a_time_budget_becomes_a_run_of_fixed_length():
    timed = make(steps=None, max_minutes=2.0)
    assert timed.with_steps(1000) == make(steps=1000)
    assert timed.with_steps(80) == make(steps=80, warmup_steps=20)
    assert timed.with_steps(1) == make(steps=1, warmup_steps=1)


def test_resume_allows_what_leaves_the_bits_alone():
    moved = make(data=Path("elsewhere"), run=Path("moved"), eval_every=50, save_every=100)
    moved.check_resume(make(), 100)


REFUSED = {
    "model": toy(rope_theta=500.0),
    "context_length": 8,
    "batch_size": 2,
    "grad_accumulation": 3,
    "lr": 1e-5,
    "warmup_steps": 1,
    "schedule": "trapezoid",
    "weight_decay": 0.0,
    "betas": (0.9, 0.9),
    "grad_clip": 2.0,
    "eval_tokens": 5,
    "seed": 9,
    "device": "cpu",
    "dtype": "bf16",
    "compile": True,
    "steps": 300,
}


@pytest.mark.parametrize("field", REFUSED)
def test_resume_refuses_every_other_change_by_name(field):
    with pytest.raises(TrainError, match="model.rope_theta was" if field == "model" else f"{field}( was|=)"):
        make(**{field: REFUSED[field]}).check_resume(make(), 150)


def test_no_field_is_forgotten_by_the_resume_rule():
    decided = {*REFUSED, *MAY_CHANGE_ON_RESUME, "max_minutes"}
    assert {field.name for field in dataclasses.fields(TrainConfig)} == decided


def test_a_trapezoid_may_be_extended_before_it_goes_down():
    stored = make(schedule="trapezoid")
    longer = make(schedule="trapezoid", steps=400)
    longer.check_resume(stored, 150)
    with pytest.raises(TrainError, match="steps=400"):
        longer.check_resume(stored, 190)


def test_every_preset_has_a_recipe_that_makes_a_config():
    assert RECIPES.keys() == PRESETS.keys()
    for name, model in PRESETS.items():
        config = TrainConfig(model=model, data=Path("d"), run=Path("r"), steps=10_000, **recipe(name))
        assert config.context_length == model.max_position_embeddings
    with pytest.raises(ConfigError, match="no preset 'huge'"):
        recipe("huge")
