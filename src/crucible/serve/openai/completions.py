"""`POST /v1/completions`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, TypeAlias, TypeVar

from crucible.serve.openai.answer import Answer
from crucible.serve.openai.logprobs import Row, TokenTable, columns
from crucible.serve.openai.requests import Request, Unsupported, check, generate
from crucible.serve.protocol import ApiError, Burst, Call, Choice, Reply, Served, TokenChance, TokenScore
from crucible.serve.wire import read_json

_UNSUPPORTED: Final[Unsupported] = {"suffix": ([""], "the model was not trained to fill in text before one")}

Prompt: TypeAlias = str | list[int]
"""Text, or token ids."""

Drawn = TypeVar("Drawn", Burst, Choice)


class CompletionRequest(Request, kw_only=True, forbid_unknown_fields=True):
    """The body: a prompt or a list of prompts, each of them text or token ids.

    With `echo` a choice's text begins with its prompt; with `max_tokens` 0 then that is all of it, and `logprobs` are
    the prompt's.
    """

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def only_scores(self) -> bool:
        """Whether nothing is to be generated. One token is then drawn all the same, for nobody to see or to pay."""
        return bool(self.echo) and self.limit[1] == 0


class CompletionAnswer(Answer):
    """The reply: texts."""

    def __init__(self, request: CompletionRequest, prompts: Sequence[Prompt], served: Served) -> None:
        super().__init__(request, served, id_prefix="cmpl", whole_type="text_completion", chunk_type="text_completion")
        self._request = request
        self._prompts = prompts
        self._decode = served.decode
        self._tables: dict[int, TokenTable] = {}

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """As `Reply.whole`."""
        if self._request.only_scores:
            choices = [dataclasses.replace(_without_draw(choice), text="") for choice in choices]
        return super().whole(choices)

    def burst(self, burst: Burst) -> bytes:
        """As `Reply.burst`."""
        if self._request.only_scores:
            burst = dataclasses.replace(_without_draw(burst), texts=[])
        return super().burst(burst)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        text, rows = self._echo(choice.index, choice.prompt_scores)
        rows += self._table(choice.index).output(choice.scores or ())
        return {"text": text + choice.text, "logprobs": None if choice.scores is None else columns(rows)}

    def _opening(self, burst: Burst) -> dict[str, Any] | None:
        if not self._request.echo:
            return None
        text, rows = self._echo(burst.index, burst.prompt_scores)
        return {"text": text, "logprobs": None if burst.prompt_scores is None else columns(rows)}

    def _piece(self, index: int, text: str, scores: Sequence[TokenScore] | None) -> dict[str, Any]:
        return {"text": text, "logprobs": None if scores is None else columns(self._table(index).output(scores))}

    def _closing(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}

    def _echo(self, index: int, scores: Sequence[TokenChance | None] | None) -> tuple[str, list[Row]]:
        """What a choice begins with: its prompt and the rows of that, or nothing."""
        if not self._request.echo:
            return "", []
        prompt = self._prompts[index // self._num_choices]
        text = prompt if isinstance(prompt, str) else self._decode(prompt)
        return text, self._table(index).prompt(text, scores, self._request.logprobs or 0) if scores else []

    def _table(self, index: int) -> TokenTable:
        return self._tables.setdefault(index, TokenTable())


MAX_PROMPTS: Final = 4096
"""Far more than a server takes at once, and few enough to look at."""


class Completions:
    """A `Surface`."""

    def read(self, body: bytes, served: Served) -> tuple[list[Call], Reply]:
        """As `Surface.read`."""
        request = read_json(body, CompletionRequest)
        check(request, served, _UNSUPPORTED)
        _check_best_of(request)
        prompts = _prompts(request.prompt)
        fields = {"max_tokens": 1} if request.only_scores else {}
        calls = [
            Call(
                request=generate(
                    request,
                    prompt=prompt,
                    logprobs=request.logprobs,
                    prompt_logprobs=bool(request.echo) and request.logprobs is not None,
                    **fields,
                ),
                names={"max_tokens": request.limit[0]},
                at=at,
            )
            for at, prompt in prompts
        ]
        return calls, CompletionAnswer(request, [prompt for _, prompt in prompts], served)


def _check_best_of(request: CompletionRequest) -> None:
    num_choices = request.n or 1
    if request.best_of not in (None, num_choices):
        raise ApiError(
            "unsupported",
            f"best_of is not supported: choices are not compared, so it can only be {num_choices}, as n is",
            param="best_of",
        )


def _prompts(prompt: str | list[Any]) -> list[tuple[str | None, Prompt]]:
    """Each prompt, and what the caller calls it where it is one of several."""
    if isinstance(prompt, str):
        return [(None, prompt)]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [(None, prompt)]
    if kinds in ({str}, {list}):
        if len(prompt) > MAX_PROMPTS:
            raise ApiError("invalid", f"prompt takes at most {MAX_PROMPTS} prompts, not {len(prompt)}", param="prompt")
        return [(f"prompt[{index}]", item) for index, item in enumerate(prompt)]
    if not prompt:
        raise ApiError("invalid", "prompt is empty; at least one token is needed", param="prompt")
    raise ApiError("invalid", "prompt must be text, token ids, a list of texts or a list of token ids", param="prompt")


def _without_draw(drawn: Drawn) -> Drawn:
    """What came of a prompt that was to be scored alone."""
    end = drawn.end
    if end is not None and end.finish_reason != "error":
        end = dataclasses.replace(end, finish_reason="length", stop=None, completion_tokens=0)
    return dataclasses.replace(drawn, token_ids=[], scores=None if drawn.scores is None else [], end=end)


COMPLETIONS: Final = Completions()
