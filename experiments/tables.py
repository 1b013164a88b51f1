"""What a row and a table are, and the sizes at which rows are run. Standard library only.

A row is a recipe: one of three fleets, the settings of a scale, and the row's own settings, each written as
`--set` takes it. A row that several tables show is run once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

from isthmus.config import ModelConfig, Recipe, parse_recipe
from isthmus.errors import ConfigError

SEEDS = (0, 1, 2)
VIEWS = ("full", "pipelined", "mixed")  # how a model is scored
LADDER = ("1/8", "1/24", "1/96", "1/192", "1/384", "1/768")  # k/d of Table 2
# A method has a learning rate of its own, tuned on its uncompressed fleet: its settings there.
MUON = ("inner.optimizer=muon", "outer.keep=128", "outer.values=2bit")
METHODS = {
    "sparseloco": (),
    "adamw": ("outer.method=adamw",),
    "diloco": ("outer.method=diloco",),
    "muon": MUON,
    "muon-diloco": ("outer.method=diloco", *MUON[:1]),
    "muon-step": ("outer.method=adamw", *MUON[:1]),  # averaged at every step
}
FINISHED = ("1/8", "1/64", "1/384")  # k/d of the runs that end with open boundaries
# Finishing rounds in percent of the run, by how they open.
FINISHES = {"open": (2, 5, 10, 20), "full": (5, 20)}

_RACK = '[[replicas]]\nname = "rack"\nkind = "full"\ncount = {}\n\n'
_EDGE = '[[replicas]]\nname = "edge"\nkind = "pipelined"\ncount = {}\nstages = 4\ncompression = "{}"\n'


def fleet_of(name: str, replicas: int) -> str:
    """M replicas of S = 4 stages: open, all compressed, half of them compressed (sec. 3 of the paper)."""
    return {
        "dense": _EDGE.format(replicas, "none"),
        "pp": _EDGE.format(replicas, "1/8"),
        "het": _RACK.format(replicas // 2) + _EDGE.format(replicas // 2, "1/8"),
    }[name]


@dataclass(frozen=True, slots=True)
class Regime:
    """How every method is tuned alike at a scale (tuning.py)."""

    trials: int  # of every method, over the learning rates
    bases: tuple[tuple[int, int], ...]  # what is tried for H and keep, in SparseLoCo's first trial
    base: tuple[int, int]  # and what all sparse methods have
    lrs: tuple[str, ...] = ("8e-4", "1.25e-3", "2e-3", "3.2e-3", "5e-3", "8e-3")
    seeds: tuple[int, ...] = (0,)  # of a reported row
    sequences: int = 0  # in an inner step of all replicas, where rows ask what brings the base near; or none


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
    more_rounds: int = 0  # of Table 3, where a fifth more rounds is not what the paper has
    by_h: tuple[int, ...] = (15, 50, 100)  # besides `inner_steps`
    decay_t_perp: bool = False  # true: its first lines were made when T_perp decayed with the rest
    replicas: int = 8  # M
    corpus: str = "corpus/"  # its text, as experiments/README.md names it
    regime: Regime | None = None  # where every method is tuned alike
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
    "muon": (5e-4, 1e-3, 2e-3, 4e-3),
    "muon-diloco": (5e-4, 1e-3, 2e-3),
    "muon-step": (1e-3, 2e-3, 4e-3),
}
_LR = {
    "sparseloco": 1e-3,
    "adamw": 2e-3,
    "diloco": 1e-3,
    "muon": 1e-3,
    "muon-diloco": 1e-3,
    "muon-step": 2e-3,
}

SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            "12m",
            "width 384, 4 layers, one to a stage",
            ("model.preset=20m", "model.layers=4", "model.ffn=704", *_SMALL),
            30, 100, _LR, _LRS, decay_t_perp=True, corpus="corpus12m/", tokens_per_second=1.8e6,
            round_seconds=0.05,
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
            "24m", "width 384, 8 layers, two to a stage, 102 M tokens",
            ("model.preset=20m", *_SMALL, "inner.batch=8", "data.eval_batches=64", "data.eval_every=52"),
            15, 416, _LR, _LRS, by_h=(30, 50, 100), corpus="corpus24m/", tokens_per_second=1.4e6,
            round_seconds=0.05,
            regime=Regime(6, ((15, 512), (15, 1344), (10, 896), (5, 384)), (15, 1344), sequences=64),
        ),
        Scale(
            "24m-4", "the same with four replicas and steps twice as large: where the base works",
            ("model.preset=20m", *_SMALL, "inner.batch=32", "data.eval_batches=16", "data.eval_every=78"),
            5, 624, _LR, _LRS, by_h=(30, 50, 100), replicas=4, corpus="corpus24m/", tokens_per_second=2.5e6,
            round_seconds=0.02,
            regime=Regime(6, ((5, 512), (5, 1344), (5, 2048), (10, 2048)), (5, 1344),
                          ("1.25e-3", "2e-3", "3.2e-3", "5e-3", "8e-3", "1.25e-2"),
                          (0, 1, 2, 3, 4)),
        ),
        Scale(
            "512m", "the paper's own, for a large machine", ("model.preset=512m",), 50, 391,
            {method: 3e-4 if method == "adamw" else 1e-3 for method in METHODS},
            {method: (3e-4, 6e-4, 1e-3) for method in METHODS}, more_rounds=458,
            by_h=(15, 30, 100), tokens_per_second=5e4,
        ),
        Scale(
            "toy", "two rounds, to try the machinery",
            ("model.preset=nano", "model.context=32", "inner.batch=2", "inner.micro_batches=1",
             "inner.warmup_steps=2", "data.eval_batches=4"),
            2, 2, {method: 4e-3 for method in METHODS},
            {method: (2e-3, 4e-3) if method == "sparseloco" else (4e-3,) for method in METHODS},
            by_h=(1, 4), record=False, tokens_per_second=2e3, regime=Regime(2, ((2, 32),), (2, 32)),
        ),
    )
}  # fmt: skip
DEFAULT_SCALE = "12m"
REGIME, EIGHT = "24m-4", "24m"  # where every method is tuned alike: the base works; eight replicas


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
    text: str = ""  # which half of the held-out text it is scored on: "report", "tuning"; or else all of it
    follows: str = ""  # takes the settings of the best trial of this group
    repeats: bool = False  # another row has the same recipe and seeds, and this is that row once more


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
    bytes: tuple[str, ...] = ()  # shows what each row sends between "stages", between "replicas"
    views: tuple[str, ...] = VIEWS
    against: str = ""  # all are compared with this row instead of each with its own
    beside: str = ""  # and the last of the views with this one's too


def rung(fleet: str, ratio: str) -> str:
    """The row of a fleet at this k/d."""
    return f"{fleet}-{ratio.partition('/')[2]}"


def size_of(recipe: Recipe) -> str:
    """What every percentage of a run depends on."""
    tokens = recipe.outer.rounds * recipe.round_tokens
    return f"{recipe.model.num_parameters / 1e6:.1f} M parameters, {tokens / 1e6:.1f} M tokens"


def recipe_of(
    row: Row,
    scale: Scale,
    seed: int,
    corpus: str,
    lrs: Mapping[str, float],
    chosen: Mapping[str, tuple[str, ...]] | None = None,
) -> Recipe:
    """The row as a recipe. `lrs` gives the learning rate of each method, `chosen` the tuned settings of each
    group."""
    decays = "true" if scale.decay_t_perp else "false"
    ours = f'[outer]\nclip = "none"\n[subspace]\ndecay_t_perp = {decays}\n'  # the paper's method has no clip
    fleet = fleet_of(row.fleet, scale.replicas)
    base = f'name = "{scale.name}-{row.name}"\n[model]\npreset = "nano"\n{ours}{fleet}'
    lr = [f"inner.lr={lrs[row.method]:g}"] if row.tuned else []
    tuned = (chosen or {}).get(row.follows, ())
    size = [*scale.settings, f"outer.inner_steps={scale.inner_steps}", f"outer.rounds={scale.rounds}"]
    text = f'data.corpus="{corpus}"'
    return parse_recipe(base, [*size, text, f"seed={seed}", *lr, *tuned, *row.settings])


def pick_scale(name: str) -> Scale:
    if name not in SCALES:
        raise ConfigError(f'--scale is "{name}"; it is one of {", ".join(SCALES)}')
    return SCALES[name]
