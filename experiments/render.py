"""docs/results.md from results/ and docs/results.in.md: prose with {{...}} where a number goes.

The placeholders: {{table NAME}}, {{figure NAME}}, {{loss ROW VIEW}}, {{gap ROW VIEW [OTHER]}},
{{verdict ROW OTHER VIEW}}, {{finish}}, {{enough K/D PERCENT open|full}}, {{h}}, {{lr METHOD}},
{{seeds ROW}}, {{judged}}, {{scoring ROW OTHER}}, {{commits}}, {{later}}, {{pooled}}, {{repeats K/D}},
{{sent ROW}}, {{setup}}, {{small}}, {{sizes}}, {{frontier}}, {{claims}}, {{papers}}, {{tally}},
{{law table|answer}}, {{regime table|picks|trials|lengths|tuning|setup|base|distance|small}},
{{eight table|nearer|distance|steps|small}} and {{178m table|claim|facts|setup}}; VIEW is full,
pipelined or mixed, ROW may be pp-last or het-last: the steepest rung of the ladder. What follows the line
{{results}} is left out as long as there is no result.

Of the regime's own rows, named as in tuning.ROWS (dense, het-8, recommended; dense-again for a row that is
run once more): {{regime verdict ROW OTHER VIEW}}, {{regime gap ROW VIEW [OTHER]}},
{{regime scoring ROW OTHER}}, and {{regime judged}}, commits, later, pooled, fleet; {{regime repeats}}: how
far a run is from itself. Its verdicts are corrected among themselves.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from experiments import checks
from experiments.budget import stage_share
from experiments.catalog import tables_of
from experiments.claim_judges import Names, is_small
from experiments.claims import claim_tests, claims_table, tally
from experiments.estimates import Book, Compared, Estimate
from experiments.finish import enough, finish_table
from experiments.fullsize import NAME as FULLSIZE
from experiments.fullsize import read_fullsize, shown_lines
from experiments.fullsize_page import fullsize_claim, fullsize_facts, fullsize_setup, fullsize_table
from experiments.law import law_answer, law_table
from experiments.lines import Line, read
from experiments.real_fleet import read_twins
from experiments.same_code import read_curves
from experiments.search_page import BYTES, NOT_YET, bytes_of, claims, counted, frontier_table, verdict
from experiments.tables import EIGHT, LADDER, REGIME, SCALES, Scale, Shown, Table, size_of
from experiments.trial_length import by_tuning, lengths
from experiments.tuning import AGAIN, ROWS, picks_table, regime_name, trials_table, unsettled
from isthmus.errors import ConfigError
from isthmus.files import replace_file

Fullsize = Mapping[str, Line]  # the line of each row of the paper's size

TEMPLATE, RUNS = "results.in.md", "results-runs.md"
NOTE = "<!-- Written by `isthmus reproduce --render` from results/ and docs/results.in.md; edit those. -->\n"
FULLSIZE_PARTS = {
    "table": fullsize_table,
    "claim": fullsize_claim,
    "facts": fullsize_facts,
    "setup": fullsize_setup,
}
COMPARED = (  # parts that compare regime rows
    "verdict", "gap", "scoring", "judged", "commits", "pooled", "later", "fleet", "repeats",
)  # fmt: skip
WITHIN = 3.0  # percent of per-step AdamW that SparseLoCo is wanted at, where the base works
NONE_YET = "There are no results yet. `isthmus reproduce all --corpus DIR --device cuda` makes them.\n"


def write_page(results: Path, docs: Path, scale: Scale) -> list[Path]:
    """Write the page and its plots; returns their paths."""
    text, book = read_template(docs), read_book(results, scale)
    fullsize = shown_lines(read_fullsize(results))
    page, drawn = docs / "results.md", []
    if book.lines:
        from experiments.plots import draw_all

        drawn = draw_all(book, docs, fullsize)
    replace_file(page, render(text, book, [path.name for path in drawn], fullsize))
    replace_file(docs / RUNS, runs_page(book))
    return [page, docs / RUNS, *drawn]


def read_template(docs: Path) -> str:
    template = docs / TEMPLATE
    try:
        return template.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {template}: {error.strerror}; give --docs its folder") from None


def read_book(results: Path, scale: Scale) -> Book:
    """The lines of a scale and of the regimes, and the rows that several commits ran."""
    book = Book(read(results, scale), scale)
    book.regime, book.eight = (Book(read(results, SCALES[name]), SCALES[name]) for name in (REGIME, EIGHT))
    book.curves = book.regime.curves = read_curves(results)
    book.regime.twins = read_twins(results)
    return book


def render(template: str, book: Book, drawn: Sequence[str] = (), fullsize: Fullsize | None = None) -> str:
    page = judge_together(template, book)
    filled = re.sub(
        r"\{\{([^}]*)\}\}", lambda found: _fill(found.group(1), book, drawn, fullsize or {}), page
    )
    return NOTE + filled


def judge_together(template: str, book: Book) -> str:
    """Set the families of the book and its regime: all that the page compares. Returns the page's text."""
    before, _, after = template.partition("{{results}}\n")
    page = before + (after if book.lines else NONE_YET)
    book.family = verdicts(page, book)
    if book.regime:
        book.regime.family = verdicts(page, book.regime, regime_name)
    return page


