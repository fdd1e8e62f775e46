"""The reference backend: numpy, float64, every architecture; the oracle that other backends are compared with."""

from crucible.engine.reference.backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
