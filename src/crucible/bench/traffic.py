"""What a load is made of and what is made of its log: prompts, bodies for each surface, arrivals, figures."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from crucible.bench.client import Outcome
from crucible.bench.harness import BenchError
from crucible.bench.load import Log, Shot
from crucible.bench.server import counters
from crucible.data.sources import documents
from crucible.models import ModelText

SHORTEST_PROMPT: Final = 8
_TEXT_BYTES: Final = 400_000
_PERCENTILES: Final = (50, 95, 99)

UNITS: Final = {"decode": "tok/s", "total": "tok/s", "batch": "req", "ttft": "ms", "gap": "ms", "client": "us/tok"}
"""Of figures, by the beginning of their names."""


# ---- prompts and requests -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text and its tokens, that with which the model's texts begin included."""

    text: str
    ids: tuple[int, ...]


class Passages:
    """Prompts from the text that ships, the same for a model and a seed."""

    def __init__(self, model: ModelText) -> None:
        self._model = model
        text = b"\n\n".join(document.utf8 for document in documents("demo"))[:_TEXT_BYTES]
        self._ids = model.tokenizer.encode(text.decode("utf-8", errors="ignore"))

    def prompts(self, count: int, longest: int, *, seed: int = 0) -> list[Prompt]:
        """Prompts of SHORTEST_PROMPT to `longest` tokens, as many short as long ones.

        Raises:
            BenchError: `longest` is too little, or more than the text has.
        """
        if not SHORTEST_PROMPT <= longest <= len(self._ids):
            raise BenchError(f"the longest prompt must have from {SHORTEST_PROMPT} to {len(self._ids)} tokens")
        rng = random.Random(seed)
        return [self._prompt(rng, rng.randint(SHORTEST_PROMPT, longest)) for _ in range(count)]

    def exact(self, length: int, *, seed: int = 0) -> list[int]:
        """Ids of that many tokens. Raises BenchError: the text has not so many."""
        if not 1 <= length <= len(self._ids):
            raise BenchError(f"a prompt must have from 1 to {len(self._ids)} tokens, not {length}")
        start = random.Random(seed).randint(0, len(self._ids) - length)
        return self._ids[start : start + length]

    def _prompt(self, rng: random.Random, length: int) -> Prompt:
        start = rng.randint(0, len(self._ids) - length)
        for end in range(start + length, start, -1):
            # Cut inside a character, or behind the token with which texts begin, a passage may become longer.
            text = self._model.tokenizer.decode(self._ids[start:end]).strip("\ufffd")
            ids = (*self._model.prefix_ids, *self._model.tokenizer.encode(text))
            if text and len(ids) <= length:
                return Prompt(text, ids)
        raise BenchError(f"no passage of the text that ships has at most {length} tokens")


