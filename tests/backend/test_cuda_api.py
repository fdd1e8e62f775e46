"""The parts of cuda-core and cuda-bindings that the driver layer calls are there; looking at them needs no driver."""

from __future__ import annotations

import inspect
from operator import attrgetter

import pytest

core = pytest.importorskip("cuda.core")
graph = pytest.importorskip("cuda.core.graph")
driver = pytest.importorskip("cuda.bindings.driver")
nvrtc = pytest.importorskip("cuda.bindings.nvrtc")

CORE = [
    "Device.set_current",
    "Device.compute_capability",
    "Device.name",
    "Device.properties",
    "Device.device_id",
    "Device.create_stream",
    "Device.create_event",
    "Device.create_graph_builder",
    "Device.allocate",
    "Stream.sync",
    "Stream.record",
    "Stream.handle",
    "Buffer.from_handle",
    "Buffer.copy_to",
    "Buffer.fill",
    "Buffer.handle",
    "ObjectCode.from_cubin",
    "ObjectCode.get_kernel",
    "Kernel.handle",
    "LaunchConfig.grid",
    "LaunchConfig.block",
    "LaunchConfig.shmem_size",
    "LaunchConfig.programmatic_stream_serialization",
    "Event.sync",
    "EventOptions",
    "LegacyPinnedMemoryResource.allocate",
]
GRAPH = [
    "GraphBuilder.begin_building",
    "GraphBuilder.end_building",
    "GraphBuilder.complete",
    "Graph.launch",
    "Graph.upload",
]
DRIVER = ["cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuKernelSetAttribute", "CUfunction_attribute"]
NVRTC = [
    "nvrtcVersion",
    "nvrtcCreateProgram",
    "nvrtcCompileProgram",
    "nvrtcGetProgramLog",
    "nvrtcGetCUBIN",
    "nvrtcDestroyProgram",
]


def test_what_the_driver_layer_calls_exists() -> None:
    for module, names in ((core, CORE), (graph, GRAPH), (driver, DRIVER), (nvrtc, NVRTC)):
        for name in names:
            attrgetter(name)(module)


def test_a_launch_takes_stream_configuration_and_kernel() -> None:
    assert list(inspect.signature(core.launch).parameters)[:3] == ["stream", "config", "kernel"]
