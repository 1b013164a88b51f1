"""One process of a real fleet, with a full replica or one stage of a pipelined one: train, save, resume."""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from isthmus.config import Member, Recipe
from isthmus.errors import RunError
from isthmus.layout.stages import EMBEDDING
from isthmus.model import checkpoint
from isthmus.model.digest import shard_digest
from isthmus.model.llama import init_tensor
from isthmus.outer import outer_method
from isthmus.outer.exchange import Contribution
from isthmus.protocol.closer import Closer
from isthmus.protocol.exchange import LedgerExchange
from isthmus.protocol.heartbeat import Heartbeat
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.shards import ShardReader, unpack_shards
from isthmus.protocol.trust import Refused, canonical
from isthmus.replica.base import Replica
from isthmus.replica.control_group import ControlGroup, agree, all_true, collect
from isthmus.replica.meter import Meter
from isthmus.runlog import finite
from isthmus.runlog.facts import Facts
from isthmus.store import StoreError
from isthmus.subspace.boundaries import BasisSet, as_sent

Log = Callable[[str], None]
SAVED = ("loss", "grad_norm", "seconds")  # of a status: saved with the round's update


@dataclass
class WorkerStatus:
    """What this process knows of itself: heartbeats and commits are made of it."""

    state: str = "starting"
    round: int = 0
    inner_step: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None
    grad_norm: float | None = None
    farewell: Facts = field(default_factory=Facts)


