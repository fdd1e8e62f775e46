"""The library API: a model, its tokenizer and an engine in one process.

llm = LLM("artifacts/demo")
for completion in llm.generate(["It is a truth", "Emma"], SamplingParams(max_tokens=40, stop=["."])):
    print(completion.text)
for piece in llm.stream([{"role": "user", "content": "Who are you?"}]):
    print(piece.text, end="", flush=True)
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from numbers import Integral
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from crucible.completion import Completion, CompletionText, Piece, SamplingParams
from crucible.engine import request, runner
from crucible.engine.backends import (
    BackendName,
    affordable_pages,
    default_weight_format,
    make_backend,
    resolve_backend,
)
from crucible.engine.engine import Engine, Event
from crucible.engine.quant import WeightFormat
from crucible.engine.request import RequestError
from crucible.models import resolve
from crucible.prompts import Prompt, Prompts
from crucible.tokenizer.chat import Message

_BEGUN: Final = Piece("", None)
"""What a stream yields before its first token, to nobody."""

NUM_SLOTS: Final = 16
"""Requests that are computed at once; more wait. No result depends on it."""


class LLM:
    """A model ready to generate. Several streams may be open at once, in one thread or many; what each of them yields
    depends on no other.

    Args:
        model: the folder of an artifact or of a Hugging Face model, a .gguf file, an id on the Hugging Face hub, or
            `smollm2`: see `models.resolve`.
        backend: "cpu" is the fast one (extra `cpu`), "reference" the float64 oracle in numpy: exact, slow, nothing to
            install. "auto" is the fastest that is installed.
        weights: what matrices are held in: "f32", "f16" or "int8". "auto" suits the backend: f32 for the reference,
            int8 for the others.
        num_slots: requests that are computed at once; more wait for their turn.

    Raises:
        CrucibleError: there is no such model, backend or weight format, or the model is malformed: the message names
            the file or the argument.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        backend: BackendName | Literal["auto"] = "auto",
        weights: WeightFormat | Literal["auto"] = "auto",
        num_slots: int = NUM_SLOTS,
    ) -> None:
        name = resolve_backend(backend)
        loaded = resolve(model)
        self.name: Final = loaded.name
        self.config: Final = loaded.config
        self.tokenizer: Final = loaded.tokenizer
        self.eos_ids: Final = loaded.generation.eos_token_ids
        self._prompts = Prompts(loaded)
        self.chat_template: Final = self._prompts.template
        self._engine = Engine(
            make_backend(
                name,
                loaded.config,
                loaded.weights,
                weight_format=default_weight_format(name) if weights == "auto" else weights,
                num_slots=num_slots,
                num_pages=affordable_pages(loaded.config, num_slots),
            ),
            eos_ids=self.eos_ids,
        )
        self._lock = threading.Lock()
        """Guards the engine and `_requests`."""
        self._requests: dict[int, _Request] = {}
        self._dropped: deque[int] = deque()
        self._request_ids = count()
        self._is_lent = False
        """Whether a stream without a cache has the backend for itself."""

    # ---- prompts ----------------------------------------------------------------------------------------------

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt: see `prompts.Prompts.encode`."""
        return self._prompts.encode(prompt)

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a conversation, ready for the reply: see `tokenizer.chat.ChatTemplate.encode`."""
        return self._prompts.encode_chat(messages)

    # ---- generation -------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: request.SamplingParams | Sequence[request.SamplingParams] | None = None,
    ) -> list[Completion]:
        """Completions of one prompt or several, computed side by side.

        Args:
            prompts: text or token ids, not empty; or a list of such.
            params: for all prompts, or one for each; None decodes greedily, 128 tokens at most.

        Returns:
            In the order of the prompts; `params.n` completions for each, with seeds that count up from `params.seed`.

        Raises:
            CrucibleError: before anything is computed: a prompt is empty, has ids that the model does not have, or does
                not fit the context with max_tokens; the parameters do not fit the model.
        """
        return self._complete([self.encode(prompt) for prompt in _listed(prompts)], params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: request.SamplingParams | Sequence[request.SamplingParams] | None = None,
    ) -> list[Completion]:
        """Replies to one conversation or several: as `generate`, of the prompts that the model's chat template makes.

        A conversation that ends with an assistant's message is answered by that message's continuation.

        Raises:
            CrucibleError: as `generate`; also a message is malformed, or the template refuses the conversation.
        """
        return self._complete([self.encode_chat(conversation) for conversation in _conversations(messages)], params)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: request.SamplingParams | None = None,
        *,
        use_cache: bool = True,
    ) -> Generator[Piece, None, None]:
        """The completion of a prompt or the reply to a conversation, token by token.

        The texts joined are the text of `generate` or `chat`. Closing the generator cancels the request.

        Args:
            prompt: text, token ids or messages; not empty.
            params: None decodes greedily, 128 tokens at most; `n` must be 1.
            use_cache: False computes everything anew for each token: slower, the same tokens. No other request can be
                computed meanwhile.

        Raises:
            CrucibleError: at the call: as `generate` and `chat`.
        """
        ids = self._encode_any(prompt)
        (params,) = _one_for_each(params, 1)
        pieces = self._pieces(self._add(ids, params, deque())) if use_cache else self._uncached_pieces(ids, params)
        # Begun, so that it is cancelled even if it is dropped before its first piece.
        next(pieces)
        return pieces

    def logits(self, prompt: Prompt) -> npt.NDArray[np.float32]:
        """Logits f32 [T, V] after each token of a prompt. Raises RequestError as `engine.runner.logits`."""
        ids = self.encode(prompt)
        with self._lock:
            self._run_until_idle()
            return runner.logits(self._engine.backend, ids)

    def _encode_any(self, prompt: Any) -> tuple[int, ...]:
        return self.encode_chat(prompt) if _is_conversation(prompt) else self.encode(prompt)

    def _complete(
        self,
        prompts: Sequence[tuple[int, ...]],
        params: request.SamplingParams | Sequence[request.SamplingParams] | None,
    ) -> list[Completion]:
        inbox: _Inbox = deque()
        requests: list[_Request] = []
        try:
            for index, (ids, shared) in enumerate(zip(prompts, _one_for_each(params, len(prompts)), strict=True)):
                at = f"prompts[{index}]: " if len(prompts) > 1 else ""
                for choice in shared.choices():
                    requests.append(self._add(ids, choice, inbox, at))
            pieces = self._finish(requests, inbox)
        finally:
            for own in requests:
                self._drop(own)
        return [Completion.of(done.prompt_ids, done.params, pieces[done.request_id]) for done in requests]

    def _finish(self, requests: Sequence[_Request], inbox: _Inbox) -> dict[int, list[Piece]]:
        """Run the requests of an inbox to their ends, side by side: the pieces of each, by its id."""
        pieces: dict[int, list[Piece]] = {own.request_id: [] for own in requests}
        num_unfinished = len(requests)
        while num_unfinished:
            own, event = self._next(inbox)
            if not own.text.is_finished:
                pieces[own.request_id].append(_piece(own.text, event))
                if own.text.is_finished:
                    self._drop(own)
                    num_unfinished -= 1
        return pieces

    def _pieces(self, own: _Request) -> Generator[Piece, None, None]:
        try:
            yield _BEGUN
            while True:
                piece = _piece(own.text, self._next(own.inbox)[1])
                if own.text.is_finished:
                    break
                yield piece
        finally:
            self._drop(own)
        yield piece

    def _uncached_pieces(self, ids: tuple[int, ...], params: request.SamplingParams) -> Generator[Piece, None, None]:
        if params.prompt_logprobs:
            raise RequestError("prompt_logprobs needs the cache; leave out use_cache=False")
        text = CompletionText(self.tokenizer, params)
        with self._lock:
            self._run_until_idle()
            tokens = runner.generate(self._engine.backend, ids, params, eos_ids=self.eos_ids, use_cache=False)
            self._is_lent = True
        try:
            yield _BEGUN
            for token in tokens:
                piece = text.push(token.token_id, token.finish, token.logprobs)
                if text.is_finished:
                    break
                yield piece
        finally:
            cast(Generator[runner.GeneratedToken, None, None], tokens).close()
            self._is_lent = False
        yield piece

    # ---- the engine, shared -----------------------------------------------------------------------------------

    def _add(self, ids: tuple[int, ...], params: request.SamplingParams, inbox: _Inbox, at: str = "") -> _Request:
        """Queue a request whose events go into an inbox. Whatever becomes of it, it must be dropped in the end."""
        with self._lock:
            self._check_not_lent()
            own = _Request(next(self._request_ids), ids, params, CompletionText(self.tokenizer, params), inbox)
            try:
                self._engine.add(own.request_id, ids, params)
            except RequestError as error:
                raise RequestError(f"{at}{error}") from None
            self._requests[own.request_id] = own
        return own

    def _next(self, inbox: _Inbox) -> tuple[_Request, Event]:
        """The next event of an inbox. Whoever waits makes the engine's steps, and hands the others their events."""
        with self._lock:
            while not inbox:
                self._step()
            own, event = inbox.popleft()
        if event is _LOST:
            raise RuntimeError("the engine failed in a step of another request, and this one was under way")
        return own, event

    def _step(self) -> None:
        """One step of the engine. Call with the lock held."""
        self._check_not_lent()
        self._cancel_dropped()
        try:
            events = self._engine.step()
        except BaseException:
            # Nothing that was under way can go on. Once it is cancelled the engine serves others.
            for own in self._requests.values():
                own.inbox.append((own, _LOST))
            self._dropped += self._requests
            self._cancel_dropped()
            raise
        for event in events:
            if (receiver := self._requests.get(cast(int, event.request_id))) is not None:
                receiver.inbox.append((receiver, event))

    def _drop(self, own: _Request) -> None:
        """End a request that has not ended, and forget it. Any number of times, at any time.

        A stream that is garbage gets here in the midst of anything, of a step too. So this never waits for the lock:
        whoever holds it cancels before the next step.
        """
        self._dropped.append(own.request_id)
        if self._lock.acquire(blocking=False):
            try:
                self._cancel_dropped()
            finally:
                self._lock.release()

    def _cancel_dropped(self) -> None:
        while self._dropped:
            request_id = self._dropped.popleft()
            if self._requests.pop(request_id, None) is not None:
                self._engine.cancel(request_id)

    def _run_until_idle(self) -> None:
        """Finish what is under way; its events wait to be asked for. Call with the lock held."""
        self._check_not_lent()
        self._cancel_dropped()
        while self._engine.has_work:
            self._step()

    def _check_not_lent(self) -> None:
        if self._is_lent:
            raise RequestError("a stream with use_cache=False is open, which has the model for itself")


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """A request under way; `inbox` is where its events wait to be asked for, with those of others like it."""

    request_id: int
    prompt_ids: tuple[int, ...]
    params: request.SamplingParams
    text: CompletionText
    inbox: _Inbox


