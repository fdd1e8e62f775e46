"""The shard format: what one side writes the other reads, and nothing malformed gets past the header."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crucible.data.shards import DataError, Shard, ShardWriter, list_shards, write_shard
from crucible.files import partial_path

ID = hashlib.sha256(b"tokenizer").digest()[:8]


def llmc_shard(path: Path, tokens: list[int], dtype: str = "<u2", version: int = 1) -> Path:
    """A shard as llm.c's `write_datafile` makes one, written here independently."""
    header = np.zeros(256, dtype=np.int32)
    header[0], header[1], header[2] = 20240520, version, len(tokens)
    path.write_bytes(header.tobytes() + np.array(tokens, dtype).tobytes())
    return path


def llmc_load(path: Path) -> list[int]:
    """What llm.c's and modded-nanogpt's loaders do: three header words, then the file to its end."""
    data = path.read_bytes()
    header = np.frombuffer(data[:1024], np.int32)
    assert header[0] == 20240520
    assert header[1] == 1
    assert len(data) == 1024 + int(header[2]) * 2
    return np.frombuffer(data[1024:], np.uint16).tolist()


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
@pytest.mark.parametrize("vocab_size", [300, 2**16, 2**16 + 1, 200_000])
def test_round_trip(tmp_path: Path, vocab_size: int, count: int) -> None:
    tokens = np.random.default_rng(count).integers(0, vocab_size, count)
    if count:
        tokens[0] = vocab_size - 1
    path = tmp_path / "train_000000.bin"
    write_shard(path, tokens, vocab_size=vocab_size, tokenizer_id=ID)
    shard = Shard.open(path)
    assert (shard.num_tokens, shard.vocab_size, shard.tokenizer_id) == (count, vocab_size, ID)
    assert shard.dtype.itemsize == (2 if vocab_size <= 2**16 else 4)
    assert shard.tokens.tolist() == tokens.tolist()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_header_bytes_are_pinned(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", [1, 513], vocab_size=50257, tokenizer_id=bytes(range(1, 9)))
    data = (tmp_path / "a.bin").read_bytes()
    assert data[:24].hex() == "88d8340101000000" + "0200000051c40000" + "0102030405060708"
    assert data[24:1024] == bytes(1000)
    assert data[1024:].hex() == "01000102"


def test_llmc_reads_ours_and_we_read_theirs(tmp_path: Path) -> None:
    tokens = [50256, 464, 2159, 318, 257, 0, 50256]
    write_shard(tmp_path / "ours.bin", tokens, vocab_size=50257, tokenizer_id=ID)
    assert llmc_load(tmp_path / "ours.bin") == tokens
    theirs = Shard.open(llmc_shard(tmp_path / "theirs.bin", tokens))
    assert theirs.tokens.tolist() == tokens
    assert (theirs.vocab_size, theirs.tokenizer_id) == (0, b"")


@settings(max_examples=50, deadline=None)
@given(parts=st.lists(st.lists(st.integers(0, 999), max_size=20), max_size=8))
def test_appending_in_parts_is_writing_at_once(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    with ShardWriter(folder / "parts.bin", vocab_size=1000, tokenizer_id=ID) as writer:
        for part in parts:
            writer.append(part)
    write_shard(folder / "whole.bin", [t for part in parts for t in part], vocab_size=1000, tokenizer_id=ID)
    assert (folder / "parts.bin").read_bytes() == (folder / "whole.bin").read_bytes()


def test_a_closed_writer_is_continued_where_it_is_told_to(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    writer = ShardWriter(path, vocab_size=100)
    writer.append([1, 2, 3, 4, 5])
    writer.close()
    assert not path.exists()
    with pytest.raises(DataError, match="6 tokens"):
        ShardWriter(path, vocab_size=100, keep=6)
    with ShardWriter(path, vocab_size=100, keep=3) as writer:
        assert writer.num_tokens == 3
        writer.append([9])
    assert Shard.open(path).tokens.tolist() == [1, 2, 3, 9]


def test_an_exception_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_shard(path, [7], vocab_size=100)
    writer = ShardWriter(path, vocab_size=100)
    writer.append([1, 2])
    assert partial_path(path).exists()
    writer.__exit__(KeyError, KeyError(), None)
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]
    assert Shard.open(path).tokens.tolist() == [7]


@pytest.mark.parametrize("tokens", [[100], [0, -1], [2**40], np.array([[1]]), [1.5]])
def test_writer_refuses_what_is_no_token(tmp_path: Path, tokens: object) -> None:
    with pytest.raises(DataError, match=r"a\.bin"):
        write_shard(tmp_path / "a.bin", tokens, vocab_size=100)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_writer_names_the_token_and_the_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="token 100 is outside the vocabulary of 100"):
        write_shard(tmp_path / "a.bin", [99, 100], vocab_size=100)
    with pytest.raises(DataError, match="vocab_size must be"):
        write_shard(tmp_path / "a.bin", [], vocab_size=0)
    with pytest.raises(DataError, match="tokenizer_id must be 8 bytes"):
        write_shard(tmp_path / "a.bin", [], vocab_size=10, tokenizer_id=b"short")


def header(*words: int) -> bytes:
    padded = np.zeros(256, "<i4")
    padded[: len(words)] = words
    return padded.tobytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes are no shard"),
        (header(20240520, 1, 0)[:-1], "1023 bytes are no shard"),
        (header(20240521, 1, 0), "magic number 20240521, expected 20240520"),
        (b"PK\3\4" + bytes(1020), "not a token shard"),
        (header(20240520, 0, 0), "version 0 is unknown"),
        (header(20240520, 3, 0), "version 3 is unknown"),
        (header(20240520, 1, 3) + bytes(5), "truncated: 3 tokens make 1030 bytes, the file has 1029"),
        (header(20240520, 1, 3) + bytes(7), "trailing bytes: 3 tokens make 1030 bytes, the file has 1031"),
        (header(20240520, 2, 3) + bytes(6), "truncated: 3 tokens make 1036 bytes, the file has 1030"),
        (header(20240520, 1, 2**31 - 1), "truncated: 2147483647 tokens make 4294968318 bytes"),
        (header(20240520, 1, -1) + bytes(2), "trailing bytes: -1 tokens make 1022 bytes, the file has 1026"),
        (header(20240520, 1, 1, -5) + bytes(2), "vocabulary of -5"),
        (header(20240520, 1, 1, 65537) + bytes(2), "vocabulary of 65537 does not fit tokens of 2 bytes"),
    ],
)
def test_malformed_files_are_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        Shard.open(path)
    assert str(path) in str(caught.value)


