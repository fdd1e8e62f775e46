"""`crucible bench soak`: whether a server stays whole under a load that misbehaves; it passes or fails.

A command of its own and no option of `bench serve`: nothing here is a speed, and one failed request is a failure.

Mixed: every surface, streams and whole replies, clients that leave at random; no request fails, and afterwards all
pages are free and no request is left. Pool: a cache of few pages lets requests wait, and refuses none. Overload: far
more clients than the server has room for; each gets its answer or a refusal that says when to come again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from crucible.bench.client import Outcome
from crucible.bench.generation import OnRound
from crucible.bench.harness import BenchError, BenchReport, Row, load_average
from crucible.bench.load import Job, Shot
from crucible.bench.serve import LoadProcess
from crucible.bench.server import Server, serving
from crucible.bench.traffic import Passages, Prompt, body, check, total_rate
from crucible.hardware import usable_cores
from crucible.models import resolve_text

NUM_SHOTS: Final = 400
"""Different requests of a run, which are sent over and over."""
LEAVING: Final = 0.25
"""Share of the clients that leave."""
LEAVE_SECONDS: Final = 0.3
"""The longest that they wait."""
LONGEST_PROMPT, MOST_TOKENS = 96, 48
MIXED_CLIENTS, POOL_CLIENTS, OVERLOAD_CLIENTS = 24, 32, 48
POOL_PAGES: Final = 32
REFUSAL_SECONDS: Final = 5.0
"""The longest that a refusal may take: it is decided at once, on a machine that is as busy as can be."""
IDLE_SECONDS: Final = 5.0

_KINDS: Final = (
    ("generate", False),
    ("native", True),
    ("native-chat", True),
    *((surface, streams) for surface in ("completions", "chat", "messages") for streams in (False, True)),
)
"""Endpoints, and whether the reply is a stream."""


@dataclass(frozen=True, slots=True)
class _Load:
    """Requests, and the tokens that each is to draw."""

    shots: list[Shot]
    new_tokens: list[int]


def bench_soak(
    model: str,
    *,
    backend: str = "auto",
    weights: str = "auto",
    seconds: float = 60.0,
    on_round: OnRound | None = None,
) -> BenchReport:
    """Numbers of requests by what became of them.

    Args:
        model, backend, weights: as for `crucible serve`.
        seconds: of the mixed load; the other two take a quarter of it each.
        on_round: called after each of the three with their number done and 3.

    Raises:
        BenchError: something failed: the first thing that did, and of how many.
        CrucibleError: there is no such model.
    """
    if not seconds > 0:
        raise BenchError(f"the soak must last a positive number of seconds, not {seconds:g}")
    text, before = resolve_text(model), load_average()
    phases: Sequence[tuple[str, int, float, dict[str, object], Callable[[list[Outcome], _Load], dict[str, float]]]] = (
        ("mixed", MIXED_CLIENTS, seconds, {"max-batch": 16}, _without_failure),
        ("pool", POOL_CLIENTS, seconds / 4, {"max-batch": 16, "kv-pages": POOL_PAGES}, _without_failure),
        ("overload", OVERLOAD_CLIENTS, seconds / 4, {"max-batch": 2, "max-queue": 4}, _refused_well),
    )
    passages, context = Passages(text), text.config.max_position_embeddings
    rows: list[Row] = []
    for number, (name, clients, length, options, judge) in enumerate(phases, start=1):
        with serving(model, backend=backend, weights=weights, options=options) as server, LoadProcess() as clientele:
            load = _load(passages, context, server.model_id, leaving=LEAVING if name == "mixed" else 0.0, seed=number)
            job = Job(
                host=server.host,
                port=server.port,
                mode="closed",
                clients=clients,
                seconds=length,
                shots=load.shots,
            )
            found = judge(clientele.run(job).outcomes, load)
            _wait_idle(server)
        rows += [
            Row(name=name, metric=metric, unit=_UNITS.get(metric, "requests"), values=(value,))
            for metric, value in found.items()
        ]
        if on_round is not None:
            on_round(number, len(phases))
    return BenchReport(
        bench="soak",
        backend=server.backend,
        model=text.name,
        threads=usable_cores(),
        rows=tuple(rows),
        notes=(
            f"mixed: {MIXED_CLIENTS} clients over every surface, a quarter of the requests left; "
            f"pool: {POOL_CLIENTS} clients, {POOL_PAGES} pages; overload: {OVERLOAD_CLIENTS} clients, room for 6",
            "no request failed; after each load all pages were free and no request was left",
        ),
        load=(before, load_average()),
        card=server.card,
    )


_UNITS: Final = {"total": "tok/s", "slowest refusal": "ms"}


# ---- loads ----------------------------------------------------------------------------------------------------------


def _load(passages: Passages, context: int, model_id: str, *, leaving: float, seed: int) -> _Load:
    rng = random.Random(seed)
    # A template needs room too: half of a small context is the passage's, a quarter the reply's.
    longest, most = min(LONGEST_PROMPT, context // 4), min(MOST_TOKENS, context // 4)
    asked, counts, shots = passages.prompts(NUM_SHOTS, longest, seed=seed), [], []
    for prompt in asked:
        counts.append(rng.randint(1, most))
        leaves_after = rng.uniform(0.0, LEAVE_SECONDS) if rng.random() < leaving else None
        shots.append(_shot(rng, prompt, counts[-1], model_id, leaves_after))
    return _Load(shots, counts)


def _shot(rng: random.Random, prompt: Prompt, new_tokens: int, model_id: str, leaves_after: float | None) -> Shot:
    endpoint, streams = rng.choice(_KINDS)
    return Shot(endpoint, body(endpoint, prompt.text, new_tokens, model_id, streams=streams), leaves_after=leaves_after)


# ---- verdicts -------------------------------------------------------------------------------------------------------


def _without_failure(outcomes: list[Outcome], load: _Load) -> dict[str, float]:
    """Raises BenchError: a request whose client stayed was not answered in full."""
    stayed = [outcome for outcome in outcomes if not outcome.has_left]
    _check_answered(stayed, load)
    return {
        "answered": len(stayed),
        "left": len(outcomes) - len(stayed),
        "total": total_rate(stayed),
    }


def _refused_well(outcomes: list[Outcome], load: _Load) -> dict[str, float]:
    """Raises BenchError: a request got neither its answer nor a refusal as it ought to be; or there were not both."""
    refused = [outcome for outcome in outcomes if outcome.status in (429, 529)]
    answered = [outcome for outcome in outcomes if outcome.status not in (429, 529)]
    _check_answered(answered, load)
    for outcome in refused:
        expected = 529 if load.shots[outcome.shot].endpoint == "messages" else 429
        if outcome.status != expected:
            raise BenchError(f"a refusal has status {outcome.status}, not {expected}: {outcome.error}")
        if not (outcome.retry_after.isdigit() and int(outcome.retry_after) >= 1):
            raise BenchError(f"a refusal has Retry-After {outcome.retry_after!r}, not a number of seconds")
    if not answered or not refused:
        raise BenchError(f"an overload answers some and refuses some, not {len(answered)} and {len(refused)}")
    slowest = max(outcome.ended - outcome.began for outcome in refused)
    if slowest > REFUSAL_SECONDS:
        raise BenchError(f"a refusal took {slowest:.1f} s, more than {REFUSAL_SECONDS:.0f} s")
    return {"answered": len(answered), "refused": len(refused), "slowest refusal": 1e3 * slowest}


def _check_answered(outcomes: Sequence[Outcome], load: _Load) -> None:
    failures = []
    for outcome in outcomes:
        try:
            check([outcome], load.new_tokens[outcome.shot])
        except BenchError as error:
            failures.append(f"{load.shots[outcome.shot].endpoint}: {error}")
    if failures:
        raise BenchError(f"{len(failures)} of {len(outcomes)} requests failed; the first: {failures[0]}")


def _wait_idle(server: Server) -> None:
    """Raises BenchError: some time after the last request, pages are in use or requests are left."""
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        found = server.get("/metrics")
        left = found["in_flight"] + found["active"] + found["prefilling"] + found["queued"]
        pages = found["pages"]
        if left == 0 and pages["free"] == pages["total"]:
            return
        if time.monotonic() > deadline:
            raise BenchError(
                f"{IDLE_SECONDS:.0f} s after the last request {left} requests are left and {pages['free']} of "
                f"{pages['total']} pages free"
            )
        time.sleep(0.05)
