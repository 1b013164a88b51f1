"""Every row and table by name: the paper's, the search's, and the learning rates of both.

Standard library only.
"""

from experiments.law_rows import law_rows, law_tables
from experiments.paper import paper_rows, paper_tables
from experiments.search import search_rows, search_tables
from experiments.tables import METHODS, SEEDS, Row, Scale, Shown, Table
from experiments.tuning import regime_rows, regime_tables

FIRST_TUNED = ("sparseloco", "adamw", "diloco")


def rows_of(scale: Scale) -> dict[str, Row]:
    """Every row at this scale, by name."""
    rows = [*paper_rows(scale), *search_rows(scale), *law_rows(scale), *regime_rows(scale), *tune_rows(scale)]
    return {row.name: row for row in rows}


def tune_rows(scale: Scale) -> list[Row]:
    """The learning rates that are tried, on the uncompressed fleet of each method."""
    return [
        Row(tune_name(method, lr), f"{method}, lr {lr:g}", "dense", (*METHODS[method], f"inner.lr={lr:g}"),
            "", method, seeds=SEEDS[:1], tuned=False)
        for method, lrs in scale.lrs.items()
        for lr in lrs
    ]  # fmt: skip


def tune_name(method: str, lr: float) -> str:
    return f"{method}-lr-{lr:g}"


def tables_of(scale: Scale) -> dict[str, Table]:
    """Every table at this scale, in the order in which `all` runs them; learning rates come before what they
    are for."""
    tried = {True: [], False: []}
    for row in tune_rows(scale):
        tried[row.method in FIRST_TUNED].append(Shown(row.name))
    tables = [
        Table("tune", "The learning rate of each method, on its baseline", tuple(tried[True])),
        Table(
            "tune-more", "The learning rate of each method with Muon, on its baseline", tuple(tried[False])
        ),
        *paper_tables(scale),
        *search_tables(scale),
        *law_tables(scale),
        *regime_tables(scale),
    ]
    return {table.name: table for table in tables}


def home_of(row: str, scale: Scale) -> str:
    """The table whose file keeps the lines of this row: the first that shows it."""
    return next(t.name for t in tables_of(scale).values() if row in [shown.row for shown in t.shown])
