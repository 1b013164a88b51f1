"""OuterSync in transformers: `Trainer(..., callbacks=[OuterSyncCallback("a.isthmus.toml")])`."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import (  # pyright: ignore[reportMissingImports] - an extra
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from isthmus.loop.outer_sync import OuterSync

FILE = "isthmus-{rank}.pt"  # in each checkpoint folder


class OuterSyncCallback(TrainerCallback):
    """One replica: it opens the run when training begins, and steps after each step of the Trainer.

    It saves its state in every checkpoint, and finds it there when the Trainer resumes from one. Training
    stops when the run is finished. `sync` is the OuterSync.
    """

    def __init__(self, key: str | os.PathLike[str], url: str | None = None, **settings: Any) -> None:
        """`settings` as for OuterSync."""
        self.key, self.url, self.settings = key, url, settings
        self.sync: OuterSync | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        saved = None
        folder = Path(args.output_dir or ".", f"checkpoint-{state.global_step}")
        file = folder / FILE.format(rank=args.process_index)
        if state.global_step and file.is_file():
            saved = torch.load(file, weights_only=True)
        self.sync = OuterSync(more["model"], self.url, key=self.key, state=saved, **self.settings)
        control.should_training_stop = self.sync.done

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        assert self.sync
        last = state.log_history[-1].get("loss") if state.log_history else None
        self.sync.step(last)
        control.should_training_stop |= self.sync.done

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        assert self.sync
        folder = Path(args.output_dir or ".", f"checkpoint-{state.global_step}")
        torch.save(self.sync.state_dict(), folder / FILE.format(rank=args.process_index))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        assert self.sync
        self.sync.close()
