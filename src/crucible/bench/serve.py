"""`crucible bench serve`: a model over HTTP, as clients see it, beside the same requests in the engine alone.

Closed loads keep so many clients at work, each with one request after the other; open ones come by Poisson arrivals,
whatever is under way. The server, its clients and the engine alone each have a process of their own. With the backend
`null`, which computes nothing, the rates are the ceiling of everything around the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Final

import msgspec

from crucible.bench.direct import Batch
from crucible.bench.generation import OnRound
from crucible.bench.harness import BenchError, BenchReport, Key, Row, Samples, interleave, load_average, ratio
from crucible.bench.load import Job, Log
from crucible.bench.process import LineProcess
from crucible.bench.server import Server, at_url, serving
from crucible.bench.traffic import Passages, Prompt, check, figures, poisson, shots, unit
from crucible.hardware import usable_cores
from crucible.models import ModelText, resolve_text

CLIENTS: Final = (1, 2, 4, 8, 16, 64)
RATES: Final = (2.0,)
REQUESTS_PER_CLIENT: Final = 2
LEAST_REQUESTS: Final = 8
OPEN_REQUESTS: Final = 32

Variant = Callable[[], Mapping[Key, float]]


class LoadProcess(LineProcess):
    """The clients' process."""

    def __init__(self) -> None:
        super().__init__("the clients", [sys.executable, "-m", "crucible.bench.load"])

    def run(self, job: Job) -> Log:
        """What comes of a job. Raises BenchError: the server cannot be reached, or the process has ended."""
        self.send(msgspec.json.encode(job))
        log = msgspec.json.decode(self.receive(), type=Log)
        if log.error:
            raise BenchError(log.error)
        return log


class DirectProcess(LineProcess):
    """The process of an engine without a server, with room for so many requests of so many positions."""

    def __init__(self, model: str, backend: str, weights: str, *, slots: int, positions: int) -> None:
        options = {"backend": backend, "weights": weights, "slots": slots, "positions": positions}
        command = [sys.executable, "-m", "crucible.bench.direct", model]
        super().__init__(
            "the engine", command + [text for key, value in options.items() for text in (f"--{key}", str(value))]
        )
        self._is_ready = False

    def run(self, batch: Batch) -> Log:
        """What comes of a batch. Raises BenchError: the process has ended."""
        if not self._is_ready:
            self.receive()
            self._is_ready = True
        self.send(msgspec.json.encode(batch))
        return msgspec.json.decode(self.receive(), type=Log)


def bench_serve(
    model: str,
    *,
    backend: str = "auto",
    weights: str = "auto",
    clients: Sequence[int] = CLIENTS,
    rates: Sequence[float] = RATES,
    longest_prompt: int = 256,
    new_tokens: int = 64,
    rounds: int = 3,
    url: str | None = None,
    on_round: OnRound | None = None,
) -> BenchReport:
    """Rates, times to the first token, gaps between tokens and mean batch, by number of clients and by arrival rate.

    Args:
        model: as for `crucible serve`.
        backend, weights: as for `crucible serve`.
        clients: of the closed loads; several rows each. Each sends REQUESTS_PER_CLIENT requests, and there are at
            least LEAST_REQUESTS in all.
        rates: requests per second of the open loads, OPEN_REQUESTS of them.
        longest_prompt: prompts are passages of the text that ships, up to so many tokens long.
        new_tokens: tokens drawn by each request, at least 2.
        rounds: rounds that count, after one that does not.
        url: of a server of the same model that runs already, instead of one of the benchmark's own; the engine alone
            is then not measured.
        on_round: called after each round with the rounds done and their number.

    Raises:
        BenchError: a number is out of range, the server does not start, or a request did not get all its tokens.
        CrucibleError: there is no such model.
    """
    text = resolve_text(model)
    _check_options(text, clients, rates, longest_prompt, new_tokens)
    slots, before, passages = max(clients, default=1), load_average(), Passages(text)
    with ExitStack() as stack:
        if url is None:
            options = {"max-batch": max(64, slots)}
            server = stack.enter_context(serving(model, backend=backend, weights=weights, options=options))
        else:
            server = at_url(url)
        load = stack.enter_context(LoadProcess())
        variants = _closed(server, load, passages, clients, longest_prompt, new_tokens)
        variants |= _open(server, load, passages, rates, longest_prompt, new_tokens)
        if url is None and clients:
            positions = longest_prompt + new_tokens
            engine = stack.enter_context(DirectProcess(model, backend, weights, slots=slots, positions=positions))
            variants |= _direct(engine, passages, clients, longest_prompt, new_tokens)
        samples = interleave(variants, rounds, on_round=on_round)
    return BenchReport(
        bench="serve",
        backend=server.backend,
        model=text.name,
        threads=usable_cores(),
        rows=_rows(samples),
        ratios=_ratios(samples, clients),
        notes=(
            f"prompts of {longest_prompt} tokens at most, {new_tokens} drawn by each request; decode is the rate while "
            "every client is at work, total that from the first request to the last token",
            "batch is requests per decode step, its ceiling the clients in flight; client is the processor time that "
            "the clients took",
        ),
        load=(before, load_average()),
        card=server.card,
    )


