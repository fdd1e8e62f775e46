"""The whole path through the command line and through the demo, on little text and few steps."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from toy_tokenizers import TRAINING_TEXT

from crucible import cli, demo
from crucible.data.shards import write_shard


def crucible(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["crucible", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_from_text_to_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("\f".join([TRAINING_TEXT] * 12))
    prepare = ("prepare", "text.txt", "--out", "data", "--tokenizer", "train:300", "--val-fraction", "0.3")
    train = ("train", "--data", "data", "--run", "run", "--preset", "nano", "--attention", "mqa", "--device", "cpu")
    sizes = ("--steps", "4", "--warmup-steps", "1", "--eval-every", "2", "--save-every", "2", "--context-length", "32")
    assert crucible(monkeypatch, *prepare) == 0
    assert crucible(monkeypatch, *prepare) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert crucible(monkeypatch, *train, *sizes) == 0
    assert "step 4 of 4" in capsys.readouterr().out
    assert crucible(monkeypatch, "export", "run", "--out", "artifact") == 0
    assert "transformers" in capsys.readouterr().out
    assert crucible(monkeypatch, "inspect", "artifact") == 0
    assert "mqa" in capsys.readouterr().out
    assert crucible(monkeypatch, "generate", "artifact", "-p", "the cat", "-n", "5") == 0
    assert capsys.readouterr().out.startswith("the cat")

    for arguments, message in (
        ((*train, *sizes), "run already holds a run: resume it (--resume)"),
        (("train", "--run", "other", "--steps", "3"), "--data is needed"),
        (("train", "--run", "other", "--data", "data"), "give --steps or --minutes, and not both"),
        (("train", "--run", "run", "--resume", "--lr", "1"), "lr was 0.002, is 1.0"),
        (("train", "--run", "run", "--resume", "--norm", "layernorm"), "leave out --norm"),
        (("train", "--run", "other", "--data", "data", "--preset", "nona", "--steps", "3"), "no preset 'nona'"),
        (("export", "run", "--out", "artifact"), "artifact exists"),
        (("export", "nowhere", "--out", "x"), "nowhere"),
    ):
        assert crucible(monkeypatch, *arguments) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_a_resumed_command_needs_no_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, count in (("train_000000", 600), ("val_000000", 100)):
        write_shard(tmp_path / f"{name}.bin", [n * n % 61 for n in range(count)], vocab_size=61)
    run = tmp_path / "run"
    options = ("--steps", "3", "--warmup-steps", "1", "--context-length", "16", "--device", "cpu")
    assert crucible(monkeypatch, "train", "--data", tmp_path, "--run", run, *options) == 0
    assert crucible(monkeypatch, "train", "--run", run, "--resume") == 0
    assert "step 3 of 3" in capsys.readouterr().out.splitlines()[-1]


def test_the_demo_walks_the_path_and_reuses_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.run(minutes=0.03, prompt="It is", root=tmp_path)
    shown = " ".join(capsys.readouterr().out.split())
    for stage in ("1/4 Prepare", "2/4 Train", "3/4 Export", "4/4 Generate", "crucible inspect"):
        assert stage in shown
    assert "reused" not in shown
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert tmp_path / "artifacts" / "demo" / "model.safetensors" in files

    demo.run(minutes=0.03, prompt="It is", root=tmp_path)
    assert capsys.readouterr().out.count("(reused") == 3
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}


def test_unigram_entropy(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", [0, 1, 1, 2], vocab_size=5)
    write_shard(tmp_path / "b.bin", [4, 1, 1, 4], vocab_size=5)
    shares = [1 / 8, 4 / 8, 1 / 8, 2 / 8]
    found = demo.unigram_entropy([tmp_path / "a.bin", tmp_path / "b.bin"])
    assert found == pytest.approx(-sum(share * math.log(share) for share in shares))
