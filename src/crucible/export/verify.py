"""Proof that an artifact computes what its checkpoint computes: every stored value, then logits of random tokens."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from crucible.config import ModelConfig
from crucible.engine import runner
from crucible.engine.artifact import ArtifactError, declares_int8, read_config
from crucible.engine.reference import ReferenceBackend
from crucible.engine.weights import load_weights, open_weights
from crucible.export.names import from_artifact
from crucible.model.attention import AttentionPath
from crucible.model.transformer import Transformer
from crucible.train.checkpoint import Checkpoint, Which, load, resolve

Logits = Callable[[Tensor], Tensor]
"""Token ids int64 [T] to f32 logits [T, V]."""

MAX_ERROR: Final = 2.0**-15
"""Largest relative error of a position's logits, 3.1e-5 or 512 roundings of f32. Measured on random weights without
small values, from toy size to 30 M parameters: up to 2e-6 against the engine, 4e-6 between torch programs."""

MAX_ERROR_PER_POSITION: Final = 2.0**-21
"""What each position may add against `transformers`, which computes RoPE's angles in f32, so that they are off by up to
position * 2^-23; ours come from float64. Measured, at up to 4,096 positions: under 2^-26."""

ENGINE_LENGTHS: Final = (1, 17, 130)
"""Sequences for the reference backend, which is slow: one token, and past the borders of pages (16) and chunks (64)."""

_TOKEN_SEED: Final = 20240520
_STORED: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """Two computations compared on random tokens, and found equal to rounding.

    Attributes:
        against: what computed the artifact's logits.
        lengths: tokens of each sequence.
        max_relative_error: largest over all positions of max |a - b| / max |b|, both over the vocabulary; b are the
            checkpoint's logits.
        top1_agreement: part of the positions at which both have the same likeliest token.
        notice: what was left out and why, if anything was.
    """

    against: str
    lengths: tuple[int, ...]
    max_relative_error: float
    top1_agreement: float
    notice: str | None = None

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"logits agree with {self.against}: relative error at most {self.max_relative_error:.1e} and the same "
            f"likeliest token at {self.top1_agreement:.1%} of {sum(self.lengths):,} positions, in sequences of up to "
            f"{max(self.lengths):,} tokens" + (f" ({self.notice})" if self.notice else "")
        )


def verify(artifact: Path, checkpoint_or_run: Path, *, which: Which = "best") -> Verification:
    """Compares an artifact, read back from disk, with the checkpoint that it was made from.

    Every tensor must equal, bit for bit, the checkpoint's rounded to the stored dtype. Then logits are compared, of
    sequences up to the full context and computed in f32 from the stored values on both sides: the checkpoint's by our
    torch model; the artifact's by `transformers` where it is a plain Llama's, else by our torch model again, with the
    other of its two attention paths.

    Raises:
        CheckpointError, ArtifactError: one of them cannot be read, or they differ; the message says where.
    """
    artifact, checkpoint = Path(artifact), load(resolve(Path(checkpoint_or_run), which))
    config, tensors = _read_back(artifact, checkpoint)
    notice, error_per_position = None, 0.0
    if config.is_llama and importlib.util.find_spec("transformers"):
        against, candidate = _transformers_logits(artifact)
        error_per_position = MAX_ERROR_PER_POSITION
    else:
        against, candidate = "our torch model", _torch_logits(config, tensors, attention_path="materialised")
        if config.is_llama:
            notice = "transformers is not installed, so no independent implementation was compared"
    reference = _torch_logits(checkpoint.model_config, tensors)
    context = config.max_position_embeddings
    lengths = tuple(sorted({1, min(17, context), -(-context // 2), context}))
    error, agreement = _compare(artifact, candidate, reference, config.vocab_size, lengths, error_per_position)
    return Verification(
        against=against, lengths=lengths, max_relative_error=error, top1_agreement=agreement, notice=notice
    )


def verify_engine(artifact: Path, checkpoint_or_run: Path, *, which: Which = "best") -> Verification:
    """As `verify`, but the artifact's logits are those of the engine's reference backend, on short sequences.

    Raises:
        CheckpointError, ArtifactError: as `verify`.
    """
    artifact, checkpoint = Path(artifact), load(resolve(Path(checkpoint_or_run), which))
    config, tensors = _read_back(artifact, checkpoint)
    lengths = tuple(sorted({min(length, config.max_position_embeddings) for length in ENGINE_LENGTHS}))
    reference = _torch_logits(checkpoint.model_config, tensors)
    error, agreement = _compare(artifact, _engine_logits(artifact, config), reference, config.vocab_size, lengths)
    return Verification(
        against="the engine's reference backend", lengths=lengths, max_relative_error=error, top1_agreement=agreement
    )


# ---- the parts of a comparison --------------------------------------------------------------------------------------


def _read_back(artifact: Path, checkpoint: Checkpoint) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The artifact's config and, by state_dict name, its tensors in f32; both are what the checkpoint says."""
    if declares_int8(artifact):
        raise ArtifactError(f"{artifact}: int8 tensors are compared with an artifact, by verify_int8")
    config, wanted = read_config(artifact), checkpoint.model_config.to_dict()
    # The name of the head grouping follows from the counts; for one head a Llama configuration does not hold it.
    for key, value in config.to_dict().items():
        if key != "attention" and value != wanted[key]:
            raise ArtifactError(f"{artifact}: {key} is {value!r}, in the checkpoint {wanted[key]!r}")
    tensors = {}
    for name, file in open_weights(artifact, config).items():
        stored = torch.from_numpy(file.array(name).astype(np.float32))
        tensor = checkpoint.tensors[from_artifact(name)]
        rounded = tensor.to(_STORED[file.tensors[name].dtype]).float()
        if not torch.equal(stored.view(torch.int32), rounded.view(torch.int32)):
            raise ArtifactError(f"{file.path}: tensor {name!r} differs from {checkpoint.path}")
        tensors[from_artifact(name)] = stored
    return config, tensors


