"""SIGTERM with --grace on the machine of one stage: all stages stop after the same inner step, and the next
start goes on to the same bits. Each stage is a thread with its own folder; frames go through queues."""

import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from returning import the_corpus
from small_recipes import pipelined, recipe_text
from test_middle import everything
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  # public

from isthmus.config import Recipe, parse_recipe
from isthmus.data.tokens import Batches
from isthmus.errors import RunError
from isthmus.protocol import closer
from isthmus.protocol.access import open_as
from isthmus.protocol.patience import Patience
from isthmus.replica.control_group import StageControlGroup
from isthmus.replica.links import LINK_PURPOSES, Departure, Frame
from isthmus.replica.pipelined import PipelinedReplica
from isthmus.replica.stage import Stage
from isthmus.runtime.checkpoint import Checkpoint
from isthmus.runtime.create import create
from isthmus.runtime.leaving import LeaveRequest, Orders
from isthmus.runtime.process import History
from isthmus.runtime.rounds import WorkerRounds
from isthmus.runtime.status import StartUp
from isthmus.runtime.trainer import Trainer
from isthmus.store.objects import open_store

ROUNDS, STEPS, STAGES = 3, 4, 2
WAIT_SECONDS = 60.0


@pytest.fixture(autouse=True)
def _close_at_once(monkeypatch):
    monkeypatch.setattr(closer, "STEP_IN_SECONDS", 0.0)


def recipe_of(more: str = "") -> Recipe:
    text = recipe_text(
        pipelined("edge", stages=STAGES, compression="1/4"),
        model={"layers": 2},
        inner={"precision": "fp64"},
        outer={"inner_steps": STEPS, "rounds": ROUNDS, "keep": 8, "values": "2bit"},
        bucket={"heartbeat_seconds": 1, "anchor_every": 2},
    )
    return parse_recipe(text, [more] if more else [])


class QueueEnd:
    """One end of a link between two threads."""

    def __init__(self, into: "queue.Queue[tuple[Tensor, ...]]", out: "queue.Queue[tuple[Tensor, ...]]"):
        self.into, self.out = into, out
        self.counts = dict.fromkeys(LINK_PURPOSES, 0)

    def expect(self, frames: Sequence[Frame], ahead: int) -> None:
        pass

    def send(self, frame: Mapping[str, Tensor]) -> Departure:
        self.out.put(tuple(tensor.clone() for tensor in frame.values()))
        departure = Departure()
        departure.now()
        return departure

    def receive(self, timeout_seconds: float | None = None) -> tuple[Tensor, ...]:
        return self.into.get(timeout=WAIT_SECONDS)

    def ready(self) -> bool:
        return True

    def close(self) -> None:
        pass


class Stages:
    """The stages of one replica, brought up again and again on the same folders."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.folder = recipe, folder
        self.said: list[list[str]] = [[] for _ in range(STAGES)]
        self.steps: list[list[int]] = [[] for _ in range(STAGES)]  # inner steps of each stage, of the run
        create(recipe, str(folder / "bucket"), folder / "keys")

    def work(self, stage: int) -> Path:
        return self.folder / f"machine-{stage}"

    def taken_back(self, stage: int, after: int) -> Callable[[int, int], None]:
        """SIGTERM comes to this stage's machine after so many inner steps of the run; there is no time."""

        def note(rank: int, inner_step: int) -> None:
            if (rank, inner_step) == (stage, after):
                self.orders[stage].parting.begin(0.0)

        return note

    def run(self, note: Callable[[int, int], None] = lambda rank, step: None) -> list[Trainer | RunError]:
        """Until all stages have ended: the trainer of each, or why its worker starts again."""
        back, forth = queue.Queue(), queue.Queue()
        ends = [(None, QueueEnd(back, forth)), (QueueEnd(forth, back), None)]
        store, pool = HashStore(), ThreadPoolExecutor(STAGES)
        self.orders = [Orders() for _ in range(STAGES)]
        with pool:
            return list(pool.map(lambda rank: self._worker(rank, ends[rank], store, note), range(STAGES)))

    def _worker(self, rank: int, ends, store, note: Callable[[int, int], None]) -> Trainer | RunError:
        recipe, cpu, work, log = self.recipe, torch.device("cpu"), self.work(rank), self.said[rank].append
        work.mkdir(exist_ok=True)
        bucket = open_store(str(self.folder / "bucket"))
        ledger, _ = open_as(bucket, "edge", str(self.folder / "keys" / "edge.key"))
        (member,) = recipe.fleet()
        batches = Batches.of(recipe, the_corpus(recipe.data.corpus).train)
        stage = Stage(recipe, member, rank, precision="fp64")
        replica = PipelinedReplica(
            recipe, member, [stage], [ends], None if rank else batches, schedule="1f1b"
        )
        plain, steps = replica.inner_step, self.steps[rank]

        def noted(inner_step: int) -> Tensor:
            loss = plain(inner_step)
            steps.append(inner_step)
            note(rank, inner_step + 1)
            return loss

        replica.inner_step = noted
        control = StageControlGroup("edge", rank, STAGES, store, WAIT_SECONDS)
        request = LeaveRequest(self.orders[rank], ledger, "0123456789abcdef", log, leader=rank == 0)
        trainer = Trainer(
            recipe,
            member,
            replica,
            ledger,
            control,
            cpu,
            work / "stage",
            "0123456789abcdef",
            log,
            save_seconds=0.0,
            background=False,
            patience=Patience(log, leave=request),
            parting=request.parting,
        )
        try:
            WorkerRounds(trainer, request, History(), StartUp(0.0, log), None, None).run()
        except RunError as error:
            return error
        return trainer


