"""`crucible bench decode` and `crucible bench prefill`: tokens per second of one backend beside the machine's ceiling.

Decode is bound by memory: every step reads all weights once, and each request's keys and values. Prefill is bound by
arithmetic. A ceiling divides what a probe measured in the same rounds by the bytes or operations that the work cannot
do without; an engine that moves or computes more falls short of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import numpy.typing as npt

from crucible.bench.harness import BenchError, BenchReport, Key, Row, Samples, interleave, load_average
from crucible.bench.probes import matmul_flops, read_bandwidth
from crucible.config import ModelConfig, preset
from crucible.engine.backend import PAGE_SIZE, Backend
from crucible.engine.backends import make_backend, resolve_backend
from crucible.engine.engine import Engine
from crucible.engine.quant import Weight, WeightFormat, chunk_size, is_matrix, num_chunks
from crucible.engine.request import SamplingParams
from crucible.hardware import usable_cores
from crucible.models import resolve

OnRound = Callable[[int, int], None]

_PROMPT_SEED: Final = 20240520


@dataclass(frozen=True, slots=True)
class Subject:
    """A model in a backend, ready to be measured; the names and the format are for the report."""

    name: str
    backend: Backend
    backend_name: str
    weight_format: WeightFormat

    @property
    def is_gpu(self) -> bool:
        """Whether the probes of `bench/gpu.py` are the ceilings."""
        return self.backend_name == "cuda"

    @property
    def card(self) -> str | None:
        """The card as it is at this moment."""
        if not self.is_gpu:
            return None
        from crucible.bench.gpu import describe

        return describe(self.backend.gpu)  # type: ignore[attr-defined]

    @property
    def threads(self) -> int:
        """Threads that the backend computes with; where it does not say, those that a library of its would take."""
        return int(getattr(self.backend, "num_threads", usable_cores()))


def bench_decode(
    model: str | Path | None,
    *,
    random: str | None = None,
    backend: str = "auto",
    weight_format: WeightFormat = "int8",
    batches: Sequence[int] = (1,),
    prompt_tokens: int = 512,
    new_tokens: int = 128,
    rounds: int = 5,
    on_round: OnRound | None = None,
) -> BenchReport:
    """Tokens per second of greedy decoding, all requests of a batch together, after prompts of random ids.

    The clock runs from the step that gave the last of the first tokens to the step that gave the last of all.

    Args:
        model: as for `crucible.LLM`; None with `random`.
        random: a preset, whose weights are drawn at random: speed does not depend on what they are.
        backend: as for `engine.backends.make_backend`.
        weight_format: what matrices are held in.
        batches: requests at once; a row each.
        prompt_tokens: tokens of each prompt.
        new_tokens: tokens drawn by each request, at least 2.
        rounds: rounds that count, after one that does not.
        on_round: called after each round with the rounds done and their number.

    Raises:
        BenchError: a number is out of range, or the engine gave other tokens than were asked for.
        CrucibleError: the model cannot be loaded.
    """
    subject = _load(model, random, backend, weight_format, max(batches, default=0), prompt_tokens + new_tokens)
    return measure_decode(
        subject,
        batches=batches,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        rounds=rounds,
        on_round=on_round,
    )


def bench_prefill(
    model: str | Path | None,
    *,
    random: str | None = None,
    backend: str = "auto",
    weight_format: WeightFormat = "int8",
    shapes: Sequence[tuple[int, int]] = ((1, 512),),
    rounds: int = 5,
    on_round: OnRound | None = None,
) -> BenchReport:
    """Prompt tokens per second, from the first step to the one that gave the last of the first tokens.

    Args:
        model, random, backend, weight_format, rounds, on_round: as for `bench_decode`.
        shapes: for each row the number of prompts and the tokens of each.

    Raises:
        BenchError, CrucibleError: as `bench_decode`.
    """
    requests = max((requests for requests, _ in shapes), default=0)
    positions = 1 + max((tokens for _, tokens in shapes), default=0)
    subject = _load(model, random, backend, weight_format, requests, positions)
    return measure_prefill(subject, shapes=shapes, rounds=rounds, on_round=on_round)


def measure_decode(
    subject: Subject,
    *,
    batches: Sequence[int],
    prompt_tokens: int,
    new_tokens: int,
    rounds: int,
    on_round: OnRound | None = None,
) -> BenchReport:
    """`bench_decode` of a model that is loaded."""
    config, name = subject.backend.config, subject.name
    if new_tokens < 2:
        raise BenchError(f"decoding needs at least 2 new tokens, not {new_tokens}")
    for batch in batches:
        _check(subject.backend, batch, prompt_tokens, new_tokens)

    def decode(batch: int) -> Callable[[], dict[Key, float]]:
        def measure() -> dict[Key, float]:
            _, seconds = run_engine(subject.backend, batch, prompt_tokens, new_tokens)
            return {(name, f"decode@b{batch}"): batch * (new_tokens - 1) / seconds}

        return measure

    memory, probe = _memory(subject)
    variants: dict[str, Callable[[], dict[Key, float]]] = {"memory": lambda: {memory: probe() / 1e9}}
    variants |= {f"b{batch}": decode(batch) for batch in batches}
    # Halfway through what is drawn.
    position = prompt_tokens + new_tokens // 2
    if subject.is_gpu:
        variants |= {f"b{n} kernels": _kernels(subject, f"kernels@b{n}", n, position, 1) for n in batches}
    samples, load = _measure(variants, rounds, on_round)
    bandwidth = 1e9 * median(samples[memory])
    weights = step_bytes(config, subject.weight_format)
    # A request reads on average the keys and values of its prompt and of half of what it draws.
    is_half = subject.is_gpu and subject.weight_format != "f32"
    cache = config.kv_bytes_per_token(2 if is_half else 4) * (prompt_tokens + new_tokens / 2)
    ceilings: dict[Key, float | None] = {memory: None}
    for batch in batches:
        ceilings[name, f"decode@b{batch}"] = batch * bandwidth / (weights + batch * cache)
        ceilings[name, f"kernels@b{batch}"] = ceilings[name, f"decode@b{batch}"]
    return BenchReport(
        bench="decode",
        backend=f"{subject.backend_name} {subject.weight_format}",
        model=name,
        threads=subject.threads,
        rows=_rows(samples, ceilings, {memory[1]: "GB/s"}),
        notes=(
            f"after {prompt_tokens} prompt tokens, {new_tokens} drawn by each request; a step reads "
            f"{weights / 1e6:.1f} MB of weights and on average {cache / 1e6:.1f} MB of keys and values per request",
            *_KERNELS_NOTE[: subject.is_gpu],
        ),
        load=load,
        card=subject.card,
    )


def measure_prefill(
    subject: Subject, *, shapes: Sequence[tuple[int, int]], rounds: int, on_round: OnRound | None = None
) -> BenchReport:
    """`bench_prefill` of a model that is loaded."""
    config, name = subject.backend.config, subject.name
    for requests, tokens in shapes:
        _check(subject.backend, requests, tokens, 1)

    def prefill(requests: int, tokens: int) -> Callable[[], dict[Key, float]]:
        def measure() -> dict[Key, float]:
            seconds, _ = run_engine(subject.backend, requests, tokens, 1)
            return {(name, f"prefill@{requests}x{tokens}"): requests * tokens / seconds}

        return measure

    product, probe = _product(subject)
    variants: dict[str, Callable[[], dict[Key, float]]] = {"product": lambda: {product: probe() / 1e9}}
    variants |= {f"{requests}x{tokens}": prefill(requests, tokens) for requests, tokens in shapes}
    if subject.is_gpu:
        variants |= {f"{n}x{k} kernels": _kernels(subject, f"kernels@{n}x{k}", n, 0, k) for n, k in shapes}
    samples, load = _measure(variants, rounds, on_round)
    rate = 1e9 * median(samples[product])
    ceilings: dict[Key, float | None] = {product: None}
    for requests, tokens in shapes:
        ceilings[name, f"prefill@{requests}x{tokens}"] = tokens * rate / prompt_flops(config, tokens)
        ceilings[name, f"kernels@{requests}x{tokens}"] = ceilings[name, f"prefill@{requests}x{tokens}"]
    return BenchReport(
        bench="prefill",
        backend=f"{subject.backend_name} {subject.weight_format}",
        model=name,
        threads=subject.threads,
        rows=_rows(samples, ceilings, {product[1]: "GFLOP/s"}),
        notes=(
            f"the ceiling is the work of the prompt's matrix products at the rate of {' '.join(product)}",
            *_KERNELS_NOTE[: subject.is_gpu],
        ),
        load=load,
        card=subject.card,
    )


def run_engine(backend: Backend, requests: int, prompt_tokens: int, new_tokens: int) -> tuple[float, float]:
    """Run greedy requests with prompts of random ids to their end: seconds to the last of the first tokens, and after.

    Raises:
        BenchError: a request drew another number of tokens than `new_tokens`.
    """
    # A GPU takes as many rows at once as its buffers hold.
    rows = getattr(backend, "max_rows", None)
    engine = Engine(backend) if rows is None else Engine(backend, prefill_budget=rows, prefill_chunk=rows)
    rng = np.random.default_rng(_PROMPT_SEED)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    for request in range(requests):
        engine.add(request, rng.integers(backend.config.vocab_size, size=prompt_tokens).tolist(), params)
    drawn = [0] * requests
    began = time.perf_counter()
    first = None
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event.request_id, int)
            drawn[event.request_id] += event.token_id is not None
        if first is None and all(drawn):
            first = time.perf_counter()
    ended = time.perf_counter()
    if first is None or drawn != [new_tokens] * requests:
        raise BenchError(f"{requests} requests were to draw {new_tokens} tokens each and drew {drawn}")
    return first - began, ended - first


def step_bytes(config: ModelConfig, weight_format: WeightFormat) -> int:
    """Bytes of weights that a decode step reads: every tensor once, of an untied embedding next to nothing."""
    total = 0
    for name, shape in config.tensor_shapes().items():
        if name == "model.embed_positions.weight" or (
            name == "model.embed_tokens.weight" and not config.tie_word_embeddings
        ):
            continue
        if not is_matrix(name) or weight_format == "f32":
            total += 4 * int(np.prod(shape))
        elif weight_format == "f16":
            total += 2 * shape[0] * shape[1] + 4 * shape[0]
        else:
            total += shape[0] * shape[1] + 4 * shape[0] * num_chunks(shape[1], chunk_size(config, name))
    return total


def prompt_flops(config: ModelConfig, tokens: int) -> int:
    """Operations of a prompt's matrix products: attention causal, the output projection for the last token alone."""
    head = 2 * config.vocab_size * config.hidden_size
    return tokens * config.flops_per_token(tokens // 2, backward=False) - (tokens - 1) * head


def random_weights(config: ModelConfig) -> dict[str, npt.NDArray[np.float32]]:
    """Tensors of a model that has learned nothing."""
    rng = np.random.default_rng(_PROMPT_SEED)
    return {
        name: np.ones(shape, dtype=np.float32)
        if len(shape) == 1
        else rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
        for name, shape in config.tensor_shapes().items()
    }


_KERNELS_NOTE: Final = (
    "kernels: a step's kernels alone, a captured graph replayed on the device without copies, drawing or host",
)


def _memory(subject: Subject) -> tuple[Key, Callable[[], float]]:
    """The row of the memory's bandwidth, and its probe."""
    if subject.is_gpu:
        from crucible.bench.gpu import copy_bandwidth

        return ("memory", "copy"), copy_bandwidth(subject.backend.gpu)  # type: ignore[attr-defined]
    return ("memory", "read"), read_bandwidth(subject.threads)


def _product(subject: Subject) -> tuple[Key, Callable[[], float]]:
    """The row of the arithmetic units' rate, and its probe."""
    if subject.is_gpu:
        from crucible.bench.gpu import tensor_flops

        return ("tensor cores", "f16 mma.sync"), tensor_flops(subject.backend.gpu)  # type: ignore[attr-defined]
    return ("numpy", "f32 matmul"), matmul_flops(subject.threads)


def _kernels(subject: Subject, metric: str, requests: int, start: int, rows: int) -> Callable[[], dict[Key, float]]:
    from crucible.bench.gpu import step_rate

    probe = step_rate(subject.backend, requests, start, rows)  # type: ignore[arg-type]
    return lambda: {(subject.name, metric): probe()}


def _load(
    model: str | Path | None,
    random: str | None,
    backend: str,
    weight_format: WeightFormat,
    requests: int,
    positions: int,
) -> Subject:
    if (model is None) == (random is None):
        raise BenchError("what is measured is a model or, with --random, a preset: one of the two")
    config: ModelConfig
    weights: Mapping[str, Weight]
    if random is not None:
        name, config = f"random {random}", preset(random)
        # Nothing was learned about positions either, so there may be more of them.
        config = config.vary(max_position_embeddings=max(config.max_position_embeddings, positions))
        weights = random_weights(config)
    else:
        loaded = resolve(str(model))
        name, config, weights = loaded.name, loaded.config, loaded.weights
    if positions > config.max_position_embeddings:
        raise BenchError(f"{positions} tokens do not fit the context of {config.max_position_embeddings}")
    held = make_backend(
        backend,
        config,
        weights,
        weight_format=weight_format,
        num_slots=max(1, requests),
        num_pages=max(1, requests) * -(-positions // PAGE_SIZE),
    )
    return Subject(name, held, resolve_backend(backend), weight_format)


def _check(backend: Backend, requests: int, prompt_tokens: int, new_tokens: int) -> None:
    """Raises BenchError where the requests cannot all run at once."""
    if requests < 1 or prompt_tokens < 1 or new_tokens < 1:
        raise BenchError(f"{requests} requests of {prompt_tokens} + {new_tokens} tokens are not work to measure")
    positions = prompt_tokens + new_tokens
    if positions > backend.config.max_position_embeddings:
        raise BenchError(f"{positions} tokens do not fit the context of {backend.config.max_position_embeddings}")
    pages = requests * -(-positions // PAGE_SIZE)
    if requests > backend.num_slots or pages > backend.num_pages:
        raise BenchError(
            f"{requests} requests at once take {requests} slots and {pages} pages; the backend has "
            f"{backend.num_slots} and {backend.num_pages}"
        )


def _measure(
    variants: dict[str, Callable[[], dict[Key, float]]], rounds: int, on_round: OnRound | None
) -> tuple[Samples, tuple[float, float]]:
    before = load_average()
    samples = interleave(variants, rounds, on_round=on_round)
    return samples, (before, load_average())


def _rows(samples: Samples, ceilings: dict[Key, float | None], units: dict[str, str]) -> tuple[Row, ...]:
    """Rows of tokens per second, and those of the probes, whose units are given by metric."""
    return tuple(
        Row(
            name=name,
            metric=metric,
            unit=units.get(metric, "tok/s"),
            values=tuple(values),
            ceiling=ceilings[name, metric],
        )
        for (name, metric), values in samples.items()
    )
