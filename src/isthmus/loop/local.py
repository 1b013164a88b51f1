"""The outer method in one process, without a bucket: M copies of a model, in a notebook."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from isthmus import gpu
from isthmus.config import OuterConfig
from isthmus.config.checks import nearest
from isthmus.errors import ConfigError, RunError
from isthmus.loop.tensors import Parameters, values
from isthmus.outer import outer_method

SETTINGS = tuple(name for name in OuterConfig.__dataclass_fields__ if name not in ("inner_steps", "rounds"))


class SparseLoCo:
    """Eq. 2 of arXiv 2601.02360 for M copies of a model in this process.

        outer = isthmus.SparseLoCo(models, inner_steps=50)
        for step in range(1000):
            for model, optimizer in zip(models, optimizers):
                ...                  # a step of each copy on its own batch
            outer.step()             # every 50th call: all copies meet at theta^(t)

    `settings` are those of [outer] in a recipe: keep, values, method and the others (docs/reference.md).
    """

    def __init__(self, models: Sequence[nn.Module], *, inner_steps: int, **settings: Any) -> None:
        """All copies start from the first one's weights."""
        models = list(models)
        if not models or len(set(map(id, models))) < len(models):
            raise ConfigError("give a list of different copies of one model (copy.deepcopy makes them)")
        for name in settings:
            if name not in SETTINGS:
                raise ConfigError(f'there is no setting "{name}"{nearest(name, SETTINGS)}')
        self.config = OuterConfig(inner_steps=inner_steps, **settings)
        if self.config.method == "adamw":
            raise ConfigError('method is "adamw", which averages gradients; take "sparseloco" or "diloco"')
        first, *others = [Parameters(model) for model in models]
        for other in others:
            other.check(first.tensors, first.frozen_digest())
        device = gpu.outer_device(next(iter(first.trained.values())).device)
        self.anchor = {name: tensor.to(device) for name, tensor in first.anchor().items()}
        self.method = outer_method(self.config, self.anchor)
        self.copies = [first, *others]
        self.feedback = [
            {name: torch.zeros_like(tensor) for name, tensor in self.anchor.items()} for _ in models
        ]
        self.num_steps = 0
        self._copy_anchor()

    @property
    def round(self) -> int:
        """Rounds that are done."""
        return self.num_steps // self.config.inner_steps

    def step(self) -> bool:
        """Call it after one optimiser step of every copy. True if this call ended a round."""
        self.num_steps += 1
        if self.num_steps % self.config.inner_steps:
            return False
        params = [
            {name: values(p, self.anchor[name]) for name, p in copy.trained.items()} for copy in self.copies
        ]
        if not all(p.isfinite().all() for own in params for p in own.values()):
            raise RunError(f"round {self.round}: a copy has weights that are not finite")
        self.method.apply(self.method.contribute_all(params, self.feedback))
        self._copy_anchor()
        return True

    @torch.no_grad()
    def _copy_anchor(self) -> None:
        for copy in self.copies:
            for name, parameter in copy.trained.items():
                parameter.copy_(self.anchor[name])
