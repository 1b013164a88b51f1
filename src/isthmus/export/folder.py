"""`isthmus export`: measure the model, refuse a plain one that is much worse, write the folder."""

from dataclasses import dataclass
from pathlib import Path

from isthmus.disk import check_room
from isthmus.errors import ConfigError
from isthmus.export.card import model_card
from isthmus.export.hf import WHAT, check_target, folder_bytes, write_folder
from isthmus.export.measure import WORSE, Losses, measure
from isthmus.export.source import Trained, open_trained, pipelined_member
from isthmus.replica.picks import pick_device


@dataclass(frozen=True, slots=True)
class Exported:
    """The measurements and the folder; `refused` says why nothing was written."""

    trained: Trained
    losses: Losses
    folder: Path
    refused: str = ""


def export(
    spec: str,
    folder: Path,
    *,
    as_: str = "plain",
    replica: str | None = None,
    dtype: str = "fp32",
    force: bool = False,
    corpus: str | None = None,
    num_batches: int | None = None,
    device: str = "auto",
) -> Exported:
    """Write the model of a run as a Hugging Face folder; `as_` is "plain" or "pipelined"."""
    check_target(folder)
    where = pick_device(device)
    trained = open_trained(spec, corpus).on(where)
    member = pipelined_member(trained.recipe, replica) if as_ == "pipelined" else None
    if as_ == "pipelined" and member is None:
        raise ConfigError(f"{trained.where} has no pipelined replica, so no boundaries to keep; drop --as")
    check_room(folder.absolute().parent, folder_bytes(trained, dtype, member), WHAT)
    losses = measure(trained, dtype, num_batches)
    if member is None and not losses.worse <= WORSE and not force:  # also refuses losses that are not numbers
        return Exported(trained, losses, folder, refused=why_not(losses, trained))
    card = model_card(trained, losses, folder.name, dtype, member)
    write_folder(trained, folder, card, dtype, member)
    return Exported(trained, losses, folder)


def why_not(losses: Losses, trained: Trained) -> str:
    kept = " --as pipelined keeps its boundaries," if pipelined_member(trained.recipe) else ""
    return (
        f"as a plain model this model is {losses.worse:.1%} worse than the one that the run trained (loss "
        f"{losses.plain:.3f} against {losses.mixed:.3f}; {WORSE:.0%} is allowed);{kept} --force writes it "
        "all the same"
    )
