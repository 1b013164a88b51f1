"""Your model and your loop as one replica of a run: `isthmus.OuterSync`."""

import hashlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from isthmus import gpu
from isthmus.errors import ConfigError, RunError
from isthmus.loop.create import create
from isthmus.loop.opening import check_alone, open_member
from isthmus.loop.ranks import Ranks
from isthmus.loop.tensors import Parameters
from isthmus.model.digest import anchor_digest, shard_digests
from isthmus.protocol.patience import Patience
from isthmus.runlog.facts import Facts
from isthmus.runtime.session import Session, State

FORMAT = 1
SAMPLES = 64  # entries of each tensor that the mark of the weights looks at
MOST_BAD_ROUNDS = 3  # in a row, with weights that are not finite


class OuterSync:
    """Average your model with the other replicas' every H-th step, by SparseLoCo over a bucket.

        sync = isthmus.OuterSync(model, key="a.isthmus.toml")
        for batch in loader:
            ...                      # your own step
            sync.step()              # every H-th call: our update goes out, everybody's comes in

    Construct it after model and optimizer are restored. The weights then are the run's newest, unless `state`
    goes on inside a round. Under torchrun all ranks make the same calls.
    """

    create = staticmethod(create)

    def __init__(
        self,
        model: nn.Module,
        url: str | os.PathLike[str] | None = None,
        *,
        key: str | os.PathLike[str],
        state: Mapping[str, Any] | None = None,
        process_group: Any = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        """`key`: the replica's file, NAME.isthmus.toml; `url` if the bucket is elsewhere than it says.
        `state`: what `state_dict` gave. `process_group`: the ranks of this replica (default: all). It waits
        while the bucket is away."""
        self._ranks = Ranks(process_group)
        shown = self._ranks.rank == 0
        self._log = (log or _print) if shown else _ignore
        self._parameters = Parameters(model)
        self._patience = Patience(self._log)
        self._ledger = open_member(os.fspath(url or ""), Path(key), self._patience, self._log)
        run = self._ledger.run
        self._steps, self._rounds = run.recipe.outer.inner_steps, run.recipe.outer.rounds
        self._session: Session | None = None
        self._parameters.check(run.tensors, run.frozen)
        self._ranks.deal(self._parameters.trained, self._ledger.shards)
        self._round = self._h = self._bad = 0
        self._begin_round()
        self._open(state)

    # What a loop calls

    def step(self, loss: Tensor | float | None = None, *, tokens: int | None = None) -> bool:
        """Call it after each optimizer step; True if this call ended a round, so that the weights changed.

        `loss` and `tokens` of this step are only for the run's reports. When a round ends it waits for the
        others, at most until the round's deadline.
        """
        if self.done:
            return False
        if self._closed:
            raise ConfigError("this OuterSync is closed; construct another one to go on")
        self._h += 1
        if loss is not None:
            self._losses += 1
            self._loss = self._loss + (loss.detach() if isinstance(loss, Tensor) else loss)
        self._tokens += tokens or 0
        if self._session:
            self._session.status.inner_step = self.global_step
        if self._h < self._steps and not self._is_overtaken():
            return False
        self._end_round()
        return True

    @property
    def round(self) -> int:
        """Rounds that the weights contain."""
        return self._round

    @property
    def global_step(self) -> int:
        """Steps that the weights stand for: `round` times H, and those of the open round. It jumps where
        rounds went on without us; let learning rate schedules follow it."""
        return self._round * self._steps + self._h

    @property
    def done(self) -> bool:
        """Whether the run is finished; the weights are its result."""
        return self._round >= self._rounds

    @property
    def digest(self) -> str:
        """The digest of the newest round's weights, the same in all replicas. Ranks read it together."""
        shards = self._ledger.shards
        parts: dict[str, str] = {}
        if self._session:
            here = [i for i, names in enumerate(shards) if names[0] in self._session.anchor]
            found = shard_digests(self._session.anchor, [shards[i] for i in here])
            parts = dict(zip(map(str, here), found, strict=True))
        whole = {index: part for each in self._ranks.share(parts) for index, part in each.items()}
        return anchor_digest([whole[str(i)] for i in range(len(shards))])

    def state_dict(self) -> dict[str, Any]:
        """What `state` takes: save it in the same file as model and optimizer. It holds tensors, numbers and
        strings, so torch.load(weights_only=True) reads it. Each rank saves its own."""
        tensors: dict[str, Tensor] = {}
        state = self._session.save() if self._session else State(self._round + 1, {}, False, [])
        for file, named in state.files.items():
            tensors |= {f"{file}/{name}": tensor for name, tensor in named.items()}
        return {
            "format": FORMAT,
            "run": self._ledger.run.run_id,
            "replica": self._ledger.signer.replica,
            "rank": self._ranks.rank,
            "ranks": self._ranks.size,
            "round": state.round,
            "inner_step": self._h,
            "carried": int(state.carried),
            "starts": sorted(state.starts),
            "bad_rounds": self._bad,
            "losses": self._losses,
            "loss": float(self._loss),
            "tokens": self._tokens,
            "mark": _mark(self._parameters.trained),
            "tensors": tensors,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from this state, if it was not given to the constructor. Restore the model first."""
        self._check_state(state)
        self.close()
        self._open(state)

    def close(self) -> None:
        """Leave the run. The others go on; the same key and a saved state come back."""
        session, closed, self._closed = self._session, self._closed, True
        if session is None or closed:
            return
        if self._ranks.size == 1 or self.done:  # otherwise other ranks may not come here
            session.finish(Facts())
        session.status.state = "finished" if self.done else "left"
        session.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # A round

    def _is_overtaken(self) -> bool:
        """Whether the others settled the open round without us. Several ranks find out at its end."""
        return self._ranks.size == 1 and self._session is not None and self._session.overtaken()

    def _begin_round(self) -> None:
        self._began = time.monotonic()
        self._losses, self._loss, self._tokens = 0, 0.0, 0

    def _end_round(self) -> None:
        """Send our update, or a skip, and take what the round gives."""
        tokens = sum(self._ranks.share(self._tokens))
        session = self._session
        params = self._ranks.gather(self._parameters.trained, session.anchor if session else {})
        if session:
            self._give(session, params, tokens)
            session.catch_up()
        del params
        self._take()

    def _give(self, session: Session, params: Mapping[str, Tensor], tokens: int) -> None:
        if session.carried:  # Ctrl-C ended an earlier wait, and `catch_up` repeats it
            return
        finite = session.is_finite(params)
        self._bad = 0 if finite else self._bad + 1
        if not finite:
            self._say_bad()
        if self._h < self._steps:  # it was settled without us
            session.settle(params if finite else None)
        elif finite:
            session.status.state = "delivering"
            session.deliver(params, self._facts(tokens))
            session.settle()
        else:
            session.skip("not_finite")
            session.settle()

    def _say_bad(self) -> None:
        where = f"round {self._round + 1}: the weights are not finite"
        if self._bad >= MOST_BAD_ROUNDS:
            raise RunError(
                f"{where}, as in the {MOST_BAD_ROUNDS - 1} rounds before; lower the learning rate, and begin "
                "with a fresh optimizer"
            )
        self._log(
            f"{where}; they return to the round's start, and nothing of ours is sent. The optimizer's state "
            "may need a reset"
        )

    def _facts(self, tokens: int) -> Facts:
        loss = float(self._loss) / self._losses if self._losses else None
        seconds = time.monotonic() - self._began
        told = tokens and self._ranks.rank == 0
        return Facts(loss=loss, seconds=seconds, measured={"tokens": [tokens]} if told else {})

    def _take(self) -> None:
        """Copy the anchor into the weights of all ranks: the next round begins."""
        session = self._session
        self._round = self._ranks.share(session.round - 1 if session else 0)[0]
        self._ranks.scatter(self._parameters.trained, session.anchor if session else {})
        self._h = 0
        self._begin_round()
        if session:
            session.status.state = "training"
        if self.done:
            self._log(f"the run is finished after {self._round} rounds")
            self.close()

    # A start

    def _open(self, state: Mapping[str, Any] | None) -> None:
        """Enter the run, and take its newest weights unless `state` goes on inside a round."""
        run, ranks, parameters = self._ledger.run, self._ranks, self._parameters.trained
        self._closed, found = False, self._restored(state) if state else None
        if ranks.rank == 0:
            check_alone(self._ledger, self._patience)
        incarnation = ranks.share(os.urandom(8).hex())[0]
        device = gpu.outer_device(next(iter(parameters.values())).device)
        dtype = torch.float64 if run.recipe.inner.precision == "fp64" else torch.float32
        shapes = self._ledger.shapes
        anchor = {name: torch.empty(shapes[name], dtype=dtype, device=device) for name in ranks.own}
        inside = ranks.share(bool(found and not found.carried and self._h))[0]
        if inside and found:  # `values` compares with the anchor
            anchor = {name: found.files["anchor"][name].to(device, copy=True) for name in anchor}
        params = ranks.gather(parameters, anchor) if inside else None
        finite = all(bool(p.isfinite().all()) for p in (params or {}).values())
        if not all(ranks.share(finite)):  # then what it has learnt is not kept
            params = None
        if ranks.session:
            self._session = Session.open(
                self._ledger,
                anchor,
                ranks.own,
                ranks.session,
                incarnation=incarnation,
                log=self._log,
                patience=self._patience,
                state=found,
                params=params,
                again=False,
            )
            self._session.catch_up(params)
        here = bool(inside and found and self._session and self._session.round == found.round)
        if ranks.share(here)[0]:
            self._round = state["round"] - 1 if state else 0
            if self._session:
                self._session.status.state = "training"
            self._log(f"back in round {self._round + 1}, after {self._h} of its {self._steps} steps")
            if self._h >= self._steps:
                self._end_round()
            return
        before = self.global_step
        self._take()
        if state and self.global_step != before:
            self._log(
                f"the newest round is {self._round}: the weights are its result, and global_step jumps from "
                f"{before} to {self.global_step}"
            )

    def _restored(self, state: Mapping[str, Any]) -> State:
        """Check a state, and take its numbers."""
        self._check_state(state)
        self._h, self._bad, self._round = state["inner_step"], state["bad_rounds"], state["round"] - 1
        self._losses, self._loss, self._tokens = state["losses"], state["loss"], state["tokens"]
        files: dict[str, dict[str, Tensor]] = {"anchor": {}, "feedback": {}, "outer": {}}
        for key, tensor in state["tensors"].items():
            file, _, name = key.partition("/")
            files[file][name] = tensor
        return State(state["round"], files, bool(state["carried"]), state["starts"])

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """ConfigError unless it is this replica's, and was saved with these weights."""
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            raise ConfigError("the state is not one of OuterSync.state_dict")
        ours = {
            "run": self._ledger.run.run_id,
            "replica": self._ledger.signer.replica,
            "ranks": self._ranks.size,
            "rank": self._ranks.rank,
        }
        differ = [name for name in ours if state[name] != ours[name]]
        if odd := [f"its {name} is {state[name]}, not {ours[name]}" for name in differ]:
            raise ConfigError(f"the state is not for this OuterSync: {'; '.join(odd[:3])}")
        if state["mark"] != _mark(self._parameters.trained):
            raise ConfigError(
                "the state was saved with other weights than the model has now; restore model and optimizer "
                "from the same file before you construct OuterSync"
            )


def _mark(parameters: Mapping[str, Tensor]) -> str:
    """A hash of some entries of every tensor, by which a state knows the weights that it was saved with."""
    digest = hashlib.sha256()
    for name, parameter in parameters.items():
        local = parameter.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        flat = local.reshape(-1)
        some = flat[:: max(1, flat.numel() // SAMPLES)]
        digest.update(f"{name}/{tuple(local.shape)}/".encode() + some.double().cpu().numpy().tobytes())
    return digest.hexdigest()


def _print(text: str) -> None:
    print(f"isthmus: {text}", file=sys.stderr, flush=True)


def _ignore(text: str) -> None:
    """Rank 0 speaks for all ranks."""
