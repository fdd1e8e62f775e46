"""Preparing data: the folder against a slow twin, and that neither workers nor kills change a byte of it."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crucible.data import prepare as prepare_module
from crucible.data.prepare import prepare
from crucible.data.progress import Progress, progress_bar
from crucible.data.shards import DataError, Shard, list_shards
from crucible.data.split import document_key, sample, split_of
from crucible.tokenizer import Tokenizer

WORDS = ["the", "a", "of", "stage", "world", "player", "men", "women", "exits", "time", "parts", "schoolboy", "é", "😀"]


def make_texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 120))) + f" {i}\n" for i in range(count)]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "small.json"
    Tokenizer.train(make_texts(100), 320).save(path)
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """150 documents in three files of two kinds."""
    folder, texts = tmp_path / "corpus", make_texts(150)
    folder.mkdir()
    (folder / "a.txt").write_text("\f".join(texts[:40]), encoding="utf-8")
    lines = [json.dumps({"text": text}) for text in [*texts[40:90], "", *texts[90:149]]]
    (folder / "b.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "c.md").write_text(texts[149], encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "_BATCH_BYTES", 2000)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tokens_of(folder: Path, split: str) -> list[int]:
    return [t for path in list_shards(folder, split) for t in Shard.open(path).tokens.tolist()]


# ---- what the folder holds ----------------------------------------------------------------------------------------


def test_the_folder_is_what_a_plain_loop_makes(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    made = prepare(
        [str(corpus)], tmp_path / "out", tokenizer=str(tokenizer), val_fraction=0.2, shard_tokens=1000, seed=3
    )
    loaded = Tokenizer.from_file(tokenizer)
    documents: dict[str, list[str]] = {"train": [], "val": []}
    for index, text in enumerate(make_texts(150)):
        documents[split_of(document_key(text.encode(), 3), index, 0.2)].append(text)
    for split, texts in documents.items():
        expected = [token for text in texts for token in [loaded.eot_id, *loaded.encode(text)]]
        assert tokens_of(made.folder, split) == expected
        shards = [Shard.open(path) for path in list_shards(made.folder, split)]
        assert [shard.num_tokens for shard in shards[:-1]] == [1000] * (len(shards) - 1)
        assert all(s.vocab_size == 320 and s.tokenizer_id == loaded.sha256[:8] for s in shards)
        assert made.meta["splits"][split] == {
            "documents": len(texts),
            "tokens": len(expected),
            "bytes": sum(len(text.encode()) for text in texts),
            "shards": len(shards),
        }
    assert 15 <= len(documents["val"]) <= 45
    assert not made.reused
    assert json.loads((made.folder / "meta.json").read_bytes()) == made.meta
    assert made.meta["tokenizer_sha256"] == Tokenizer.from_file(made.folder).sha256.hex() == loaded.sha256.hex()
    names = {path.name for path in made.folder.iterdir()}
    assert names == {path.name for s in documents for path in list_shards(made.folder, s)} | {
        "meta.json",
        "tokenizer.json",
    }


def test_workers_change_no_byte(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    for workers in (1, 2, 3):
        out = tmp_path / f"out{workers}"
        prepare([str(corpus)], out, tokenizer=str(tokenizer), val_fraction=0.1, shard_tokens=1500, workers=workers)
    assert contents(tmp_path / "out1") == contents(tmp_path / "out2") == contents(tmp_path / "out3")


def test_equal_texts_are_on_one_side_and_the_seed_moves_them() -> None:
    keys = np.array([[document_key(f"text {i}".encode(), seed) for i in range(4000)] for seed in (0, 1)])
    assert ((keys >= 0) & (keys < 1)).all()
    assert abs((keys < 0.1).mean() - 0.1) < 0.015
    assert 0.15 < ((keys[0] < 0.1) != (keys[1] < 0.1)).mean() < 0.21  # 2 * 0.1 * 0.9 where the seeds are independent
    assert document_key(b"text", 0) == 0.10977507583663715
    assert [split_of(0.05, i, 0.1) for i in range(3)] == ["train", "val", "val"]
    assert [split_of(0.5, i, 0.1) for i in range(3)] == ["train", "val", "train"]
    assert [split_of(0.0, i, 0) for i in range(3)] == ["train"] * 3


def test_two_documents_are_enough_and_one_is_not(tmp_path: Path, tokenizer: Path) -> None:
    source, out = tmp_path / "a.txt", tmp_path / "out"
    source.write_text("all the world")
    with pytest.raises(DataError, match=r"one document cannot be divided .*form feeds .*--val-fraction 0"):
        prepare([str(source)], out, tokenizer=str(tokenizer))
    made = prepare([str(source)], out, tokenizer=str(tokenizer), val_fraction=0)
    assert made.meta["splits"]["val"] == {"documents": 0, "tokens": 0, "bytes": 0, "shards": 0}
    with pytest.raises(DataError, match="no shards of the split 'val'"):
        list_shards(out, "val")
    source.write_text("all the world\fis a stage")
    made = prepare([str(source)], out, tokenizer=str(tokenizer), force=True)
    loaded = Tokenizer.from_file(tokenizer)
    assert tokens_of(out, "train") == [loaded.eot_id, *loaded.encode("all the world")]
    assert tokens_of(out, "val") == [loaded.eot_id, *loaded.encode("is a stage")]


def test_no_text_at_all_is_an_error(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text(" \n\f ")
    with pytest.raises(DataError, match=r"a\.txt: no document with any text"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer=str(tokenizer))
    assert not {"meta.json", "train_000000.bin"} & {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("limit", [1, 2, 60, 999, 1000, 1001, 4321, 10**6])
def test_a_token_limit_is_exact(tmp_path: Path, corpus: Path, tokenizer: Path, limit: int) -> None:
    options: dict[str, Any] = {"tokenizer": str(tokenizer), "val_fraction": 0, "shard_tokens": 1000}
    made = prepare([str(corpus / "a.txt")], tmp_path / "out", **options, limit_tokens=limit)
    whole = prepare([str(corpus / "a.txt")], tmp_path / "whole", **options)
    tokens = tokens_of(tmp_path / "whole", "train")[:limit]
    assert tokens_of(tmp_path / "out", "train") == tokens
    counts, loaded = made.meta["splits"]["train"], Tokenizer.from_file(tokenizer)
    assert counts["tokens"] == len(tokens) == min(limit, whole.meta["splits"]["train"]["tokens"])
    assert counts["bytes"] == sum(len(loaded.token_bytes(t)) for t in tokens if t != loaded.eot_id)
    assert counts["documents"] == tokens.count(loaded.eot_id)


def test_a_limit_within_the_first_document_leaves_nothing_to_validate_on(
    tmp_path: Path, corpus: Path, tokenizer: Path
) -> None:
    with pytest.raises(DataError, match="a higher token limit"):
        prepare([str(corpus)], tmp_path / "out", tokenizer=str(tokenizer), limit_tokens=3)


# ---- the tokenizer ------------------------------------------------------------------------------------------------


def test_a_tokenizer_is_trained_on_training_documents_alone(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    train = Tokenizer.train

    def spy(texts: Iterator[str], vocab_size: int) -> Tokenizer:
        seen.extend(texts)
        return train(seen, vocab_size)

    monkeypatch.setattr(Tokenizer, "train", spy)
    made = prepare([str(corpus)], tmp_path / "out", tokenizer="train:300", val_fraction=0.2)
    texts = make_texts(150)
    assert seen == [t for i, t in enumerate(texts) if split_of(document_key(t.encode(), 0), i, 0.2) == "train"]
    assert made.meta["vocab_size"] == Tokenizer.from_file(made.folder).vocab_size == 300
    again = prepare([str(corpus)], tmp_path / "again", tokenizer="train:300", val_fraction=0.2)
    assert contents(made.folder) == contents(again.folder)


def test_a_sample_is_just_large_enough_and_blind_to_order() -> None:
    texts = [text.encode() for text in make_texts(200)]
    options: dict[str, Any] = {"seed": 1, "val_fraction": 0.0, "max_bytes": 5000}
    chosen = sample(texts, **options)
    sizes = [len(text) for text in chosen]
    by_key = sorted(chosen, key=lambda text: document_key(text, 1))
    assert sum(sizes) >= 5000 > sum(sizes) - len(by_key[-1])
    assert max(document_key(t, 1) for t in chosen) < min(document_key(t, 1) for t in texts if t not in chosen)
    assert chosen == [text for text in texts if text in chosen]
    assert sorted(sample(texts[::-1], **options)) == sorted(chosen)
    assert sample(texts, seed=1, val_fraction=0.0, max_bytes=10**9) == texts


# ---- killed and started again -------------------------------------------------------------------------------------

CHILD = """
import os, signal, sys
from pathlib import Path
from crucible.data import prepare as module

