"""The tokens of a run: which shards, whose tokenizer, and whether the model fits them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from crucible.config import ModelConfig, preset
from crucible.data.loader import PAD_TARGET, Batch, Loader, LoaderState
from crucible.data.shards import Shard, list_shards
from crucible.tokenizer import Tokenizer
from crucible.train.config import TrainConfig, TrainError

VALIDATION_SEED: Final = 0
"""The windows of an evaluation are the same in every run, whatever its seed."""
_VOCAB_MULTIPLE: Final = 64
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The checked data folder of a run."""

    train: list[Path]
    val: list[Path]
    tokenizer: bytes | None
    """Canonical tokenizer.json; None for shards from elsewhere that came without one."""
    identity: dict[str, Any]
    """What two folders with the same tokens have in common, ready for JSON: meta.json, tokenizer hash, shard hashes."""
    vocab_is_known: bool
    """Whether every shard states its vocabulary, which the loader then checks each batch against."""

    @classmethod
    def open(cls, config: TrainConfig) -> Inputs:
        """Finds and checks the shards of `config.data` against its tokenizer and `config.model`.

        Raises:
            DataError: there is no train or no val shard, or one is malformed.
            TrainError: shards, tokenizer.json and model contradict one another; the message names both sides.
        """
        train, val = list_shards(config.data, "train"), list_shards(config.data, "val")
        shards = [Shard.open(path) for path in (*train, *val)]
        file = config.data / "tokenizer.json"
        tokenizer = Tokenizer.from_file(file) if file.exists() else None
        for shard in shards:
            _check_shard(shard, shards[0], tokenizer, file, config)
        meta = config.data / "meta.json"
        identity = {
            "meta": json.loads(meta.read_bytes()) if meta.exists() else None,
            "tokenizer_sha256": tokenizer.sha256.hex() if tokenizer else None,
            "shards": [
                {"name": shard.path.name, "tokens": shard.num_tokens, "sample_sha256": sample_sha256(shard.path)}
                for shard in shards
            ],
        }
        return cls(
            train=train,
            val=val,
            tokenizer=tokenizer.to_json() if tokenizer else None,
            identity=identity,
            vocab_is_known=all(shard.vocab_size for shard in shards),
        )

    def loader(self, config: TrainConfig, state: LoaderState | None = None, *, prefetch: int = 2) -> Loader:
        """The training batches of a run from a position on, by default from its beginning."""
        return Loader(
            self.train,
            batch_size=config.batch_size,
            context_length=config.context_length,
            seed=config.seed,
            state=state,
            prefetch=prefetch,
        )

    def validation_batches(self, config: TrainConfig) -> list[Batch]:
        """The windows that every evaluation uses, [B, T] each; rows that fill up the last batch are all padding.

        A random sample without repetition of about `config.eval_tokens` tokens, or the whole split.

        Raises:
            TrainError: as `check_vocabulary`.
        """
        width = config.context_length
        available = sum(-(-(Shard.open(path).num_tokens - 1) // width) for path in self.val)
        wanted = min(available, -(-config.eval_tokens // width))
        batches = []
        with Loader(
            self.val, batch_size=config.batch_size, context_length=width, seed=VALIDATION_SEED, prefetch=0
        ) as loader:
            for done in range(0, wanted, config.batch_size):
                tokens_BT, targets_BT = loader.next_batch()
                targets_BT[wanted - done :] = PAD_TARGET
                self.check_vocabulary((tokens_BT, targets_BT), config)
                batches.append((tokens_BT, targets_BT))
        return batches

    def check_vocabulary(self, batch: Batch, config: TrainConfig) -> None:
        """Whether the model has every token of a batch, looked at only where the shards do not promise it.

        Raises:
            TrainError: naming the token.
        """
        if not self.vocab_is_known:
            largest = max(int(array.max()) for array in batch)
            if largest >= config.model.vocab_size:
                raise TrainError(
                    f"{config.data} holds token {largest}, the model's vocab_size is {config.model.vocab_size}"
                )


def model_for(preset_name: str, data: Path, changes: Mapping[str, Any]) -> ModelConfig:
    """A preset with some fields changed and a vocabulary that fits a data folder.

    The vocabulary is that of the shards, rounded up to a multiple of 64 (where matrix products are fastest), and the
    preset's own where the shards do not state theirs.

    Raises:
        ConfigError: no such preset, or the changes make no model.
        DataError: there are no shards in the folder.
    """
    stated = max(Shard.open(path).vocab_size for split in ("train", "val") for path in list_shards(data, split))
    vocab_size = -(-stated // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE or preset(preset_name).vocab_size
    return preset(preset_name).vary(**{"vocab_size": vocab_size, **changes})


def sample_sha256(path: Path) -> str:
    """SHA-256 over the size of a file and 16 blocks of 4 KiB spread evenly from its first to its last byte.

    It tells two data sets apart in milliseconds, at any size; it is no proof against one changed token.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for start in np.linspace(0, max(0, size - _SAMPLE_BYTES), _SAMPLES).astype(np.int64):
            file.seek(int(start))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _check_shard(shard: Shard, first: Shard, tokenizer: Tokenizer | None, file: Path, config: TrainConfig) -> None:
    if shard.vocab_size > config.model.vocab_size:
        raise TrainError(
            f"{shard.path} was made with a vocabulary of {shard.vocab_size} tokens, the model's vocab_size is "
            f"{config.model.vocab_size}: give the model at least as many"
        )
    if shard.tokenizer_id and tokenizer and shard.tokenizer_id != tokenizer.sha256[: len(shard.tokenizer_id)]:
        raise TrainError(
            f"{shard.path} was made with tokenizer {shard.tokenizer_id.hex()}, {file} is tokenizer "
            f"{tokenizer.sha256[: len(shard.tokenizer_id)].hex()}: prepare the data anew"
        )
    if shard.tokenizer_id != first.tokenizer_id:
        raise TrainError(
            f"{shard.path} was made with tokenizer {shard.tokenizer_id.hex() or 'unknown'}, {first.path} with "
            f"{first.tokenizer_id.hex() or 'unknown'}: prepare the data anew"
        )
