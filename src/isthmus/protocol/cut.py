"""The tensors of a run, and how its updates are cut into shards: the only place that reads either.

A run has the parameters of its recipe's [model], cut so that each stage finds its part whole; or it states a
list of named tensors, whose shards are cut by size.
"""

from collections.abc import Iterable, Sequence
from math import prod

from isthmus.config import Recipe
from isthmus.layout.chunks import packed_many_bytes
from isthmus.layout.traffic import codec_settings, shard_bytes, shards
from isthmus.protocol.documents import MOST_SHARDS, RunDocument, RunInfo, Shard, Tensor
from isthmus.protocol.trust import Refused

MAX_FACTS_BYTES = 4096
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def run_shapes(run: RunInfo) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and shape, in the order that all replicas share."""
    return run.recipe.model.shapes()


def run_shards(run: RunInfo) -> tuple[tuple[str, ...], ...]:
    """The tensor names of each shard. `run` is epoch 0: later members do not change the cut."""
    if run.tensors:
        return cut_by_size(run.tensors, run.shard_bytes)
    return shards(run.recipe, run.room)


def run_sizes(run: RunInfo) -> tuple[int, ...]:
    """The bytes of each shard of an update, exactly as the codec packs it."""
    if not run.tensors:
        return shard_bytes(run.recipe, run.room)
    shapes, (keep, values) = run_shapes(run), codec_settings(run.recipe)
    side = run.recipe.outer.chunk_side
    return tuple(
        packed_many_bytes({name: shapes[name] for name in names}, side, keep, values)
        for names in run_shards(run)
    )


def cut_by_size(tensors: Iterable[Tensor], most: int) -> tuple[tuple[str, ...], ...]:
    """Cut in the order of the list: a shard ends before the tensor that would make it larger than `most`
    bytes. A tensor larger than that gets a shard of its own."""
    found: list[list[str]] = []
    room = 0
    for tensor in tensors:
        size = prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
        if not found or size > room:
            found.append([])
            room = most
        found[-1].append(tensor.name)
        room -= size
    return tuple(map(tuple, found))


def check_cut(run: RunDocument, recipe: Recipe) -> None:
    """Raise Refused if the parts of run.json that state what is trained contradict each other."""
    if any(stages > recipe.model.layers for stages in run.room):
        raise Refused("it has room for more stages than the model has layers")
    for name, given in (("kept", run.kept_progress), ("overlap", run.overlap_steps)):
        if given and name not in run.requires:
            raise Refused(f'it does not say that it requires "{name}"')
    if bool(run.tensors) != ("tensors" in run.requires):
        raise Refused('it requires "tensors" and lists none, or the other way round')
    if run.tensors:
        _check_tensors(run, [member.config.parts for member in recipe.fleet()])


def _check_tensors(run: RunDocument, parts: Sequence[int]) -> None:
    names = [tensor.name for tensor in run.tensors]
    if len(set(names)) < len(names):
        raise Refused("it lists a tensor twice")
    if not run.start:
        raise Refused("it lists tensors, and does not name the anchor with their first values")
    if run.room or any(number > 1 for number in parts):
        raise Refused("it lists tensors, and has replicas with stages")
    if not run.shard_bytes or len(cut_by_size(run.tensors, run.shard_bytes)) > MOST_SHARDS:
        raise Refused(f"its shards of {run.shard_bytes} bytes are none, or more than {MOST_SHARDS}")


class Cut:
    """The tensors of a run and the shards of its updates."""

    def __init__(self, run: RunInfo) -> None:
        """`run` is epoch 0: later members do not change the cut."""
        self.shapes, self.shards, self.sizes = run_shapes(run), run_shards(run), run_sizes(run)

    @property
    def commit_limit(self) -> int:
        """Bytes of a commit: its facts, and its shards."""
        return 2 * MAX_FACTS_BYTES + 128 * len(self.shards)

    def check(self, shards: Sequence[Shard]) -> None:
        """Raise Refused unless they are all shards of an update once, in order, each of its size."""
        if [shard.index for shard in shards] != list(range(len(self.shards))):
            raise Refused("it does not list every shard once")
        for shard, size in zip(shards, self.sizes, strict=True):
            if shard.size != size:
                words = f"shard {shard.index} is said to have {shard.size} bytes; this run's have {size}"
                raise Refused(words)
