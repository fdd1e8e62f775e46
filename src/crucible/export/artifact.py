"""A checkpoint made into an artifact: the folder that the engine loads, and `transformers` too if it is a Llama's."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

import crucible
from crucible.config import ModelConfig
from crucible.engine.artifact import (
    CONFIG_NAME,
    GENERATION_NAME,
    PROVENANCE_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    ArtifactError,
    Dtype,
    Generation,
    config_to_json,
    generation_to_json,
)
from crucible.engine.weights import INDEX_NAME, WEIGHTS_NAME
from crucible.export.names import to_artifact
from crucible.export.target import check_target, new_artifact
from crucible.export.verify import Verification, verify, verify_engine
from crucible.files import write_json
from crucible.tokenizer import Tokenizer
from crucible.train.checkpoint import Checkpoint, Which, load, resolve
from crucible.train.folder import CONFIG_FILE
from crucible.train.folder import read as read_run

__all__ = ["Verification", "export_checkpoint", "verify", "verify_engine"]

_TORCH_DTYPES: Final[Mapping[Dtype, torch.dtype]] = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
}
MAX_SHARD_BYTES: Final = 5_000_000_000
"""Size of tensors above which they are spread over several files, as `transformers` does."""


def export_checkpoint(
    checkpoint_or_run: Path,
    out: Path,
    *,
    which: Which = "best",
    dtype: Dtype = "f32",
    force: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Writes the artifact of a checkpoint and returns its folder, which appears complete or not at all.

    Args:
        checkpoint_or_run: a checkpoint's folder, or a run's, of which `which` is taken.
        out: the folder to make. With `force` it may be an artifact already, which is then moved aside, replaced and
            removed; for the moment between two renames neither stands there, a mixture never does.
        dtype: how tensors are stored, f32, f16 or bf16; rounded to nearest, ties to even.

    Raises:
        CheckpointError, TrainError: there is no such checkpoint, or it or its run's config.json is malformed.
        ArtifactError: `dtype` is none of these, `out` exists and may not be replaced, the run has no tokenizer that
            fits its model, a weight is not finite or out of `dtype`'s range (the message names the tensor), or `out`
            cannot be written; nothing is left behind then, and what stood there still does.
    """
    if dtype not in _TORCH_DTYPES:
        raise ArtifactError(f"dtype must be one of {', '.join(_TORCH_DTYPES)}, not {dtype!r}")
    check_target(Path(out), force=force)  # before the work
    checkpoint = load(resolve(Path(checkpoint_or_run), which))
    tokenizer = _read_tokenizer(checkpoint)
    shards = _split(round_tensors(checkpoint.tensors, dtype), max_shard_bytes)
    with new_artifact(Path(out), force=force) as folder:
        _write_texts(folder, checkpoint, tokenizer, dtype)
        _write_tensors(folder, shards)
    return Path(out)


def round_tensors(tensors: Mapping[str, Tensor], dtype: Dtype) -> dict[str, Tensor]:
    """State_dict tensors under their artifact names and in the artifact's dtype.

    Raises:
        ArtifactError: a value is not finite, before or after rounding; the message names the tensor.
    """
    rounded = {}
    for name, tensor in tensors.items():
        name, target = to_artifact(name), _TORCH_DTYPES[dtype]
        if not tensor.isfinite().all():
            raise ArtifactError(f"tensor {name!r} holds a value that is not finite: this checkpoint is broken")
        rounded[name] = tensor.to(target).contiguous()
        if not rounded[name].isfinite().all():
            raise ArtifactError(
                f"tensor {name!r}: {tensor.abs().max().item():.6g} is out of range for {dtype}, whose largest number "
                f"is {torch.finfo(target).max:.6g}; choose another dtype"
            )
    return rounded


# ---- what is written ------------------------------------------------------------------------------------------------


def _write_texts(folder: Path, checkpoint: Checkpoint, tokenizer: Tokenizer, dtype: Dtype) -> None:
    config, eot_id = checkpoint.model_config, tokenizer.eot_id
    # Training puts one end-of-text between documents: it ends the one and begins the next.
    special = Generation(bos_token_id=eot_id, eos_token_ids=(eot_id,), pad_token_id=eot_id)
    texts = {
        CONFIG_NAME: config_to_json(config, dtype=dtype, bos_token_id=eot_id, eos_token_id=eot_id),
        GENERATION_NAME: generation_to_json(special),
        TOKENIZER_CONFIG_NAME: _tokenizer_config(tokenizer, config),
        PROVENANCE_NAME: _provenance(checkpoint, dtype),
    }
    for name, values in texts.items():
        write_json(folder / name, values)
    (folder / TOKENIZER_NAME).write_bytes(tokenizer.to_json())


def _tokenizer_config(tokenizer: Tokenizer, config: ModelConfig) -> dict[str, Any]:
    """What `transformers.AutoTokenizer` needs beside tokenizer.json to encode and decode exactly as we do."""
    eot = tokenizer.token_bytes(tokenizer.eot_id).decode()
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": eot,
        "eos_token": eot,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
    }


def _provenance(checkpoint: Checkpoint, dtype: Dtype) -> dict[str, Any]:
    """Where the artifact comes from. Nothing needs this to run the model."""
    run, state = _run_folder(checkpoint), checkpoint.state
    values = {"run": run.name, "step": state.step, "tokens": state.tokens, "val_loss": state.val_loss, "dtype": dtype}
    if (run / CONFIG_FILE).is_file():  # else the checkpoint was copied out of its run
        stored = read_run(run)
        values |= {"data": stored.data.get("meta"), "tokenizer_sha256": stored.data.get("tokenizer_sha256")}
        values |= {key: stored.environment.get(key) for key in ("git", "device", "versions")}
    versions = {"crucible": crucible.__version__, "torch": version("torch"), "safetensors": version("safetensors")}
    return {**values, "exported_with": versions}


def _write_tensors(folder: Path, shards: list[dict[str, Tensor]]) -> None:
    if len(shards) == 1:
        save_file(shards[0], folder / WEIGHTS_NAME, metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _split(tensors: Mapping[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    """Tensors in order, a new group wherever the next would exceed `max_bytes`; one that is larger stands alone."""
    shards: list[dict[str, Tensor]] = [{}]
    held = 0
    for name, tensor in tensors.items():
        if shards[-1] and held + tensor.nbytes > max_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = tensor
        held += tensor.nbytes
    return shards


# ---- the run that is read -------------------------------------------------------------------------------------------


def _run_folder(checkpoint: Checkpoint) -> Path:
    """RUN of RUN/checkpoints/step-NNNNNNNN."""
    return checkpoint.path.resolve().parent.parent


def _read_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    path = _run_folder(checkpoint) / TOKENIZER_NAME
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file; an artifact needs the tokenizer that the data was made with")
    tokenizer = Tokenizer.from_file(path)
    if tokenizer.vocab_size > checkpoint.model_config.vocab_size:
        raise ArtifactError(
            f"{path}: {tokenizer.vocab_size} tokens do not fit the model's vocab_size="
            f"{checkpoint.model_config.vocab_size}"
        )
    return tokenizer
