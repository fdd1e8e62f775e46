"""From requests in text to the engine's: what every surface's requests go through.

A request is prepared (tokenised, its parameters checked), then all its choices enter the engine at once or none does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from crucible.completion import SamplingParams
from crucible.errors import CrucibleError
from crucible.prompts import Prompts
from crucible.serve.metrics import Metrics
from crucible.serve.protocol import (
    LOWEST_LOGPROB,
    ApiError,
    Call,
    Generate,
    Served,
    TokenChance,
)
from crucible.serve.running import Running
from crucible.serve.supervisor import Supervisor

_LONG_TEXT: Final = 4096
"""From which on prompts are tokenised in a thread: so many characters take about a millisecond."""

_MESSAGE_LENGTH: Final = 32
_RETRY_AFTER: Final = 1
_VALUE: Final = re.compile(r", not ['\"\[{].*$", re.DOTALL)
_PARAM_FIELDS: Final = frozenset(field.name for field in dataclasses.fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt that fits, and how it is to be completed; `params.n` choices."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams


class Service:
    """The model that is served.

    Args:
        prompts: how text becomes its tokens.
        supervisor: of its engine, whose state may be any.
        model_id, aliases, created: as in `Served`.
        max_in_flight: choices that are computed or wait; more are refused at once.
        default_seed: of requests without one; None draws one for each.
    """

    def __init__(
        self,
        prompts: Prompts,
        supervisor: Supervisor,
        *,
        model_id: str,
        aliases: Sequence[str] = (),
        created: int = 0,
        max_in_flight: int = 320,
        default_seed: int | None = 1234,
    ) -> None:
        self.prompts = prompts
        self.supervisor = supervisor
        self.max_in_flight = max_in_flight
        self.metrics = Metrics()
        self.is_draining = False
        self._default_seed = default_seed
        self._model_id, self._aliases, self._created = model_id, frozenset(aliases), created
        self._chances: dict[int, tuple[str, bytes]] = {}
        self.running: set[Running] = set()
        """Requests whose replies are not complete."""

    @property
    def sampling(self) -> str:
        """How tokens are drawn unless a request says so, in words."""
        seed = "one drawn for each request" if self._default_seed is None else str(self._default_seed)
        return f"greedy without a positive temperature; without a seed it is {seed}"

    @property
    def served(self) -> Served:
        """What surfaces may know. Raises ApiError before the engine has once been ready."""
        ready = self.supervisor.ready
        if ready is None:
            raise ApiError("unavailable", "the engine is starting", retry_after=_RETRY_AFTER)
        return Served(
            model_id=self._model_id,
            aliases=self._aliases,
            created=self._created,
            # More tokens than the whole cache holds could never be computed.
            context=min(ready.context, ready.num_pages * ready.page_size),
            vocab_size=ready.vocab_size,
            fingerprint=ready.fingerprint,
            decode=self.decode,
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids; ids that only the model's padding has are nothing."""
        return self.prompts.tokenizer.decode(i for i in token_ids if i < self.prompts.tokenizer.vocab_size)

    # ---- before the engine ----------------------------------------------------------------------------------------

    async def prepare(self, calls: Sequence[Call]) -> list[Prepared]:
        """The prompts of one request.

        Raises:
            ApiError: a prompt or a parameter is not one that the model can take, or more are asked for than may be in
                flight.
        """
        if sum(call.request.n or 1 for call in calls) > self.max_in_flight:
            raise ApiError(
                "invalid", f"at most {self.max_in_flight} choices can be asked for at once, over all prompts", param="n"
            )
        if sum(_length(call.request) for call in calls) < _LONG_TEXT:
            return [self._prepare(call) for call in calls]
        return await asyncio.to_thread(lambda: [self._prepare(call) for call in calls])

    def _prepare(self, call: Call) -> Prepared:
        prompt_ids = self._encode(call)
        return Prepared(prompt_ids, self._params(call, self._max_tokens(call, len(prompt_ids))))

    async def encode(self, call: Call) -> tuple[int, ...]:
        """The tokens of a call's prompt. Raises ApiError as `prepare`."""
        if _length(call.request) < _LONG_TEXT:
            return self._encode(call)
        return await asyncio.to_thread(self._encode, call)

    def _encode(self, call: Call) -> tuple[int, ...]:
        prompt, messages = call.request.prompt, call.request.messages
        if (prompt is None) == (messages is None):
            raise ApiError("invalid", "give exactly one of prompt and messages", param="prompt")
        try:
            ids = self.prompts.encode(prompt) if prompt is not None else self.prompts.encode_chat(messages or [])
        except CrucibleError as error:
            raise _refused(error, call, "prompt" if messages is None else "messages") from None
        self._check_prompt(call, ids)
        return ids

    def _check_prompt(self, call: Call, prompt_ids: Sequence[int]) -> None:
        at = call.at or ("prompt" if call.request.messages is None else "messages")
        if not prompt_ids:
            raise ApiError("invalid", f"{at} is empty; at least one token is needed", param=at)
        vocab_size = self.served.vocab_size
        if not all(0 <= token_id < vocab_size for token_id in prompt_ids):
            raise ApiError("invalid", f"{at} has an id that is none of the model's, 0 to {vocab_size - 1}", param=at)

    def _max_tokens(self, call: Call, num_prompt: int) -> int:
        """What `max_tokens` stands for: what the context leaves, where it is absent or may be lowered."""
        asked, context = call.request.max_tokens, self.served.context
        name = call.names.get("max_tokens", "max_tokens")
        left = context - num_prompt
        at = call.at or ("the prompt" if call.request.messages is None else "the messages")
        if left < 1:
            raise ApiError(
                "too_long",
                f"{at}: {num_prompt} tokens leave no room for a reply in the context of {context}",
                param="prompt" if call.request.messages is None else "messages",
                code="context_length_exceeded",
            )
        if asked is None or (call.clamps_max_tokens and asked > left):
            return left
        if asked > left:
            raise ApiError(
                "too_long",
                f"{at}: {num_prompt} tokens and {name} {asked if asked < 10**12 else 'of that size'} do not fit the "
                f"context of {context}",
                param=name,
                code="context_length_exceeded",
            )
        return asked

    def _params(self, call: Call, max_tokens: int) -> SamplingParams:
        given = {name: getattr(call.request, name) for name in Generate.__struct_fields__ if name in _PARAM_FIELDS}
        fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if "seed" not in fields:
            fields["seed"] = time.time_ns() if self._default_seed is None else self._default_seed
        try:
            params = SamplingParams(**{**fields, "max_tokens": max_tokens})
            params.check_vocabulary(self.served.vocab_size)
        except CrucibleError as error:
            raise _refused(error, call, None) from None
        return params

    # ---- in the engine --------------------------------------------------------------------------------------------

    def start(self, prepared: Sequence[Prepared]) -> Running:
        """Give all choices of all prompts to the engine, or none.

        Raises:
            ApiError: there is no room for them, or no engine.
        """
        if self.is_draining:
            raise ApiError("unavailable", "the server is stopping")
        wanted = [(one.prompt_ids, cast(SamplingParams, params)) for one in prepared for params in one.params.choices()]
        if self.supervisor.in_flight + len(wanted) > self.max_in_flight:
            self.metrics.refused += 1
            raise ApiError("overloaded", "too many requests are waiting; try again later", retry_after=_RETRY_AFTER)
        return Running(self, wanted)

    def stop_all(self, error: ApiError) -> None:
        """End everything that is under way with an error."""
        for running in tuple(self.running):
            running.fail(error)

    # ---- words for tokens -----------------------------------------------------------------------------------------

    def chance(self, token_id: int, logprob: float) -> TokenChance:
        """A token's chance in text and bytes."""
        known = self._chances.get(token_id)
        if known is None:
            has_text = token_id < self.prompts.tokenizer.vocab_size
            data = self.prompts.tokenizer.token_bytes(token_id) if has_text else b""
            known = self._chances[token_id] = data.decode(errors="replace"), data
        # Not min or max: a NaN would pass them.
        return TokenChance(token_id, *known, logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB)


def _length(request: Generate) -> int:
    """In proportion to what a prompt costs: its characters or ids, and for a message as much as its frame."""
    if request.messages is None:
        return len(request.prompt or ())
    return sum(_MESSAGE_LENGTH + _content_length(message.get("content")) for message in request.messages)


def _content_length(content: Any) -> int:
    if not isinstance(content, list):
        return len(content) if isinstance(content, str) else 0
    texts = [part.get("text") for part in content if isinstance(part, Mapping)]
    return len(content) + sum(len(text) for text in texts if isinstance(text, str))


def _refused(error: CrucibleError, call: Call, param: str | None) -> ApiError:
    """An error of the engine's or the template's, in the caller's names and without the caller's text."""
    message = _VALUE.sub("", str(error))
    for word in re.findall(r"[a-z_]+(?:\[\d+\][\w.\[\]]*)?", message):
        field = word.partition("[")[0]
        if field in Generate.__struct_fields__:
            name = call.names.get(field, field)
            message = re.sub(rf"\b{field}\b", name, message)
            param = name + word[len(field) :].rstrip(".")
            break
    if call.at is not None:
        message = f"{call.at}: {message}"
    return ApiError("invalid", message, param=param)