def verdicts(page: str, book: Book, names: Names = str) -> list[Compared]:
    """What a page judges together of a book, each once: what its prose compares, and the tests behind the
    answers to the papers' claims. The law's are apart."""
    named: list[Compared] = []
    which = "verdict" if is_small(names) else "regime verdict"
    for words in re.findall(rf"\{{\{{{which} ([^\s}}]+ [^\s}}]+ [^\s}}]+)\}}\}}", page):
        row, other, view = (book.aliases.get(word, word) for word in str(words).split())
        named.append((names(row), names(other), view))
    if "{{papers}}" in page:
        named += claim_tests(book, names)
    return list(dict.fromkeys(one for one in [*named, *book.derived] if one not in book.apart))


def _fill(text: str, book: Book, drawn: Sequence[str], fullsize: Fullsize) -> str:
    name, *words = text.split()
    words = [book.aliases.get(word, word) for word in words]
    known: dict[str, Callable[..., str]] = {
        "table": lambda table: table_of(table, book),
        "figure": lambda figure: _figure(figure, drawn),
        "loss": lambda row, view: _text(book.loss(row, view), 3),
        "gap": lambda row, view, other=None: _text(book.gap(row, view, other), 2, "+", " %"),
        "verdict": book.verdict,
        "judged": lambda: checks.judged(book),
        "scoring": lambda row, other: checks.scoring(book, row, other),
        "commits": lambda: checks.commits(book),
        "pooled": lambda: checks.pooled(book),
        "later": lambda: checks.by_later(book),
        "repeats": lambda ratio: checks.repeats(book, ratio),
        "sent": lambda row: f"{100 * stage_share(book.recipe(row)):.1f} %",
        "finish": lambda: finish_table(book),
        "enough": lambda ratio, percent, how: enough(book, ratio, float(percent), how),
        "h": lambda: str(book.scale.inner_steps),
        "lr": lambda method: f"{book.lrs[method]:g}",
        "seeds": lambda row: str(len(book.finished(row))),
        "setup": lambda: setup(book),
        "frontier": lambda: frontier_table(book),
        "claims": lambda: claims(book),
        "papers": lambda: claims_table(book),
        "tally": lambda: tally(book),
        "small": lambda: small(book),
        "sizes": lambda: sizes(book),
        "law": lambda part: {"table": law_table, "answer": law_answer}[part](book),
        "regime": lambda part, *rest: (regime_compared if part in COMPARED else regime_part)(
            part, book.regime, *rest
        ),
        "eight": lambda part: eight_part(part, book),
        FULLSIZE: lambda part: FULLSIZE_PARTS[part](fullsize),
    }
    try:
        return known[name](*words)
    except (KeyError, TypeError):
        raise ConfigError(
            f"the page has {{{{{text}}}}}, which is none of {', '.join(known)} with its words"
        ) from None


