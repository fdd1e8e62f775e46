"""The loader against a slow twin: plain Python lists, one window at a time."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crucible.data.loader import PAD_TARGET, Loader, LoaderState, permutation
from crucible.data.shards import DataError, Shard, write_shard

Window = tuple[tuple[int, ...], tuple[int, ...]]
"""Inputs and targets of one row."""


def make_shards(folder: Path, sizes: list[int], vocab_size: int = 2**20) -> list[Path]:
    """Shards whose every token is unique, so that a token says where it stands."""
    paths, first = [], 1
    for number, size in enumerate(sizes):
        paths.append(folder / f"train_{number:06d}.bin")
        write_shard(paths[-1], np.arange(first, first + size), vocab_size=vocab_size)
        first += size
    return paths


def windows_of(tokens: list[int], width: int) -> list[Window]:
    """The windows of a shard in plain order."""
    windows = []
    for start in range(0, len(tokens) - 1, width):
        targets = tokens[start + 1 : start + 1 + width]
        inputs = tokens[start : start + len(targets)]
        short = width - len(targets)
        windows.append((tuple(inputs + [0] * short), tuple(targets + [PAD_TARGET] * short)))
    return windows


def epoch_windows(paths: list[Path], width: int, seed: int, epoch: int, shuffle: bool) -> list[Window]:
    """The slow twin: all windows of one epoch in order."""
    shards = [tokens for path in paths if len(tokens := Shard.open(path).tokens.tolist()) > 1]
    order = list(permutation(len(shards), seed=seed, epoch=epoch, stream=0)) if shuffle else range(len(shards))
    found = []
    for index in order:
        windows = windows_of(shards[index], width)
        if shuffle:
            windows = [windows[i] for i in permutation(len(windows), seed=seed, epoch=epoch, stream=int(index) + 1)]
        found += windows
    return found


def rows(batch: tuple[np.ndarray, np.ndarray]) -> list[Window]:
    tokens, targets = batch
    assert tokens.dtype == targets.dtype == np.int64
    return [(tuple(t.tolist()), tuple(y.tolist())) for t, y in zip(tokens, targets, strict=True)]


@st.composite
def settings_of_a_loader(draw: st.DrawFn) -> dict[str, object]:
    width = draw(st.sampled_from([1, 2, 3, 5, 8]))
    edge_sizes = [0, 1, 2, width, width + 1, width + 2, 2 * width, 2 * width + 1]
    sizes = draw(st.lists(st.one_of(st.sampled_from(edge_sizes), st.integers(2, 30)), min_size=1, max_size=4))
    if max(sizes) < 2:
        sizes.append(2)
    return {
        "sizes": sizes,
        "context_length": width,
        "batch_size": draw(st.integers(1, 5)),
        "world_size": draw(st.integers(1, 4)),
        "seed": draw(st.sampled_from([0, 1, 2**64 - 1])),
        "shuffle": draw(st.booleans()),
    }


@settings(max_examples=80, deadline=None)
@given(case=settings_of_a_loader())
def test_the_ranks_together_read_the_sequence(tmp_path_factory: pytest.TempPathFactory, case: dict) -> None:
    """Every rank count cuts the same endless sequence; each epoch of it holds every target once."""
    sizes, width, seed, shuffle = case["sizes"], case["context_length"], case["seed"], case["shuffle"]
    paths = make_shards(tmp_path_factory.mktemp("shards"), sizes)
    options = {key: value for key, value in case.items() if key not in ("sizes", "world_size")}
    epochs = [epoch_windows(paths, width, seed, epoch, shuffle) for epoch in range(3)]
    step = case["batch_size"] * case["world_size"]
    steps = -(-2 * len(epochs[0]) // step)

    expected = [window for epoch in epochs for window in epoch]
    while len(expected) < steps * step:
        expected += epoch_windows(paths, width, seed, len(expected) // len(epochs[0]), shuffle)
    ranks = [
        Loader(paths, **options, rank=r, world_size=case["world_size"], prefetch=0) for r in range(case["world_size"])
    ]
    read = [row for _ in range(steps) for rank in ranks for row in rows(rank.next_batch())]
    assert read == expected[: steps * step]
    assert len({rank.state for rank in ranks}) == 1

    starts = np.cumsum([1, *sizes])[:-1]
    wanted = Counter(t for start, size in zip(starts, sizes, strict=True) for t in range(start + 1, start + size))
    for epoch in (0, 1):
        chunk = read[epoch * len(epochs[0]) : (epoch + 1) * len(epochs[0])]
        pairs = [(x, y) for inputs, targets in chunk for x, y in zip(inputs, targets, strict=True) if y != PAD_TARGET]
        assert Counter(y for _, y in pairs) == wanted
        assert all(x == y - 1 for x, y in pairs)
    assert ranks[0].tokens_per_epoch == wanted.total()


@settings(max_examples=40, deadline=None)
@given(case=settings_of_a_loader(), data=st.data())
def test_resuming_anywhere_goes_on_with_the_next_batch(
    tmp_path_factory: pytest.TempPathFactory, case: dict, data: st.DataObject
) -> None:
    """From every state, through JSON, again and again, across epoch edges."""
    paths = make_shards(tmp_path_factory.mktemp("shards"), case["sizes"])
    options = {key: value for key, value in case.items() if key not in ("sizes", "seed")}
    options["rank"] = case["world_size"] - 1
    windows = len(epoch_windows(paths, case["context_length"], 0, 0, False))
    steps = 2 * -(-windows // (case["batch_size"] * case["world_size"])) + 2
    straight = Loader(paths, seed=case["seed"], **options, prefetch=0)
    states, expected = [], []
    for _ in range(steps):
        states.append(straight.state)
        expected.append(rows(straight.next_batch()))

    for start, state in enumerate(states):
        assert rows(Loader(paths, state=state, **options, prefetch=0).next_batch()) == expected[start]

    at, state = 0, LoaderState.from_dict(json.loads(json.dumps(states[0].to_dict())))
    while at < steps:
        with Loader(paths, state=state, **options, prefetch=data.draw(st.integers(0, 3))) as loader:
            for _ in range(min(steps - at, data.draw(st.integers(1, 4)))):
                assert loader.state == states[at]
                assert rows(loader.next_batch()) == expected[at]
                at += 1
            state = LoaderState.from_dict(json.loads(json.dumps(loader.state.to_dict())))


def test_batch_size_and_rank_count_may_change_at_a_resume(tmp_path: Path) -> None:
    paths = make_shards(tmp_path, [23, 7, 40])
    expected = epoch_windows(paths, 4, 5, 0, True) + epoch_windows(paths, 4, 5, 1, True)
    first = Loader(paths, batch_size=3, context_length=4, seed=5, prefetch=0)
    read = rows(first.next_batch()) + rows(first.next_batch())
    for rank in range(2):
        second = Loader(paths, batch_size=4, context_length=4, state=first.state, rank=rank, world_size=2, prefetch=0)
        read += rows(second.next_batch())
    assert read == expected[:14]


def test_epochs_and_seeds_are_permuted_differently(tmp_path: Path) -> None:
    paths = make_shards(tmp_path, [200, 300])
    orders = {tuple(epoch_windows(paths, 4, seed, epoch, True)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert tuple(epoch_windows(paths, 4, 0, 0, False)) not in orders


def philox(key: tuple[int, int], counter: int) -> list[int]:
    """Philox4x64-10 in Python integers, from Salmon et al. 2011, section 3.3 and table 2."""
    mask = 2**64 - 1
    x = [counter >> 64 * i & mask for i in range(4)]
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
        x = [p1 >> 64 ^ x[1] ^ k0, p1 & mask, p0 >> 64 ^ x[3] ^ k1, p0 & mask]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return x


@pytest.mark.parametrize("count", [0, 1, 2, 10, 101])
@pytest.mark.parametrize(("seed", "epoch", "stream"), [(0, 0, 0), (1234, 2, 3), (2**64 - 1, 70_000, 1)])
def test_the_permutation_is_the_stable_order_of_philox_draws(count: int, seed: int, epoch: int, stream: int) -> None:
    blocks = [philox((seed, epoch), (stream << 192) + 1 + i) for i in range(-(-count // 4))]
    draws = [draw for block in blocks for draw in block][:count]
    expected = sorted(range(count), key=draws.__getitem__)
    assert permutation(count, seed=seed, epoch=epoch, stream=stream).tolist() == expected


def test_the_permutation_is_pinned() -> None:
    """Another one would make every checkpoint resume on other data."""
    assert permutation(10, seed=0, epoch=0, stream=0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]


def test_prefetching_changes_nothing_and_is_not_counted(tmp_path: Path) -> None:
    paths = make_shards(tmp_path, [50, 31])
    plain = Loader(paths, batch_size=3, context_length=4, prefetch=0)
    with Loader(paths, batch_size=3, context_length=4, prefetch=4) as ahead:
        for _ in range(40):
            assert ahead.state == plain.state
            assert rows(ahead.next_batch()) == rows(plain.next_batch())


def test_the_thread_starts_with_the_first_batch_and_ends_with_close(tmp_path: Path) -> None:
    paths = make_shards(tmp_path, [50])
    before = threading.active_count()
    loader = Loader(paths, batch_size=2, context_length=4)
    assert threading.active_count() == before
    loader.next_batch()
    assert threading.active_count() == before + 1
    loader.close()
    loader.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        loader.next_batch()


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_token_outside_the_vocabulary_is_raised_by_its_batch_and_ever_after(tmp_path: Path, prefetch: int) -> None:
    """The good batches before it still arrive: an error read ahead neither overtakes them nor gets lost."""
    path = make_shards(tmp_path, [41], vocab_size=100)[0]
    data = bytearray(path.read_bytes())
    data[1024 + 2 * 21 : 1024 + 2 * 22] = (65535).to_bytes(2, "little")
    path.write_bytes(bytes(data))
    with Loader([path], batch_size=1, context_length=4, shuffle=False, prefetch=prefetch) as loader:
        for _ in range(5):
            loader.next_batch()
        for _ in range(3):
            with pytest.raises(DataError, match=r"train_000000\.bin: token 65535 is outside its vocabulary of 100"):
                loader.next_batch()
        assert loader.state == LoaderState(0, 0, 5, 0)


def test_a_shard_without_a_stated_vocabulary_loads(tmp_path: Path) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 5
    (tmp_path / "a.bin").write_bytes(header.tobytes() + np.arange(65531, 65536, dtype="<u2").tobytes())
    batch = Loader([tmp_path / "a.bin"], batch_size=1, context_length=4, prefetch=0).next_batch()
    assert rows(batch) == [((65531, 65532, 65533, 65534), (65532, 65533, 65534, 65535))]


def test_no_usable_shard_is_an_error(tmp_path: Path) -> None:
    for paths in ([], make_shards(tmp_path, [0, 1, 1])):
        with pytest.raises(DataError, match=f"none of {len(paths)} shards"):
            Loader(paths, batch_size=1, context_length=4)


def test_shards_of_two_tokenizers_do_not_mix(tmp_path: Path) -> None:
    a, b = tmp_path / "a.bin", tmp_path / "b.bin"
    write_shard(a, [1, 2], vocab_size=10, tokenizer_id=b"12345678")
    write_shard(b, [1, 2], vocab_size=10, tokenizer_id=b"87654321")
    with pytest.raises(DataError, match=r"different tokenizers \(tokenizer_id\)") as caught:
        Loader([a, b], batch_size=1, context_length=1)
    assert str(a) in str(caught.value)
    assert str(b) in str(caught.value)
    write_shard(b, [1, 2], vocab_size=11)
    with pytest.raises(DataError, match=r"different tokenizers \(vocab_size\)"):
        Loader([a, b], batch_size=1, context_length=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"context_length": 0}, "context_length must be at least 1, not 0"),
        ({"world_size": 0}, "world_size must be at least 1"),
        ({"rank": 2, "world_size": 2}, "rank must be from 0 to 1, not 2"),
        ({"prefetch": -1}, "prefetch must be at least 0"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"state": LoaderState(0, 1, 0, 0)}, "shard 1 of 1"),
        ({"state": LoaderState(0, 0, 3, 0)}, "window 3 of 3"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, changes: dict, message: str) -> None:
    paths = make_shards(tmp_path, [10])
    with pytest.raises(DataError, match=message):
        Loader(paths, **{"batch_size": 1, "context_length": 4, **changes})


def test_state_is_checked_by_name() -> None:
    good = LoaderState(epoch=1, shard=2, offset=3, seed=4)
    assert LoaderState.from_dict(good.to_dict()) == good
    for wrong in ({"epoch": 1}, {**good.to_dict(), "rank": 0}):
        with pytest.raises(DataError, match="keys must be epoch, shard, offset, seed"):
            LoaderState.from_dict(wrong)
    for value in (-1, 1.0, True, None, 2**64):
        with pytest.raises(DataError, match="offset must be a whole number"):
            LoaderState.from_dict({**good.to_dict(), "offset": value})
