"""What every HTTP surface is written in: the native request, what becomes of it, and errors without a vendor's shape.

A surface (native, OpenAI's, Anthropic's) turns its request into `Call`s and what these yield into its own reply; it
does no I/O. `serve/exchange.py` does, in the same way for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import msgspec

from crucible.errors import CrucibleError

# ---- errors -----------------------------------------------------------------------------------------------------

ErrorKind = Literal[
    "invalid",
    "unsupported",
    "too_long",
    "authentication",
    "host",
    "not_found",
    "method",
    "too_large",
    "media_type",
    "overloaded",
    "unavailable",
    "internal",
]

STATUS: Final[Mapping[ErrorKind, int]] = {
    "invalid": 400,
    "unsupported": 400,
    "too_long": 400,
    "authentication": 401,
    "host": 403,
    "not_found": 404,
    "method": 405,
    "too_large": 413,
    "media_type": 415,
    "overloaded": 429,
    "unavailable": 503,
    "internal": 500,
}
"""Of an error before the first byte of a reply. Anthropic's surface answers 529 where this says 429."""


class ApiError(CrucibleError):
    """A refusal or a failure, before any surface has put it into its envelope.

    Attributes:
        kind: of which `STATUS` is the HTTP status.
        message: one line for a person. It names the field and what is allowed, and repeats no text of the request.
        param: the field at fault as the caller wrote it, such as `messages[0].content`; None where it is no field.
        code: what a program may look at, such as `context_length_exceeded`; None where the kind says it all.
        retry_after: seconds after which the same request may succeed; None where it never will.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.kind: Final = kind
        self.message: Final = message
        self.param: Final = param
        self.code: Final = code
        self.retry_after: Final = retry_after

    @property
    def status(self) -> int:
        return STATUS[self.kind]


def no_usable_logit() -> ApiError:
    """Of a choice that ended by "error", for APIs that know no such finish reason."""
    return ApiError("internal", "the model gave no usable logit", code="no_usable_logit")


# ---- requests ---------------------------------------------------------------------------------------------------


class Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that the requests of all surfaces have under the same names: `completion.SamplingParams`' own."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None


class Generate(Sampling, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body of the native `POST /v1/generate` and `/v1/generate/stream`, and what others are turned into.

    Exactly one of `prompt` (text or token ids) and `messages` is given. Null stands for a field that is left out. The
    others are `completion.SamplingParams`' fields of the same names; without `max_tokens` it is what the context
    leaves, without `seed` the server's.
    """

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One prompt to complete, `request.n` times.

    Attributes:
        clamps_max_tokens: a `max_tokens` beyond what the context leaves is lowered to that, not refused.
        names: the caller's names of fields where they differ from the native ones, for error messages.
        at: what the caller calls this prompt where there are several, such as `prompt[1]`.
    """

    request: Generate
    clamps_max_tokens: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    at: str | None = None


# ---- what comes back --------------------------------------------------------------------------------------------


class TokenChance(msgspec.Struct, frozen=True):
    """A token and its log-probability (natural, of the raw logits at temperature 1); never below LOWEST_LOGPROB.

    `text` is the token alone, U+FFFD where its bytes are no text; `bytes` are its bytes.
    """

    token_id: int
    text: str
    bytes: bytes
    logprob: float


class TokenScore(msgspec.Struct, frozen=True):
    """The drawn token's chance, and those of the likeliest tokens, best first, as many as were asked for."""

    chosen: TokenChance
    top: list[TokenChance]


LOWEST_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON has not."""

FinishReason = Literal["stop", "length", "error"]


@dataclass(slots=True)
class Burst:
    """What has come of one choice since one looked last: at least one token, or the end, or both.

    Attributes:
        index: which choice: prompts in order, the choices of each in order.
        token_ids: drawn since.
        texts: of each of these tokens what became certain with it; often "" for one, as `completion.Piece.text`.
        scores: one for each token where log-probabilities were asked for, else None.
        prompt_scores: with the first burst, where they were asked for: of each token of the prompt; None for the first.
        end: with the last burst.
    """

    index: int
    token_ids: list[int]
    texts: list[str]
    scores: list[TokenScore] | None = None
    prompt_scores: list[TokenChance | None] | None = None
    end: End | None = None


@dataclass(frozen=True, slots=True)
class End:
    """How one choice ended.

    Attributes:
        finish_reason: "error" means that no logit was usable, which is the model's fault.
        stop: the stop string that ended it, or the id among `stop_token_ids`; None for the model's own end or a limit.
        prompt_tokens, completion_tokens: counted by the tokenizer; the token that ended it counts.
        seed: of this choice: sending it again with n = 1 gives the same text.
    """

    finish_reason: FinishReason
    stop: str | int | None
    prompt_tokens: int
    completion_tokens: int
    seed: int


@dataclass(slots=True)
class Choice:
    """A finished choice: all its bursts together."""

    index: int
    prompt_ids: tuple[int, ...]
    token_ids: list[int]
    text: str
    scores: list[TokenScore] | None
    prompt_scores: list[TokenChance | None] | None
    end: End


# ---- surfaces ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The model as surfaces may know it.

    Attributes:
        model_id: what it is called by clients; never a path.
        aliases: other names that it answers to.
        created: when it was made, Unix seconds.
        context: tokens of prompt and output together.
        vocab_size: ids are 0 to one less.
        fingerprint: of weights, format and backend: equal ones give equal bits.
        decode: the text of token ids.
    """

    model_id: str
    aliases: frozenset[str]
    created: int
    context: int
    vocab_size: int
    fingerprint: str
    decode: Callable[[Sequence[int]], str]

    def answers_to(self, name: str) -> bool:
        return name == self.model_id or name in self.aliases


class Reply(Protocol):
    """What one request is answered with, by one surface; stateful, without I/O."""

    streams: bool
    """Whether the caller asked for a stream of events."""

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """The body of a reply that is no stream, in JSON; choices in order of their index."""
        ...

    def begin(self, prompt_tokens: Sequence[int]) -> bytes:
        """Events before the first token, written as soon as the request is accepted; may be empty.

        Args:
            prompt_tokens: the number of tokens of each prompt.
        """
        ...

    def burst(self, burst: Burst) -> bytes:
        """Events of a burst."""
        ...

    def finish(self) -> bytes:
        """Events after all choices have ended."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """The event that ends a stream which cannot go on."""
        ...


class Surface(Protocol):
    """One endpoint that generates."""

    def read(self, body: bytes, served: Served) -> tuple[list[Call], Reply]:
        """From a request's body to what is to be generated and how to answer.

        Raises:
            ApiError: it is refused.
        """
        ...


Refusal = Callable[[ApiError, str], tuple[int, dict[str, str], bytes]]
"""How an API says no: from an error before the first byte of a reply, and the request's id, to the status, headers
beside content-type, and the JSON body."""
