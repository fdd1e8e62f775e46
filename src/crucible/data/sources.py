"""Documents, in a fixed order, from local files and from the Hugging Face hub.

A source is named by one string: `demo` (the novels shipped with the package), `hf:OWNER/NAME[:CONFIG][@SPLIT]`, or a
file, a folder or a glob of .txt, .md and .jsonl files (plain, .gz, .xz or .zst) and .parquet files. A text file is one
document, unless form feeds (U+000C) divide it into several. docs/formats.md, "Token shards and prepared folders", has
the rules.
"""

from __future__ import annotations

import functools
import glob
import gzip
import hashlib
import importlib
import itertools
import json
import lzma
import os
import re
import socket
import urllib.parse
import urllib.request
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Final

from crucible.data.shards import DataError
from crucible.errors import install

DEMO_FILE: Final = Path(__file__).parent / "demo" / "austen.txt.xz"

_BLOCK_BYTES: Final = 2**18
_KNOWN: Final = "known are .txt .md .jsonl (also .gz .xz .zst) and .parquet"


@dataclass(frozen=True, slots=True)
class Document:
    """One document and where its source stands after it."""

    utf8: bytes
    cursor: Any
    """JSON value from which the source goes on with the next document."""
    position: int
    """Bytes read so far, of the source's `total_bytes`; 0 throughout a stream."""


def open_source(name: str, text_field: str = "text", pinned: dict[str, Any] | None = None) -> Source:
    """The source of that name. `pinned` is its earlier description: a hub data set stays at that revision.

    `description` says what is read, ready for JSON: its name, the files or the revision, the licence where it is
    known. `total_bytes` is its size on disk, None for a stream. `documents(after)` yields all documents, or those that
    follow the one whose cursor is `after`; it raises DataError naming the file and place of a malformed record.

    Raises:
        DataError: nothing is there, an extension is unknown, or the hub cannot be reached.
    """
    if name == "demo":
        sha256 = hashlib.sha256(DEMO_FILE.read_bytes()).hexdigest()
        return LocalSource([DEMO_FILE], text_field, {"name": name, "licence": "public domain", "sha256": sha256})
    if name.startswith("hf:"):
        return HubSource(name, text_field, pinned)
    files, skipped = _find_files(name)
    sizes = [{"path": str(file), "bytes": file.stat().st_size} for file in files]
    return LocalSource(files, text_field, {"name": name, "files": sizes, "skipped": skipped})


def read_all(sources: Sequence[Source], after: Any = None) -> Iterator[Document]:
    """The documents of all sources in turn, but for those of white space alone.

    A cursor is [source, that source's cursor]; positions add up.
    """
    first, inner = after or (0, None)
    before = sum(source.total_bytes or 0 for source in sources[:first])
    for number, source in enumerate(sources[first:], start=first):
        for document in source.documents(inner if number == first else None):
            if document.utf8 and not document.utf8.isspace():
                yield Document(document.utf8, [number, document.cursor], before + document.position)
        before += source.total_bytes or 0


def documents(name: str, *, text_field: str = "text") -> Iterator[Document]:
    """`read_all` of one source by name. Raises DataError as `open_source` and on a malformed record."""
    return read_all([open_source(name, text_field)])


# ---- local files --------------------------------------------------------------------------------------------------


class LocalSource:
    """Files in a fixed order. A cursor is [files finished, records read of the next]."""

    def __init__(self, files: Sequence[Path], text_field: str, description: dict[str, Any]) -> None:
        self.description = description
        self.total_bytes = sum(file.stat().st_size for file in files)
        self._files, self._text_field = files, text_field

    def documents(self, after: Any = None) -> Iterator[Document]:
        first, skip = after or (0, 0)
        before = sum(file.stat().st_size for file in self._files[:first])
        for number, file in enumerate(self._files[first:], start=first):
            records = enumerate(_records(file, self._text_field), start=1)
            for count, (utf8, position) in itertools.islice(records, skip, None):
                yield Document(utf8, [number, count], before + position)
            before, skip = before + file.stat().st_size, 0


Record = tuple[bytes, int]
"""UTF-8 of one record and the bytes of its file read so far."""


