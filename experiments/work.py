"""The runs of some tables as a list: which have a line, which are missing, how long they may take."""

import dataclasses
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from experiments.catalog import home_of, rows_of, tables_of
from experiments.lines import Line, digest, identity, tuned_lrs
from experiments.tables import Row, Scale, Table, recipe_of
from experiments.tuning import chosen, scored_on, unsettled
from isthmus.config import FinishConfig, Recipe
from isthmus.errors import ConfigError

# A step of Muon takes as long as so many more tokens for each weight of all replicas, whatever the batch: at
# 12m a run took up to twice as long, at 24m-4 a tenth longer.
MUON_TOKENS = 6e-5
EXCHANGE_COST = 45_000  # tokens that are trained in the time of one exchange: H = 15 against 100 at 12m
SITTING = 1600.0  # seconds of a GPU that is lent for half an hour: starting and copying are taken off
COMPILE_SECONDS = 25.0  # for a worker's first run of a forward on a GPU; assumed


@dataclass(frozen=True, slots=True)
class Run:
    """One row at one seed."""

    row: Row
    seed: int
    table: str  # whose file keeps the line
    recipe: Recipe
    digest: str

    @property
    def tokens(self) -> int:
        return self.recipe.outer.rounds * self.recipe.round_tokens

    @property
    def unfinished(self) -> int:
        """Tokens before the finishing rounds."""
        return self.tokens - self.recipe.finish.rounds * self.recipe.round_tokens

    @property
    def signature(self) -> tuple:
        """Equal for two runs that share the compiled function of their inner steps."""
        r = self.recipe
        fleet = tuple(
            (x.count, x.stages, x.compressed and x.subspace_dim(r.model.width), x.wire) for x in r.replicas
        )
        finishes = r.finish.rounds > 0  # a second function, whose boundaries open
        kind = (r.outer.method == "adamw", r.inner.optimizer, r.inner.batch, finishes)
        return (*kind, *r.model.shapes().values(), fleet)

    @property
    def repeats(self) -> bool:
        return self.row.repeats

    def __str__(self) -> str:
        return f"{self.row.name} seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Job:
    """One run, or several that differ only in how they finish: their shared rounds are trained once."""

    runs: tuple[Run, ...]

    @property
    def seed(self) -> int:
        return self.runs[0].seed

    @property
    def repeats(self) -> bool:
        return self.runs[0].repeats

    @property
    def signatures(self) -> frozenset[tuple]:
        return frozenset(run.signature for run in self.runs)

    @property
    def cost(self) -> float:
        """In tokens of a run with AdamW inside."""
        recipe = self.runs[0].recipe
        steps = self.trained_tokens / recipe.round_tokens * recipe.outer.inner_steps
        weights = recipe.num_replicas * recipe.model.num_parameters
        return self.trained_tokens + (recipe.inner.optimizer == "muon") * MUON_TOKENS * weights * steps

    @property
    def load(self) -> float:
        """The same, and its exchanges: how long it takes beside another job."""
        recipe = self.runs[0].recipe
        exchanges = self.trained_tokens / recipe.round_tokens if recipe.outer.method != "adamw" else 0
        return self.cost + EXCHANGE_COST * exchanges

    @property
    def trained_tokens(self) -> int:
        """Shared rounds count once."""
        whole = max(run.tokens if not run.recipe.finish.rounds else run.unfinished for run in self.runs)
        return whole + sum(run.tokens - run.unfinished for run in self.runs if run.recipe.finish.rounds)


def jobs_of(runs: Sequence[Run]) -> list[Job]:
    """Group the runs that are equal until they finish. Seed after seed, in the order of the runs; the longest
    job of a seed first, so that no long one remains alone at the end. What is run once more comes last."""
    alike: dict[tuple, list[Run]] = {}
    for run in runs:
        stem = dataclasses.replace(run.recipe, finish=FinishConfig())
        alike.setdefault((run.seed, digest(stem), run.row.text), []).append(run)
    seeds = list(dict.fromkeys(run.seed for run in runs))
    jobs = [Job(tuple(group)) for group in alike.values()]
    return sorted(jobs, key=lambda job: (job.repeats, seeds.index(job.seed), -job.trained_tokens))


def pick_tables(names: Sequence[str], scale: Scale) -> list[Table]:
    tables = tables_of(scale)
    if "all" in names:
        return list(tables.values())
    for name in names:
        if name not in tables:
            raise ConfigError(f'there is no table "{name}"; there are {", ".join(tables)}, all')
    return [table for table in tables.values() if table.name in names]