def the_whole(stages: Sequence[Trainer | RunError]) -> dict[str, Tensor]:
    found = {}
    for rank, trainer in enumerate(stages):
        assert isinstance(trainer, Trainer), trainer
        found |= {f"{rank}/{name}": tensor for name, tensor in everything(trainer).items()}
    return found


@pytest.mark.parametrize("more", ["", "subspace.weight_projection=true"])
@pytest.mark.parametrize(("stage", "after"), [(1, STEPS + 1), (0, STEPS + 2)])
def test_one_machine_is_taken_back_and_all_stages_stop_and_go_on_together(stage, after, more, tmp_path: Path):
    usual, taken = (Stages(recipe_of(more), tmp_path / name) for name in ("usual", "taken"))
    whole = the_whole(usual.run())
    ended = taken.run(taken.taken_back(stage, after))
    stop = after - STEPS + 1  # the wish travels with the next inner step
    for rank in range(STAGES):
        assert f"stopped in round 2, after {stop} of its {STEPS} inner steps" in taken.said[rank]
        assert taken.steps[rank] == list(range(STEPS + stop))
    # The machine that stays starts its worker again, which waits for the other.
    assert isinstance(ended[stage], Trainer)
    assert isinstance(ended[1 - stage], RunError)
    assert "the machine of another stage was taken back" in str(ended[1 - stage])
    back = the_whole(taken.run())
    for rank in range(STAGES):
        assert f"back in round 2, after {stop} of its inner steps" in taken.said[rank]
        assert taken.steps[rank] == list(range(ROUNDS * STEPS))  # none is trained twice
    assert whole.keys() == back.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, back[name]), name


def test_a_wish_in_the_last_inner_step_but_one_leaves_at_the_edge(tmp_path: Path):
    usual, taken = (Stages(recipe_of(), tmp_path / name) for name in ("usual", "taken"))
    whole = the_whole(usual.run())
    taken.run(taken.taken_back(1, 2 * STEPS - 1))
    assert taken.steps == [list(range(2 * STEPS))] * STAGES
    assert "left after round 2" in taken.said[0]
    back = the_whole(taken.run())
    assert taken.steps == [list(range(ROUNDS * STEPS))] * STAGES
    for name, tensor in whole.items():
        assert torch.equal(tensor, back[name]), name


def test_stages_that_have_different_checkpoints_go_on_from_the_newest_that_all_have(tmp_path: Path):
    """One stage could not write the last one, which stands inside round 2."""
    usual, taken = (Stages(recipe_of(), tmp_path / name) for name in ("usual", "taken"))
    whole = the_whole(usual.run())
    taken.run(taken.taken_back(1, STEPS + 1))
    for path in (taken.work(1) / "stage" / "state" / "inside").rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-7])
    back = the_whole(taken.run())
    assert any("a checkpoint is lost: " in line and "cannot be read" in line for line in taken.said[1])
    assert any("another process of this replica cannot read its part" in line for line in taken.said[0])
    assert f"back in round 1, after {STEPS} of its inner steps" in taken.said[0]
    assert taken.steps[0] == [*range(STEPS + 2), *range(STEPS, ROUNDS * STEPS)]
    for name, tensor in whole.items():
        assert torch.equal(tensor, back[name]), name


def test_stages_save_at_the_same_places_by_the_word_that_travels_with_each_step(tmp_path: Path, monkeypatch):
    """Where only one of them would save, none does. Where both would, both do, after the same step."""
    stages, asked = Stages(recipe_of(), tmp_path / "stages"), []
    both = [False]

    def is_due(self, edge: bool) -> bool:
        asked.append(self)
        return both[0] or "machine-0" in str(self.folder)

    monkeypatch.setattr(Checkpoint, "is_due", is_due)
    for trainer in stages.run():
        assert trainer.checkpoint.numbers() == set()
    both[0] = True
    stages = Stages(recipe_of(), tmp_path / "both")
    first, second = stages.run()
    assert first.checkpoint.numbers() == second.checkpoint.numbers() != set()
