"""What a stage link does to numbers: it rounds them to the wire's type in both directions."""

import torch
from torch import Tensor

from isthmus.subspace.boundary import as_on_wire

WIRE_TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


class LocalLink:
    """A stage link inside one process: it rounds as a real link does."""

    def __init__(self, wire: str) -> None:
        self.dtype = WIRE_TYPES[wire]

    def carry(self, z: Tensor) -> Tensor:
        # A wire of higher precision than the stream changes nothing.
        return as_on_wire(z, self.dtype) if self.dtype.itemsize < z.dtype.itemsize else z