class Trainer:
    """This process's replica in the outer-round loop, which drives it as it drives a simulated fleet."""

    def __init__(
        self,
        recipe: Recipe,
        member: Member,
        replica: Replica,
        ledger: Ledger,
        control: ControlGroup,
        device: torch.device,
        work_dir: Path,
        incarnation: str,
        log: Log,
    ) -> None:
        self.recipe, self.member, self.replica, self.ledger = recipe, member, replica, ledger
        self.control, self.device, self.log = control, device, log
        self.state_dir = work_dir / "state"
        self.status = WorkerStatus()
        own = replica.named_parameters()
        master_dtype = next(iter(own.values())).dtype
        # Every stage of a compressed replica keeps the embedding, and applies its update as stage 0 does.
        names = [*own, *({EMBEDDING} - own.keys() if member.config.compressed else ())]
        self.writes = [i for i, shard in enumerate(ledger.shards) if own.keys() >= set(shard)]
        self.reads = [i for i, shard in enumerate(ledger.shards) if set(names) >= set(shard)]
        shapes = recipe.model.shapes()
        self.anchor = {
            name: init_tensor(name, shapes[name], recipe.model, recipe.seed).to(device, master_dtype)
            for name in names
        }
        self.bases = BasisSet(recipe, device, master_dtype)
        self.outer = outer_method(recipe.outer, self.anchor)
        with_feedback = recipe.outer.method == "sparseloco"
        self.feedback = {name: torch.zeros_like(p) for name, p in own.items()} if with_feedback else {}
        reader = ShardReader(ledger, self.reads)
        closes = control.rank == 0 and member.name in ledger.run.closers
        closer = Closer(ledger, reader, log) if closes else None
        self.exchange = LedgerExchange(ledger, control, self.writes, reader, closer, incarnation, log)
        self.meter = Meter(replica, device)
        self.pending: Contribution | None = None
        self.step_count = 0  # inner steps that the optimiser has taken

    # What the loop calls

    def train_round(self, round_index: int, progress: Callable[[int], None]) -> list[Contribution]:
        """H inner steps, then this replica's update on disk before any of it is sent."""
        steps, status = self.recipe.outer.inner_steps, self.status
        status.state, status.round = "training", round_index + 1
        self.replica.begin_round(self.anchor)
        started, losses = time.monotonic(), []
        for h in range(steps):
            losses.append(self.replica.inner_step(round_index * steps + h))
            self.meter.step()
            status.inner_step = round_index * steps + h + 1
            if self.device.type == "cpu":
                status.loss = float(losses[-1])
            progress(h + 1)
        status.loss = float(torch.stack([loss.double().cpu() for loss in losses]).mean())
        status.seconds = time.monotonic() - started
        tokens = steps * self.recipe.inner.batch * self.recipe.model.context
        status.tokens_per_second = tokens / status.seconds
        status.grad_norm = float(self.replica.grad_norm)
        if not math.isfinite(status.loss):  # the same at every stage
            self._roll_back(round_index + 1)
            return []
        self.step_count += steps
        params = {name: p.detach() for name, p in self.replica.named_parameters().items()}
        params = as_sent(self.recipe, self.member, self.bases, params, self.anchor)
        try:
            sent = self.outer.contribute(params, self.feedback)
        except ValueError as error:
            raise RunError(f"replica {self.member.name}: {error}") from error
        packed = {i: self.outer.codec.pack_many(sent.part(self.ledger.shards[i])) for i in self.writes}
        self.pending = Contribution(self.member.name, packed, self.pop_facts())
        self._save(round_index + 1, packed)
        status.state = "delivering"
        return [self.pending]

    def apply(self, round_number: int, contributions: Sequence[Contribution]) -> None:
        """theta^(t-1) -> theta^(t); an update of ours that does not count returns to the feedback."""
        payloads = []
        for contribution in contributions:
            try:
                payloads.append(unpack_shards(self.ledger, contribution.shards, self.outer.codec.unpack_many))
            except Refused as reason:
                raise RunError(f"round {round_number} counts {contribution.replica}: {reason}") from None
        self.outer.apply(payloads)
        self._settle_pending(round_number)
        self._hold(round_number)
        if round_number % self.recipe.bucket.anchor_every == 0:
            self._write_anchor(round_number)

    def _settle_pending(self, round_number: int) -> None:
        """Only the manifest says whether our update counted, by the hashes of its shards."""
        pending, self.pending = self.pending, None
        manifest = self.ledger.manifest(round_number)
        assert manifest is not None, "only a settled round is applied"
        if pending is None or self.exchange.counts_in(manifest, pending):
            return
        sent = unpack_shards(self.ledger, pending.shards, self.outer.codec.unpack_many)
        self.outer.take_back(sent, self.feedback)
        self.log(f"round {round_number} was settled without our update; it returned to the error feedback")

    def _hold(self, round_number: int) -> None:
        digests = {i: shard_digest(self.anchor, self.ledger.shards[i]) for i in self.reads}
        digest = self.exchange.hold_anchor(round_number, digests)
        self.status.round = round_number
        self.log(f"round {round_number}: anchor {digest[:16]}")

    def _write_anchor(self, round_number: int) -> None:
        """The round's closer writes theta^(t): each of its processes the shards it trains."""
        manifest = self.ledger.manifest(round_number)
        if manifest is None or manifest.closer != self.member.name:
            return
        files = {}
        for i in self.writes:
            tensors = {name: self.anchor[name] for name in self.ledger.shards[i]}
            outer = {key: t for key, t in self.outer.state().items() if key.split("/", 1)[1] in tensors}
            files[i] = self.ledger.put_anchor_shard(round_number, i, tensors | outer)
        names = collect(self.control, files, len(self.ledger.shards))
        if self.control.rank == 0:
            self.ledger.complete_anchor(round_number, self.exchange.anchor, names)

    def _roll_back(self, round_number: int) -> None:
        """A loss that is not finite: we skip this round, and the optimiser returns to its start."""
        self.log(
            f"round {round_number}: the loss is {self.status.loss}; rolled back to the round's start, no "
            "update of ours. If it happens again, lower inner.lr"
        )
        rounds = checkpoint.saved_rounds(self.state_dir)
        if rounds:
            files = checkpoint.load_round(self.state_dir, rounds[-1])
            self.replica.restore(files["optimiser"], self.step_count)
        else:
            self.replica.restore({k: torch.zeros_like(t) for k, t in self.replica.state().items()}, 0)
            self.step_count = 0
        self.pending = None

    # Saving and resuming

    def _save(self, round_number: int, packed: Mapping[int, bytes]) -> None:
        """State with a round's update in it, before the PUT: a crash from here on loses nothing."""
        pending = {
            f"shard-{i}": torch.frombuffer(bytearray(data), dtype=torch.uint8) for i, data in packed.items()
        }
        pending |= {"step_count": torch.tensor(self.step_count), "round": torch.tensor(round_number)}
        # The commit reports these; made again after a crash, it reports the same.
        for name in SAVED:
            value = float(getattr(self.status, name) or 0.0)
            pending[f"told-{name}"] = torch.tensor(value, dtype=torch.float64)
        files = {
            "anchor": self.anchor,
            "optimiser": self.replica.state(),
            "feedback": self.feedback,
            "outer": self.outer.state(),
            "pending": pending,
        }
        checkpoint.save(self.state_dir, round_number, files, keep=2)

    def resume(self) -> int:
        """Restore what is on this disk, or start from the bucket; how many rounds are done."""
        rounds = set(checkpoint.saved_rounds(self.state_dir))
        for data in self.control.share(canonical(sorted(rounds))):
            rounds &= set(json.loads(data))
        for round_number in sorted(rounds, reverse=True):
            files = self._readable(round_number)
            if not all_true(self.control, files is not None) or files is None:
                self.log(f"the private state of round {round_number} is spoilt; trying the round before it")
                continue
            # Later rounds were saved by some stages and not by others, and are trained again.
            for newer in checkpoint.saved_rounds(self.state_dir):
                if newer > round_number:
                    checkpoint.drop_round(self.state_dir, newer)
            return self._restore(round_number, files)
        last = self._agreed_last_round()
        start = self._from_bucket(last)
        if last:
            self.log(
                f"no private state here: joining at round {last} from the bucket with a fresh optimiser and "
                "an empty error feedback"
            )
        return start

    def _readable(self, round_number: int) -> dict[str, dict[str, Tensor]] | None:
        """A saved round's files, or None where they are not whole."""
        try:
            files = checkpoint.load_round(self.state_dir, round_number)
            wanted = {f"shard-{i}" for i in self.writes} | {"step_count"}
            whole = (
                self.anchor.keys() == files["anchor"].keys()
                and self.feedback.keys() <= files.get("feedback", {}).keys()
                and wanted <= files["pending"].keys()
                and "optimiser" in files
            )
            return files if whole else None
        except (OSError, ValueError, KeyError, SafetensorError):
            return None

    def _restore(self, round_number: int, files: dict[str, dict[str, Tensor]]) -> int:
        """Our own optimiser, error feedback and unsettled update; then the round they wait for."""
        with torch.no_grad():
            for name, tensor in self.anchor.items():
                tensor.copy_(files["anchor"][name])
            for name, tensor in self.feedback.items():
                tensor.copy_(files["feedback"][name])
            self.outer.restore(files.get("outer", {}))
        self.step_count = int(files["pending"]["step_count"])
        self.replica.restore(files["optimiser"], self.step_count)
        for name in SAVED:
            setattr(self.status, name, float(files["pending"].get(f"told-{name}", 0.0)))
        shards = {i: bytes(files["pending"][f"shard-{i}"].numpy()) for i in self.writes}
        self.pending = Contribution(self.member.name, shards, self.pop_facts())
        if self._swept(round_number):
            self._settle_pending(round_number)
            last = self._agreed_last_round()
            self.log(f"back with the state of round {round_number}, and with the anchor of a later one")
            return self._from_bucket(last)
        self._hold(round_number - 1)
        self.log(f"back with the state of round {round_number}")
        counted = self.exchange.closed(round_number)
        if counted is None:
            counted = self.exchange.close(round_number, [self.pending])
        self.apply(round_number, counted)
        return round_number

    def _swept(self, round_number: int) -> bool:
        """May the round's payloads be gone? Those up to the second-newest anchor are swept."""
        anchors = self.ledger.anchor_rounds() if self.control.rank == 0 else []
        return agree(self.control, len(anchors) > 1 and round_number <= anchors[-2])

    def _agreed_last_round(self) -> int:
        mine = self.ledger.last_round() if self.control.rank == 0 else 0
        return int(self.control.share(str(mine).encode())[0])

    def _from_bucket(self, last: int) -> int:
        """The newest whole anchor; the loop then replays the rounds after it, digest by digest."""
        mine = [t for t in self.ledger.anchor_rounds() if t <= last] if self.control.rank == 0 else []
        for start in reversed(json.loads(self.control.share(canonical(mine))[0])):
            digest, tensors = self._read_anchor(start)
            if not all_true(self.control, bool(digest)):
                continue
            with torch.no_grad():
                for name, tensor in self.anchor.items():
                    tensor.copy_(tensors[name])
                if start:  # theta^(0) comes without a state of the outer method
                    self.outer.restore(tensors)
            self._hold(start)
            if self.exchange.anchor != digest:
                raise RunError(
                    f"the anchor of round {start} does not have the digest it states; it cannot be used"
                )
            return start
        if self.ledger.run.start:
            raise RunError("theta^(0) of this run cannot be read from its bucket; trying again")
        self._hold(0)
        return 0

    def _read_anchor(self, round_number: int) -> tuple[str, dict[str, Tensor]]:
        try:
            return self.ledger.read_anchor(round_number, self.reads)
        except StoreError:
            raise  # it may be whole, and only out of reach
        except RunError as error:
            self.log(f"{error}; trying the one before")
            return "", {}

    def pop_facts(self) -> Facts:
        """What this process has measured since the last call."""
        counts = self.replica.pop_counts()
        trip, figures = self.meter.pop(counts)
        return Facts(
            loss=finite(self.status.loss),
            grad_norm=finite(self.status.grad_norm),
            seconds=round(self.status.seconds or 0.0, 4),
            trip_seconds=trip,
            bytes=counts,
            measured={name: [figure] for name, figure in figures.items()},
        )


class HeartbeatThread(threading.Thread):
    """Heartbeats of a replica, in the bucket; its first process sends them."""

    def __init__(self, trainer: Trainer, incarnation: str, every_seconds: float) -> None:
        super().__init__(daemon=True, name="heartbeat")
        self.trainer, self.incarnation, self.every = trainer, incarnation, every_seconds
        self.ended = threading.Event()

    def beat(self) -> None:
        status, member = self.trainer.status, self.trainer.member
        self.trainer.ledger.beat(
            Heartbeat(
                incarnation=self.incarnation,
                kind=member.config.kind,
                stages=member.config.stages,
                state=status.state,
                round=status.round,
                inner_step=status.inner_step,
                loss=finite(status.loss),
                tokens_per_second=status.tokens_per_second,
                awaiting=self.trainer.exchange.awaiting,
                farewell=status.farewell,
                pid=os.getpid(),
            )
        )

    def run(self) -> None:
        while not self.ended.wait(self.every):
            try:
                self.beat()
            except Exception as error:  # the next one may get through; the run itself finds out what is wrong
                self.trainer.log(f"no heartbeat: {str(error).splitlines()[0]}")

    def end(self) -> None:
        self.ended.set()
        self.join(timeout=10)
        self.beat()