def body(endpoint: str, prompt: str | Sequence[int], new_tokens: int, model_id: str, *, streams: bool = True) -> str:
    """A request for greedy tokens, that many whatever they are, as one of ENDPOINTS takes it.

    Where messages are spoken in, the prompt is the user's.
    """
    says: Any = {"messages": [{"role": "user", "content": prompt}]}
    raw: Any = {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    shared: dict[str, Any] = {"max_tokens": new_tokens, "ignore_eos": True}
    if endpoint in ("generate", "native"):
        return json.dumps({**raw, **shared})
    if endpoint == "native-chat":
        return json.dumps({**says, **shared})
    values = {"model": model_id, **(raw if endpoint == "completions" else says), **shared}
    if streams:
        values["stream"] = True
        if endpoint != "messages":
            values["stream_options"] = {"include_usage": True}
    return json.dumps(values)


def shots(endpoint: str, asked: Sequence[Prompt], new_tokens: int, model_id: str) -> list[Shot]:
    """A stream for each prompt."""
    return [Shot(endpoint, body(endpoint, prompt.text, new_tokens, model_id)) for prompt in asked]


def poisson(count: int, rate: float, *, seed: int = 0) -> list[float]:
    """Seconds at which that many independent arrivals come, `rate` a second on average."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, size=count)
    return list(np.cumsum(gaps).tolist())


# ---- figures --------------------------------------------------------------------------------------------------------


def check(outcomes: Sequence[Outcome], new_tokens: int, asked: Sequence[Prompt] | None = None) -> None:
    """Whether each request was answered with all its tokens.

    Args:
        outcomes: of all requests of a load.
        new_tokens: that each was to draw.
        asked: the prompts by number, if the server's count of their tokens is to be theirs.

    Raises:
        BenchError: one was not; it names the first and what it got.
    """
    for outcome in outcomes:
        if outcome.error:
            raise BenchError(f"request {outcome.shot} failed with status {outcome.status}: {outcome.error}")
        if outcome.tokens != new_tokens:
            raise BenchError(f"request {outcome.shot} was to draw {new_tokens} tokens and drew {outcome.tokens}")
        if asked is not None and outcome.prompt_tokens != len(asked[outcome.shot].ids):
            raise BenchError(
                f"request {outcome.shot} has {len(asked[outcome.shot].ids)} prompt tokens, and the server "
                f"counted {outcome.prompt_tokens}"
            )


def total_rate(outcomes: Sequence[Outcome]) -> float:
    """Tokens per second from the first request to the last token."""
    seconds = max(outcome.ended for outcome in outcomes) - min(outcome.began for outcome in outcomes)
    return sum(outcome.tokens for outcome in outcomes) / seconds


def first_token_ms(outcomes: Sequence[Outcome]) -> list[float]:
    """Milliseconds from when each request was due to its first token."""
    return [1e3 * (outcome.times[0] - outcome.began) for outcome in outcomes if outcome.times]


def gaps_ms(outcome: Outcome) -> list[float]:
    """Milliseconds between a stream's tokens as they came: of those that came together, none but the first waited."""
    gaps: list[float] = []
    for before, now, count in zip(outcome.times, outcome.times[1:], outcome.counts[1:], strict=False):
        gaps += [1e3 * (now - before), *[0.0] * (count - 1)]
    return gaps


def figures(log: Log, *, steady: bool) -> dict[str, float]:
    """What is reported of a load of streams: rates, times to the first token, gaps, the mean batch, the client's cost.

    Args:
        log: of a load whose requests were all answered.
        steady: whether every client had always something to do between `log.begin` and `log.end`; the rate of that
            time is "decode".

    Raises:
        BenchError: there was no such time.
    """
    outcomes = log.outcomes
    num_tokens = sum(outcome.tokens for outcome in outcomes)
    found = {"total": total_rate(outcomes)}
    if steady:
        found = {"decode": _steady_rate(log)} | found
    found["batch"] = _mean_batch(log)
    gaps = [gap for outcome in outcomes for gap in gaps_ms(outcome)]
    found |= _percentiles("ttft", first_token_ms(outcomes), (50, 95)) | _percentiles("gap", gaps, _PERCENTILES)
    if log.cpu_seconds:
        found["client"] = 1e6 * log.cpu_seconds / num_tokens
    return found


def unit(figure: str) -> str:
    """Of a figure by its name."""
    return UNITS[figure.partition("_")[0]]


def _steady_rate(log: Log) -> float:
    begin, end = log.begin.at, log.end.at
    if end <= begin:
        raise BenchError("the first client was done before the last had begun: each needs more tokens or requests")
    num_tokens = sum(
        count
        for outcome in log.outcomes
        for at, count in zip(outcome.times, outcome.counts, strict=True)
        if begin < at <= end
    )
    return num_tokens / (end - begin)


def _mean_batch(log: Log) -> float:
    """Requests per decode step."""
    before, after = counters(log.begin.metrics), counters(log.end.metrics)
    plans = _change("decode_plans_total", before, after)
    return _change("decode_rows_total", before, after) / plans if plans else 0.0


def _change(name: str, before: Mapping[str, float], after: Mapping[str, float]) -> float:
    if name not in before or name not in after:
        raise BenchError(f"the server's metrics lack crucible:{name}")
    return after[name] - before[name]


def _percentiles(name: str, values: Sequence[float], ranks: Sequence[int]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}_p{rank}": float(value) for rank, value in zip(ranks, np.percentile(values, ranks), strict=True)}
