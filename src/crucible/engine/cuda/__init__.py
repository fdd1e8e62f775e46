"""The CUDA backend: kernels of our own, compiled for the card at hand, and nothing but numpy around them."""

from crucible.engine.cuda.backend import CudaBackend

__all__ = ["CudaBackend"]
