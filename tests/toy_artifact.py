"""A toy artifact on disk, with a tokenizer of its own and a padded vocabulary; made without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from cells import toy
from safetensors.numpy import save_file
from toy_tokenizers import TRAINING_TEXT
from toy_weights import toy_weights

from crucible.engine.artifact import Generation, config_to_json, generation_to_json
from crucible.tokenizer import Tokenizer

VOCAB_SIZE = 300
PADDED_VOCAB_SIZE = 320


def write_toy_artifact(
    folder: Path, *, chat_template: str | None = None, control: Sequence[str] = (), **changes: Any
) -> Path:
    """An artifact of `cells.toy(**changes)` with random weights, and control tokens beside the end of text."""
    folder.mkdir(parents=True)
    config = toy(**{"vocab_size": PADDED_VOCAB_SIZE, **changes})
    library = tokenizers.Tokenizer.from_str(Tokenizer.train([TRAINING_TEXT], VOCAB_SIZE).to_json().decode())
    library.add_special_tokens(list(control))
    tokenizer = Tokenizer.from_bytes(library.to_str().encode())
    eot_id = tokenizer.eot_id
    values = config_to_json(config, dtype="f32", bos_token_id=eot_id, eos_token_id=eot_id)
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "generation_config.json").write_text(
        json.dumps(generation_to_json(Generation(eot_id, (eot_id,), eot_id)))
    )
    save_file(toy_weights(config), folder / "model.safetensors")
    tokenizer.save(folder)
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder
