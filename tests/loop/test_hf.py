"""The callback for transformers' Trainer, which itself needs accelerate: here a loop that calls its hooks."""

from pathlib import Path

import pytest
import torch
from loops import Run
from models import Odd, batch, train_step

pytest.importorskip("transformers")
from transformers import TrainerControl, TrainerState, TrainingArguments

from isthmus.hf import OuterSyncCallback


class Arguments:
    """The two fields of TrainingArguments that the callback reads; the real class needs accelerate."""

    def __init__(self, folder: Path) -> None:
        self.output_dir, self.process_index = str(folder), 0


def trained(folder: Path, key: Path, resume: int = 0, steps: int = 10**6) -> OuterSyncCallback:
    args, control = Arguments(folder), TrainerControl()
    state = TrainerState(global_step=resume)
    model, callback = Odd(), OuterSyncCallback(key)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if resume:
        found = torch.load(folder / f"checkpoint-{resume}" / "model.pt", weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
    call = {"args": args, "state": state, "control": control}
    callback.on_train_begin(**call, model=model)  # pyright: ignore[reportArgumentType]
    while not control.should_training_stop and state.global_step < steps:
        train_step(model, optimizer, batch(1, state.global_step))
        state.global_step += 1
        callback.on_step_end(**call)  # pyright: ignore[reportArgumentType]
    there = folder / f"checkpoint-{state.global_step}"
    there.mkdir(parents=True)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, there / "model.pt")
    callback.on_save(**call)  # pyright: ignore[reportArgumentType]
    callback.on_train_end(**call)  # pyright: ignore[reportArgumentType]
    return callback


def test_a_trainer_goes_on_from_its_checkpoint_and_stops_when_the_run_is_finished(tmp_path: Path):
    digests = []
    for name, stops in (("one", [10**6]), ("two", [4, 10**6])):
        (tmp_path / name).mkdir()
        run, resume = Run(tmp_path / name, "a"), 0
        for stop in stops:
            callback = trained(tmp_path / name / "out", run.keys["a"], resume, stop)
            resume = stop
        assert callback.sync
        assert (callback.sync.done, callback.sync.global_step) == (True, 12)
        digests.append(callback.sync.digest)
    assert digests[0] == digests[1]


def test_the_hooks_are_those_that_the_trainer_calls():
    names = {name for name in vars(OuterSyncCallback) if name.startswith("on_")}
    assert names == {"on_train_begin", "on_step_end", "on_save", "on_train_end"}
    assert TrainingArguments
