"""What a run refuses: folders, configs, data and models that do not fit one another."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cells import toy
from train_runs import raise_at, toy_run, write_data

from crucible.config import PRESETS, ConfigError
from crucible.data.shards import DataError, write_shard
from crucible.tokenizer import Tokenizer
from crucible.train.config import TrainError
from crucible.train.inputs import model_for
from crucible.train.loop import train

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_existing_run_is_never_overwritten(tmp_path):
    train(toy_run(tmp_path), on_event=raise_at(2))
    before = outcome_files(tmp_path / "run")
    with pytest.raises(TrainError, match=r"run already holds a run: resume it \(--resume\) or give another folder"):
        train(toy_run(tmp_path))
    assert outcome_files(tmp_path / "run") == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.tex").touch()
    with pytest.raises(TrainError, match=r"other holds other files \(thesis.tex\)"):
        train(toy_run(tmp_path, "other"))


def outcome_files(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_there_must_be_a_run_to_resume(tmp_path):
    with pytest.raises(TrainError, match=r"run holds no run to resume \(no config.json\)"):
        train(toy_run(tmp_path), resume=True)
    assert not (tmp_path / "run").exists()


def test_resume_with_another_config_or_other_data_is_refused_and_changes_nothing(tmp_path):
    train(toy_run(tmp_path), on_event=raise_at(6))
    before = outcome_files(tmp_path / "run")
    with pytest.raises(TrainError, match=r"batch_size was 5, is 4; lr was 0.01, is 0.02"):
        train(toy_run(tmp_path, lr=2e-2, batch_size=4), resume=True)
    with pytest.raises(TrainError, match="number of steps can only change"):
        train(toy_run(tmp_path, steps=30), resume=True)
    tokens = np.arange(331) % 67
    write_shard(tmp_path / "data/train_000001.bin", tokens, vocab_size=67)
    with pytest.raises(TrainError, match="does not hold the data"):
        train(toy_run(tmp_path), resume=True)
    assert outcome_files(tmp_path / "run") == before


def test_only_one_process_trains_in_a_run(tmp_path):
    (tmp_path / "run").mkdir()
    code = (
        "import fcntl, os, sys\n"
        "fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], **pipes) as other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(TrainError, match="another process is training in"):
            train(toy_run(tmp_path))
        other.stdin.close()
    train(toy_run(tmp_path, steps=1, warmup_steps=0))


def test_data_and_model_must_fit(tmp_path):
    with pytest.raises(TrainError, match=r"vocabulary of 67 tokens, the model's vocab_size is 64"):
        train(toy_run(tmp_path, model=toy(vocab_size=64)))
    assert not (tmp_path / "run").exists()
    (tmp_path / "data/val_000000.bin").unlink()
    with pytest.raises(DataError, match="val"):
        train(toy_run(tmp_path))


def test_a_token_that_the_shards_do_not_promise_is_found(tmp_path):
    """A shard from elsewhere that does not state its vocabulary."""
    config = toy_run(tmp_path, model=toy(vocab_size=60))
    for path in config.data.iterdir():
        content = bytearray(path.read_bytes())
        content[12:16] = bytes(4)
        path.write_bytes(content)
    only_val = toy_run(tmp_path, "other", model=toy(vocab_size=60), data=tmp_path / "only-val")
    shutil.copytree(config.data, only_val.data)
    for number in range(2):
        write_shard(only_val.data / f"train_00000{number}.bin", np.arange(50), vocab_size=60)
    with pytest.raises(TrainError, match=r"only-val holds token 6\d"):
        train(only_val)
    with pytest.raises(TrainError, match=r"data holds token 6\d, the model's vocab_size is 60"):
        train(config)
    train(toy_run(tmp_path, "fits", steps=2, warmup_steps=0))


def test_shards_of_another_tokenizer_are_refused_and_the_run_gets_its_own(tmp_path):
    tokenizer = Tokenizer.train(["a b a b c"] * 20, vocab_size=260)
    ours, theirs = tokenizer.sha256[:8], bytes(range(8))
    write_data(tmp_path / "data", tokenizer_id=ours, vocab_size=260)
    tokenizer.save(tmp_path / "data/tokenizer.json")
    model = toy(vocab_size=260)
    train(toy_run(tmp_path, model=model, steps=1, warmup_steps=0))
    assert Tokenizer.from_file(tmp_path / "run/tokenizer.json").sha256 == tokenizer.sha256
    stored = json.loads((tmp_path / "run/config.json").read_text())
    assert stored["data"]["tokenizer_sha256"] == tokenizer.sha256.hex()
    write_shard(tmp_path / "data/val_000000.bin", np.arange(60), vocab_size=260, tokenizer_id=theirs)
    with pytest.raises(TrainError, match=f"{theirs.hex()}.*{ours.hex()}"):
        train(toy_run(tmp_path, "other", model=model))
    (tmp_path / "data/tokenizer.json").unlink()
    with pytest.raises(TrainError, match=f"{theirs.hex()}.*{ours.hex()}"):
        train(toy_run(tmp_path, "other", model=model))


@pytest.mark.parametrize(("stated", "expected"), [(67, 128), (2048, 2048), (50257, 50304), (0, 50304)])
def test_a_preset_gets_the_vocabulary_of_its_data(tmp_path, stated, expected):
    data = write_data(tmp_path / "data", vocab_size=stated or 67)
    if not stated:
        for path in data.iterdir():
            content = bytearray(path.read_bytes())
            content[12:16] = bytes(4)
            path.write_bytes(content)
    assert model_for("30m", data, {}) == PRESETS["30m"].vary(vocab_size=expected)
    assert model_for("30m", data, {"vocab_size": 70_000, "norm": "layernorm"}).vocab_size == 70_000
    with pytest.raises(ConfigError, match="unknown key dropout"):
        model_for("30m", data, {"dropout": 0.1})
