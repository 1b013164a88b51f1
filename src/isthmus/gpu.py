"""Whether Triton kernels can run: the one question that code with a fused form asks of a device."""

import importlib.util
from functools import lru_cache

import torch


@lru_cache(maxsize=1)
def _triton_is_here() -> bool:
    return importlib.util.find_spec("triton") is not None


def usable(device: torch.device) -> bool:
    """Whether kernels can run on tensors of this device."""
    return device.type == "cuda" and torch.version.hip is None and _triton_is_here()
