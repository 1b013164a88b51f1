"""A run's result, and its rows as a pandas frame."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.errors import ConfigError
from isthmus.runlog.row import Row

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingImports] - an extra


@dataclass(frozen=True, slots=True, repr=False)
class Results:
    """A run's result: its folder, and one row per round. Row 0 is the model before training."""

    run_dir: Path
    rows: list[Row]

    def __repr__(self) -> str:
        number = max(0, len(self.rows) - 1)
        facts = [str(self.run_dir), f"{number} round{'s' * (number != 1)}"]
        if self.rows and (loss := self.last.loss_mixed) is not None:
            facts.append(f"loss_mixed {loss:.4f}")
        return f"<Results of {', '.join(facts)}>"

    @property
    def last(self) -> Row:
        return self.rows[-1]

    def to_frame(self) -> "pd.DataFrame":
        """Return one row per round, indexed by round; see `to_frame` below."""
        return to_frame(self.rows)


def to_frame(rows: Iterable[Row]) -> "pd.DataFrame":
    """Return rows as a pandas frame indexed by round. Nested tables become columns such as
    `bytes.payload_up`; missing measurements are NaN."""
    try:
        import pandas as pd  # pyright: ignore[reportMissingImports] - an extra
    except ImportError:
        raise ConfigError("to_frame needs pandas: pip install pandas, or isthmus[pandas]") from None
    frame = pd.DataFrame([dict(_columns(row)) for row in rows])
    return frame.set_index("round") if len(frame) else frame


def _columns(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _columns(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", float("nan") if value is None else value
