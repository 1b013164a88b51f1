"""What is run, as data: rows are a fleet and settings, tables are rows with the paper's numbers beside them.

A row is a recipe: one of three fleets, the settings of a scale, and the row's own settings, each written as
`--set` takes it. A row that several tables show is run once. Standard library only.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

from isthmus.config import ModelConfig, Recipe, parse_recipe
from isthmus.errors import ConfigError

SEEDS = (0, 1, 2)
LADDER = ("1/8", "1/24", "1/96", "1/192", "1/384", "1/768")  # k/d of Table 2
METHODS = ("sparseloco", "adamw", "diloco")
FINISHED = ("1/8", "1/64", "1/384")  # k/d of the runs that end with open boundaries
# Finishing rounds in percent of the run, by how they open.
FINISHES = {"open": (2, 5, 10, 20), "full": (5, 20)}

# M = 8 replicas of S = 4 stages: open, all compressed, half of them compressed (sec. 3 of the paper).
_EDGE = '[[replicas]]\nname = "edge"\nkind = "pipelined"\ncount = {}\nstages = 4\ncompression = "{}"\n'
FLEETS = {
    "dense": _EDGE.format(8, "none"),
    "pp": _EDGE.format(8, "1/8"),
    "het": '[[replicas]]\nname = "rack"\nkind = "full"\ncount = 4\n\n' + _EDGE.format(4, "1/8"),
}


@lru_cache(maxsize=64)
def _model(settings: tuple[str, ...]) -> ModelConfig:
    return parse_recipe(
        'name = "size"\n[model]\npreset = "nano"\n[[replicas]]\nname = "one"\n', settings
    ).model


@dataclass(frozen=True, slots=True)
class Scale:
    """A size at which every row can be run."""

    name: str
    about: str
    settings: tuple[str, ...]
    inner_steps: int  # H where a row does not say
    rounds: int
    lr: dict[str, float]  # where no run of the tune table is there
    lrs: dict[str, tuple[float, ...]] = field(default_factory=dict)  # what the tune table tries
    by_h: tuple[int, ...] = (15, 50, 100)  # besides `inner_steps`
    record: bool = True  # false: a trial of the machinery, whose lines never go into results/
    # Assumed until runs have been measured, all workers together: the rate of inner steps, and the device's
    # time for one exchange of sparse payloads.
    tokens_per_second: float = 0.0
    round_seconds: float = 0.0

    @property
    def model(self) -> ModelConfig:
        return _model(tuple(s for s in self.settings if s.startswith("model.")))

    @property
    def width(self) -> int:
        return self.model.width

    def ladder(self) -> tuple[str, ...]:
        """The rungs at which the subspace has a dimension left."""
        return tuple(ratio for ratio in LADDER if self.width * Fraction(ratio) >= 1)

    def finished(self) -> tuple[str, ...]:
        return tuple(ratio for ratio in FINISHED if self.width * Fraction(ratio) >= 1)


_SMALL = ("model.context=256", "inner.batch=4", "inner.micro_batches=1", "inner.warmup_steps=150",
          "data.eval_batches=128", "data.eval_every=10")  # fmt: skip
_LRS = {
    "sparseloco": (5e-4, 1e-3, 2e-3, 4e-3),
    "adamw": (1e-3, 2e-3, 4e-3, 8e-3),
    "diloco": (5e-4, 1e-3, 2e-3),
}
_LR = {"sparseloco": 1e-3, "adamw": 2e-3, "diloco": 1e-3}

SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            "12m",
            "width 384, 4 layers, one to a stage",
            ("model.preset=20m", "model.layers=4", "model.ffn=704", *_SMALL),
            30, 100, _LR, _LRS, tokens_per_second=1.8e6, round_seconds=0.05,
        ),
        Scale(
            "10m", "width 256, 8 layers", ("model.preset=10m", *_SMALL), 30, 100, _LR, _LRS,
            tokens_per_second=1.8e6, round_seconds=0.05,
        ),
        Scale(
            "20m", "width 384, 8 layers", ("model.preset=20m", *_SMALL), 30, 100, _LR, _LRS,
            tokens_per_second=1.0e6, round_seconds=0.08,
        ),
        Scale(
            "512m", "the paper's own, for a large machine", ("model.preset=512m",), 50, 391,
            {"sparseloco": 1e-3, "adamw": 3e-4, "diloco": 1e-3},
            {method: (3e-4, 6e-4, 1e-3) for method in METHODS}, by_h=(15, 30, 100), tokens_per_second=5e4,
        ),
        Scale(
            "toy", "two rounds, to try the machinery",
            ("model.preset=nano", "model.context=32", "inner.batch=2", "inner.micro_batches=1",
             "inner.warmup_steps=2", "data.eval_batches=4"),
            2, 2, {method: 4e-3 for method in METHODS},
            {"sparseloco": (2e-3, 4e-3), "adamw": (4e-3,), "diloco": (4e-3,)},
            by_h=(1, 4), record=False, tokens_per_second=2e3,
        ),
    )
}  # fmt: skip
DEFAULT_SCALE = "12m"


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration: what is run for every seed, and the row that its loss is compared with."""

    name: str
    title: str
    fleet: str
    settings: tuple[str, ...] = ()
    against: str = "dense"
    method: str = "sparseloco"
    seeds: tuple[int, ...] = SEEDS
    tuned: bool = True  # takes the learning rate that the tune table found for its method


