"""One process of a real fleet: a full replica, or one stage of a pipelined one. Join, train, leave, come
back."""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from isthmus.config import Member, Recipe
from isthmus.errors import RunError
from isthmus.layout.stages import EMBEDDING
from isthmus.model import checkpoint
from isthmus.model.digest import shard_digest
from isthmus.model.llama import init_tensor
from isthmus.outer.baselines import DiLoCo
from isthmus.outer.exchange import Contribution
from isthmus.outer.sparseloco import SparseLoCo
from isthmus.protocol.closer import checked_payloads
from isthmus.protocol.exchange import LedgerExchange
from isthmus.protocol.ledger import Ledger
from isthmus.protocol.trust import Refused, canonical, sha256
from isthmus.replica.base import Replica
from isthmus.replica.control_group import ControlGroup, agree, all_true, collect
from isthmus.replica.meter import Meter
from isthmus.sparse import pack_many
from isthmus.store.retry import StoreError
from isthmus.subspace.boundaries import BasisSet, as_sent

Log = Callable[[str], None]
TOLD = ("loss", "grad_norm", "seconds")  # of a round: saved with its update


@dataclass
class WorkerStatus:
    """What this process says of itself: heartbeats and commits are made of it."""

    state: str = "starting"
    round: int = 0
    inner_step: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None
    grad_norm: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class RealFleet:
    """The fleet as this process sees it: itself. The loop drives it as it drives the simulator's."""

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
        self.control, self.device, self.work_dir, self.log = control, device, work_dir, log
        self.told = WorkerStatus()
        own = replica.named_parameters()
        self.wide = next(iter(own.values())).dtype
        # Every stage of a compressed replica holds the embedding, and applies its update like stage 0 does.
        self.held = dict.fromkeys([*own, *([EMBEDDING] if member.config.compressed else [])])
        self.writes = [i for i, names in enumerate(ledger.shards) if set(names) <= set(own)]
        self.reads = [i for i, names in enumerate(ledger.shards) if set(names) <= set(self.held)]
        shapes = recipe.model.shapes()
        self.anchor = {
            name: init_tensor(name, shapes[name], recipe.model, recipe.seed).to(device, self.wide)
            for name in self.held
        }
        self.bases = BasisSet(recipe, device, self.wide)
        self.outer = {"sparseloco": SparseLoCo, "diloco": DiLoCo}[recipe.outer.method](
            self.anchor, recipe.outer
        )
        with_feedback = recipe.outer.method == "sparseloco"
        self.feedback = {name: torch.zeros_like(p) for name, p in own.items()} if with_feedback else {}
        self.exchange = LedgerExchange(ledger, control, self.writes, self.reads, incarnation, log)
        self.exchange.facts = self._facts
        self.meter = Meter(replica, device)
        self.pending: Contribution | None = None
        self.step_count = 0  # inner steps that the optimiser has taken
        self.round_started = time.monotonic()

    # What the loop calls

    def train_round(self, round_index: int, progress: Callable[[int], None]) -> list[Contribution]:
        """H inner steps, then this replica's update on disk before any of it is sent."""
        steps = self.recipe.outer.inner_steps
        self.told.state, self.told.round = "training", round_index + 1
        self.replica.begin_round(self.anchor)
        started, losses = time.monotonic(), []
        for h in range(steps):
            losses.append(self.replica.inner_step(round_index * steps + h))
            self.meter.step()
            self.told.inner_step = round_index * steps + h + 1
            if self.device.type == "cpu":
                self.told.loss = float(losses[-1])
            progress(h + 1)
        self.told.loss = float(torch.stack([loss.double().cpu() for loss in losses]).mean())
        self.told.seconds = time.monotonic() - started
        tokens = steps * self.recipe.inner.batch * self.recipe.model.context
        self.told.tokens_per_second = tokens / self.told.seconds
        self.told.grad_norm = float(self.replica.grad_norm)
        if not math.isfinite(self.told.loss):  # the same at every stage
            self._roll_back(round_index + 1)
            return []
        self.step_count += steps
        params = {name: p.detach() for name, p in self.replica.named_parameters().items()}
        params = as_sent(self.recipe, self.member, self.bases, params, self.anchor)
        try:
            sent = self.outer.contribute(params, self.feedback)
        except ValueError as error:
            raise RunError(f"replica {self.member.name}: {error}") from error
        packed = {i: pack_many(sent.part(self.ledger.shards[i])) for i in self.writes}
        self.pending = Contribution(self.member.name, packed)
        self.save(round_index + 1)
        self.told.state = "delivering"
        return [self.pending]

    def apply(self, round_number: int, counted: Sequence[Contribution]) -> None:
        """theta^(t-1) -> theta^(t); a payload of ours that does not count returns to the feedback."""
        payloads = []
        for contribution in counted:
            tensors = {}
            for index, packed in contribution.shards.items():
                try:
                    tensors |= checked_payloads(self.ledger, packed, index, self.device)
                except Refused as reason:
                    raise RunError(f"round {round_number} counts {contribution.replica}: {reason}") from None
            payloads.append(tensors)
        self.outer.apply(payloads)
        self._settle_pending(round_number)
        self._hold(round_number)
        if round_number % self.recipe.bucket.anchor_every == 0:
            self._write_anchor(round_number)

    def _settle_pending(self, round_number: int) -> None:
        """Only the manifest says whether our update counted, by the hashes of its shards."""
        if self.pending is None:
            return
        hashes = {index: sha256(packed) for index, packed in self.pending.shards.items()}
        if not self.exchange.counts_in(self.ledger.manifest(round_number), hashes):
            sent = {}
            for index, packed in self.pending.shards.items():
                sent |= checked_payloads(self.ledger, packed, index, self.device)
            self.outer.take_back(sent, self.feedback)
            self.log(
                f"round {round_number} was settled without our update; it returned to the error feedback"
            )
        self.pending = None

    def _hold(self, round_number: int) -> None:
        self.digests = {i: shard_digest(self.anchor, self.ledger.shards[i]) for i in self.reads}
        digest = self.exchange.hold_anchor(round_number, self.digests)
        self.told.round = round_number
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
        """A loss that is not finite: this round goes without us, and the optimiser returns to before it."""
        self.log(
            f"round {round_number}: the loss is {self.told.loss}; rolled back to the round's start, no "
            "update of ours. If it happens again, lower inner.lr"
        )
        rounds = checkpoint.saved_rounds(self.work_dir / "state")
        if rounds:
            files = checkpoint.load_round(self.work_dir / "state", rounds[-1])
            self.replica.restore(files["optimiser"], self.step_count)
        else:
            self.replica.restore({k: torch.zeros_like(t) for k, t in self.replica.state().items()}, 0)
            self.step_count = 0
        self.pending = None

    # Coming back

    def save(self, round_number: int) -> None:
        """State with a round's update in it, before the PUT: a crash from here on loses nothing."""
        facts = {"step_count": torch.tensor(self.step_count), "round": torch.tensor(round_number)}
        # The commit tells these; made again after a crash, it tells the same.
        for name in TOLD:
            facts[f"told-{name}"] = torch.tensor(float(getattr(self.told, name) or 0.0), dtype=torch.float64)
        shards = {
            f"shard-{i}": torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for i, data in self.pending.shards.items()
        }
        files = {
            "anchor": self.anchor,
            "optimiser": self.replica.state(),
            "feedback": self.feedback,
            "outer": self.outer.state(),
            "pending": shards | facts,
        }
        checkpoint.save(self.work_dir / "state", round_number, files, keep=2)

    def come_up(self) -> int:
        """Take up what is on this disk, or start from the bucket; the number of rounds that lie behind us."""
        state = self.work_dir / "state"
        rounds = set(checkpoint.saved_rounds(state))
        for data in self.control.share(canonical(sorted(rounds))):
            rounds &= set(json.loads(data))
        for round_number in sorted(rounds, reverse=True):
            files = self._readable(round_number)
            if not all_true(self.control, files is not None):
                self.log(f"the private state of round {round_number} is spoilt; trying what was before it")
                continue
            # Beyond it lies only what some stages saved and others did not: to be trained again.
            for newer in checkpoint.saved_rounds(state):
                if newer > round_number:
                    checkpoint.drop_round(state, newer)
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
        """A saved round's files, or None where a disk has spoilt them."""
        try:
            files = checkpoint.load_round(self.work_dir / "state", round_number)
            whole = self.anchor.keys() == files["anchor"].keys() and self.feedback.keys() <= (
                files.get("feedback", {}).keys()
            )
            wanted = {f"shard-{i}" for i in self.writes} | {"step_count"}
            whole = whole and wanted <= files["pending"].keys()
            return files if whole and "optimiser" in files else None
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
        for name in TOLD:
            setattr(self.told, name, float(files["pending"].get(f"told-{name}", 0.0)))
        shards = {
            int(name.removeprefix("shard-")): bytes(t.numpy())
            for name, t in files["pending"].items()
            if name.startswith("shard-")
        }
        self.pending = Contribution(self.member.name, shards)
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
        """Was so long ago that its payloads may be gone: rounds up to the second-newest anchor are swept."""
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
            raise  # it may be whole: we cannot reach it
        except RunError as error:
            self.log(f"{error}; trying the one before")
            return "", {}

    def _facts(self) -> dict[str, Any]:
        counts = self.replica.pop_counts()
        for purpose, count in self.exchange.pop_counts().items():
            counts[purpose] = counts.get(purpose, 0) + count
        trip, figures = self.meter.take()
        return {
            "loss": finite(self.told.loss),
            "grad_norm": finite(self.told.grad_norm),
            "seconds": round(self.told.seconds or 0.0, 4),
            "trip_seconds": trip,
            "bytes": counts,
            "measured": figures | self.exchange.pop_seconds(),
        }


