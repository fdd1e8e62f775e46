"""What a request may ask of the engine: checked once, here, before anything else sees it.

Every field is honoured by the engine; what it means to the bit is docs/sampling.md. Ids, numbers and limits only:
stop strings, chat messages and the fields of other people's APIs belong to the layers above.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Final, Literal

from crucible.config import MAX_VOCAB_SIZE
from crucible.errors import CrucibleError

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""Why a request ended: an end-of-text or stop id; max_tokens or the context; its client; no usable logit."""

DEFAULT_SEED: Final = 1234
MAX_STOP_IDS: Final = 16
"""Ids that can end one request, end-of-text included: what a slot of a backend holds."""
MAX_CHOICES: Final = 128
MAX_LOGPROBS: Final = 20
_MAX_COUNT: Final = 2**31 - 1
_SHOWN_LENGTH: Final = 60


class RequestError(CrucibleError):
    """A request that cannot be honoured: the message names the field and says what is allowed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one request are drawn and when it ends.

    Without arguments it decodes greedily. Fields that shape a distribution need a positive temperature, because
    greedy decoding would ignore them.

    Attributes:
        temperature: 0 takes the best token and uses no randomness.
        top_k: candidates kept, best first; 0 keeps all.
        top_p: share of the probability, in [0, 1], that the kept candidates reach; 1 keeps all.
        min_p: least probability of a candidate relative to the best one's, in [0, 1]; 0 keeps all.
        seed: any integer, taken mod 2^64; choice i of n uses seed + i.
        n: independent continuations of the prompt.
        max_tokens: tokens generated at most.
        min_tokens: while fewer are generated, no id that would end the request is drawn.
        stop_token_ids: ids that end the request, besides the model's end-of-text ids.
        ignore_eos: the model's end-of-text ids do not end the request.
        repetition_penalty: tokens of prompt and output: positive logits are divided by it, others multiplied.
        frequency_penalty: subtracted from a token's logit once per occurrence in the output.
        presence_penalty: subtracted from the logit of each token that occurs in the output.
        logit_bias: added to the logits of single token ids, before the penalties.
        logprobs: None for none; otherwise how many of the likeliest tokens to report beside the drawn one.
        prompt_logprobs: report the log-probability of each token of the prompt but the first.

    Raises:
        RequestError: a value is of another type, not finite or out of range; or two fields contradict each other.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = DEFAULT_SEED
    n: int = 1
    max_tokens: int = 128
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0, math.inf)
        _check_integer("top_k", self.top_k, 0, _MAX_COUNT)
        _check_number("top_p", self.top_p, 0, 1)
        _check_number("min_p", self.min_p, 0, 1)
        _check_integer("seed", self.seed)
        _check_integer("n", self.n, 1, MAX_CHOICES)
        _check_integer("max_tokens", self.max_tokens, 1, _MAX_COUNT)
        _check_integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("ignore_eos", "prompt_logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {_shown(getattr(self, name))}")
        # The sampler rounds these four to float32, so their ranges also keep that free of zeros and infinities.
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        self._check_logit_bias()
        self._check_stop_token_ids()
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        self._check_temperature_goes_with_filters()
        object.__setattr__(self, "seed", self.seed % 2**64)
        # Copies, so that a caller's later change to its list or dict cannot pass unchecked.
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, not be {_shown(self.logit_bias)}")
        for token_id, bias in self.logit_bias.items():
            _check_integer("a token id of logit_bias", token_id, 0, MAX_VOCAB_SIZE - 1)
            _check_number(f"logit_bias of token {token_id}", bias, -100, 100)

    def _check_stop_token_ids(self) -> None:
        if not isinstance(self.stop_token_ids, (list, tuple)):
            raise RequestError(f"stop_token_ids must be a list of token ids, not {_shown(self.stop_token_ids)}")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise RequestError(f"stop_token_ids takes at most {MAX_STOP_IDS} ids, not {len(self.stop_token_ids)}")
        for token_id in self.stop_token_ids:
            _check_integer("an id of stop_token_ids", token_id, 0, MAX_VOCAB_SIZE - 1)

    def _check_temperature_goes_with_filters(self) -> None:
        if self.temperature > 0:
            return
        for name, no_op in (("top_k", 0), ("top_p", 1), ("min_p", 0)):
            value = getattr(self, name)
            if value != no_op:
                raise RequestError(
                    f"{name}={value!r} needs a positive temperature: at temperature 0 the best token is taken "
                    f"(leave {name} out or at {no_op})"
                )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises RequestError naming the first id of stop_token_ids or logit_bias that the model does not have."""
        for name, token_ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token_id in token_ids:
                if token_id >= vocab_size:
                    raise RequestError(f"{name} has token id {token_id}; the model's are 0 to {vocab_size - 1}")

    def end_ids(self, eos_ids: Collection[int]) -> tuple[int, ...]:
        """The ids that end this request on a model with these end-of-text ids, ascending.

        Raises:
            RequestError: they are more than MAX_STOP_IDS together.
        """
        end_ids = set(self.stop_token_ids) | (set() if self.ignore_eos else set(eos_ids))
        if len(end_ids) > MAX_STOP_IDS:
            raise RequestError(
                f"stop_token_ids and the model's {len(eos_ids)} end-of-text ids are {len(end_ids)} together, "
                f"{MAX_STOP_IDS} are allowed"
            )
        return tuple(sorted(end_ids))

    def choices(self) -> tuple[SamplingParams, ...]:
        """The n requests that this one is to a scheduler: each with n = 1 and a seed of its own."""
        return tuple(dataclasses.replace(self, n=1, seed=self.seed + choice) for choice in range(self.n))

    @property
    def counts_tokens(self) -> bool:
        """Whether drawing needs to know which tokens occurred, and how often."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


def checked_prompt(prompt_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The ids of a prompt as plain integers, after the check that a model of this vocabulary has them.

    Raises:
        RequestError: there are none, or one is no integer from 0 to vocab_size - 1.
    """
    if len(prompt_ids) == 0:
        raise RequestError("the prompt is empty; at least one token is needed")
    for token_id in prompt_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, Integral):
            raise RequestError(f"a prompt is integer token ids; this one has {_shown(token_id)}")
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"the prompt has token id {_shown(token_id)}; the model's are 0 to {vocab_size - 1}")
    return tuple(map(int, prompt_ids))


def checked_limit(num_prompt: int, max_tokens: int, context: int) -> int:
    """Tokens of prompt and output together. Raises RequestError, naming all three numbers, if they pass the context."""
    if num_prompt + max_tokens > context:
        raise RequestError(
            f"the prompt's {num_prompt} tokens and max_tokens={max_tokens} do not fit the context of {context}"
        )
    return num_prompt + max_tokens


def _check_integer(name: str, value: Any, low: int | None = None, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, not {_shown(value)}")
    if (low is not None and value < low) or (high is not None and value > high):
        raise RequestError(f"{name} must be from {low} to {high}, not {_shown(value)}")


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} must be a number, not {_shown(value)}")
    # Finiteness first: every comparison with a NaN is false, so a range check alone can let it pass.
    if not _is_finite(value) or not low <= value <= high:
        allowed = f"at least {low}" if high == math.inf else f"from {low} to {high}"
        raise RequestError(f"{name} must be a finite number {allowed}, not {_shown(value)}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False


def _shown(value: Any) -> str:
    """A value as an error message shows it, however long it is."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return "an integer of thousands of digits"
    return text if len(text) <= _SHOWN_LENGTH else text[: _SHOWN_LENGTH - 3] + "..."
