"""A toy artifact on disk, with a tokenizer of its own and a padded vocabulary; made without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cells import toy
from safetensors.numpy import save_file
from toy_tokenizers import TRAINING_TEXT
from toy_weights import toy_weights

from crucible.engine.artifact import Generation, config_to_json, generation_to_json
from crucible.tokenizer import Tokenizer

VOCAB_SIZE = 300
PADDED_VOCAB_SIZE = 320


def write_toy_artifact(folder: Path, **changes: Any) -> Path:
    """An artifact of `cells.toy(**changes)` with random weights."""
    folder.mkdir(parents=True)
    config = toy(**{"vocab_size": PADDED_VOCAB_SIZE, **changes})
    tokenizer = Tokenizer.train([TRAINING_TEXT], VOCAB_SIZE)
    eot_id = tokenizer.eot_id
    values = config_to_json(config, dtype="f32", bos_token_id=eot_id, eos_token_id=eot_id)
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "generation_config.json").write_text(
        json.dumps(generation_to_json(Generation(eot_id, (eot_id,), eot_id)))
    )
    save_file(toy_weights(config), folder / "model.safetensors")
    tokenizer.save(folder)
    return folder
