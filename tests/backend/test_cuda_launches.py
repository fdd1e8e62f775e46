"""What the CUDA backend would launch, looked at without a GPU: every argument against the kernel's compiled signature,
every block against what a card allows, and the rows and outputs that a grid covers."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from toy_weights import toy_weights

pytest.importorskip("cuda.bindings")

from crucible.config import ModelConfig
from crucible.engine.backend import PAGE_SIZE
from crucible.engine.cuda.batch import make_batch
from crucible.engine.cuda.compile import compile_source
from crucible.engine.cuda.driver import Kernel
from crucible.engine.cuda.model import WIDE_SHAPES, TensorModel
from crucible.engine.cuda.plain import PlainModel
from crucible.engine.host_backend import Span
from crucible.engine.quant import WeightFormat, convert

ARCH = "sm_90a"
SMALL_CARD, H200 = 99 * 1024, 227 * 1024
"""Bytes of shared memory that a block can have on a consumer card, and there."""

PARAMETER_INFO = 0x17
"""Of the attributes in a cubin's section .nv.info.<kernel>: one per parameter, its size in bits 18 and up."""


def parameter_sizes(cubin: bytes) -> dict[str, list[int]]:
    """Bytes of each parameter of each kernel, in order, from the ELF file that a cubin is."""
    section_at, (size, count, names_index) = (
        struct.unpack_from("<Q", cubin, 40)[0],
        struct.unpack_from("<HHH", cubin, 58),
    )
    headers = [struct.unpack_from("<IIQQQQ", cubin, section_at + index * size) for index in range(count)]
    names_at = headers[names_index][4]
    found: dict[str, list[int]] = {}
    for name_at, _, _, _, offset, length in headers:
        name = cubin[names_at + name_at :].split(b"\0", 1)[0].decode()
        if not name.startswith(".nv.info."):
            continue
        sizes: dict[int, int] = {}
        at = offset
        while at < offset + length:
            kind, attribute, value = struct.unpack_from("<BBH", cubin, at)
            payload = value if kind == 4 else 0
            if attribute == PARAMETER_INFO:
                _, ordinal, _, bits = struct.unpack_from("<IHHI", cubin, at + 4)
                sizes[ordinal] = bits >> 18
            at += 4 + payload
        found[name.removeprefix(".nv.info.")] = [sizes[ordinal] for ordinal in sorted(sizes)]
    return found


class Memory:
    """A buffer that is nowhere."""

    def __init__(self, num_bytes: int) -> None:
        self.size, self.handle = num_bytes, 1 << 40


class FakeGpu:
    """Takes what `driver.Gpu` takes, and checks it."""

    num_sms, arch = 132, ARCH

    def __init__(self, max_shared: int) -> None:
        self.max_shared = max_shared
        self.launches: list[tuple[str, tuple[int, ...], int]] = []
        self._sizes: dict[str, list[int]] = {}
        self._sources: dict[str, str] = {}

    def allocate(self, num_bytes: int, fill: int | None = None) -> Memory:
        return Memory(num_bytes)

    def upload(self, array: npt.NDArray[Any]) -> Memory:
        return Memory(array.nbytes)

    def kernel(self, source: str, name: str, definitions: Any = None, *, shared_bytes: int = 0) -> Kernel:
        assert shared_bytes <= self.max_shared
        sizes = parameter_sizes(compile_source(source, ARCH, definitions).code)
        return Kernel(sizes[name], f"{source} {name}", shared_bytes)

    def launch(
        self,
        kernel: Kernel,
        *,
        grid: Any,
        block: int,
        args: Any,
        shared_bytes: int | None = None,
        overlap: bool = False,
    ) -> None:
        found = [8 if isinstance(arg, Memory | int) else np.asarray(arg).nbytes for arg in args]
        assert found == kernel.handle, kernel.name
        assert 1 <= block <= 512
        assert all(size >= 1 for size in grid)
        assert (shared_bytes or 0) <= max(kernel.shared_bytes, 48 * 1024), kernel.name
        self.launches.append((kernel.name, tuple(grid), block))

    def sync(self) -> None: ...


CONFIG = ModelConfig.build(
    vocab_size=2000,
    max_position_embeddings=512,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=1,
    num_attention_heads=12,
)


def queue_step(config: ModelConfig, weight_format: WeightFormat, gpu: FakeGpu, spans: list[Span]) -> None:
    held = convert(config, toy_weights(config), weight_format)
    sizes = {"num_pages": 64, "max_rows": 1024, "max_logits": 64}
    model: Any = (
        PlainModel(gpu, config, held, **sizes)  # type: ignore[arg-type]
        if weight_format == "f32"
        else TensorModel(gpu, config, held, weight_format, **sizes)  # type: ignore[arg-type]
    )
    rows = sum(span.length for span in spans)
    batch = make_batch(np.zeros(rows, dtype=np.int64), spans, np.ones(rows, dtype=bool), config.group_size)
    model.queue(batch, 1 << 20)
    model.queue_head(batch, 1 << 20, 0, min(rows, 64))


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # Where test_cuda_compile.py has left them, if it ran before.
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cubins"))
        yield


@pytest.mark.parametrize("max_shared", [SMALL_CARD, H200])
@pytest.mark.parametrize("weight_format", ["int8", "f32"])
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 300])
def test_what_is_launched_fits_kernels_and_cards(weight_format: WeightFormat, rows: int, max_shared: int) -> None:
    gpu = FakeGpu(max_shared)
    queue_step(CONFIG, weight_format, gpu, [Span(np.arange(32), 100, rows)])
    by_decode = FakeGpu(max_shared)
    queue_step(CONFIG, weight_format, by_decode, [Span(np.arange(32), 100, 1)] * min(rows, 100))
    assert len(gpu.launches) == len(by_decode.launches) == (12 if weight_format == "f32" else 10)


@pytest.mark.parametrize("rows", [1, 64, 100])
def test_the_widest_heads_and_f16_weights_fit_a_small_card(rows: int) -> None:
    config = CONFIG.vary(head_dim=128, qkv_bias=True, o_bias=True)
    queue_step(config, "f16", FakeGpu(SMALL_CARD), [Span(np.arange(32), 100, 1)] * rows)


@pytest.mark.parametrize("rows", [65, 128, 500, 4096])
@pytest.mark.parametrize("outputs", [576, 1152, 4096, 50304])
def test_a_grid_of_tiles_covers_all_rows_and_outputs(rows: int, outputs: int) -> None:
    for shape in WIDE_SHAPES:
        x, y = shape.grid(rows, outputs)
        assert (x - 1) * shape.outputs < outputs <= x * shape.outputs
        assert (y - 1) * shape.rows < rows <= y * shape.rows


def test_pages_hold_sixteen_positions_as_the_kernels_have_it() -> None:
    assert PAGE_SIZE == 16
