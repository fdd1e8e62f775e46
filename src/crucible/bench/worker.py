"""One engine in a process of its own, driven line by line: `python -m crucible.bench.worker ENGINE MODEL ...`.

Several engines in one process would fight over threads and memory. Each line on standard input is a request,
{"ids": [...], "new_tokens": n}; the reply is one line of JSON with the drawn ids and the seconds to the first of them
and from there to the last. The first line written says that the model is loaded, and by what.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Stream = Callable[[Sequence[int], int], Iterator[int]]
"""Prompt ids and a number of tokens to that many greedy tokens, one by one."""


def main() -> None:
    """Serve requests until standard input ends."""
    # Libraries that print must not break the protocol: their standard output becomes standard error.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=["crucible", "llama-cpp", "requantise"])
    parser.add_argument("model")
    parser.add_argument("--format", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=0)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    def reply(values: dict[str, Any]) -> None:
        replies.write(json.dumps(values) + "\n")
        replies.flush()

    if arguments.engine == "requantise":
        from crucible.bench.llama_cpp import requantise

        requantise(Path(arguments.model), arguments.out, arguments.format)
        return
    stream, description = _llama_cpp(arguments) if arguments.engine == "llama-cpp" else _crucible(arguments)
    reply({"ready": description})
    for line in sys.stdin:
        reply(_run(stream, **json.loads(line)))


def _run(stream: Stream, ids: Sequence[int], new_tokens: int) -> dict[str, Any]:
    began = time.perf_counter()
    drawn, times = [], []
    for token_id in stream(ids, new_tokens):
        drawn.append(token_id)
        times.append(time.perf_counter())
    return {"ids": drawn, "first": times[0] - began, "rest": times[-1] - times[0]}


def _crucible(arguments: argparse.Namespace) -> tuple[Stream, str]:
    from crucible.engine.backend import PAGE_SIZE
    from crucible.engine.backends import make_backend, resolve_backend
    from crucible.engine.engine import Engine
    from crucible.engine.request import SamplingParams
    from crucible.models import resolve

    loaded = resolve(arguments.model)
    backend = make_backend(
        arguments.backend,
        loaded.config,
        loaded.weights,
        weight_format=arguments.format,
        num_slots=1,
        num_pages=-(-arguments.context // PAGE_SIZE),
    )
    engine = Engine(backend)

    def stream(ids: Sequence[int], new_tokens: int) -> Iterator[int]:
        engine.add(0, ids, SamplingParams(max_tokens=new_tokens, ignore_eos=True))
        while engine.has_work:
            for event in engine.step():
                if event.token_id is not None:
                    yield event.token_id

    return stream, f"crucible, backend {resolve_backend(arguments.backend)}"


def _llama_cpp(arguments: argparse.Namespace) -> tuple[Stream, str]:
    from crucible.bench.llama_cpp import LlamaCpp, describe

    model = LlamaCpp(Path(arguments.model), threads=arguments.threads, context=arguments.context)

    def stream(ids: Sequence[int], new_tokens: int) -> Iterator[int]:
        token_id = model.begin(ids)
        yield token_id
        for _ in range(new_tokens - 1):
            token_id = model.next(token_id)
            yield token_id

    return stream, describe()


if __name__ == "__main__":
    main()
