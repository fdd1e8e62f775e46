"""Documents from files and from a stand-in hub: what comes out, in which order, and how bad input is named."""

from __future__ import annotations

import gzip
import json
import lzma
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crucible.data import sources
from crucible.data.shards import DataError
from crucible.data.sources import documents, open_source, read_all


def texts(name: object, **options: str) -> list[str]:
    return [document.utf8.decode() for document in documents(str(name), **options)]


def write(path: Path, *lines: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# ---- text ---------------------------------------------------------------------------------------------------------


def test_a_text_file_is_one_document_as_it_is(tmp_path: Path) -> None:
    content = "one\r\n\r\n  two\n\n\n"
    for name in ("a.txt", "b.md", "C.TXT"):
        (tmp_path / name).write_bytes(content.encode())
        assert texts(tmp_path / name) == [content]


def test_form_feeds_divide_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeffone\n\ftwo\n\f \n\f\fthree", encoding="utf-8")
    assert texts(tmp_path / "a.txt") == ["one\n", "two\n", "three"]


@settings(max_examples=100, deadline=None)
@given(content=st.text(alphabet="ab\f \né😀", max_size=60), block=st.integers(1, 9))
def test_blocks_are_cut_anywhere(tmp_path_factory: pytest.TempPathFactory, content: str, block: int) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "_BLOCK_BYTES", block)
        assert texts(path) == [piece for piece in content.split("\f") if piece.encode().strip()]


@pytest.mark.parametrize(
    ("content", "offset"), [(b"ab\xff", 2), (b"ab\fcd\f\xe2\x82", 6), (b"\f\xe9t\xe9", 1), (b"\xed\xa0\x80", 0)]
)
def test_what_is_not_utf8_is_named_by_file_and_byte(tmp_path: Path, content: bytes, offset: int) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.txt: not UTF-8 at byte {offset}: "):
        texts(tmp_path / "a.txt")


def test_the_demo_is_six_novels_by_chapter() -> None:
    found = texts("demo")
    assert len(found) == 269
    assert sum(len(text.encode()) for text in found) == 4_014_496 - 268
    assert [text.split("\n")[0] for text in found if not text.lower().startswith("chapter")] == [
        "EMMA",
        "MANSFIELD PARK",
        "NORTHANGER ABBEY",
        "Persuasion",
        "PRIDE AND PREJUDICE",
        "SENSE AND SENSIBILITY",
    ]
    assert open_source("demo").description["licence"] == "public domain"


# ---- records ------------------------------------------------------------------------------------------------------