# ---- what is measured -----------------------------------------------------------------------------------------------


def _closed(
    server: Server, load: LoadProcess, passages: Passages, clients: Sequence[int], longest: int, new_tokens: int
) -> dict[str, Variant]:
    def variant(count: int) -> Variant:
        asked = _prompts(passages, count, longest)
        job = Job(
            host=server.host,
            port=server.port,
            mode="closed",
            clients=count,
            shots=shots("native", asked, new_tokens, server.model_id),
        )
        return lambda: _figures("http", f"c{count}", load.run(job), asked, new_tokens, steady=True)

    return {f"http c{count}": variant(count) for count in clients}


def _open(
    server: Server, load: LoadProcess, passages: Passages, rates: Sequence[float], longest: int, new_tokens: int
) -> dict[str, Variant]:
    def variant(rate: float) -> Variant:
        asked = passages.prompts(OPEN_REQUESTS, longest)
        streams = shots("native", asked, new_tokens, server.model_id)
        timed = [
            msgspec.structs.replace(shot, at=at) for shot, at in zip(streams, poisson(len(streams), rate), strict=True)
        ]
        job = Job(host=server.host, port=server.port, mode="open", shots=timed)
        return lambda: _figures("http", f"{rate:g}/s", load.run(job), asked, new_tokens, steady=False)

    return {f"http {rate:g}/s": variant(rate) for rate in rates}


def _direct(
    engine: DirectProcess, passages: Passages, clients: Sequence[int], longest: int, new_tokens: int
) -> dict[str, Variant]:
    def variant(count: int) -> Variant:
        asked = _prompts(passages, count, longest)
        batch = Batch(prompts=[prompt.ids for prompt in asked], new_tokens=new_tokens, clients=count)
        return lambda: _figures("engine", f"c{count}", engine.run(batch), asked, new_tokens, steady=True)

    return {f"engine c{count}": variant(count) for count in clients}


def _prompts(passages: Passages, clients: int, longest: int) -> list[Prompt]:
    """The same for the server and the engine."""
    return passages.prompts(max(LEAST_REQUESTS, REQUESTS_PER_CLIENT * clients), longest, seed=clients)


def _figures(
    name: str, setting: str, log: Log, asked: Sequence[Prompt], new_tokens: int, *, steady: bool
) -> dict[Key, float]:
    check(log.outcomes, new_tokens, asked)
    if sum(sum(outcome.counts) for outcome in log.outcomes) != new_tokens * len(asked):
        raise BenchError(f"{name}: the tokens that were seen are not those that were counted")
    return {(name, f"{figure}@{setting}"): value for figure, value in figures(log, steady=steady).items()}


# ---- rows and ratios ------------------------------------------------------------------------------------------------


def _rows(samples: Samples) -> tuple[Row, ...]:
    """By setting, the engine's rows behind the server's."""
    settings = list(dict.fromkeys(metric.partition("@")[2] for _, metric in samples))
    keys = sorted(samples, key=lambda key: settings.index(key[1].partition("@")[2]))
    return tuple(
        Row(
            name=name,
            metric=metric,
            unit=unit(metric.partition("@")[0]),
            values=tuple(samples[name, metric]),
            ceiling=float(metric.partition("@c")[2]) if metric.startswith("batch@c") else None,
        )
        for name, metric in keys
    )


def _ratios(samples: Samples, clients: Sequence[int]) -> dict[str, float]:
    """What is left of the engine's rates over HTTP; nothing where the engine alone was not measured."""
    return {
        f"http/engine:{figure}@c{count}": ratio(samples, ("http", metric), ("engine", metric))
        for count in clients
        for figure in ("decode", "total")
        if ("engine", metric := f"{figure}@c{count}") in samples
    }


def _check_options(
    text: ModelText, clients: Sequence[int], rates: Sequence[float], longest_prompt: int, new_tokens: int
) -> None:
    if not clients and not rates:
        raise BenchError("nothing to measure: there are neither numbers of clients nor arrival rates")
    if min(clients, default=1) < 1:
        raise BenchError(f"the number of clients must be at least 1, not {min(clients)}")
    if not min(rates, default=1.0) > 0:
        raise BenchError(f"an arrival rate must be a positive number of requests per second, not {min(rates):g}")
    if new_tokens < 2:
        raise BenchError(f"decoding needs at least 2 new tokens, not {new_tokens}")
    context = text.config.max_position_embeddings
    if longest_prompt + new_tokens > context:
        raise BenchError(f"{longest_prompt} + {new_tokens} tokens do not fit the context of {context}")