def finite(number: float | None) -> float | None:
    """JSON has no NaN."""
    return number if number is not None and math.isfinite(number) else None


class HeartbeatThread(threading.Thread):
    """Heartbeats of the lead, in the bucket, and a file that tells the launcher that this process still
    runs."""

    def __init__(self, fleet: RealFleet, incarnation: str, every_seconds: float) -> None:
        super().__init__(daemon=True, name="heart")
        self.fleet, self.incarnation, self.every = fleet, incarnation, every_seconds
        self.ended = threading.Event()

    def beat(self) -> None:
        told, member = self.fleet.told, self.fleet.member
        self.fleet.ledger.beat(
            {
                "incarnation": self.incarnation,
                "kind": member.config.kind,
                "stages": member.config.stages,
                "state": told.state,
                "round": told.round,
                "inner_step": told.inner_step,
                "loss": finite(told.loss),
                "tokens_per_second": told.tokens_per_second,
                "awaiting": self.fleet.exchange.awaiting,
                "farewell": told.extra,
                "pid": os.getpid(),
            }
        )

    def run(self) -> None:
        while not self.ended.wait(self.every):
            try:
                self.beat()
            except Exception as error:  # the next one may pass; the run itself finds out what is wrong
                self.fleet.log(f"no heartbeat: {str(error).splitlines()[0]}")

    def end(self) -> None:
        self.ended.set()
        self.join(timeout=10)
        self.beat()