def _compare(
    artifact: Path,
    candidate: Logits,
    reference: Logits,
    vocab_size: int,
    lengths: Iterable[int],
    error_per_position: float = 0.0,
) -> tuple[float, float]:
    """The largest relative error and the top-1 agreement. Raises ArtifactError where an error is above its bound."""
    generator = torch.Generator().manual_seed(_TOKEN_SEED)
    largest, agreed, positions = 0.0, 0, 0
    for length in lengths:
        ids_T = torch.randint(vocab_size, (length,), generator=generator)
        found_TV, wanted_TV = candidate(ids_T), reference(ids_T)
        error_T = (found_TV - wanted_TV).abs().amax(dim=-1) / wanted_TV.abs().amax(dim=-1)
        bound_T = MAX_ERROR + error_per_position * torch.arange(length)
        failed_T = ~(error_T <= bound_T)  # a NaN fails too
        if failed_T.any():
            position = int(failed_T.nonzero()[0])
            raise ArtifactError(
                f"{artifact}: logits differ from the checkpoint's: relative error {error_T[position]:.2g} at position "
                f"{position} of {length}, above the bound of {bound_T[position]:.2g}"
            )
        largest = max(largest, error_T.max().item())
        agreed += int((found_TV.argmax(dim=-1) == wanted_TV.argmax(dim=-1)).sum())
        positions += length
    return largest, agreed / positions


def _torch_logits(
    config: ModelConfig, tensors: Mapping[str, Tensor], *, attention_path: AttentionPath = "fused"
) -> Logits:
    model = Transformer(config, attention_path=attention_path)
    model.load_state_dict(dict(tensors))

    def logits(ids_T: Tensor) -> Tensor:
        with torch.inference_mode():
            logits_BTV: Tensor = model(ids_T[None])
        return logits_BTV[0]

    return logits


def _transformers_logits(artifact: Path) -> tuple[str, Logits]:
    import transformers

    log: Any = transformers.logging
    shows_progress = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            artifact, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except Exception as error:  # its config checks raise types of several libraries
        raise ArtifactError(f"{artifact}: transformers {transformers.__version__} cannot load it: {error}") from error
    finally:
        if shows_progress:
            log.enable_progress_bar()
    model, report = loaded
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[problem]:
            raise ArtifactError(f"{artifact}: transformers finds {problem}: {sorted(report[problem])}")
    model.float().eval()

    def logits(ids_T: Tensor) -> Tensor:
        with torch.inference_mode():
            logits_BTV: Tensor = model(ids_T[None], use_cache=False).logits
        return logits_BTV[0]

    return f"transformers {transformers.__version__}", logits


def _engine_logits(artifact: Path, config: ModelConfig) -> Logits:
    backend = ReferenceBackend(config, load_weights(artifact, config))
    return lambda ids_T: torch.from_numpy(runner.logits(backend, ids_T.tolist()))
