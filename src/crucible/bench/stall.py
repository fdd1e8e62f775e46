"""`crucible bench stall`: what a prompt that arrives does to streams that are under way, and how long it waits itself.

A step has the rows of all running requests and `--prefill-budget` tokens of prompts, at most `--prefill-chunk` of one.
Large steps read a prompt soon and let the streams wait for it; small ones spread it. The defaults of both options are
chosen from this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from crucible.bench.client import Outcome
from crucible.bench.generation import OnRound
from crucible.bench.harness import BenchError, BenchReport, Key, Row, interleave, load_average
from crucible.bench.load import Job, Log, Mode, Shot
from crucible.bench.serve import LoadProcess
from crucible.bench.server import Server, serving
from crucible.bench.traffic import Passages, body, check, first_token_ms, total_rate
from crucible.hardware import usable_cores
from crucible.models import resolve_text

STREAMS: Final = (1, 4)
ARRIVALS: Final = ((1, 33), (1, 535), (1, 941), (4, 535))
"""Prompts that arrive at once, and tokens of each."""
BUDGETS: Final = (64, 128, 256, 512, 1024)
CHUNKS: Final = (32, 64, 128, 256)
BURST: Final = 16
BURST_PROMPT, BURST_TOKENS = 128, 32
STREAM_PROMPT: Final = 16
ARRIVAL_TOKENS: Final = 8

Setting = tuple[int, int]
"""Prefill budget and chunk; a chunk as large as the budget is none."""


def bench_stall(
    model: str,
    *,
    backend: str = "auto",
    weights: str = "auto",
    budgets: Sequence[int] = BUDGETS,
    chunks: Sequence[int] = CHUNKS,
    streams: Sequence[int] = STREAMS,
    arrivals: Sequence[tuple[int, int]] = ARRIVALS,
    rounds: int = 3,
    on_round: OnRound | None = None,
) -> BenchReport:
    """The worst gap of established streams while prompts arrive, these prompts' times to the first token, and a burst.

    Each setting has a server of its own in each round. The rows of a metric stand together, to compare settings.

    Args:
        model, backend, weights: as for `crucible serve`.
        budgets: values of `--prefill-budget`.
        chunks: values of `--prefill-chunk`; those below a budget are tried with it, and always none.
        streams: streams that are under way.
        arrivals: prompts that arrive at once, and tokens of each.
        rounds: rounds, all of which count; a server's first requests do not.
        on_round: called after each round with the rounds done and their number.

    Raises:
        BenchError: a number is out of range, a server does not start, a request did not get all its tokens, or a
            stream came to the context's end before the prompts had their first tokens.
        CrucibleError: there is no such model.
    """
    text, before = resolve_text(model), load_average()
    passages, context = Passages(text), text.config.max_position_embeddings
    server: Server | None = None
    settings = [
        (budget, chunk) for budget in budgets for chunk in (*(chunk for chunk in chunks if chunk < budget), budget)
    ]
    if not settings or not streams or min(streams) < 1:
        raise BenchError("nothing to measure: at least one prefill budget and one stream are needed")
    longest = max((tokens for _, tokens in arrivals), default=0) + ARRIVAL_TOKENS
    if max(longest, BURST_PROMPT + BURST_TOKENS) > context:
        raise BenchError(f"{longest} tokens do not fit the context of {context}")

    def variant(setting: Setting) -> Callable[[], Mapping[Key, float]]:
        options = {"prefill-budget": setting[0], "prefill-chunk": setting[1]}

        def measure() -> dict[Key, float]:
            nonlocal server
            with serving(model, backend=backend, weights=weights, options=options) as server, LoadProcess() as load:
                probe = _Probe(server, load, passages, context)
                # What is compiled or cached at first use must not count.
                probe.burst()
                probe.interrupted(streams[0], (1, STREAM_PROMPT))
                found = probe.burst()
                for count in streams:
                    for arrival in arrivals:
                        found |= probe.interrupted(count, arrival)
            return {(_name(setting), metric): value for metric, value in found.items()}

        return measure

    samples = interleave({_name(s): variant(s) for s in settings}, rounds, warm_up=0, on_round=on_round)
    assert server is not None
    metrics = list(dict.fromkeys(metric for _, metric in samples))
    return BenchReport(
        bench="stall",
        backend=server.backend,
        model=text.name,
        threads=usable_cores(),
        rows=tuple(
            Row(
                name=name,
                metric=metric,
                unit="tok/s" if metric.startswith("total") else "ms",
                values=tuple(values),
            )
            for metric in metrics
            for (name, other), values in samples.items()
            if other == metric
        ),
        notes=(
            "a name is prefill budget and chunk; stall is the longest gap of a stream while prompts arrived, "
            "ttft the longest time to the first token of these; @4s+1x941 is one prompt of 941 tokens on four streams",
            f"a burst is {BURST} prompts of {BURST_PROMPT} tokens at once, {BURST_TOKENS} drawn by each",
        ),
        load=(before, load_average()),
        card=server.card,
    )


class _Probe:
    """Measures one server."""

    def __init__(self, server: Server, load: LoadProcess, passages: Passages, context: int) -> None:
        self._server, self._load, self._passages, self._context = server, load, passages, context

    def burst(self) -> dict[str, float]:
        """Times to the first token and the rate of requests that come at once."""
        shots = [self._shot(BURST_PROMPT, BURST_TOKENS, seed) for seed in range(BURST)]
        outcomes = self._run("closed", shots, clients=BURST).outcomes
        check(outcomes, BURST_TOKENS)
        median, high = np.percentile(first_token_ms(outcomes), (50, 95))
        return {
            "ttft_p50@burst": float(median),
            "ttft_p95@burst": float(high),
            "total@burst": total_rate(outcomes),
        }

    def interrupted(self, streams: int, arrival: tuple[int, int]) -> dict[str, float]:
        """The worst gap of streams while prompts arrive, and the worst time to the first token of these."""
        count, tokens = arrival
        room = self._context - STREAM_PROMPT
        shots = [self._shot(STREAM_PROMPT, room, seed) for seed in range(streams)]
        shots += [self._shot(tokens, ARRIVAL_TOKENS, seed) for seed in range(count)]
        log = self._run("interrupt", shots, clients=streams)
        established = [outcome for outcome in log.outcomes if outcome.shot < streams]
        newcomers = [outcome for outcome in log.outcomes if outcome.shot >= streams]
        check(newcomers, ARRIVAL_TOKENS)
        if not all(stream.has_left for stream in established):
            raise BenchError("a stream ended before the prompts that arrived were answered: the context is too short")
        answered = max(outcome.times[0] for outcome in newcomers)
        setting = f"{streams}s+{count}x{tokens}"
        return {
            f"stall@{setting}": max(worst_gap_ms(stream, log.cut_at, answered) for stream in established),
            f"ttft@{setting}": max(first_token_ms(newcomers)),
        }

    def _shot(self, tokens: int, new_tokens: int, seed: int) -> Shot:
        ids = self._passages.exact(tokens, seed=seed)
        return Shot("native", body("native", ids, new_tokens, self._server.model_id))

    def _run(self, mode: Mode, shots: list[Shot], *, clients: int) -> Log:
        job = Job(host=self._server.host, port=self._server.port, mode=mode, shots=shots, clients=clients)
        return self._load.run(job)


def worst_gap_ms(stream: Outcome, begin: float, end: float) -> float:
    """The longest time without a token of a stream that reaches into the time from `begin` to `end`, in ms."""
    gaps = [
        now - before
        for before, now in zip(stream.times, stream.times[1:], strict=False)
        if now > begin and before < end
    ]
    return 1e3 * max(gaps, default=0.0)


def _name(setting: Setting) -> str:
    budget, chunk = setting
    return f"{budget}/{chunk if chunk < budget else 'off'}"
