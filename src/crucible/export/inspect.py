"""What a model, a checkpoint or a safetensors file holds, for people: checked like a load, without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from crucible.config import AXES, ConfigError, ModelConfig
from crucible.engine.artifact import (
    PROVENANCE_NAME,
    TOKENIZER_NAME,
    ArtifactError,
    model_type_of,
    read_config,
    read_generation,
    read_json,
)
from crucible.engine.safetensors_file import SafetensorsFile, TensorInfo, shown
from crucible.engine.weights import WEIGHTS_NAME, open_weights
from crucible.export.names import to_artifact
from crucible.gguf import model as gguf_model
from crucible.gguf.file import GgufFile
from crucible.gguf.tokenizer import tokenizer_document
from crucible.models import locate
from crucible.tokenizer import Tokenizer, TokenizerError
from crucible.tokenizer.spec import Spec

Kind = Literal["artifact", "checkpoint", "GGUF file", "safetensors file"]

_STATE_NAME: Final = "state.json"
_STATE_SHOWN: Final = ("step", "tokens", "val_loss", "best_step", "best_val_loss")
_FAMILIES: Final = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "crucible": "crucible"}
_UNITS: Final = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What was found.

    Attributes:
        path: what was inspected.
        kind: what it is.
        tensors: in the order of the model, or of the file where no model is known.
        bytes_on_disk: size of the files that hold the tensors.
        config: the model; None for a bare safetensors file.
        tokenizer: None where there is no tokenizer.json.
        end_ids: ids that end a text, from generation_config.json.
        provenance: crucible.json, or where a checkpoint stands in its run.
        metadata: free text of a bare safetensors file.
    """

    path: Path
    kind: Kind
    tensors: tuple[TensorInfo, ...]
    bytes_on_disk: int
    config: ModelConfig | None = None
    tokenizer: Tokenizer | None = None
    end_ids: tuple[int, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    def render(self) -> RenderableType:
        """A summary and the table of tensors, for `rich`. Nothing that a file says can style or move the terminal."""
        summary = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        summary.add_column(style="bold", no_wrap=True)
        summary.add_column(overflow="fold")
        for key, value in _summarise(self):
            summary.add_row(_text(key), _text(value))
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("tensor", overflow="fold")
        for heading in ("shape", "dtype", "bytes"):
            table.add_column(heading, justify="right", no_wrap=True)
        for info in self.tensors:
            shape = " x ".join(map(str, info.shape)) or "scalar"
            table.add_row(_text(info.name), shape, info.dtype, f"{info.nbytes:,}")
        return Group(summary, table)


def inspect(model: str | Path) -> Inspection:
    """Opens a checkpoint's folder, one .safetensors file, or a model as for `models.resolve`; checks all but values.

    Raises:
        ArtifactError: it is none of these, or anything about it is malformed; the message names the file.
        TokenizerError: its tokenizer is not one that we can use.
    """
    path = Path(model)
    if path.suffix == ".safetensors" and path.is_file():
        file = SafetensorsFile(path)
        size = path.stat().st_size
        tensors = tuple(file.tensors.values())
        return Inspection(
            path=path, kind="safetensors file", tensors=tensors, bytes_on_disk=size, metadata=file.metadata
        )
    path, _ = locate(model)
    if path.is_file():
        return _inspect_gguf(path)
    if (path / _STATE_NAME).is_file():
        return _inspect_checkpoint(path)
    if (path / "checkpoints").is_dir():
        raise ArtifactError(
            f"{path} is a run's folder: inspect one of its checkpoints, {path / 'checkpoints' / 'best'}"
        )
    return _inspect_artifact(path)


def _inspect_artifact(path: Path) -> Inspection:
    config = read_config(path)
    files = open_weights(path, config)
    tokenizer, provenance = path / TOKENIZER_NAME, path / PROVENANCE_NAME
    return Inspection(
        path=path,
        kind="artifact",
        tensors=tuple(file.tensors[name] for name, file in files.items()),
        bytes_on_disk=sum(file.stat().st_size for file in {file.path for file in files.values()}),
        config=config,
        tokenizer=Tokenizer.from_file(tokenizer) if tokenizer.exists() else None,
        end_ids=read_generation(path).eos_token_ids,
        provenance=read_json(provenance) if provenance.exists() else {},
    )


def _inspect_gguf(path: Path) -> Inspection:
    file = GgufFile(path)
    config = gguf_model.read_config(file)
    tensors = [(name, file.tensors[stored]) for name, stored in gguf_model.checked_names(file, config).items()]
    return Inspection(
        path=path,
        kind="GGUF file",
        tensors=tuple(TensorInfo(name, info.type.name, info.shape, info.offset, info.nbytes) for name, info in tensors),
        bytes_on_disk=path.stat().st_size,
        config=config,
        tokenizer=Tokenizer(Spec.from_document(tokenizer_document(file))),
        end_ids=gguf_model.read_generation(file).eos_token_ids,
        provenance={key: value for key, value in file.metadata.items() if key.startswith("general.")},
    )


def _inspect_checkpoint(path: Path) -> Inspection:
    state_path, weights_path = path / _STATE_NAME, path / WEIGHTS_NAME
    state = read_json(state_path)
    if not isinstance(state.get("model"), dict):
        raise ArtifactError(f"{state_path}: missing key: model")
    try:
        config = ModelConfig.from_dict(state["model"])
    except ConfigError as error:
        raise ArtifactError(f"{state_path}: model: {error}") from None
    file = SafetensorsFile(weights_path)
    if config.num_hidden_layers > len(file.tensors):  # before tensor_shapes() makes a list of that length
        raise ArtifactError(f"{weights_path}: too few tensors for num_hidden_layers={config.num_hidden_layers}")
    found = {to_artifact(name): info for name, info in file.tensors.items()}
    shapes = config.tensor_shapes()
    for name in sorted(shapes.keys() | found.keys()):
        shape = found[name].shape if name in found else None
        if shape != shapes.get(name):
            raise ArtifactError(
                f"{weights_path}: tensor {shown(name)}: shape is {shape}, by {_STATE_NAME} {shapes.get(name)}"
            )
    return Inspection(
        path=path,
        kind="checkpoint",
        tensors=tuple(found[name] for name in shapes),
        bytes_on_disk=weights_path.stat().st_size,
        config=config,
        provenance={key: state[key] for key in _STATE_SHOWN if key in state},
    )


# ---- words for numbers ----------------------------------------------------------------------------------------------


def _summarise(inspection: Inspection) -> list[tuple[str, str]]:
    dtypes = Counter(info.dtype for info in inspection.tensors)
    rows = [("path", str(inspection.path)), ("kind", inspection.kind)]
    if inspection.config is not None:
        rows += _describe(inspection.config)
    rows += [
        ("tensors", f"{len(inspection.tensors)}: " + ", ".join(f"{n} {dtype}" for dtype, n in dtypes.most_common())),
        ("on disk", _size(inspection.bytes_on_disk)),
    ]
    if inspection.kind in ("artifact", "GGUF file"):
        rows += [("tokenizer", _describe_tokenizer(inspection.tokenizer)), ("ends with", _ids(inspection.end_ids))]
    rows += [row for key, value in inspection.provenance.items() for row in _flat(key, value)]
    rows += list(inspection.metadata.items())
    return rows


def _describe(config: ModelConfig) -> list[tuple[str, str]]:
    scaling = config.rope_scaling
    extras = [name for name in ("qkv_bias", "o_bias", "qk_norm") if getattr(config, name)]
    extras += [f"rope_scaling {scaling.kind} by {scaling.factor:g}"] if scaling is not None else []
    parts = [*(f"{axis} {getattr(config, axis)}" for axis in AXES), *extras]
    sizes = (
        f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, intermediate {config.intermediate_size}, "
        f"{config.num_attention_heads} heads and {config.num_key_value_heads} for keys and values, each of "
        f"{config.head_dim}"
    )
    total, non_embedding = config.num_parameters(), config.num_non_embedding_parameters()
    head = "tied" if config.tie_word_embeddings else "untied"
    return [
        ("architecture", f"{_FAMILIES[model_type_of(config)]}: {', '.join(parts)}"),
        ("sizes", sizes),
        (
            "vocabulary",
            f"{config.vocab_size:,} tokens, {head} output projection",
        ),
        ("context", f"{config.max_position_embeddings:,} tokens"),
        ("parameters", f"{total:,} ({non_embedding:,} outside embeddings)"),
        ("KV cache", f"{config.kv_bytes_per_token():,} bytes per token in f16"),
    ]


def _describe_tokenizer(tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return f"none ({TOKENIZER_NAME} is missing)"
    try:
        end = f"end of text {tokenizer.eot_id}"
    except TokenizerError:
        end = "no end of text"
    return f"{tokenizer.vocab_size:,} tokens, {end}, sha256 {tokenizer.sha256.hex()[:16]}"


def _ids(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids)) or "no id: a text ends at its length only"


def _size(num_bytes: int) -> str:
    scaled, unit = float(num_bytes), 0
    while scaled >= 1000 and unit < len(_UNITS) - 1:
        scaled, unit = scaled / 1000, unit + 1
    return f"{num_bytes:,} bytes" + (f" ({scaled:.1f} {_UNITS[unit]})" if unit else "")


def _flat(key: str, value: Any) -> list[tuple[str, str]]:
    """Rows of a value in JSON: an object is a row for each of its fields."""
    if isinstance(value, Mapping):
        return [row for name, item in value.items() for row in _flat(f"{key}.{name}", item)]
    if isinstance(value, float):
        return [(key, f"{value:.6g}")]
    return [(key, value if isinstance(value, str) else shown(value))]


def _text(value: str) -> Text:
    return Text(value if value.isprintable() else shown(value))
