"""Checkpoint folders: what is in them, where the links point, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from cells import axis_cells, toy
from safetensors import SafetensorError
from safetensors.torch import save_file

from crucible.model.transformer import Transformer
from crucible.train import checkpoint
from crucible.train.checkpoint import CheckpointError, TrainingState, load, load_optimizer, resolve, save


def save_step(run: Path, step: int, *, best: int | None, config=None, val_loss: float = 2.5) -> Path:
    config = config or toy()
    model = Transformer(config)
    model.init_weights(step)
    return save(
        run,
        model_config=config,
        tensors=model.state_dict(),
        optimizer={"step.norm.weight": torch.tensor(float(step))},
        state=TrainingState(
            step=step,
            tokens=100 * step,
            val_loss=val_loss,
            best_step=best,
            best_val_loss=None if best is None else 1 / 3,
            loader={"epoch": 1, "shard": 0, "offset": 7, "seed": 2**63},
            rng=checkpoint.capture_rng(),
        ),
    )


def folders(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize("config", axis_cells())
def test_everything_reads_back_exactly(tmp_path, config):
    torch.manual_seed(11)
    path = save_step(tmp_path, 5, best=5, config=config)
    found = load(path)
    model = Transformer(config)
    model.init_weights(5)
    assert found.model_config == config
    assert found.tensors.keys() == model.state_dict().keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in model.state_dict().items())
    assert {name: tensor.item() for name, tensor in load_optimizer(path).items()} == {"step.norm.weight": 5.0}
    assert (found.state.step, found.state.tokens, found.state.val_loss) == (5, 500, 2.5)
    assert (found.state.best_step, found.state.best_val_loss) == (5, 1 / 3)
    assert found.state.loader == {"epoch": 1, "shard": 0, "offset": 7, "seed": 2**63}
    drawn = torch.rand(3)
    torch.manual_seed(0)
    checkpoint.restore_rng(found.state.rng)
    assert torch.equal(torch.rand(3), drawn)


def test_only_what_best_and_last_point_to_is_kept(tmp_path):
    save_step(tmp_path, 1, best=None)
    assert folders(tmp_path) == ["last", "step-00000001"]
    save_step(tmp_path, 2, best=2)
    assert folders(tmp_path) == ["best", "last", "step-00000002"]
    save_step(tmp_path, 3, best=2)
    save_step(tmp_path, 4, best=2)
    assert folders(tmp_path) == ["best", "last", "step-00000002", "step-00000004"]
    assert (tmp_path / "checkpoints/best").readlink() == Path("step-00000002")
    assert resolve(tmp_path, "best") == (tmp_path / "checkpoints/step-00000002").resolve()
    assert resolve(tmp_path, "last") == (tmp_path / "checkpoints/step-00000004").resolve()
    for step in (99_999_999, 100_000_000):  # where names no longer sort as numbers do
        save_step(tmp_path, step, best=step)
        assert folders(tmp_path) == ["best", "last", f"step-{step}"]


def test_a_path_may_be_the_run_its_checkpoints_or_one_of_them(tmp_path):
    path = save_step(tmp_path, 3, best=3)
    for given in (tmp_path, tmp_path / "checkpoints", path, tmp_path / "checkpoints/last"):
        assert resolve(given) == path.resolve()


def test_a_path_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        resolve(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"neither a checkpoint \(no state.json\) nor a run"):
        resolve(tmp_path)
    save_step(tmp_path, 3, best=None)
    with pytest.raises(CheckpointError, match="has no 'best' checkpoint yet, but a 'last' one"):
        resolve(tmp_path, "best")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="file names of descriptors are read from /proc")
def test_every_byte_is_on_disk_before_the_name_appears(tmp_path, monkeypatch):
    """The order of system calls that survives a power cut: contents, folder, rename, parent."""
    calls: list[str] = []

    def noted(name, real):
        def call(*arguments, **keywords):
            target = arguments[0] if isinstance(arguments[0], int) else Path(arguments[0]).name
            if isinstance(target, int):
                target = Path(f"/proc/self/fd/{target}").readlink().name
            calls.append(f"{name} {target}")
            return real(*arguments, **keywords)

        return call

    for name in ("fsync", "rename", "replace", "symlink"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    save_step(tmp_path, 1, best=1)
    monkeypatch.undo()
    renamed = calls.index("rename .tmp-step-00000001")
    for file in ("model.safetensors", "optimizer.safetensors", ".state.json.partial", ".tmp-step-00000001"):
        assert f"fsync {file}" in calls[:renamed]
    assert calls[renamed + 1] == "fsync checkpoints"
    assert calls[renamed + 2 :] == [
        "symlink step-00000001",
        "replace .tmp-last",
        "fsync checkpoints",
        "symlink step-00000001",
        "replace .tmp-best",
        "fsync checkpoints",
    ]


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
@pytest.mark.parametrize("call", [1, 2])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, failure, call):
    save_step(tmp_path, 1, best=1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    calls = []

    def fails(tensors, path):
        calls.append(path)
        if len(calls) == call:
            Path(path).write_bytes(b"half")
            raise failure
        save_file(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", fails)
    with pytest.raises(CheckpointError, match=r"cannot save .*step-00000002: .*No space left on device"):
        save_step(tmp_path, 2, best=2)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert load(resolve(tmp_path, "last")).state.step == 1


def test_repair_finishes_a_save_that_was_cut_off_after_its_rename(tmp_path):
    save_step(tmp_path, 1, best=1)
    old = tmp_path / "old"
    shutil.copytree(tmp_path / "checkpoints", old / "checkpoints", symlinks=True)
    save_step(tmp_path, 2, best=2)
    shutil.copytree(tmp_path / "checkpoints/step-00000002", old / "checkpoints/step-00000002")
    (old / "checkpoints/.tmp-step-00000003").mkdir()
    (old / "checkpoints/.tmp-last").symlink_to("nowhere")
    checkpoint.repair(old)
    assert folders(old) == ["best", "last", "step-00000002"]
    assert load(resolve(old, "best")).state.step == load(resolve(old, "last")).state.step == 2
    checkpoint.repair(old)
    assert folders(old) == ["best", "last", "step-00000002"]


def test_repair_of_nothing_is_nothing(tmp_path):
    checkpoint.repair(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda s: {**s, "format": 2}, "format 2, this version reads 1"),
        (lambda s: {k: v for k, v in s.items() if k != "loader"}, "missing key 'loader'"),
        (lambda s: {k: v for k, v in s.items() if k != "model"}, "missing key 'model'"),
        (lambda s: {**s, "model": {**s["model"], "norm": "batch"}}, "norm must be one of"),
        (lambda s: [], "cannot read"),
    ],
)
def test_a_malformed_state_is_refused_by_the_name_of_its_file(tmp_path, change, complaint):
    path = save_step(tmp_path, 1, best=1)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(change(state)))
    with pytest.raises(CheckpointError, match=rf"state\.json: .*{complaint}|cannot read .*state\.json"):
        load(path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: {**t, "extra": torch.zeros(2)}, "tensor extra .* not part of the model"),
        (lambda t: {k: v for k, v in t.items() if k != "norm.weight"}, "tensor norm.weight is missing"),
        (lambda t: {**t, "norm.weight": torch.zeros(23)}, r"tensor norm.weight is \(\(23,\)"),
        (lambda t: {**t, "norm.weight": torch.zeros(24).half()}, "tensor norm.weight .*float16"),
    ],
)
def test_tensors_that_are_not_the_config_s_are_refused(tmp_path, change, complaint):
    path = save_step(tmp_path, 1, best=1)
    save_file(change(load(path).tensors), path / "model.safetensors")
    with pytest.raises(CheckpointError, match=complaint):
        load(path)


def test_a_truncated_or_missing_tensor_file_is_refused(tmp_path):
    path = save_step(tmp_path, 1, best=1)
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[:-4])
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
        load(path)
    (path / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*optimizer\.safetensors"):
        load_optimizer(path)


def test_files_have_the_mode_that_the_user_s_umask_gives(tmp_path):
    path = save_step(tmp_path, 1, best=1)
    probe = tmp_path / "probe"
    probe.touch()
    assert {file.stat().st_mode for file in path.iterdir()} == {probe.stat().st_mode}
