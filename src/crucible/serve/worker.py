"""The engine's process: `python -m crucible.serve.worker ADDRESS PARENT`, started by `serve/supervisor.py`.

It owns the model and the device, and does whatever its parent says through a channel: signals of a terminal do not
concern it. It does not outlive its parent, in whatever way that ends.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import zmq

from crucible.engine.request import SamplingParams
from crucible.errors import CrucibleError
from crucible.serve.channel import (
    Add,
    Cancel,
    Channel,
    Detail,
    EngineConfig,
    Failed,
    FromEngine,
    Loading,
    Logprobs,
    Ping,
    Pong,
    Ready,
    Refused,
    Start,
    Stats,
    Step,
    Stop,
    ToEngine,
    connect,
)

if TYPE_CHECKING:
    from crucible.engine.engine import Engine, Event
    from crucible.models import ModelText

_Parent: TypeAlias = Channel[FromEngine, ToEngine]

_PR_SET_PDEATHSIG: Final = 1
_LINGER_MS: Final = 1000

_NULL_TEXT: Final = (
    "The quick brown fox jumps over the lazy dog while five wizards boil a very big pot of soup, and nobody asks why. "
)
"""What the backend `null` says."""


def main() -> None:
    """Serve until the parent says Stop, or is gone."""
    began = time.perf_counter()
    address, parent = sys.argv[1], int(sys.argv[2])
    _die_with(parent)
    faulthandler.enable()
    os.dup2(2, 1)  # nothing that a library prints shall be taken for what the parent prints
    # The parent decides when this ends: a terminal's Ctrl-C goes to it, which may have answers to finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with zmq.Context[zmq.Socket[bytes]]() as context:
        channel = connect(context, address)
        try:
            _run(channel, began)
        finally:
            channel.close(_LINGER_MS)


def _run(channel: _Parent, began: float) -> None:
    channel.send(Loading("starting the engine"))
    start = channel.receive()
    assert isinstance(start, Start)
    try:
        engine, ready = _load(start.config, lambda stage: channel.send(Loading(stage)), began)
    except CrucibleError as error:
        channel.send(Failed(str(error)))
        return
    except MemoryError as error:
        channel.send(Failed(f"out of memory; fewer kv_pages or a smaller max_batch takes less: {error}"))
        return
    channel.send(ready)
    _serve(channel, engine)


# ---- never without its parent -----------------------------------------------------------------------------------


def _die_with(parent: int) -> None:
    """End this process when its parent does.

    Linux does it even while this process is stopped. Elsewhere the end of standard input says it, whose other end
    nobody but the parent holds.
    """
    threading.Thread(target=_wait_for_end_of_input, name="lifeline", daemon=True).start()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(1)


def _wait_for_end_of_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


# ---- starting ---------------------------------------------------------------------------------------------------


def _load(config: EngineConfig, notify: Callable[[str], Any], began: float) -> tuple[Engine, Ready]:
    """Raises CrucibleError: the model cannot be had or run, or an option is out of range."""
    from crucible.engine.backend import PAGE_SIZE
    from crucible.engine.backends import (
        affordable_pages,
        default_weight_format,
        make_backend,
        resolve_backend,
        serving_budget,
    )
    from crucible.engine.engine import Engine
    from crucible.engine.fingerprint import fingerprint
    from crucible.models import LoadedModel, resolve, resolve_text

    name = resolve_backend(config.backend)
    notify(f"reading {config.model}")
    model: ModelText = resolve_text(config.model) if name == "null" else resolve(config.model)
    weights = model.weights if isinstance(model, LoadedModel) else {}
    weight_format: Any = default_weight_format(name) if config.weights == "auto" else config.weights
    num_pages = affordable_pages(model.config, config.max_batch) if config.kv_pages is None else config.kv_pages
    notify(f"preparing the {name} backend")
    with ThreadPoolExecutor(1) as pool:
        mark = pool.submit(fingerprint, model.config, weights, name, weight_format)
        backend = make_backend(
            name,
            model.config,
            weights,
            weight_format=weight_format,
            num_slots=config.max_batch,
            num_pages=num_pages,
            null_ids=model.tokenizer.encode(_NULL_TEXT) if name == "null" else (),
        )
    options = {key: getattr(config, key) for key in ("prefill_budget", "prefill_chunk", "look_ahead")}
    chosen = {"prefill_budget": serving_budget(name)}
    chosen |= {key: value for key, value in options.items() if value is not None}
    engine = Engine(backend, eos_ids=model.generation.eos_token_ids, **chosen)
    return engine, Ready(
        backend=name,
        device=_device(name),
        weights=weight_format,
        max_batch=backend.num_slots,
        num_pages=backend.num_pages,
        page_size=PAGE_SIZE,
        context=model.config.max_position_embeddings,
        vocab_size=model.config.vocab_size,
        fingerprint=mark.result(),
        seconds=time.perf_counter() - began,
    )


def _device(backend: str) -> str:
    """What a backend computes on, in words."""
    from crucible.hardware import cpu, machine

    if backend == "null":
        return "none"
    if backend == "cuda":
        return machine().gpus[0].name
    return f"{cpu().model}, {cpu().usable_cores} threads"


# ---- serving ----------------------------------------------------------------------------------------------------


def _serve(channel: _Parent, engine: Engine) -> None:
    """Step after step while there is work; asleep while there is none.

    Everything that came in during a step is taken in before the next, so that requests of one moment share a step.
    """
    while True:
        while channel.has_message or not engine.has_work:
            match channel.receive():
                case Add(number, prompt_ids, params):
                    _add(channel, engine, number, prompt_ids, params)
                case Cancel(number):
                    engine.cancel(number)
                case Ping(sequence):
                    channel.send(Pong(sequence))
                case Stop():
                    return
        channel.send(_step(engine.step(), engine))


def _add(channel: _Parent, engine: Engine, number: int, prompt_ids: list[int], params: dict[str, Any]) -> None:
    try:
        engine.add(number, prompt_ids, SamplingParams(**params))
    except CrucibleError as error:
        channel.send(Refused(number, str(error)))


def _step(events: list[Event], engine: Engine) -> Step:
    numbers: list[Any] = []
    ids: list[int] = []
    ends: list[tuple[int, str]] = []
    details: list[Detail] = []
    for event in events:
        number: Any = event.request_id
        if event.token_id is not None:
            numbers.append(number)
            ids.append(event.token_id)
        if event.finish is not None:
            ends.append((number, event.finish))
        if event.timing is not None or event.logprobs is not None:
            details.append(_detail(number, event))
    return Step(numbers, ids, ends, details, _stats(engine))


def _detail(number: int, event: Event) -> Detail:
    scores, prompt_scores, timing = event.logprobs, event.prompt_logprobs, event.timing
    return Detail(
        number,
        None if scores is None else Logprobs(scores.logprob, list(scores.top_ids), list(scores.top_logprobs)),
        None if prompt_scores is None else list(prompt_scores),
        None if timing is None else timing.queue_seconds,
        None if timing is None else timing.prefill_seconds,
    )


def _stats(engine: Engine) -> Stats:
    stats = engine.stats
    return Stats(*(getattr(stats, name) for name in Stats.__struct_fields__))


if __name__ == "__main__":
    main()
