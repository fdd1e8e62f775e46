"""What a training run is: every choice that decides its result, and nothing about how it is watched."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from crucible.config import ConfigError, ModelConfig
from crucible.errors import CrucibleError
from crucible.train.schedule import SCHEDULES, Schedule, same_past

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "f32", "bf16"]
Compile = Literal["auto"] | bool

MAY_CHANGE_ON_RESUME: Final = ("data", "run", "eval_every", "save_every")
"""Fields that leave every parameter's bits alone: where files lie (their contents are compared), and how often the run
looks at itself. `steps` may change under the rule of `schedule.same_past`."""


class TrainError(CrucibleError):
    """A run that cannot start or go on: the message says why and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """One training run. Frozen, checked once here, refuses what it does not know.

    One update sees `batch_size * grad_accumulation` windows of `context_length` tokens.

    Raises:
        ConfigError: a field is out of range or contradicts another; the message names it.
    """

    model: ModelConfig
    data: Path
    """Folder of token shards with a train and a val split."""
    run: Path
    """Folder that the run makes: config.json, tokenizer.json, log.csv, checkpoints/."""
    context_length: int
    steps: int | None = None
    """Updates. Exactly one of `steps` and `max_minutes` is given."""
    max_minutes: float | None = None
    """Wall time to aim at. The run times its own step, evaluation and save on this machine before it begins, and makes
    as many steps as that says. A trapezoid settles its length again where its rate begins to fall, when four fifths of
    the time are gone. Either way the outcome is that of a run given the final number of steps."""
    batch_size: int = 32
    grad_accumulation: int = 1
    lr: float = 6e-4
    """Peak learning rate."""
    warmup_steps: int = 100
    schedule: Schedule = "cosine"
    weight_decay: float = 0.1
    """Of linear layers only, see `optim.decayed`."""
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = 1.0
    """Largest joint L2 norm of all gradients."""
    eval_every: int = 250
    """Steps between evaluations on the val split; the last step is always evaluated."""
    eval_tokens: int = 2**18
    """Tokens of each evaluation, always the same windows; all of the val split where it holds fewer."""
    save_every: int = 250
    """Steps between checkpoints, a multiple of `eval_every`, so that each checkpoint has a validation loss."""
    seed: int = 0
    """Of the initial weights and of the order of the windows."""
    device: Device = "auto"
    dtype: Dtype = "auto"
    """Of matrix products: f32, or bf16 by autocast. Parameters, gradients and optimizer state are f32 in both. "auto"
    is bf16 on a device that computes in it natively (a CPU with AVX512-BF16 too), else f32."""
    compile: Compile = False
    """Whether torch.compile makes the step faster at the price of a start that takes half a minute. "auto" is yes on a
    GPU where there is a C compiler, which it needs, and no on a CPU, where it gains nothing."""

    def __post_init__(self) -> None:
        self._check_types()
        for field in ("context_length", "batch_size", "grad_accumulation", "eval_every", "eval_tokens", "save_every"):
            _require(getattr(self, field) >= 1, field, "a positive integer", getattr(self, field))
        for field in ("lr", "grad_clip"):
            _require(getattr(self, field) > 0, field, "a positive number", getattr(self, field))
        _require(self.weight_decay >= 0, "weight_decay", "zero or a positive number", self.weight_decay)
        _require(all(0 <= beta < 1 for beta in self.betas), "betas", "two numbers in [0, 1)", self.betas)
        _require(0 <= self.seed < 2**63, "seed", "an integer in [0, 2^63)", self.seed)
        _require(self.warmup_steps >= 0, "warmup_steps", "zero or a positive integer", self.warmup_steps)
        for field, allowed in (("schedule", SCHEDULES), ("device", get_args(Device)), ("dtype", get_args(Dtype))):
            _require(getattr(self, field) in allowed, field, f"one of {', '.join(allowed)}", getattr(self, field))
        _require(
            self.context_length <= self.model.max_position_embeddings,
            "context_length",
            f"at most the model's max_position_embeddings={self.model.max_position_embeddings}",
            self.context_length,
        )
        _require(
            self.save_every % self.eval_every == 0,
            "save_every",
            f"a multiple of eval_every={self.eval_every}",
            self.save_every,
        )
        self._check_length()

    def _check_types(self) -> None:
        if not isinstance(self.model, ModelConfig):
            raise ConfigError(f"model must be a ModelConfig, not {self.model!r}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                _require(_is_integer(value), field.name, "an integer", value)
            if field.type == "float":
                _require(_is_number(value), field.name, "a finite number", value)
            if field.type == "Compile":
                _require(isinstance(value, bool) or value == "auto", field.name, "true, false or auto", value)
            if field.type == "Path":
                _require(isinstance(value, Path), field.name, "a pathlib.Path", value)
        pair = isinstance(self.betas, tuple) and len(self.betas) == 2 and all(map(_is_number, self.betas))
        _require(pair, "betas", "two numbers in [0, 1)", self.betas)

    def _check_length(self) -> None:
        if (self.steps is None) == (self.max_minutes is None):
            raise ConfigError("give exactly one of steps and max_minutes")
        if self.steps is not None:
            _require(_is_integer(self.steps) and self.steps >= 1, "steps", "a positive integer", self.steps)
            _require(self.warmup_steps <= self.steps, "warmup_steps", f"at most steps={self.steps}", self.warmup_steps)
        if self.max_minutes is not None:
            holds = _is_number(self.max_minutes) and self.max_minutes > 0
            _require(holds, "max_minutes", "a positive number", self.max_minutes)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The inverse of `to_dict`; fields that have a default may be absent.

        Raises:
            ConfigError: naming every missing or unknown key.
        """
        fields = {f.name: f for f in dataclasses.fields(cls)}
        unknown = [key for key in values if key not in fields]
        if unknown:
            raise ConfigError(
                f"unknown key{'s' * (len(unknown) > 1)} {', '.join(unknown)}; allowed: {', '.join(fields)}"
            )
        missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in values]
        if missing:
            raise ConfigError(f"missing key{'s' * (len(missing) > 1)}: {', '.join(missing)}")
        values = dict(values)
        values["model"] = ModelConfig.from_dict(values["model"])
        for name in ("data", "run"):
            values[name] = Path(values[name])
        if isinstance(values.get("betas"), list):
            values["betas"] = tuple(values["betas"])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, ready for JSON."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return values | {
            "model": self.model.to_dict(),
            "data": str(self.data),
            "run": str(self.run),
            "betas": list(self.betas),
        }

    @property
    def windows_per_step(self) -> int:
        """Windows of `context_length` tokens that one update sees."""
        return self.batch_size * self.grad_accumulation

    def with_steps(self, steps: int) -> TrainConfig:
        """The run of so many steps that a time budget came to.

        A warm-up longer than a quarter of it, which nobody can know before a machine is timed, is cut to that quarter.
        """
        return dataclasses.replace(
            self, steps=steps, max_minutes=None, warmup_steps=min(self.warmup_steps, max(1, steps // 4))
        )

    def check_resume(self, stored: TrainConfig, step: int) -> None:
        """Whether a run stored under `stored` and interrupted after `step` may go on under this config.

        Both have `steps`, or both are as the time budget was asked for.

        Raises:
            TrainError: naming every field that differs and must not.
        """
        ours, theirs = self.to_dict(), stored.to_dict()
        changed = [
            f"{name} was {theirs[name]!r}, is {ours[name]!r}"
            for name in ours
            if name not in (*MAY_CHANGE_ON_RESUME, "steps", "model") and ours[name] != theirs[name]
        ] + [
            f"model.{name} was {theirs['model'][name]!r}, is {value!r}"
            for name, value in ours["model"].items()
            if value != theirs["model"][name]
        ]
        if changed:
            raise TrainError(
                f"{self.run} cannot go on with another config: {'; '.join(changed)}. "
                "Give the same values, or start another run folder"
            )
        if self.steps is None or stored.steps is None:
            return
        if not same_past(
            step,
            schedule=self.schedule,
            warmup_steps=self.warmup_steps,
            old_steps=stored.steps,
            new_steps=self.steps,
        ):
            raise TrainError(
                f"{self.run} cannot go on with steps={self.steps}: it was started with steps={stored.steps}, and the "
                f"learning rates of the {step} steps already made would have been others. The number of steps can "
                "only change under schedule=trapezoid and before its rate goes down"
            )


RECIPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "nano": {
        "context_length": 256,
        "batch_size": 4,
        "lr": 2e-3,
        "warmup_steps": 50,
        "schedule": "trapezoid",
        "eval_every": 50,
        "eval_tokens": 2**14,
        "save_every": 50,
    },
    "30m": {
        "context_length": 1024,
        "batch_size": 32,
        "grad_accumulation": 2,
        "lr": 1e-3,
        "warmup_steps": 200,
        "compile": "auto",
    },
    "120m": {
        "context_length": 1024,
        "batch_size": 16,
        "grad_accumulation": 4,
        "lr": 6e-4,
        "warmup_steps": 500,
        "compile": "auto",
    },
    "350m": {
        "context_length": 1024,
        "batch_size": 8,
        "grad_accumulation": 16,
        "lr": 3e-4,
        "warmup_steps": 1000,
        "compile": "auto",
    },
}
"""Training fields by model preset.

nano: measured, on its demo text at 0.9 M tokens (some two minutes on two cores): validation loss 3.93 at batch size 4
and lr 2e-3, against 4.03 (1e-3), 4.01 (4e-3) and 4.91 (8e-3); at 2e-3 3.95, 3.98 and 4.10 with batch sizes 2, 8 and 16.
Those with a cosine; with a trapezoid, which keeps a time budget better, 3.91.
The others are sized for a card of 24 GB; their rates follow Brown et al. 2020 (table 2.1), 30m by extrapolation.
"""


def recipe(preset: str) -> dict[str, Any]:
    """The fields of a `TrainConfig` that suit a model preset, to be overridden freely.

    Raises:
        ConfigError: there is no preset of that name.
    """
    if preset not in RECIPES:
        raise ConfigError(f"no preset {preset!r}; there are {', '.join(RECIPES)}")
    return dict(RECIPES[preset])


def _require(holds: bool, field: str, allowed: str, value: Any) -> None:
    if not holds:
        raise ConfigError(f"{field} must be {allowed}, not {value!r}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
