"""`crucible bench compare`: this engine beside llama.cpp, same machine, same threads, same model, in one run.

Ours holds the weights in int8, theirs in Q8_0 that their own tool made of the same file: 8 bits each. Prompts are the
same ids, tokens are drawn greedily and counted. Each engine has a process of its own, and they take turns.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final, Literal, get_args

from crucible.bench.generation import OnRound, prompt_flops, step_bytes
from crucible.bench.harness import BenchError, BenchReport, Key, Row, Samples, interleave, load_average, ratio
from crucible.bench.probes import matmul_flops, read_bandwidth
from crucible.bench.process import EngineProcess, EngineSpec, time_to_first_token, worker_command
from crucible.config import ModelConfig
from crucible.data.sources import documents
from crucible.errors import install
from crucible.hardware import cache_dir, usable_cores
from crucible.models import SMOLLM2, gguf_path, resolve
from crucible.tokenizer import Tokenizer

EngineName = Literal["crucible", "llama-cpp"]
ENGINES: Final[tuple[EngineName, ...]] = get_args(EngineName)

GREEDY_PROMPTS: Final = ("The capital of France is", "Once upon a time", "To boil an egg,", "The moon is")
"""Continued by both engines with f32 weights: in its other formats llama.cpp rounds activations to 8 bits."""
GREEDY_TOKENS: Final = 32


def bench_compare(
    model: str = SMOLLM2,
    *,
    engines: Sequence[str] = ENGINES,
    prompt_tokens: int = 512,
    new_tokens: int = 128,
    rounds: int = 5,
    threads: int | None = None,
    backend: str = "auto",
    on_round: OnRound | None = None,
) -> BenchReport:
    """Prefill, decode and time to the first token of each engine, interleaved, beside this machine's ceilings.

    Files that llama.cpp's tool makes are kept in the cache folder for the next run.

    Args:
        model: a .gguf file, or `smollm2`.
        engines: what to compare; the first is the one whose ratios to the others are given.
        prompt_tokens: of a text that ships.
        new_tokens: tokens drawn after it, at least 2.
        rounds: rounds that count, after one that does not.
        threads: of each engine and of the probes; by default as many as this process may use.
        backend: of our engine, as for `engine.backends.make_backend`.
        on_round: called after each round with the rounds done and their number.

    Raises:
        BenchError: llama-cpp-python is not installed, the model has no .gguf file, a number is out of range, or an
            engine fails or draws another number of tokens.
    """
    source = _checked(model, engines, new_tokens)
    threads = usable_cores() if threads is None else threads
    loaded, before = resolve(model), load_average()
    ids = _prompt(loaded.tokenizer, prompt_tokens)
    context = prompt_tokens + new_tokens
    specs = {
        "crucible": EngineSpec(
            engine="crucible", model=model, format="int8", threads=threads, context=context, backend=backend
        )
    }
    notes = []
    if "llama-cpp" in engines:
        path = requantised(source, "Q8_0")
        specs["llama-cpp"] = EngineSpec(
            engine="llama-cpp", model=str(path), format="Q8_0", threads=threads, context=context
        )
        notes.append(_agreement(loaded.tokenizer, source, model, threads, backend))
    with ExitStack() as stack:
        processes = {name: stack.enter_context(EngineProcess(specs[name])) for name in engines}
        notes += [f"{name}: {process.wait_ready()}" for name, process in processes.items()]
        variants = _probes(threads)
        for name, process in processes.items():
            variants[name] = _generation(name, process, ids, new_tokens)
            variants[f"start of {name}"] = _start(name, specs[name], ids)
        samples = interleave(variants, rounds, on_round=on_round)
    return BenchReport(
        bench="compare",
        backend=" / ".join(f"{name} {specs[name].format}" for name in engines),
        model=loaded.name,
        threads=threads,
        rows=_rows(samples, loaded.config, prompt_tokens, new_tokens),
        ratios=_ratios(samples, engines),
        notes=tuple(notes),
        load=(before, load_average()),
    )


def requantised(source: Path, file_type: Literal["F32", "Q8_0"]) -> Path:
    """A .gguf file in another type, made by llama.cpp's tool and kept in the cache folder under its content's hash.

    Raises:
        BenchError: the tool fails.
    """
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    path = cache_dir() / "bench" / f"{source.stem}-{digest[:16]}-{file_type}.gguf"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    command = worker_command("requantise", str(source), "--format", file_type, "--out", str(partial))
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        partial.unlink(missing_ok=True)
        raise BenchError(f"{source}: llama.cpp did not write it as {file_type}: {done.stderr.strip()[-300:]}")
    partial.replace(path)
    return path


# ---- what is measured -----------------------------------------------------------------------------------------------

Variant = Callable[[], Mapping[Key, float]]


def _probes(threads: int) -> dict[str, Variant]:
    read, flops = read_bandwidth(threads), matmul_flops(threads)
    return {
        "read": lambda: {("memory", "read"): read() / 1e9},
        "matmul": lambda: {("numpy", "f32 matmul"): flops() / 1e9},
    }


def _generation(name: str, process: EngineProcess, ids: Sequence[int], new_tokens: int) -> Variant:
    def measure() -> dict[Key, float]:
        reply = process.ask(ids, new_tokens)
        return {(name, "prefill"): len(ids) / reply.first, (name, "decode"): (new_tokens - 1) / reply.rest}

    return measure


def _start(name: str, spec: EngineSpec, ids: Sequence[int]) -> Variant:
    return lambda: {(name, "ttft"): time_to_first_token(spec, ids)}


def _agreement(tokenizer: Tokenizer, source: Path, model: str, threads: int, backend: str) -> str:
    """A sentence on the greedy tokens of both engines from f32 weights."""
    prompts = [tokenizer.encode(text) for text in GREEDY_PROMPTS]
    context = GREEDY_TOKENS + max(map(len, prompts))
    found: list[list[tuple[int, ...]]] = []
    for engine, path in (("crucible", model), ("llama-cpp", str(requantised(source, "F32")))):
        spec = EngineSpec(engine=engine, model=path, format="f32", threads=threads, context=context, backend=backend)
        with EngineProcess(spec) as process:
            found.append([process.ask(prompt, GREEDY_TOKENS).ids for prompt in prompts])
    equal = sum(ours == theirs for ours, theirs in zip(*found, strict=True))
    return f"with f32 weights {equal} of {len(prompts)} prompts are continued by the same {GREEDY_TOKENS} greedy tokens"


# ---- rows and ratios ------------------------------------------------------------------------------------------------


def _rows(samples: Samples, config: ModelConfig, prompt_tokens: int, new_tokens: int) -> tuple[Row, ...]:
    bandwidth, flops = (1e9 * median(samples[key]) for key in (("memory", "read"), ("numpy", "f32 matmul")))
    # Both engines read about a byte per weight. The least for keys and values: 2 bytes an element.
    step = step_bytes(config, "int8") + config.kv_bytes_per_token(2) * (prompt_tokens + new_tokens / 2)
    units = {"read": "GB/s", "f32 matmul": "GFLOP/s", "ttft": "s", "prefill": "tok/s", "decode": "tok/s"}
    ceilings = {"decode": bandwidth / step, "prefill": prompt_tokens * flops / prompt_flops(config, prompt_tokens)}
    settings = {"prefill": f"prefill@1x{prompt_tokens}", "decode": "decode@b1", "ttft": f"ttft@{prompt_tokens}"}
    keys = [key for metric in ("decode", "prefill", "ttft") for key in samples if key[1] == metric]
    return tuple(
        Row(
            name=name,
            metric=settings.get(metric, metric),
            unit=units[metric],
            values=tuple(samples[name, metric]),
            ceiling=ceilings.get(metric),
        )
        for name, metric in (*keys, *(key for key in samples if key not in keys))
    )


def _ratios(samples: Samples, engines: Sequence[str]) -> dict[str, float]:
    """Of tokens per second, where more is better, and of seconds to the first token, where less is."""
    first, *others = engines
    return {
        f"{first}/{other}:{metric}": ratio(samples, (first, metric), (other, metric))
        for other in others
        for metric in ("decode", "prefill", "ttft")
    }


# ---- checks ---------------------------------------------------------------------------------------------------------


def _checked(model: str, engines: Sequence[str], new_tokens: int) -> Path:
    """The model's .gguf file."""
    for engine in engines:
        if engine not in ENGINES:
            raise BenchError(f"an engine must be one of {', '.join(ENGINES)}, not {engine!r}")
    if not engines or len(set(engines)) < len(engines):
        raise BenchError(f"the engines must be different ones, at least one, not {', '.join(engines) or 'none'}")
    if "llama-cpp" in engines and importlib.util.find_spec("llama_cpp") is None:
        raise BenchError(f"llama-cpp-python is not installed: {install('peers')} builds it")
    if new_tokens < 2:
        raise BenchError(f"decoding needs at least 2 new tokens, not {new_tokens}")
    path = gguf_path(model)
    if path is None:
        raise BenchError(f"{model}: llama.cpp reads a .gguf file, or {SMOLLM2}")
    return path


def _prompt(tokenizer: Tokenizer, count: int) -> list[int]:
    """The first tokens of the text that ships."""
    text = b"\n\n".join(document.utf8 for document in documents("demo"))[: 16 * count + 1000]
    ids = tokenizer.encode(text.decode("utf-8", errors="ignore"))[:count]
    if len(ids) < count or count < 1:
        raise BenchError(f"the prompt must have from 1 to {len(ids)} tokens, not {count}")
    return ids