def _records(path: Path, text_field: str) -> Iterator[Record]:
    form = _form(path)
    assert form is not None, path
    read, compression = form
    try:
        with path.open("rb") as file:
            yield from read(path, file, _COMPRESSIONS[compression](file), text_field)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: damaged {compression} file: {error}") from None


def _read_text(path: Path, file: IO[bytes], blocks: Iterator[bytes], _: str) -> Iterator[Record]:
    for start, piece in _pieces(blocks, b"\f"):
        text = _decode(piece, path, start)
        yield (text.removeprefix("\ufeff").encode() if start == 0 else piece), file.tell()


def _read_jsonl(path: Path, file: IO[bytes], blocks: Iterator[bytes], text_field: str) -> Iterator[Record]:
    for number, (start, line) in enumerate(_pieces(blocks, b"\n"), start=1):
        if not line or line.isspace():
            continue
        try:
            record = json.loads(_decode(line, path, start).removeprefix("\ufeff"))
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not JSON: {error.msg} at column {error.colno}") from None
        yield _text(record, text_field, f"{path}, line {number}"), file.tell()


def _read_parquet(path: Path, file: IO[bytes], _: Iterator[bytes], text_field: str) -> Iterator[Record]:
    parquet = _require("pyarrow.parquet", str(path))
    size = os.fstat(file.fileno()).st_size
    try:
        table = parquet.ParquetFile(file)
        if text_field not in table.schema_arrow.names:
            raise DataError(f"{path}: no column {text_field!r}; there are {', '.join(table.schema_arrow.names)}")
        row = 0
        for batch in table.iter_batches(columns=[text_field]):
            for record in batch.to_pylist():
                row += 1
                yield _text(record, text_field, f"{path}, row {row}"), size * row // table.metadata.num_rows
    except _require("pyarrow", str(path)).ArrowException as error:
        raise DataError(f"{path}: not a readable parquet file: {_first_line(error)}") from None


def _pieces(blocks: Iterator[bytes], end: bytes) -> Iterator[tuple[int, bytes]]:
    """What lies between the `end` bytes of a stream of blocks, each with the offset it starts at."""
    start, parts = 0, list[bytes]()
    for block in blocks:
        *ended, rest = block.split(end)
        for piece in ended:
            piece = b"".join([*parts, piece])
            parts.clear()
            yield start, piece
            start += len(piece) + len(end)
        parts.append(rest)
    yield start, b"".join(parts)


def _decode(utf8: bytes, path: Path, start: int) -> str:
    try:
        return utf8.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {start + error.start}: {error.reason}") from None


