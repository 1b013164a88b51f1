"""A module that Isthmus does not know, and eq. 2 of arXiv 2601.02360 in float64, computed plainly."""

import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

CONTEXT, VOCAB, WIDTH = 8, 32, 12
DRAWING = threading.Lock()


class Odd(nn.Module):
    """Biases, a tied head, a 3-D, a 0-D and a frozen parameter, and a buffer."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with DRAWING:  # other threads make models, too
            torch.manual_seed(seed)
            self._draw()
        self.head.weight = self.embed.weight
        self.to(dtype)

    def _draw(self) -> None:
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.fixed = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.fixed
        for matrix in self.mix:
            x = x + self.scale * torch.tanh(x @ matrix)
        x = self.norm(self.inner(x).transpose(1, 2)).transpose(1, 2)
        return self.head(x)

    def loss(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batch(seed: int, step: int) -> Tensor:
    """A text that can be learnt: each token is followed by a fixed other one, most of the time."""
    draw = torch.Generator().manual_seed(1000 * seed + step)
    tokens = torch.randint(VOCAB, (4, CONTEXT + 1), generator=draw)
    for place in range(1, CONTEXT + 1):
        told = torch.rand(4, generator=draw) < 0.9
        tokens[:, place] = torch.where(told, (5 * tokens[:, place - 1] + 3) % VOCAB, tokens[:, place])
    return tokens


def train_step(model: Odd, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    loss = model.loss(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def chunks(shape: Sequence[int], side: int) -> list[tuple[slice, slice]]:
    """The blocks of a tensor, folded to two dimensions: divisors of each axis, as none of these is prime."""
    rows, cols = (shape[0], int(torch.tensor(shape[1:]).prod())) if len(shape) > 1 else (1, sum(shape) or 1)
    height = max(d for d in range(1, side + 1) if rows % d == 0)
    width = max(d for d in range(1, side + 1) if cols % d == 0)
    return [
        (slice(y, y + height), slice(x, x + width))
        for y in range(0, rows, height)
        for x in range(0, cols, width)
    ]


class Equation2:
    """theta and the feedback of M replicas in float64; keep = 8 of a 16 x 16 chunk, values as they are."""

    def __init__(
        self, theta: Mapping[str, Tensor], num_replicas: int, keep: int, side: int, beta: float
    ) -> None:
        self.theta = {name: tensor.double().clone() for name, tensor in theta.items()}
        zeros = [{name: torch.zeros_like(t) for name, t in self.theta.items()} for _ in range(num_replicas)]
        self.feedback, self.keep, self.side, self.beta = zeros, keep, side, beta

    def round(self, params: Sequence[Mapping[str, Tensor]]) -> None:
        for name, theta in self.theta.items():
            total, count = torch.zeros_like(theta), torch.zeros_like(theta)
            for own, e in zip(params, self.feedback, strict=True):
                carried = self.beta * e[name] + (theta - own[name].double())
                sent = self._top(carried)
                e[name] = carried - sent
                total += sent
                count += sent != 0
            theta -= total / count.clamp(min=1)

    def _top(self, dense: Tensor) -> Tensor:
        rows = dense.shape[0] if dense.ndim > 1 else 1
        flat, kept = dense.reshape(rows, -1), torch.zeros_like(dense).reshape(rows, -1)
        for block in chunks(dense.shape, self.side):
            part = flat[block]
            number = min(part.numel(), max(1, round(part.numel() * self.keep / self.side**2)))
            index = part.abs().flatten().topk(number).indices
            mask = torch.zeros(part.numel(), dtype=torch.bool)
            mask[index] = True
            kept[block] = torch.where(mask.view_as(part), part, torch.zeros_like(part))
        return kept.reshape(dense.shape)