corpus, tokenizer, out, workers, last = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
calls = 0

def die(progress):
    global calls
    calls += 1
    if calls == last:
        import multiprocessing
        print(*[child.pid for child in multiprocessing.active_children()], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    module._BATCH_BYTES = 2000
    options = {"val_fraction": 0.1, "shard_tokens": 300, "workers": workers, "progress": die}
    module.prepare([corpus], out, tokenizer=tokenizer, **options)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(("workers", "kills"), [(1, [2, 3, 5]), (2, [4])])
def test_killed_runs_end_in_the_same_bytes(
    tmp_path: Path, corpus: Path, tokenizer: Path, workers: int, kills: list[int]
) -> None:
    script, out = tmp_path / "child.py", tmp_path / "out"
    script.write_text(CHILD)
    done = 0
    for last in kills:
        args = [sys.executable, str(script), str(corpus), str(tokenizer), str(out), str(workers), str(last)]
        child = subprocess.run(args, capture_output=True, text=True, timeout=60, check=False)
        assert child.returncode == -signal.SIGKILL, child.stderr
        deadline = time.monotonic() + 10
        while any(is_running(int(pid)) for pid in child.stdout.split()):
            assert time.monotonic() < deadline, "a worker outlived its parent"
            time.sleep(0.05)
        assert not (out / "meta.json").exists()
        documents = sum(s["documents"] for s in json.loads((out / "progress.json").read_bytes())["splits"].values())
        assert documents > done
        done = documents
    options: dict[str, Any] = {"tokenizer": str(tokenizer), "val_fraction": 0.1, "shard_tokens": 300}
    starts: list[int] = []
    prepare([str(corpus)], out, **options, progress=lambda p: starts.append(p.documents))
    assert starts[0] > done
    prepare([str(corpus)], tmp_path / "straight", **options)
    assert contents(out) == contents(tmp_path / "straight")


class Crash(BaseException):
    """Stands for losing power: nothing of the program runs after it."""


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_crash_at_any_rename_ends_in_the_same_bytes(
    tmp_path: Path, corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    """Every durable step is a rename; each in turn is the last thing that happens, or just doesn't happen."""
    options: dict[str, Any] = {"tokenizer": str(tokenizer), "val_fraction": 0.1, "shard_tokens": 400}
    replace, renames, crash_at = Path.replace, 0, 0

    def counting_replace(path: Path, target: Path) -> Path:
        nonlocal renames
        renames += 1
        if renames == crash_at and before:
            raise Crash
        result = replace(path, target)
        if renames == crash_at:
            raise Crash
        return result

    monkeypatch.setattr(Path, "replace", counting_replace)
    prepare([str(corpus / "a.txt")], tmp_path / "straight", **options)
    total, wanted = renames, contents(tmp_path / "straight")
    assert total >= 12  # shards of both splits, progress with each, tokenizer and meta
    for step in range(1, total + 1):
        out, renames, crash_at = tmp_path / f"out{step}", 0, step
        with pytest.raises(Crash):
            prepare([str(corpus / "a.txt")], out, **options)
        crash_at = 0
        prepare([str(corpus / "a.txt")], out, **options)
        assert contents(out) == wanted, step


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_leaves_what_can_be_continued(tmp_path: Path, corpus: Path, tokenizer: Path, workers: int) -> None:
    options: dict[str, Any] = {
        "tokenizer": str(tokenizer),
        "val_fraction": 0.1,
        "shard_tokens": 500,
        "limit_tokens": 6000,
    }

    def interrupt(progress: Progress) -> None:
        if progress.tokens > 3000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([str(corpus)], tmp_path / "out", **options, workers=workers, progress=interrupt)
    assert (tmp_path / "out" / "train_000002.bin").exists()
    prepare([str(corpus)], tmp_path / "out", **options)
    prepare([str(corpus)], tmp_path / "straight", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


# ---- a folder that is there already -------------------------------------------------------------------------------


def test_a_finished_folder_is_left_alone(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    options: dict[str, Any] = {"tokenizer": str(tokenizer), "val_fraction": 0.1}
    first = prepare([str(corpus)], tmp_path / "out", **options)
    times = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    second = prepare([str(corpus)], tmp_path / "out", **options, workers=3)
    assert (second.reused, second.meta) == (True, first.meta)
    assert {path: path.stat().st_mtime_ns for path in first.folder.iterdir()} == times


@pytest.mark.parametrize("finished", [True, False])
def test_other_arguments_are_named(tmp_path: Path, corpus: Path, tokenizer: Path, finished: bool) -> None:
    options: dict[str, Any] = {"tokenizer": str(tokenizer), "val_fraction": 0.1, "shard_tokens": 500}

    def interrupt(progress: Progress) -> None:
        if not finished and progress.tokens > 1000:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    try:
        prepare([str(corpus)], out, **options, progress=interrupt)
    except KeyboardInterrupt:
        assert not finished
    before = contents(out)
    with pytest.raises(DataError, match=r"seed was 0, now 1; choose another folder, or start anew with --force"):
        prepare([str(corpus)], out, **options, seed=1)
    with pytest.raises(
        DataError, match=r"sources was .*; val_fraction was 0\.1, now 0\.2; limit_tokens was None, now 9"
    ):
        prepare([str(corpus / "a.txt")], out, **{**options, "val_fraction": 0.2}, limit_tokens=9)
    (corpus / "d.txt").write_text("one more")
    with pytest.raises(DataError, match=r"the files of .*corpus have changed"):
        prepare([str(corpus)], out, **options)
    assert contents(out) == before
    (out / "notes.txt").write_text("mine")
    made = prepare([str(corpus)], out, **options, seed=1, force=True)
    prepare([str(corpus)], tmp_path / "fresh", **options, seed=1)
    assert contents(out) == {**contents(tmp_path / "fresh"), "notes.txt": b"mine"}
    assert not made.reused


def test_a_folder_of_something_else_is_refused(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train_000000.bin").write_bytes(b"somebody's")
    with pytest.raises(
        DataError, match=r"out is not empty and was not made by this command: it holds train_000000\.bin"
    ):
        prepare([str(corpus)], tmp_path / "out", tokenizer=str(tokenizer))
    (tmp_path / "out" / "meta.json").write_text("{}")
    with pytest.raises(DataError, match=r"meta\.json: is damaged or was not written by this command"):
        prepare([str(corpus)], tmp_path / "out", tokenizer=str(tokenizer))
    (tmp_path / "out" / "meta.json").write_text("{")
    with pytest.raises(DataError, match=r"meta\.json: is damaged"):
        prepare([str(corpus)], tmp_path / "out", tokenizer=str(tokenizer))
    assert (tmp_path / "out" / "train_000000.bin").read_bytes() == b"somebody's"


def test_a_file_in_the_folder_s_place_is_named(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(DataError, match=r"a\.txt: cannot be made: File exists"):
        prepare([str(corpus)], corpus / "a.txt")


def test_a_finished_folder_that_lost_a_shard_is_refused(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    prepare([str(corpus)], tmp_path / "out", tokenizer=str(tokenizer))
    (tmp_path / "out" / "val_000000.bin").unlink()
    with pytest.raises(DataError, match=r"val_000000\.bin: cannot be read: No such file"):
        prepare([str(corpus)], tmp_path / "out", tokenizer=str(tokenizer))


def test_a_folder_within_its_source_is_found_finished(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    """Our own files there are no text, and are not taken for a change of it."""
    for expected in (False, True):
        assert prepare([str(corpus)], corpus / "out", tokenizer=str(tokenizer)).reused == expected


def test_an_unfinished_folder_that_lost_a_file_is_refused(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    options: dict[str, Any] = {"tokenizer": str(tokenizer), "val_fraction": 0.1, "shard_tokens": 500}

    def interrupt(progress: Progress) -> None:
        if progress.tokens > 3000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([str(corpus)], tmp_path / "out", **options, progress=interrupt)
    (tmp_path / "out" / "train_000001.bin").unlink()
    with pytest.raises(DataError, match=r"train_000001\.bin: cannot be read: No such file"):
        prepare([str(corpus)], tmp_path / "out", **options)


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_text_is_named_and_leaves_nothing_in_the_way(tmp_path: Path, tokenizer: Path, workers: int) -> None:
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_text('{"body": "one"}\n{"body": "two"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: no field 'text'"):
        prepare([str(path)], out, tokenizer=str(tokenizer), workers=workers)
    prepare([str(path)], out, tokenizer=str(tokenizer), text_field="body")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": []}, "no sources"),
        ({"val_fraction": 1.0}, "val_fraction must be from 0 to 0.99, not 1.0"),
        ({"val_fraction": -0.1}, "val_fraction must be"),
        ({"val_fraction": float("nan")}, "val_fraction must be"),
        ({"limit_tokens": 0}, "limit_tokens must be from 1 to "),
        ({"shard_tokens": 1}, "shard_tokens must be from 2 to 2147483647"),
        ({"shard_tokens": 2**31}, "shard_tokens must be from 2 to 2147483647"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"seed": -1}, "seed must be from 0"),
        ({"tokenizer": "train:x"}, "train:x"),
        ({"tokenizer": "gone.json"}, "gone.json"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, corpus: Path, changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"sources": [str(corpus)], "tokenizer": "train:300", **changes}
    with pytest.raises(ValueError, match=message):
        prepare(arguments.pop("sources"), tmp_path / "out", **arguments)


# ---- progress -----------------------------------------------------------------------------------------------------


def test_progress_rises_to_the_whole(tmp_path: Path, corpus: Path) -> None:
    events: list[Progress] = []
    made = prepare([str(corpus)], tmp_path / "out", tokenizer="train:300", progress=events.append)
    stages = [event.stage for event in events]
    assert stages == sorted(stages)
    assert set(stages) == {"tokenizer", "tokens"}
    tokens = [event for event in events if event.stage == "tokens"]
    fractions = [event.fraction for event in tokens]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert tokens[-1].documents == sum(split["documents"] for split in made.meta["splits"].values())
    assert tokens[-1].tokens == sum(split["tokens"] for split in made.meta["splits"].values())


def test_the_bar_shows_counts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with progress_bar() as show:
        show(Progress(stage="tokenizer", documents=5, tokens=0, fraction=0.5))
        show(Progress(stage="tokens", documents=10, tokens=1234567, fraction=None))
        show(Progress(stage="tokens", documents=20, tokens=2345678, fraction=0.75))
    shown = capsys.readouterr().err
    assert "20 documents" in shown
    assert "2,345,678 tokens" in shown
    assert "75%" in shown
