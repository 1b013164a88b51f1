"""Time this machine's training: the inner step of a full replica, with the planner's operation counts."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from isthmus.config import Member, Recipe, ReplicaConfig
from isthmus.data.tokens import Batches
from isthmus.planner.cost import step_flops
from isthmus.planner.memory import process_memory
from isthmus.planner.rate import FEWEST_STEPS, Cores, TrainingRate, usable_cores
from isthmus.replica.full import FullReplica

MOST_SEQUENCES = 32  # inner.batch's default
STEPS = FEWEST_STEPS + 1  # per tried batch, in the given time
PATIENCE = 3.0  # times the given time, after which it ends however few steps were done


class _Noise(Batches):
    """Random tokens instead of a corpus: a training rate does not depend on the text."""

    def __init__(self, vocab: int, context: int, batch: int) -> None:
        self.batch = batch
        rows = max(batch, MOST_SEQUENCES)
        self.tokens = torch.randint(vocab, (rows, context + 1), generator=torch.Generator())

    def at(self, replica: int, inner_step: int) -> Tensor:
        return self.tokens[: self.batch]


def training_rate(
    recipe: Recipe,
    device: str,
    precision: str,
    seconds: float,
    available_bytes: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> TrainingRate:
    """Train the recipe's model for about `seconds`: forward, backward, clipping and InnerOpt, as a worker of
    a fleet does.

    With `available_bytes` the batch doubles while several inner steps fit the time and one fits the memory;
    without, it stays. It ends after `PATIENCE` x `seconds`, plus the rest of a step.
    """
    one = Recipe(
        name="measured",
        model=recipe.model.plain,
        inner=recipe.inner,
        replicas=(ReplicaConfig(name="measured"),),
    )
    model, batches = one.model, _Noise(one.model.vocab, one.model.context, one.inner.batch)
    # The batch grows while the replica stays, since a step reads its tokens from `batches`.
    replica = FullReplica(
        one, Member(0, "measured", one.replicas[0]), batches, device=device, precision=precision
    )
    count = 0

    def step() -> float:
        nonlocal count
        began = clock()
        replica.inner_step(count)
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        count += 1
        return clock() - began

    began, cores = clock(), Cores()
    step()  # the first one also allocates and chooses kernels
    spent = step()
    while available_bytes is not None and (double := 2 * batches.batch) <= MOST_SEQUENCES:
        wanted = _with_batch(one, double)
        needed = process_memory(wanted, wanted.replicas[0], 0, 1).total
        if 2 * spent * STEPS > seconds or needed > available_bytes:
            break
        batches.batch = double
        step()
        spent = step()
    times = [spent]
    while (gone := clock() - began) + spent <= PATIENCE * seconds:
        if gone + spent > seconds and len(times) >= FEWEST_STEPS:
            break
        times.append(step())
    each = statistics.median(times)
    return TrainingRate(
        device=device,
        precision=precision,
        preset=model.preset,
        sequences=batches.batch,
        steps=len(times),
        step_seconds=each,
        fastest_seconds=min(times),
        slowest_seconds=max(times),
        tflops=step_flops(_with_batch(one, batches.batch), one.replicas[0]) / each / 1e12,
        tokens_per_second=batches.batch * model.context / each,
        threads=torch.get_num_threads() if device == "cpu" else 1,
        others_cores=cores.others(),
        host_cores=cores.host_cores,
    )


def _with_batch(recipe: Recipe, batch: int) -> Recipe:
    return replace(recipe, inner=replace(recipe.inner, batch=batch))


def measured_here(recipe: Recipe, seconds: float = 1.0) -> tuple[Recipe, TrainingRate]:
    """The recipe as it would run on this machine's CPU alone, with all processes of its fleet here: each
    machine's tflops is one process's share of the measured rate. For a plan of a fleet that `train` starts on
    one machine, where the recipe's own rates are those of other machines.

    Cores are shared evenly while all processes compute. Processes with more work continue when the others are
    done, so that over a round a process has at least its share of the work.
    """
    parts = {r.name: max(r.stages, r.processes) for r in recipe.replicas}
    processes = sum(r.count * parts[r.name] for r in recipe.replicas)
    work = sum(recipe.batch_of(r) * r.count for r in recipe.replicas)
    cores = usable_cores()
    precision = "fp32" if recipe.inner.precision == "auto" else recipe.inner.precision
    with _threads(max(1, cores // processes)):  # the supervisor's thread count
        rate = training_rate(recipe, "cpu", precision, seconds)

    def share(replica: ReplicaConfig) -> float:
        own = recipe.batch_of(replica) / parts[replica.name] / work
        return min(1.0, cores * max(1 / processes, own))

    replicas = tuple(replace(r, tflops=float(f"{rate.tflops * share(r):.3g}")) for r in recipe.replicas)
    return replace(recipe, replicas=replicas), rate


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
