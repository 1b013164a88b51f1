"""Replicas with a loop of their own, in threads of this process: started, killed and started again."""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from models import Odd, batch, train_step
from torch import Tensor

from isthmus.loop.create import create
from isthmus.loop.outer_sync import OuterSync
from isthmus.loop.tensors import Parameters

HASTY = {"bucket.heartbeat_seconds": 0.2, "bucket.anchor_every": 2}


class Run:
    """A run of `Odd` with its keys."""

    def __init__(
        self,
        folder: Path,
        replicas: Sequence[str] = ("a", "b"),
        dtype: torch.dtype = torch.float32,
        **more: Any,
    ) -> None:
        self.folder, self.dtype, self.url = folder, dtype, more.pop("url", str(folder / "bucket"))
        settings = {"inner_steps": 3, "rounds": 4, "keys": folder / "keys"} | more
        settings["overrides"] = HASTY | settings.get("overrides", {})
        self.keys = create(Odd(dtype=dtype), self.url, replicas=list(replicas), **settings)

    def loop(self, name: str, **more: Any) -> "Loop":
        return Loop(self, name, **more)


class Loop:
    """One start of a replica: a model, an optimizer, and OuterSync."""

    def __init__(self, run: Run, name: str, saved: Mapping[str, Any] | None = None, lr: float = 0.1) -> None:
        self.name, self.said, self.sent = name, list[str](), list[dict[str, Tensor]]()
        self.model = Odd(dtype=run.dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        if saved:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
        state = saved["sync"] if saved else None
        self.sync = OuterSync(self.model, key=run.keys[name], state=state, log=self.said.append)

    @property
    def params(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in Parameters(self.model).trained.items()}

    def saved(self) -> dict[str, Any]:
        """As a checkpoint file would hold it."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return _copied(state | {"sync": self.sync.state_dict()})

    def step(self) -> bool:
        tokens = batch(ord(self.name), self.sync.global_step)
        loss = train_step(self.model, self.optimizer, tokens)
        if self.sync.global_step % 3 == 2:
            self.sent.append(self.params)
        return self.sync.step(loss, tokens=tokens.numel())

    def train(self, rounds: int = 10**6) -> "Loop":
        """Until so many rounds are done, or all of them."""
        while self.sync.round < rounds and not self.sync.done:
            self.step()
        return self

    def kill(self) -> None:
        """Its threads end and say nothing, as after SIGKILL."""
        session = self.sync._session
        assert session
        session.ended.set()
        session.heart.ended.set()
        session.heart.news.set()
        session.heart.join()


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


def together(*calls: Callable[[], Any], seconds: float = 60.0) -> list[Any]:
    """The results of calls in threads; the first fault if there is one."""
    results: list[Any] = [None] * len(calls)
    faults: list[BaseException] = []

    def run(place: int) -> None:
        try:
            results[place] = calls[place]()
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        if faults:
            raise faults[0]
        assert not thread.is_alive(), "it does not end"
    return results


def all_of(run: Run, *names: str) -> list[Loop]:
    return together(*(lambda name=name: run.loop(name).train() for name in names))