def test_jsonl_takes_one_field_of_each_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "one"}, {"text": "", "id": 3}, {"id": 4, "text": "é\n\ftwo 😀"})
    path.write_text("\ufeff" + path.read_text() + "\n  \n" + json.dumps({"text": "last, no newline"}))
    assert texts(path) == ["one", "é\n\ftwo 😀", "last, no newline"]
    path = write(tmp_path / "b.jsonl", {"body": "one", "text": 1})
    assert texts(path, text_field="body") == ["one"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x", "id": 1}', "line 2: no field 'text'; there are 'body', 'id' (--text-field)"),
        ('{"text": null}', "line 2: field 'text' must be a string, not NoneType"),
        ('{"text": ["x"]}', "line 2: field 'text' must be a string, not list"),
        ('["text"]', "line 2: expected an object with the field 'text', not list"),
        ('{"text": "x"', "line 2: not JSON: Expecting ',' delimiter at column 13"),
        ('{"text": "a\\ud83d"}', "line 2: field 'text' holds half a surrogate pair at 1"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError) as caught:
        texts(path)
    assert str(caught.value) == f"{path}, {message}"


def test_a_bad_byte_in_a_line_is_named_by_its_place_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl: not UTF-8 at byte 27"):
        texts(tmp_path / "a.jsonl")


def zstd(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    return b"".join(zstandard.compress(part) for part in (data[: len(data) // 2], data[len(data) // 2 :]))


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress), (".zst", zstd)])
def test_compressed_files_read_like_plain_ones(tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]) -> None:
    lines = [{"text": f"document {i} " + "x" * (i % 97)} for i in range(5000)]
    plain = write(tmp_path / "a.jsonl", *lines)
    packed = tmp_path / f"a.jsonl{suffix}"
    packed.write_bytes(compress(plain.read_bytes()))
    assert texts(packed) == [line["text"] for line in lines]
    text = tmp_path / f"b.txt{suffix}"
    text.write_bytes(compress(b"one\ftwo"))
    assert texts(text) == ["one", "two"]
    data = packed.read_bytes()
    for damaged in (data[:-10], data[: len(data) // 2], data[:100] + bytes(20) + data[120:], b"plain text"):
        packed.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"a\.jsonl{suffix}"):
            texts(packed)


@pytest.fixture
def parquet() -> Any:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    def write_table(path: Path, columns: dict[str, list[Any]], **options: Any) -> Path:
        pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)
        return path

    return write_table


def test_parquet_takes_one_column(tmp_path: Path, parquet: Any) -> None:
    wanted = [f"document {i} é" for i in range(2500)]
    path = parquet(tmp_path / "a.parquet", {"id": list(range(2500)), "text": wanted}, row_group_size=700)
    assert texts(path) == wanted
    found = list(documents(str(path)))
    assert [document.position for document in found] == sorted(document.position for document in found)
    assert found[-1].position == path.stat().st_size


def test_bad_parquet_is_named(tmp_path: Path, parquet: Any) -> None:
    path = tmp_path / "a.parquet"
    parquet(path, {"id": [1], "body": ["x"]})
    with pytest.raises(DataError, match=r"a\.parquet: no column 'text'; there are id, body"):
        texts(path)
    parquet(path, {"text": ["x", None]})
    with pytest.raises(DataError, match=r"a\.parquet, row 2: field 'text' must be a string, not NoneType"):
        texts(path)
    for content in (path.read_bytes()[:-9], b"", b"PAR1"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.parquet: not a readable parquet file"):
            texts(path)


@pytest.mark.parametrize(
    ("name", "content", "package"), [("a.txt.zst", b"x", "zstandard"), ("a.parquet", b"x", "pyarrow")]
)
def test_a_missing_package_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, package: str
) -> None:
    for module in [package, *(m for m in sys.modules if m.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}: .* package {package}: pip install --editable '.\[data\]'"):
        texts(tmp_path / name)


# ---- which files --------------------------------------------------------------------------------------------------


def test_a_folder_is_read_in_order_and_others_are_counted(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/b.txt", "c.md", "B.txt", "a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    for name in ("page.html", "other.html", "noext", ".hidden.txt", ".git/x.txt", "a.parquet.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("no")
    assert texts(tmp_path) == ["B.txt", "a/b.txt", "a/z.txt", "a.txt", "b.txt", "c.md"]
    description = open_source(str(tmp_path)).description
    assert description["skipped"] == {".html": 2, "noext": 1, ".gz": 1}
    assert description["files"][0] == {"path": str(tmp_path / "B.txt"), "bytes": 5}


def test_a_glob_is_read_in_order(tmp_path: Path) -> None:
    for name in ("a2.txt", "a1.txt", "b.txt", "sub/a3.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(tmp_path / "a*.txt") == ["a1.txt", "a2.txt"]
    assert texts(tmp_path / "**" / "a*.txt") == ["a1.txt", "a2.txt", "sub/a3.txt"]
    (tmp_path / "[odd].txt").write_text("a name that is no pattern")
    assert texts(tmp_path / "[odd].txt") == ["a name that is no pattern"]


def test_names_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("x")
    for name, message in [
        ("gone.txt", "gone.txt: no such file or folder"),
        ("*.txt", r"\*\.txt: matches no file"),
        ("page.html", r"page\.html: unknown extension '\.html'; known are \.txt"),
        ("*.html", r"page\.html: unknown extension"),
        (".", r"no file to read in it \(found \.html\)"),
    ]:
        with pytest.raises(DataError, match=message):
            open_source(str(tmp_path / name))


# ---- going on from a cursor ---------------------------------------------------------------------------------------


def test_every_cursor_leads_to_the_next_document(tmp_path: Path, parquet: Any) -> None:
    (tmp_path / "a.txt").write_text("one\f\f \ftwo\f")
    write(tmp_path / "b.jsonl", {"text": "three"}, {"text": " "}, {"text": "four"}, {"text": ""})
    (tmp_path / "c.txt").write_text("  ")
    parquet(tmp_path / "d.parquet", {"text": ["five", "", "six"]})
    opened = [open_source(str(tmp_path)), open_source(str(tmp_path / "b.jsonl")), open_source(str(tmp_path / "a.txt"))]
    found = list(read_all(opened))
    words = [document.utf8.decode() for document in found]
    assert words == ["one", "two", "three", "four", "five", "six", "three", "four", "one", "two"]
    for count, document in enumerate(found, start=1):
        cursor = json.loads(json.dumps(document.cursor))
        assert list(read_all(opened, cursor)) == found[count:]
    positions = [document.position for document in found]
    assert positions == sorted(positions)
    assert positions[-1] == sum(source.total_bytes or 0 for source in opened)


# ---- the hub ------------------------------------------------------------------------------------------------------


class Stream:
    """As `datasets.IterableDataset`: an iterator over records with a state of its own."""

    def __init__(self, records: list[Any]) -> None:
        self.records, self.at = records, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.records):
            self.at += 1
            if isinstance(self.records[self.at - 1], Exception):
                raise self.records[self.at - 1]
            yield self.records[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A hub in memory; `calls` holds what was asked of it."""
    fake = SimpleNamespace(records=[{"text": "one"}, {"text": "  "}, {"text": "two"}, {"text": "three"}], calls=[])
    info = SimpleNamespace(sha="5ca1ab1e", card_data={"license": "odc-by"})

    def load_dataset(*args: Any, **options: Any) -> Stream:
        fake.calls.append((args, options))
        return Stream(fake.records)

    api = SimpleNamespace(dataset_info=lambda name: fake.calls.append(name) or info)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=lambda: api))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    return fake


@pytest.mark.parametrize(
    ("name", "config", "split"),
    [
        ("hf:HuggingFaceFW/fineweb-edu", None, "train"),
        ("hf:HuggingFaceFW/fineweb-edu:sample-10BT", "sample-10BT", "train"),
        ("hf:a/b.c@test[:10%]", None, "test[:10%]"),
        ("hf:a/b:c@validation", "c", "validation"),
    ],
)
def test_a_hub_name_says_what_is_streamed(hub: SimpleNamespace, name: str, config: str | None, split: str) -> None:
    assert texts(name) == ["one", "two", "three"]
    repository = name[3:].partition("@")[0].partition(":")[0]
    assert hub.calls == [
        repository,
        ((repository, config), {"split": split, "revision": "5ca1ab1e", "streaming": True}),
    ]


def test_a_hub_stream_goes_on_from_its_state_at_its_revision(hub: SimpleNamespace) -> None:
    first = open_source("hf:a/b")
    found = list(read_all([first]))
    assert first.description == {"name": "hf:a/b", "revision": "5ca1ab1e", "licence": "odc-by"}
    second = open_source("hf:a/b", pinned={**first.description, "revision": "0ddba11"})
    for count, document in enumerate(found, start=1):
        assert list(read_all([second], document.cursor)) == found[count:]
    assert hub.calls[-1][1]["revision"] == "0ddba11"


def test_hub_failures_are_one_line_with_the_name(hub: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.records = [{"text": "one"}, ConnectionError("reset by peer\nand more")]
    with pytest.raises(DataError, match=r"^hf:a/b: ConnectionError: reset by peer; run this again") as caught:
        texts("hf:a/b")
    assert "\n" not in str(caught.value)
    hub.records = [{"text": "one"}, {"content": "two"}]
    with pytest.raises(DataError, match="hf:a/b, record 2: no field 'text'; there are 'content'"):
        texts("hf:a/b")
    for name in ("hf:justname", "hf:a/b:", "hf:a/b@", "hf:a/b/c"):
        with pytest.raises(DataError, match="expected hf:OWNER/NAME"):
            open_source(name)

    def unresolved(*_: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    for proxy in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    with pytest.raises(
        DataError, match=r"hf:a/b: no network: huggingface\.co cannot be resolved; go online, or give local files"
    ):
        open_source("hf:a/b")


def test_the_hub_without_the_package_names_the_remedy(hub: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"hf:a/b: .* package datasets: pip install --editable '.\[data\]'"):
        open_source("hf:a/b")


def test_the_real_stream_has_the_state_the_cursor_relies_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` itself over local files, in the hub's place."""
    datasets = pytest.importorskip("datasets")
    files = [write(tmp_path / f"{i}.jsonl", *({"text": f"{i}-{j}"} for j in range(40))) for i in range(3)]
    real = datasets.load_dataset

    def load(*_: Any, split: str, **__: Any) -> Any:
        return real("json", data_files=[str(file) for file in files], split=split, streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    source = open_source("hf:a/b", pinned={"name": "hf:a/b", "revision": None})
    found = list(source.documents())
    assert [document.utf8.decode() for document in found] == [f"{i}-{j}" for i in range(3) for j in range(40)]
    for count in (1, 39, 40, 41, 77, 120):
        cursor = json.loads(json.dumps(found[count - 1].cursor))
        assert [d.utf8 for d in source.documents(cursor)] == [d.utf8 for d in found[count:]]
