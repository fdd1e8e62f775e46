"""The linear layer of every projection: no bias, and no draw from torch's global generator at construction."""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """y = x W^T with a weight [outputs, inputs]. The owner of the layer initialises it (`Transformer.init_weights`)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Nothing: torch's default would be drawn only to be overwritten."""
