"""A contributor gone bad, for bench/attacks.py: what it sends instead of its own update.

It trains honestly, and changes what it sends: its key is valid, its payload well formed. In the simulator it
knows everybody's update of the round before it sends its own; in a real fleet it goes by its own norm.
"""

import os
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from isthmus.sparse import Bundle, SparseChunks
from isthmus.sparse.topk import TopK, decode

BAD = "ISTHMUS_BENCH_ATTACK"  # REPLICA:KIND:SCALE, of the process that turns bad
BELOW = 0.9  # of the limit, by its own norm: that may be below the median, which it does not know
Dense = dict[str, Tensor]
Payloads = Mapping[str, SparseChunks]


def flip(own: Dense, others: Sequence[Dense], round_number: int) -> Dense:
    """Its own update with the sign turned: up the hill."""
    return {name: -tensor for name, tensor in own.items()}


def noise(own: Dense, others: Sequence[Dense], round_number: int) -> Dense:
    """Normal numbers at entries of its choice."""
    random = torch.Generator().manual_seed(round_number)
    drawn = {name: torch.randn(own[name].shape, generator=random) for name in sorted(own)}
    return {name: drawn[name].to(tensor) * tensor.norm() for name, tensor in own.items()}


def against(own: Dense, others: Sequence[Dense], round_number: int) -> Dense:
    """The mean of the honest updates with the sign turned."""
    return {name: -torch.stack([each[name] for each in others]).mean(0) for name in own}


def apart(own: Dense, others: Sequence[Dense], round_number: int) -> Dense:
    """The turned update where nobody else sends anything: the mean over contributors does not thin it."""
    alone = {n: torch.stack([each[n] for each in others]).eq(0).all(0) for n in own}
    return {name: torch.where(alone[name], -tensor, 1e-12 * tensor) for name, tensor in own.items()}


def focus(own: Dense, others: Sequence[Dense], round_number: int) -> Dense:
    """All of its norm in the smallest tensors, the gains of the norms."""
    return {name: -1e3 * tensor if tensor.dim() == 1 else tensor for name, tensor in own.items()}


def late(own: Dense, others: Sequence[Dense], round_number: int) -> Dense:
    """Honest for six rounds."""
    return own if round_number <= 6 else flip(own, others, round_number)


def large(own: Dense, others: Sequence[Dense], round_number: int) -> Dense:
    """Its own update: nothing is wrong with it but its size."""
    return own


Kind = Callable[[Dense, Sequence[Dense], int], Dense]
KINDS: dict[str, Kind] = {each.__name__: each for each in (flip, noise, large, against, apart, focus, late)}


def norm_of(dense: Mapping[str, Tensor]) -> float:
    return float(sum(tensor.double().square().sum() for tensor in dense.values()) ** 0.5)


def dense_of(payloads: Payloads) -> Dense:
    return {name: decode(payload) for name, payload in payloads.items()}


def forged(codec: TopK, kind: str, own: Payloads, others: Sequence[Payloads], norm: float, t: int) -> Bundle:
    """What it sends in round t: an update of this kind, with this norm."""
    changed = KINDS[kind](dense_of(own), [dense_of(each) for each in others], t)
    if kind == "late" and t <= 6:
        norm = norm_of(changed)
    for _ in range(2):  # what the codec keeps has another norm than what it is given
        sent = codec.encode_many(changed)
        changed = {n: x * (norm / max(norm_of(dense_of(sent)), 1e-30)) for n, x in changed.items()}
    return codec.encode_many(changed)


def turn_bad() -> None:
    """Of a real worker: from now on `contribute` returns what the environment asks for. Called by the
    sitecustomize that bench/attacks.py puts before it."""
    from isthmus.outer.sparseloco import SparseLoCo

    _, kind, scale = os.environ[BAD].split(":")
    honest, rounds = SparseLoCo.contribute, 0
    # What was refused does not return to its own feedback, which would grow from round to round.
    SparseLoCo.take_back = lambda *given: None  # pyright: ignore[reportAttributeAccessIssue]

    def contribute(self: SparseLoCo, params: Dense, feedback: Dense) -> Bundle:
        nonlocal rounds
        rounds += 1
        own = honest(self, params, feedback)
        norm = norm_of({name: payload.values for name, payload in own.items()})
        return forged(self.codec, kind, own, [], norm * float(scale), rounds)

    SparseLoCo.contribute = contribute  # pyright: ignore[reportAttributeAccessIssue]
