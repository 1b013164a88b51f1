"""The result of a run, and its rows as a pandas frame."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.errors import ConfigError
from isthmus.runlog.row import Row

if TYPE_CHECKING:
    import pandas as pd  # pyright: ignore[reportMissingImports] - an extra


@dataclass(frozen=True, slots=True)
class Results:
    """The result of a run: its folder, and a row for each round. Row 0 is the model before training."""

    run_dir: Path
    rows: list[Row]

    @property
    def last(self) -> Row:
        return self.rows[-1]

    def to_frame(self) -> "pd.DataFrame":
        """A row for each round, which is its index; see `to_frame` below."""
        return to_frame(self.rows)


def to_frame(rows: Iterable[Row]) -> "pd.DataFrame":
    """Rows as a pandas frame with the round as its index. A table within a row becomes columns such as
    `bytes.payload_up`; what was not measured is NaN."""
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