def check_rows(only: Sequence[str], tables: Sequence[Table]) -> None:
    names = list(dict.fromkeys(shown.row for table in tables for shown in table.shown))
    for name in only:
        if name not in names:
            raise ConfigError(f'--only is "{name}"; these tables have {", ".join(names)}')


def all_runs(
    tables: Sequence[Table],
    scale: Scale,
    corpus: str,
    lines: Sequence[Line],
    seeds: Sequence[int] | None = None,
    only: Sequence[str] = (),
) -> list[Run]:
    """Every run of the tables: the first seed of every row, then the second. After a stop at any moment, the
    rows can be compared. What is run once more comes last."""
    rows, lrs, settled = rows_of(scale), tuned_lrs(scale, lines), chosen(scale, lines)
    names = list(dict.fromkeys(shown.row for table in tables for shown in table.shown))
    check_rows(only, tables)
    names = [name for name in names if not only or name in only]
    runs: dict[tuple, Run] = {}  # the best of the tune table is a baseline too: one run
    for at in range(max(len(rows[name].seeds) for name in names) if not seeds else len(seeds)):
        for name in names:
            row = rows[name]
            fixed = not row.tuned and not row.follows
            own = [s for s in row.seeds if s in seeds] if seeds and fixed else seeds or row.seeds
            if at < len(own):
                recipe = recipe_of(row, scale, own[at], corpus, lrs, settled)
                run = Run(row, own[at], home_of(name, scale), recipe, digest(recipe))
                runs.setdefault((run.seed, run.digest, row.text), run)
    return sorted(runs.values(), key=lambda run: run.repeats)


def missing(runs: Sequence[Run], lines: Sequence[Line], corpus: str) -> list[Run]:
    """`corpus` is the fingerprint of the text, not its folder."""
    there = {identity(line) for line in lines}
    return [run for run in runs if (run.seed, run.digest, scored_on(corpus, run.row.text)) not in there]


def settled(runs: Sequence[Run], scale: Scale, lines: Sequence[Line]) -> list[Run]:
    """The runs whose settings are chosen. Those of a group with a missing trial would have others once it is
    there, and their lines would be of no use."""
    waiting = [group for group in unsettled(scale, lines) if any(run.row.follows == group for run in runs)]
    if waiting:
        print(f"rows of {', '.join(waiting)} wait for their trials: reproduce tune-regime", file=sys.stderr)
    return [run for run in runs if run.row.follows not in waiting]


def rate(scale: Scale, lines: Sequence[Line], jobs: int = 1) -> tuple[float, bool]:
    """Tokens/s of all workers together, and whether that was measured or assumed.

    A line does not say how many workers shared the device with it. The fastest was alone or nearly so: the
    device gives that much to one worker as well."""
    measured = [line["tokens_per_second"] for line in lines]
    if not measured:
        return scale.tokens_per_second, False
    return max(statistics.median(measured) * jobs, max(measured)), True


def predicted_seconds(runs: Sequence[Run], scale: Scale, lines: Sequence[Line], jobs: int) -> float:
    """For the whole list. An assumed rate is that of inner steps; a measured one is over whole rounds."""
    together, measured = rate(scale, lines, jobs)
    training = sum(job.cost for job in jobs_of(runs)) / together
    if not measured:
        rounds = sum(run.recipe.outer.rounds for run in runs if run.row.method != "adamw")
        training += rounds * scale.round_seconds
    compiling = COMPILE_SECONDS * len({run.signature for run in runs}) / jobs if scale.record else 0.0
    return training + compiling


def sittings(
    runs: Sequence[Run], scale: Scale, lines: Sequence[Line], jobs: int, seconds: float = SITTING
) -> list[list[Run]]:
    """The runs in their order, cut into parts of so many seconds each."""
    parts: list[list[Run]] = []
    for run in runs:
        if parts and predicted_seconds([*parts[-1], run], scale, lines, jobs) <= seconds:
            parts[-1].append(run)
        else:
            parts.append([run])
    return parts


def next_job(pending: Sequence[Job], compiled: set[tuple], elsewhere: set[tuple]) -> Job:
    """A worker's next job: one whose inner step it has compiled, or else one that no other worker has. A
    later seed comes only when every job left of this one is compiled elsewhere."""
    first = [job for job in pending if (job.repeats, job.seed) == (pending[0].repeats, pending[0].seed)]

    def candidates() -> Iterator[Job]:
        yield from (job for job in first if job.signatures <= compiled)
        yield from (job for job in first if job.signatures.isdisjoint(elsewhere))
        yield from (job for job in pending if job.signatures <= compiled)
        yield from first

    return next(candidates())