def _text(record: Any, text_field: str, where: str) -> bytes:
    """UTF-8 of a record's text field."""
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected an object with the field {text_field!r}, not {type(record).__name__}")
    if text_field not in record:
        raise DataError(f"{where}: no field {text_field!r}; there are {', '.join(map(repr, record))} (--text-field)")
    text = record[text_field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field {text_field!r} must be a string, not {type(text).__name__}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: field {text_field!r} holds half a surrogate pair at {error.start}") from None


def _plain(file: IO[bytes] | gzip.GzipFile) -> Iterator[bytes]:
    return iter(functools.partial(file.read, _BLOCK_BYTES), b"")


def _gunzip(file: IO[bytes]) -> Iterator[bytes]:
    return _plain(gzip.GzipFile(fileobj=file))


def _unxz(file: IO[bytes]) -> Iterator[bytes]:
    return _plain(lzma.LZMAFile(file))


def _unzstd(file: IO[bytes]) -> Iterator[bytes]:
    """Frame by frame: the library's own stream reader takes a file cut off in a frame for a whole one."""
    zstandard = _require("zstandard", getattr(file, "name", "a .zst file"))
    frame = None
    for block in _plain(file):
        while block:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                yield frame.decompress(block)
            except zstandard.ZstdError as error:
                raise zlib.error(str(error)) from None
            block = frame.unused_data
            frame = None if frame.eof else frame
    if frame:
        raise EOFError("it ends inside a frame")


_COMPRESSIONS: Final = {"": _plain, ".gz": _gunzip, ".xz": _unxz, ".zst": _unzstd}
_READERS: Final = {".txt": _read_text, ".md": _read_text, ".jsonl": _read_jsonl, ".parquet": _read_parquet}


def _form(path: Path) -> tuple[Callable[..., Iterator[Record]], str] | None:
    """How a file of that name is read: by which of `_READERS` and what compression; None for an unknown extension."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in _COMPRESSIONS else ""
    reader = _READERS.get(suffixes[-1]) if suffixes else None
    if reader is None or (reader is _read_parquet and compression):
        return None
    return reader, compression


def _find_files(name: str) -> tuple[list[Path], dict[str, int]]:
    """The files of a path or glob, sorted, and how many others of a folder were passed over by extension."""
    path = Path(name)
    if path.is_dir():
        return _files_below(path)
    matches = glob.glob(name, recursive=True)  # noqa: PTH207 (Path.glob takes no absolute pattern)
    files = [path] if path.is_file() else sorted(filter(Path.is_file, map(Path, matches)))
    if not files:
        raise DataError(f"{name}: matches no file" if glob.has_magic(name) else f"{name}: no such file or folder")
    for file in files:
        if _form(file) is None:
            raise DataError(f"{file}: unknown extension {''.join(file.suffixes)!r}; {_KNOWN}")
    return files, {}


def _files_below(folder: Path) -> tuple[list[Path], dict[str, int]]:
    inside = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    shown = [path for path in inside if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    files = [path for path in shown if _form(path)]
    skipped = Counter(path.suffix or path.name for path in shown if not _form(path))
    if not files:
        raise DataError(f"{folder}: no file to read in it (found {', '.join(skipped) or 'nothing'}); {_KNOWN}")
    return files, dict(skipped)


# ---- the Hugging Face hub -----------------------------------------------------------------------------------------


class HubSource:
    """A data set streamed through `datasets`, pinned to the revision it had when it was first opened.

    A cursor is [records read, the stream's own state].
    """

    total_bytes = None

    def __init__(self, name: str, text_field: str, pinned: dict[str, Any] | None) -> None:
        match = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?::([^@]+))?(?:@(.+))?", name)
        if not match:
            raise DataError(f"{name}: expected hf:OWNER/NAME, hf:OWNER/NAME:CONFIG or either with @SPLIT")
        self._name, self._text_field = name, text_field
        self._repository, self._config, self._split = match[1], match[2], match[3] or "train"
        self.description = pinned or self._describe()

    def _describe(self) -> dict[str, Any]:
        hub = _require("huggingface_hub", self._name)
        _require("datasets", self._name)
        _check_network(self._name)
        try:
            info = hub.HfApi().dataset_info(self._repository)
        except Exception as error:
            raise self._failure(error) from None
        card = info.card_data or {}
        return {"name": self._name, "revision": info.sha, "licence": card.get("license")}

    def documents(self, after: Any = None) -> Iterator[Document]:
        datasets = _require("datasets", self._name)
        _check_network(self._name)
        try:
            options = {"split": self._split, "revision": self.description["revision"], "streaming": True}
            stream = datasets.load_dataset(self._repository, self._config, **options)
            done, state = after or (0, None)
            if state is not None:
                stream.load_state_dict(state)
            for number, record in enumerate(stream, start=done + 1):
                utf8 = _text(record, self._text_field, f"{self._name}, record {number}")
                yield Document(utf8, [number, stream.state_dict()], 0)
        except DataError:
            raise
        except Exception as error:
            raise self._failure(error) from None

    def _failure(self, error: Exception) -> DataError:
        return DataError(
            f"{self._name}: {type(error).__name__}: {_first_line(error)}; run this again to go on from here"
        )


def _check_network(name: str) -> None:
    """Fails at once where the hub's name cannot be resolved: its client retries for half a minute first."""
    host = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        if "https" not in urllib.request.getproxies():
            socket.getaddrinfo(host, 443)
    except OSError:
        raise DataError(f"{name}: no network: {host} cannot be resolved; go online, or give local files") from None


def _require(module: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(f"{what}: reading it needs the package {module.partition('.')[0]}: {install('data')}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


Source = LocalSource | HubSource