def regime_part(part: str, book: Book | None) -> str:
    """Of the scale where the base works and every method is tuned alike."""
    if book is None or not book.lines:
        command = f"isthmus reproduce tune-regime regime --scale {REGIME} --dry-run"
        return f"Not run yet: `{command}` shows it by sittings." if part == "setup" else ""
    if part in ("picks", "trials"):
        return {"picks": picks_table, "trials": trials_table}[part](book.scale, book.lines)
    if part in ("lengths", "tuning"):
        return {"lengths": lengths, "tuning": by_tuning}[part](book.scale, book.all_lines)
    if part == "distance":
        gap = book.gap(regime_name("dense"), "full")
        found = verdict(gap, WITHIN) if gap else "not run."
        open_ = {"dense", "adamw"} & set(unsettled(book.scale, book.lines))
        words = "both with the best of the trials that are there" if open_ else "both tuned"
        return f"SparseLoCo against AdamW averaged at every step, {words}: {found}"
    if part == "small":
        return small(book, regime_name("dense"))
    tables = {"table": "regime", "base": "tune-base", "nearer": "nearer"}
    return setup(book, regime_name("dense")) if part == "setup" else table_of(tables[part], book)


def regime_compared(part: str, book: Book | None, *words: str) -> str:
    """How rows of the regime compare, and how good these comparisons are."""
    if book is None:
        return NOT_YET

    def gap(row: str, view: str, other: str | None = None) -> str:
        found = book.gap(_regime_row(row), view, _regime_row(other) if other else None)
        return _text(found, 2, "+", " %") + " (one seed)" * bool(found and found.count == 1)

    parts: dict[str, Callable[..., str]] = {
        "verdict": lambda row, other, view: book.verdict(_regime_row(row), _regime_row(other), view),
        "gap": gap,
        "scoring": lambda row, other: checks.scoring(book, _regime_row(row), _regime_row(other)),
        "judged": lambda: checks.judged(book),
        "commits": lambda: checks.commits(book),
        "pooled": lambda: checks.pooled(book),
        "later": lambda: checks.by_later(book),
        "fleet": lambda: checks.by_fleet(book),
        "repeats": lambda: checks.run_again(book),
    }
    return parts[part](*words)


def _regime_row(name: str) -> str:
    short = [row for row, *_ in ROWS] + [f"{row}-again" for row in AGAIN]
    if name not in short:
        raise ConfigError(f'the regime has no row "{name}"; it has {", ".join(short)}')
    return regime_name(name)


def eight_part(part: str, book: Book) -> str:
    """Of the same model with eight replicas and smaller steps; `steps`: how far the regime's SparseLoCo is
    from averaging at those smaller steps."""
    if part != "steps":
        return regime_part(part, book.eight)
    if not (book.regime and book.eight):
        return "not run"
    ours, theirs = (
        book.regime.losses(regime_name("dense"), "full"),
        book.eight.losses(regime_name("adamw"), "full"),
    )
    shared = sorted(ours.keys() & theirs.keys())
    gap = Estimate.of([100 * (ours[seed] / theirs[seed] - 1) for seed in shared])
    return counted(gap) if gap else "not run"


def _text(estimate: Estimate | None, digits: int, sign: str = "", unit: str = "") -> str:
    return estimate.text(digits, sign, unit) if estimate else "not run"


def _figure(name: str, drawn: Sequence[str]) -> str:
    file = f"results-{name}.svg"
    return f"![{name}]({file})" if file in drawn else ""


def table_of(name: str, book: Book) -> str:
    tables = tables_of(book.scale)
    if name not in tables:
        raise ConfigError(f'there is no table "{name}"; there are {", ".join(tables)}')
    table = tables[name]
    paper = any(entry.paper for entry in table.shown)
    gaps = any(book.row(entry.row).against not in ("", entry.row) for entry in table.shown)
    head = ["configuration", *(["paper, 512M", "Δ"] * paper)]
    for view in table.views:
        head += [view, *(["Δ"] * gaps)]
    if table.beside:
        head.append(f"{table.views[-1]}, against {book.row(table.beside).title}")
    head += [*(column for kind in table.bytes for column in BYTES[kind]), "tokens", "seeds"]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    rows += [_cells(entry, table, book, paper, gaps) for entry in table.shown]
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    missing = [ratio for ratio in LADDER if ratio not in book.scale.ladder()]
    if name == "2" and missing:
        lines += ["", f"The paper's k/d = {' and '.join(missing)} would leave less than one of "
                  f"{book.scale.width} dimensions."]  # fmt: skip
    return "\n".join(lines)


