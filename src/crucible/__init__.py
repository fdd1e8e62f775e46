"""Train small language models from scratch and serve them, bit for bit reproducible."""

__version__ = "0.1.0"
