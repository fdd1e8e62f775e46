"""The fast backend for CPUs: every architecture, compiled by Numba (docs/arithmetic.md, section 6)."""

from crucible.engine.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
