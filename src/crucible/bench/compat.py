"""`crucible bench compat`: the same work through every surface of the server, interleaved.

A surface that is a thin layer costs next to nothing against the native one with the same prompt: raw text for
completions, a message of a user for chat and messages, whose template makes the prompt longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Final

from crucible.bench.generation import OnRound
from crucible.bench.harness import BenchError, BenchReport, Key, Row, interleave, load_average, ratio
from crucible.bench.load import Job
from crucible.bench.serve import LEAST_REQUESTS, REQUESTS_PER_CLIENT, LoadProcess
from crucible.bench.server import Server, at_url, serving
from crucible.bench.traffic import Passages, Prompt, check, shots, total_rate
from crucible.hardware import usable_cores
from crucible.models import resolve_text

NATIVE_OF: Final = {"completions": "native", "chat": "native-chat", "messages": "native-chat"}
"""The native way to send the prompt that a surface sends."""
SURFACES: Final = ("native", "completions", "native-chat", "chat", "messages")
TEMPLATE_ROOM: Final = 128
"""Tokens that a chat template may add to a message."""


def bench_compat(
    model: str,
    *,
    backend: str = "auto",
    weights: str = "auto",
    clients: Sequence[int] = (1, 8),
    longest_prompt: int = 256,
    new_tokens: int = 128,
    rounds: int = 5,
    url: str | None = None,
    on_round: OnRound | None = None,
) -> BenchReport:
    """Tokens per second, from the first request to the last token, of streams through each surface.

    Args:
        model, backend, weights, rounds, url, on_round: as for `bench.serve.bench_serve`.
        clients: at work at once; rows for each number.
        longest_prompt: of the passages that are sent, in tokens without what a chat template adds.
        new_tokens: tokens drawn by each request.

    Raises:
        BenchError: a number is out of range, the server does not start, a request did not get all its tokens, or two
            surfaces made other prompts of the same message.
        CrucibleError: there is no such model.
    """
    text, before = resolve_text(model), load_average()
    if min(clients, default=0) < 1 or new_tokens < 1:
        raise BenchError(f"{min(clients, default=0)} clients that draw {new_tokens} tokens are not work to measure")
    if longest_prompt + TEMPLATE_ROOM + new_tokens > text.config.max_position_embeddings:
        raise BenchError(
            f"{longest_prompt} + {new_tokens} tokens and a chat template do not fit the context of "
            f"{text.config.max_position_embeddings}"
        )
    counted: dict[str, int] = {}
    passages = Passages(text)
    with ExitStack() as stack:
        server = stack.enter_context(serving(model, backend=backend, weights=weights)) if url is None else at_url(url)
        load = stack.enter_context(LoadProcess())
        variants = {
            f"{surface} c{count}": _variant(
                server,
                load,
                surface,
                count,
                passages.prompts(max(LEAST_REQUESTS, REQUESTS_PER_CLIENT * count), longest_prompt, seed=count),
                new_tokens,
                counted,
            )
            for count in clients
            for surface in SURFACES
        }
        samples = interleave(variants, rounds, on_round=on_round)
    metrics = [f"total@c{count}" for count in clients]
    return BenchReport(
        bench="compat",
        backend=server.backend,
        model=text.name,
        threads=usable_cores(),
        rows=tuple(
            Row(name=name, metric=metric, unit="tok/s", values=tuple(values))
            for (name, metric), values in samples.items()
        ),
        ratios={
            f"{surface}/{native}:{metric}": ratio(samples, (surface, metric), (native, metric))
            for metric in metrics
            for surface, native in NATIVE_OF.items()
        },
        notes=(_prompt_note(counted, clients[-1]), f"{new_tokens} tokens drawn by each request"),
        load=(before, load_average()),
        card=server.card,
    )


def _variant(
    server: Server,
    load: LoadProcess,
    surface: str,
    clients: int,
    asked: Sequence[Prompt],
    new_tokens: int,
    counted: dict[str, int],
) -> Callable[[], Mapping[Key, float]]:
    """Measures a surface; `counted` gets the prompt tokens that the server told, by surface and clients."""
    job = Job(
        host=server.host,
        port=server.port,
        mode="closed",
        clients=clients,
        shots=shots(surface, asked, new_tokens, server.model_id),
    )

    def measure() -> dict[Key, float]:
        outcomes = load.run(job).outcomes
        check(outcomes, new_tokens, asked if surface in ("native", "completions") else None)
        counted[f"{surface} c{clients}"] = sum(outcome.prompt_tokens for outcome in outcomes)
        return {(surface, f"total@c{clients}"): total_rate(outcomes)}

    return measure


def _prompt_note(counted: Mapping[str, int], clients: int) -> str:
    """Raises BenchError: surfaces counted different tokens of the same prompts."""
    found = {surface: counted[f"{surface} c{clients}"] for surface in SURFACES}
    for surface, native in NATIVE_OF.items():
        if found[surface] != found[native]:
            raise BenchError(
                f"the same prompts have {found[native]} tokens by {native} and {found[surface]} by {surface}"
            )
    return (
        f"prompt tokens of all requests of {clients} clients: {found['completions']} raw, {found['chat']} by chat, "
        f"{found['messages']} by messages"
    )