@dataclass(frozen=True, slots=True)
class Shown:
    """A row in a table, with the paper's 512M loss and its distance from the paper's baseline, in percent.

    Where the paper prints no distance (Tables 1 and 3), it is computed from its losses.
    """

    row: str
    paper: float | None = None
    paper_gap: float | None = None
    paper_178m: float | None = None


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    title: str
    shown: tuple[Shown, ...]


def rows_of(scale: Scale) -> dict[str, Row]:
    """Every row at this scale, by name."""
    h, rounds = scale.inner_steps, scale.rounds
    steps, turn = h * rounds, h * min(10, rounds // 2)  # 500 inner steps with H = 50, as in the paper
    rows = [Row("dense", "SparseLoCo", "dense")]
    for fleet, words in (("pp", "PP-Compress"), ("het", "Het-PP-Compress (1/2)")):
        title = f"SparseLoCo + {words}"
        for ratio in scale.ladder():
            setting = f"replicas.edge.compression={ratio}"
            rows.append(Row(rung(fleet, ratio), f"{title}, k/d = {ratio}", fleet, (setting,)))
        # Table 1's *: 3910 of 19,550 inner steps of warm-up and an outer learning rate of 0.8.
        tuned = (f"inner.warmup_steps={steps // 5}", "outer.lr=0.8")
        rows += [
            Row(f"{fleet}-8-star", f"{title}*, k/d = 1/8", fleet, tuned),
            Row(f"{fleet}-8-more", f"{title}, 20 % more tokens", fleet, (f"outer.rounds={rounds * 6 // 5}",)),
            Row(f"{fleet}-8-projected", f"{title}, weights projected", fleet,
                ("subspace.weight_projection=true",)),
            Row(f"{fleet}-8-grassmann", f"{title}, Grassmann every {turn} inner steps", fleet,
                (f"subspace.grassmann_every={turn}",)),
            Row(f"{fleet}-8-modified", f"{title}, modified AdamW", fleet, ("subspace.modified_adamw=true",)),
        ]  # fmt: skip
    rows += [
        Row("het-8-frozen", "SparseLoCo + Het-PP-Compress (1/2), T_perp not adapted", "het",
            ("subspace.adaptation=false",)),
        Row("dense-all", "SparseLoCo, mean over all", "dense", ("outer.aggregation=all",)),
        Row("het-8-all", "SparseLoCo + Het-PP-Compress (1/2), mean over all", "het",
            ("outer.aggregation=all",), against="dense-all"),
        Row("diloco", "DiLoCo (Nesterov 0.9, outer lr 0.7, dense fp32 exchange)", "dense",
            ("outer.method=diloco",), method="diloco"),
        Row("dense-2bit", "SparseLoCo, 2-bit values", "dense", ("outer.values=2bit",)),
        Row("het-8-2bit", "SparseLoCo + Het-PP-Compress (1/2), 2-bit values", "het", ("outer.values=2bit",),
            against="het-8"),
        Row("het-8-bf16", "SparseLoCo + Het-PP-Compress (1/2), bf16 values", "het", ("outer.values=bf16",),
            against="het-8"),
    ]  # fmt: skip
    for fleet, words in (
        ("dense", "AdamW"),
        ("pp", "AdamW + PP-Compress"),
        ("het", "AdamW + Het-PP-Compress (1/2)"),
    ):
        name = "adamw" if fleet == "dense" else f"adamw-{fleet}-8"
        rows.append(Row(name, words, fleet, ("outer.method=adamw",), against="adamw", method="adamw"))
    for other in scale.by_h:
        settings = (f"outer.inner_steps={other}", f"outer.rounds={-(-steps // other)}")
        rows += [
            Row(f"dense-h{other}", f"SparseLoCo, H = {other}", "dense", settings, against=f"dense-h{other}"),
            Row(f"het-8-h{other}", f"SparseLoCo + Het-PP-Compress (1/2), H = {other}", "het", settings,
                against=f"dense-h{other}"),
        ]  # fmt: skip
    rows += finish_rows(scale)
    for method, lrs in scale.lrs.items():
        for lr in lrs:
            settings = (f"outer.method={method}", f"inner.lr={lr:g}")
            rows.append(Row(f"{method}-lr-{lr:g}", f"{method}, lr {lr:g}", "dense", settings, "", method,
                            seeds=SEEDS[:1], tuned=False))  # fmt: skip
    return {row.name: row for row in rows}


def finish_rows(scale: Scale) -> list[Row]:
    """All replicas compressed, and the last rounds with boundaries that open."""
    rows = []
    for ratio in scale.finished():
        title, k = f"SparseLoCo + PP-Compress, k/d = {ratio}", f"replicas.edge.compression={ratio}"
        if ratio not in scale.ladder():
            rows.append(Row(rung("pp", ratio), title, "pp", (k,)))
        for how, n in finishes(scale):
            words = f"{title}, {'opened over' if how == 'open' else 'open for'} {n} rounds"
            settings = (k, f"finish.rounds={n}", f"finish.how={how}")
            rows.append(Row(finish_name(ratio, how, n), words, "pp", settings))
    return rows


def finishes(scale: Scale) -> list[tuple[str, int]]:
    """(how, rounds) of every way to finish that is tried; fewer where a scale has few rounds."""
    found = [
        (how, max(1, share * scale.rounds // 100)) for how, shares in FINISHES.items() for share in shares
    ]
    return list(dict.fromkeys(found))


def finish_name(ratio: str, how: str, rounds: int) -> str:
    return f"{rung('pp', ratio)}-{how}-{rounds}"


def rung(fleet: str, ratio: str) -> str:
    """The row of a fleet at this k/d."""
    return f"{fleet}-{ratio.partition('/')[2]}"


PAPER_LADDER = {  # Table 2: k/d -> loss and its distance from the baseline in percent; uniform, then half
    "1/8": ((2.84, 4.0), (2.82, 3.3)),
    "1/24": ((2.89, 5.9), (2.88, 5.5)),
    "1/96": ((2.96, 8.4), (2.94, 7.7)),
    "1/192": ((3.03, 11.0), (2.97, 8.8)),
    "1/384": ((3.04, 11.4), (2.99, 9.5)),
    "1/768": ((3.07, 12.5), (3.00, 9.9)),
}


def tables_of(scale: Scale) -> dict[str, Table]:
    """Every table at this scale, in the order in which `all` runs them; `tune` comes before what it tunes."""
    ladder = [Shown("dense", 2.73)]
    for at, fleet in enumerate(("pp", "het")):
        ladder += [Shown(rung(fleet, ratio), *PAPER_LADDER[ratio][at]) for ratio in scale.ladder()]
    rows = rows_of(scale)
    tables = (
        Table("tune", "The learning rate of each method, on its baseline",
              tuple(Shown(row.name) for row in rows.values() if not row.tuned)),
        Table("1", "Table 1: SparseLoCo with compressed pipelines", (
            Shown("dense", 2.73, None, 3.07), Shown("pp-8", 2.84, 4.0, 3.14),
            Shown("het-8", 2.82, 3.3, 3.12))),
        Table("4", "Table 4: AdamW, gradients averaged at every step", (
            Shown("adamw", 2.75), Shown("adamw-pp-8", 2.81, 2.2), Shown("adamw-het-8", 2.83, 2.9))),
        Table("2", "Table 2: the compression ladder", tuple(ladder)),
        Table("3", "Table 3: 20 % more tokens for the compressed runs", (
            Shown("dense", 2.73), Shown("pp-8-more", 2.78, 1.8), Shown("het-8-more", 2.75, 0.7))),
        Table("5", "Table 5: ablations", (
            Shown("dense", 2.73), Shown("pp-8", 2.84, 4.0), Shown("het-8", 2.82, 3.3),
            Shown("het-8-frozen", 2.89, 5.9),
            Shown("pp-8-projected", 2.88, 5.5), Shown("het-8-projected", 2.87, 5.1),
            Shown("pp-8-grassmann", 2.84, 4.0), Shown("het-8-grassmann", 2.82, 3.3),
            Shown("pp-8-modified", 2.84, 4.0), Shown("het-8-modified", 2.82, 3.3))),
        Table("aggregation", "The mean: over the contributors of a coordinate, or over all replicas", (
            Shown("dense"), Shown("dense-all"), Shown("het-8"), Shown("het-8-all"), Shown("diloco"))),
        Table("h", "H, at the same number of tokens", tuple(
            shown
            for h in sorted({*scale.by_h, scale.inner_steps})
            for shown in ((Shown("dense"), Shown("het-8")) if h == scale.inner_steps
                          else (Shown(f"dense-h{h}"), Shown(f"het-8-h{h}"))))),
        Table("values", "Q: the values of the sparse payload", (
            Shown("dense"), Shown("dense-2bit"), Shown("het-8"), Shown("het-8-bf16"), Shown("het-8-2bit"))),
        Table("1-star", "Table 1, the rows with *: settings tuned for compressed runs", (
            Shown("dense", 2.73), Shown("pp-8-star", 2.82, 3.3), Shown("het-8-star", 2.80, 2.6))),
        Table("finish", "Finish dense: the last rounds with boundaries that open, all replicas compressed", (
            Shown("dense"), *(
                Shown(name)
                for ratio in scale.finished()
                for name in (rung("pp", ratio), *(finish_name(ratio, *one) for one in finishes(scale)))))),
    )  # fmt: skip
    return {table.name: table for table in tables}


def home_of(row: str, scale: Scale) -> str:
    """The table whose file keeps the lines of this row: the first that shows it."""
    return next(t.name for t in tables_of(scale).values() if row in [shown.row for shown in t.shown])


def recipe_of(row: Row, scale: Scale, seed: int, corpus: str, lrs: dict[str, float]) -> Recipe:
    """The row as a recipe. `lrs` gives the learning rate of each method."""
    # The paper's method has no clip.
    outer = '[outer]\nclip = "none"\n'
    base = f'name = "{scale.name}-{row.name}"\n[model]\npreset = "nano"\n{outer}{FLEETS[row.fleet]}'
    lr = [f"inner.lr={lrs[row.method]:g}"] if row.tuned else []
    size = [*scale.settings, f"outer.inner_steps={scale.inner_steps}", f"outer.rounds={scale.rounds}"]
    text = f'data.corpus="{corpus}"'
    return parse_recipe(base, [*size, text, f"seed={seed}", *lr, *row.settings])


def pick_scale(name: str) -> Scale:
    if name not in SCALES:
        raise ConfigError(f'--scale is "{name}"; it is one of {", ".join(SCALES)}')
    return SCALES[name]