def test_an_unfinished_shard_is_no_shard(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "a.bin", vocab_size=100)
    writer.append([1, 2, 3])
    writer.close()
    with pytest.raises(DataError, match="magic number 0"):
        Shard.open(partial_path(tmp_path / "a.bin"))


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.bin: cannot be read: No such file"):
        Shard.open(tmp_path / "gone.bin")
    with pytest.raises(DataError, match="nowhere: no such folder"):
        list_shards(tmp_path / "nowhere", "train")
    with pytest.raises(DataError, match="no shards of the split 'val'"):
        list_shards(tmp_path, "val")


def test_shards_are_listed_in_order_and_by_split(tmp_path: Path) -> None:
    names = [
        "train_000001.bin",
        "train_000000.bin",
        "val_000000.bin",
        "fineweb_train_000002.bin",
        "shakespeare_val.bin",
    ]
    for name in [*names, "train_000003.txt", "trainer_000000.bin", ".train_000002.bin.partial", "meta.json"]:
        (tmp_path / name).touch()
    found = [path.name for path in list_shards(tmp_path, "train")]
    assert found == ["fineweb_train_000002.bin", "train_000000.bin", "train_000001.bin"]
    assert [path.name for path in list_shards(tmp_path, "val")] == ["shakespeare_val.bin", "val_000000.bin"]
