"""The CUDA driver through `cuda-core`: one device and stream, memory, kernels, graphs. No other module calls it.

    gpu = Gpu.open()
    x = gpu.upload(np.arange(4, dtype=np.float32))
    gpu.launch(kernel, grid=(1,), block=32, args=(x, np.int32(4)))
    gpu.download(x, np.float32, (4,))

Every call queues on the one stream, so that what was queued first is done first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from crucible.engine.cuda.compile import compile_source
from crucible.errors import CrucibleError

T = TypeVar("T", bound=np.generic)

SUPPORTED_FROM: Final = (8, 0)
"""The oldest compute capability: f16 operands of `mma.sync.m16n8k16` and `cp.async`."""


class CudaError(CrucibleError):
    """No device to compute on; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that is loaded, and the most dynamic shared memory that it may be launched with."""

    handle: Any
    name: str
    shared_bytes: int = 0


@dataclass(slots=True, eq=False)
class Gpu:
    """One device, its context current in this thread, and the stream that everything runs on.

    Attributes:
        arch: what kernels are compiled for, `sm_90a`.
        num_sms: multiprocessors.
        name: of the card.
        max_shared: bytes of shared memory that a block can have.
        has_overlap: whether a kernel can start while the one before it still runs.
        stream: of cuda-core.
    """

    arch: str
    num_sms: int
    name: str
    max_shared: int
    has_overlap: bool
    _core: Any
    _device: Any
    stream: Any
    _queue: Any
    _modules: dict[tuple[str, tuple[tuple[str, int | str], ...]], Any] = field(default_factory=dict)
    _configs: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    @classmethod
    def open(cls, index: int = 0) -> Gpu:
        """Raises CudaError: `cuda-core` is not installed, or there is no driver or device, or it is too old."""
        try:
            from cuda import core
        except ImportError as error:
            raise CudaError(
                f"backend 'cuda' needs cuda-core: pip install '.[cuda]' in the checkout ({error})"
            ) from None
        try:
            device = core.Device(index)
            device.set_current()
        except Exception as error:  # cuda-core's own classes, those of its loader and of the driver
            reason = " ".join(str(error).split()) or type(error).__name__
            raise CudaError(f"backend 'cuda' finds no usable NVIDIA driver and device {index}: {reason}") from None
        capability = device.compute_capability
        if (capability.major, capability.minor) < SUPPORTED_FROM:
            raise CudaError(
                f"backend 'cuda' needs compute capability {SUPPORTED_FROM[0]}.{SUPPORTED_FROM[1]} or newer; "
                f"{device.name} has {capability.major}.{capability.minor}"
            )
        arch = f"sm_{capability.major}{capability.minor}" + ("a" if capability.major in (9, 10) else "")
        stream = device.create_stream()
        properties = device.properties
        return cls(
            arch=arch,
            num_sms=properties.multiprocessor_count,
            name=device.name,
            max_shared=properties.max_shared_memory_per_block_optin,
            has_overlap=capability.major >= 9,
            _core=core,
            _device=device,
            stream=stream,
            _queue=stream,
        )

    def use(self) -> None:
        """Make the device the current one of the calling thread, as it is of the one that opened it."""
        self._device.set_current()

    # ---- memory -----------------------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int, fill: int | None = None) -> Any:
        """Device memory; every byte `fill` if given. Raises CudaError: there is not as much."""
        try:
            buffer = self._device.allocate(max(16, num_bytes), stream=self.stream)
        except Exception as error:  # cuda-core's own class
            raise CudaError(f"{self.name} has no {num_bytes:,} bytes of memory left: {error}") from None
        if fill is not None:
            buffer.fill(np.uint8(fill), stream=self.stream)
        return buffer

    def pinned(self, num_bytes: int) -> tuple[Any, npt.NDArray[np.uint8]]:
        """Host memory that the device copies from and to by itself, and the same as an array."""
        buffer = self._core.LegacyPinnedMemoryResource().allocate(num_bytes, stream=self.stream)
        memory: Any = (ctypes.c_uint8 * num_bytes).from_address(int(buffer.handle))
        return buffer, np.frombuffer(memory, dtype=np.uint8)

    def upload(self, array: npt.NDArray[Any]) -> Any:
        """A copy of an array on the device; returns when it is there."""
        from cuda.bindings import driver

        array = np.ascontiguousarray(array)
        buffer = self.allocate(array.nbytes)
        if array.nbytes:
            # On our stream: a copy on another one may still be under way when a kernel starts on this one.
            _check(driver.cuMemcpyHtoDAsync(buffer.handle, array.ctypes.data, array.nbytes, self.stream.handle))
            self.sync()
        return buffer

    def download(self, buffer: Any, dtype: type[T], shape: Sequence[int]) -> npt.NDArray[T]:
        """A copy of the front of a buffer, once all that is queued is done."""
        from cuda.bindings import driver

        array = np.empty(shape, dtype=dtype)
        if array.nbytes:
            _check(driver.cuMemcpyDtoHAsync(array.ctypes.data, buffer.handle, array.nbytes, self.stream.handle))
        self.sync()
        return array

    def copy(self, source: Any, target: Any, num_bytes: int) -> None:
        """Queue a copy of the front of one buffer to the front of another."""
        self._front(source, num_bytes).copy_to(self._front(target, num_bytes), stream=self._queue)

    def _front(self, buffer: Any, num_bytes: int) -> Any:
        return self._core.Buffer.from_handle(int(buffer.handle), num_bytes, owner=buffer)

    # ---- code -------------------------------------------------------------------------------------------------------

    def kernel(
        self, source: str, name: str, definitions: Mapping[str, int | str] | None = None, *, shared_bytes: int = 0
    ) -> Kernel:
        """A kernel of a file of the kernels folder, compiled if need be.

        Raises CompileError as `compile_source`, CudaError where the device lacks the shared memory.
        """
        key = (source, tuple(sorted((definitions or {}).items())))
        if key not in self._modules:
            cubin = compile_source(source, self.arch, definitions)
            self._modules[key] = self._core.ObjectCode.from_cubin(cubin.code, name=source)
        handle = self._modules[key].get_kernel(name)
        from cuda.bindings import driver

        attributes = driver.CUfunction_attribute
        # The same split of L1 and shared memory for all: a multiprocessor changes it only when it is idle.
        wanted = [(attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100)]
        if shared_bytes > 48 * 1024:
            wanted.append((attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes))
        for attribute, value in wanted:
            _check(
                driver.cuKernelSetAttribute(attribute, value, handle.handle, self._device.device_id),
                f"{name} with {shared_bytes} bytes of shared memory per block",
            )
        return Kernel(handle, name, shared_bytes)

    def launch(
        self,
        kernel: Kernel,
        *,
        grid: Sequence[int],
        block: int,
        args: Sequence[Any],
        shared_bytes: int | None = None,
        overlap: bool = False,
    ) -> None:
        """Queue a kernel. Arguments are buffers, addresses as int, and numpy scalars.

        `shared_bytes` of dynamic shared memory per block, by default as much as the kernel may have. With `overlap` it
        may start while the one before it still runs, and has to wait for its results by itself
        (`griddepcontrol.wait`); where the device cannot, it starts after.
        """
        overlap = overlap and self.has_overlap
        shared_bytes = kernel.shared_bytes if shared_bytes is None else shared_bytes
        key = (tuple(grid), block, shared_bytes, overlap)
        config = self._configs.get(key)
        if config is None:
            config = self._configs[key] = self._core.LaunchConfig(
                grid=tuple(grid),
                block=block,
                shmem_size=shared_bytes,
                programmatic_stream_serialization=overlap,
            )
        self._core.launch(self._queue, config, kernel.handle, *args)

    # ---- order ------------------------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Wait until all that is queued is done."""
        self.stream.sync()

    def capture(self, queue: Callable[[], None]) -> Any:
        """What a function queues, as a graph for `replay`; nothing of it runs now."""
        builder = self._device.create_graph_builder().begin_building()
        self._queue = builder
        try:
            queue()
        finally:
            self._queue = self.stream
            builder.end_building()
        graph = builder.complete()
        graph.upload(self.stream)
        return graph

    def replay(self, graph: Any) -> None:
        """Queue a graph."""
        graph.launch(self.stream)

    def seconds(self, queue: Callable[[], None]) -> float:
        """Seconds that the device takes for what a function queues."""
        options = self._core.EventOptions(timing_enabled=True)
        first, last = self._device.create_event(options), self._device.create_event(options)
        self.stream.record(first)
        queue()
        self.stream.record(last)
        last.sync()
        return float(last - first) / 1e3


def _check(result: tuple[Any, ...], what: str = "CUDA") -> None:
    status = result[0]
    if status != type(status).CUDA_SUCCESS:
        raise CudaError(f"{what}: {status.name}")
