"""Check that a run's model can be what run.json states, before allocating memory for it.

A run.json of a few kB may state any model, and theta^(0) is drawn from a seed. Without this check a reader
would fill its machine's memory.
"""

from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

from isthmus.errors import RunError
from isthmus.memory import check_fits_memory
from isthmus.protocol.ledger import Ledger
from isthmus.store import StoreRefused

if TYPE_CHECKING:
    from isthmus.store import Info

BELIEVED_BYTES = 1 << 30  # models up to this size are not worth a request
LOOKED_BACK = 10  # rounds: the payloads of a single one may be damaged


def check_claims(ledger: Ledger, start: int, copies: int) -> None:
    """Compare the model with this machine's memory and with what the bucket holds: a settled round leaves at
    least one whole update or anchor there. A replay begins at round `start` and holds `copies` copies of the
    model in this machine's memory."""
    model = ledger.run.recipe.model
    num_bytes = (8 if ledger.run.recipe.inner.precision == "fp64" else 4) * model.num_stored
    words = f"run.json states a model of {model.num_parameters:,} parameters"
    check_fits_memory(copies * num_bytes, f"{words}; to rebuild it")
    if num_bytes <= BELIEVED_BYTES or not (last := ledger.last_round()):
        return
    rounds = chain([min(start + 1, last)], range(last, max(0, last - LOOKED_BACK), -1))
    if not any(_has_update(ledger, t) for t in rounds) and _total(ledger.store.scan("anchors")) < num_bytes:
        raise RunError(
            f"{words}, and the bucket holds no update and no anchor of such a model; it is not rebuilt"
        )


def _has_update(ledger: Ledger, round_number: int) -> bool:
    """Whether the bucket holds a replica's whole update of a settled round."""
    manifest = ledger.manifest(round_number)
    # A closer also keeps copies of the others' shards.
    most = 1000 + 2 * len(ledger.shards) * (1 + len(ledger.names))
    for entry in manifest.entries if manifest else ():
        with suppress(StoreRefused):  # its author has filled the folder with other objects: ask for another's
            found = ledger.store.scan(f"payloads/{entry.replica}/{round_number:06d}", most=most)
            if _total(found) >= sum(ledger.sizes):
                return True
    return False


def _total(found: "Mapping[str, Info]") -> int:
    return sum(info.size for info in found.values())