_Inbox: TypeAlias = deque[tuple[_Request, Event]]

_LOST: Final = Event(None, None, "error")
"""Stands for the events that will not come after a step has failed."""


def _piece(text: CompletionText, event: Event) -> Piece:
    return text.push(event.token_id, event.finish, event.logprobs, event.prompt_logprobs)


# ---- arguments --------------------------------------------------------------------------------------------------


def _listed(prompts: Any) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        return [cast(Prompt, prompts)]
    items = list(prompts)
    return [items] if all(isinstance(item, Integral) for item in items) else items


def _is_conversation(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], Mapping)


def _conversations(messages: Any) -> list[Sequence[Message]]:
    """One conversation or several, as a list. What is neither is refused as a conversation."""
    is_several = isinstance(messages, (list, tuple)) and bool(messages) and isinstance(messages[0], (list, tuple))
    return list(messages) if is_several else [messages]


def _one_for_each(params: Any, num_prompts: int) -> list[request.SamplingParams]:
    if params is None or isinstance(params, request.SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not isinstance(params, (list, tuple)) or not all(isinstance(one, request.SamplingParams) for one in params):
        raise RequestError(f"params must be SamplingParams or a list of them, not {params!r:.60}")
    if len(params) != num_prompts:
        raise RequestError(
            f"params must be one for all prompts or one for each: {len(params)} for {num_prompts} prompts"
        )
    return list(params)
