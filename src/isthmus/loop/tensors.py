"""The parameters of any `nn.Module`, by the names that all replicas share."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from isthmus.errors import ConfigError
from isthmus.model.digest import shard_digest
from isthmus.protocol.documents import Tensor as NamedTensor

DTYPES: dict[torch.dtype, Literal["float64", "float32", "bfloat16", "float16"]] = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
COMPILED = "_orig_mod."  # what torch.compile puts before the names of what it has compiled
MOST_SHOWN = 3  # differences that an error names


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module below torch.compile, DistributedDataParallel and DataParallel."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


class Parameters:
    """A model's parameters in the order of their names: those that are trained and sent, and the frozen ones.

    A tied parameter appears once. Buffers are the user's.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"the model is a {type(model).__name__}; give a torch.nn.Module")
        found = {name.replace(COMPILED, ""): p for name, p in unwrapped(model).named_parameters()}
        for name, parameter in found.items():
            _check(name, parameter)
        self.trained = {name: found[name] for name in sorted(found) if found[name].requires_grad}
        self.frozen = {name: found[name] for name in sorted(found) if not found[name].requires_grad}
        if not self.trained:
            raise ConfigError("the model has no parameter that is trained (requires_grad)")

    @property
    def tensors(self) -> tuple[NamedTensor, ...]:
        """The trained parameters as run.json lists them."""
        return tuple(NamedTensor(n, tuple(p.shape), DTYPES[p.dtype]) for n, p in self.trained.items())

    @property
    def is_double(self) -> bool:
        return any(p.dtype == torch.float64 for p in self.trained.values())

    @property
    def dtype(self) -> torch.dtype:
        """The anchor's: float32 also for bf16 and fp16 weights, so that their rounding is not sent."""
        return torch.float64 if self.is_double else torch.float32

    def anchor(self) -> dict[str, Tensor]:
        """A copy of the trained values, in the anchor's dtype, on the CPU."""
        return {name: whole(p).to("cpu", self.dtype, copy=True) for name, p in self.trained.items()}

    def frozen_digest(self) -> str:
        """The digest of the frozen parameters; "" if there are none."""
        here = {name: whole(p).cpu().contiguous() for name, p in self.frozen.items()}
        return shard_digest(here, list(here)) if here else ""

    def check(self, tensors: Sequence[NamedTensor], frozen: str) -> None:
        """ConfigError with the first differences unless the run has exactly these names and shapes. The dtype
        may differ from replica to replica."""
        theirs = {each.name: tuple(each.shape) for each in tensors}
        ours = {name: tuple(p.shape) for name, p in self.trained.items()}
        odd = [_difference(name, theirs, ours, self.frozen) for name in sorted(theirs.keys() | ours.keys())]
        if lines := [line for line in odd if line]:
            more = f"; and {len(lines) - MOST_SHOWN} more" if len(lines) > MOST_SHOWN else ""
            raise ConfigError(f"this model is not the run's: {'; '.join(lines[:MOST_SHOWN])}{more}")
        if self.frozen_digest() != frozen:
            raise ConfigError(
                "this model is not the run's: its frozen parameters (requires_grad=False) have other names, "
                "dtypes or values"
            )


def whole(parameter: Tensor) -> Tensor:
    """The detached values; of a parameter that FSDP2 has cut, gathered from all ranks."""
    full = getattr(parameter, "full_tensor", None)
    return full().detach() if full else parameter.detach()


def _check(name: str, parameter: Tensor) -> None:
    if isinstance(parameter, UninitializedParameter):
        raise ConfigError(f"{name} has no shape yet; run one batch through the model first")
    if parameter.requires_grad and parameter.dtype not in DTYPES:
        kind = str(parameter.dtype).removeprefix("torch.")
        raise ConfigError(f"{name} is {kind}; a trained parameter is {', '.join(DTYPES.values())}")
    if parameter.is_meta:
        raise ConfigError(f"{name} is on the meta device; give the model its weights first")
    if parameter.is_sparse or not parameter.numel():
        raise ConfigError(f"{name} is {'sparse' if parameter.is_sparse else 'empty'}; it cannot be sent")
    if "/" in name or len(name) > 300:
        raise ConfigError(
            f"{name[:80]} cannot be a tensor's name in a run: it has a / or over 300 characters"
        )


def _difference(
    name: str,
    theirs: Mapping[str, tuple[int, ...]],
    ours: Mapping[str, tuple[int, ...]],
    frozen: Mapping[str, Tensor],
) -> str:
    if name not in ours:
        return f"{name} is {'frozen' if name in frozen else 'missing'} here"
    if name not in theirs:
        return f"the run has no {name}"
    return "" if theirs[name] == ours[name] else f"{name} is {ours[name]} here and {theirs[name]} in the run"


@torch.no_grad()
def values(parameter: Tensor, anchor: Tensor) -> Tensor:
    """A parameter's values in the anchor's dtype, on its device. For narrower weights they stand as far from
    the anchor as the weights do from the rounded anchor, so what was not trained differs by nothing."""
    here = parameter.detach().to(anchor.device)
    if here.dtype == anchor.dtype:
        return here.contiguous()
    return anchor - (anchor.to(here.dtype).to(anchor.dtype) - here.to(anchor.dtype))
