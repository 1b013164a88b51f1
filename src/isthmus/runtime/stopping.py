"""Where a process stops, so that its next start goes on from there: in the middle of a round, or at its edge.

The edge is the middle of the next round after none of its inner steps.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isthmus.runtime.middle import PARAMS, Middle
from isthmus.runtime.parting import Parted

if TYPE_CHECKING:
    from isthmus.runtime.trainer import Trainer


def save_middle(trainer: "Trainer", round_number: int, losses: Sequence[Tensor]) -> None:
    """Begin to write where an open round stands, after the inner steps with these losses."""
    trainer.state.save_middle(*_here(trainer, round_number, losses))
    trainer.state.protect()


def save_here(trainer: "Trainer", round_number: int, losses: Sequence[Tensor] = ()) -> None:
    """The same, and on disk when it returns. All processes of a replica call it after the same inner step."""
    trainer.state.finish()
    save_middle(trainer, round_number, losses)
    trainer.state.finish()


def save_edge(trainer: "Trainer") -> None:
    """Before the next round begins. A middle that was restored and not gone on with is still on disk."""
    if trainer.middle is None:
        save_here(trainer, trainer.status.round + 1)


def save_delivered(trainer: "Trainer") -> None:
    """A round that waits for the others: the state with which it was delivered, unless it is on disk."""
    trainer.state.finish()
    if trainer.pending is None or trainer.update is None or trainer.update[0] in trainer.state.rounds():
        return
    trainer.state.hurry()
    trainer.state.save(trainer.update[0], trainer.state_files(), trainer.update[1])
    trainer.state.finish()


def part_if_asked(
    trainer: "Trainer", round_number: int, losses: Sequence[Tensor], seconds_left: float
) -> None:
    """Between two inner steps: if this machine is taken back, save at once, and stop here unless the rest of
    the round, which takes `seconds_left`, fits into the time.

    Stages stop together, whichever of their machines is taken back. They save when they stop, and not
    before: that would cost each of them a pause, and one alone can do nothing with what it saved.
    """
    parting = trainer.parting
    asked = parting.asked()
    if trainer.replica.stops(asked and not parting.fits(seconds_left)):
        save_here(trainer, round_number, losses)
        steps = trainer.recipe.outer.inner_steps
        raise Parted(f"stopped in round {round_number}, after {len(losses)} of its {steps} inner steps")
    if asked and not parting.saved and trainer.control.size == 1:
        save_here(trainer, round_number, losses)
        parting.saved = True


def _here(
    trainer: "Trainer", round_number: int, losses: Sequence[Tensor]
) -> tuple[Middle, dict[str, dict[str, Tensor]]]:
    about = Middle(round_number, trainer.step_count, doubles(losses), trainer.measured.fresh_steps)
    own = trainer.replica.named_parameters()
    params = own if losses else {name: trainer.anchor[name] for name in own}
    return about, {**{file: dict(named) for file, named in trainer.state_files().items()}, PARAMS: params}


def doubles(losses: Sequence[Tensor]) -> Tensor:
    """(h,) on the CPU: some may come from a file, and not every device has float64."""
    return torch.stack([loss.cpu().double() for loss in losses]) if losses else torch.zeros(0).double()