def _cells(entry: Shown, table: Table, book: Book, paper: bool, gaps: bool) -> list[str]:
    row = book.row(entry.row)
    small = f" (178M: {entry.paper_178m:.2f})" if entry.paper_178m else ""
    cells = [row.title]
    if paper:
        cells += [f"{entry.paper:.2f}{small}" if entry.paper else "",
                  f"+{entry.paper_gap:.1f} %" if entry.paper_gap is not None else ""]  # fmt: skip
    sent = bytes_of(book.recipe(entry.row), table.bytes) if table.bytes else []
    finished, failed = book.finished(entry.row), book.failed(entry.row)
    if not finished:
        rest = len(table.views) * (1 + gaps) + bool(table.beside) + 1
        return [*cells, "diverged" if failed else "not run", *[""] * (rest - 2), *sent, "", ""]
    for view in table.views:
        gap = book.gap(entry.row, view, table.against or None)
        cells += [_text(book.loss(entry.row, view), 3), *([gap.text(2, "+", " %") if gap else ""] * gaps)]
    if table.beside:
        gap = book.gap(entry.row, table.views[-1], table.beside)
        cells.append(gap.text(2, "+", " %") if gap else "")
    cells += sent
    seeds = f"{len(finished)}" + (f", {failed} more diverged" if failed else "")
    return [*cells, f"{finished[0]['tokens'] / 1e6:.1f} M", seeds]


def setup(book: Book, row: str = "dense") -> str:
    """Models, devices and corpora of the lines."""
    recipe, line = book.recipe(row), book.lines[0]
    model, tokens = recipe.model, recipe.outer.rounds * recipe.round_tokens
    held_out = recipe.data.eval_batches * recipe.inner.batch * model.context
    devices = ", ".join(sorted({line["device"] for line in book.lines}))
    return (
        f"A LLaMA of {line['parameters'] / 1e6:.1f} M parameters (width {model.width}, "
        f"{model.layers} layers, {model.heads} heads, FFN {model.ffn}, vocabulary {model.vocab:,}, "
        f"context {model.context}); {recipe.num_replicas} replicas, {recipe.inner.batch} x {model.context} "
        "tokens each per inner step, "
        f"{recipe.outer.rounds} rounds of H = {recipe.outer.inner_steps}: {tokens / 1e6:.1f} M tokens, "
        f"{tokens / line['corpus_tokens']:.2f} passes over a text of {line['corpus_tokens'] / 1e6:.1f} M. "
        f"Held-out losses are in nats a token, on the same {held_out:,} tokens for every run, at its last "
        "round. "
        f"{len(book.lines)} runs on {devices}."
    )


def small(book: Book, row: str = "dense") -> str:
    """Beside every percentage that depends on it."""
    return f"Percentages here are of a small model and a short run ({size_of(book.recipe(row))})."


def sizes(book: Book) -> str:
    """Beside percentages of this scale and of the regime together."""
    named = [(book.scale.name, book.recipe("dense"))]
    if book.regime:
        named.append((book.regime.scale.name, book.regime.recipe(regime_name("dense"))))
    listed = "; ".join(f"`{name}`: {size_of(recipe)}" for name, recipe in named)
    return f"Percentages here are of small models and short runs ({listed})."


def runs_page(book: Book) -> str:
    """Which lines every row of the page comes from, by scale."""
    parts = [NOTE, "# The runs behind the results\n"]
    for each in filter(None, (book, book.regime, book.eight)):
        if each.lines:
            rates = sorted(line["tokens_per_second"] for line in each.lines)
            speed = f"{rates[len(rates) // 2] / 1e6:.2f} M tokens/s"
            told = f"Speed of one worker, several at once: {speed} (median, the first round left out)."
            parts.append(f"## `{each.scale.name}`\n\n{told}\n\n{runs_of(each)}\n")
    return "\n".join(parts if len(parts) > 2 else [*parts, NONE_YET])


def runs_of(book: Book) -> str:
    """Which lines each row comes from."""
    lines = ["| row | recipe | seeds | commit | device | torch |", "|---|---|---|---|---|---|"]
    for name, runs in book.runs.items():
        for commit, device, version in sorted({_origin(line) for line in runs.values()}):
            seeds = [str(seed) for seed, line in runs.items() if _origin(line) == (commit, device, version)]
            found = next(iter(runs.values()))["digest"]
            lines.append(f"| `{name}` | `{found}` | {', '.join(seeds)} | `{commit}` | {device} | {version} |")
    if book.unused:
        lines += ["", f"{book.unused} lines of other settings or another corpus are kept and not shown."]
    return "\n".join(lines)


def _origin(line: dict) -> tuple[str, str, str]:
    return line["commit"], line["device"], line["torch"]
