"""The rows of the paper's size on the page, from their lines alone. Standard library only."""

from collections.abc import Mapping

from experiments.estimates import VIEWS
from experiments.fullsize import NAME, SCALES, rows_at
from experiments.lines import Line
from isthmus.config import stored_recipe
from isthmus.runlog import STAGE_PURPOSES
from isthmus.runlog.words import duration, size

NOT_YET = f"Not run yet: `isthmus reproduce {NAME} --corpus DIR --device cuda` runs it."
WANTED = 2.0  # percent that the recommended row is to lie below the paper's mixed one


def fullsize_table(lines: Mapping[str, Line]) -> str:
    """The three rows: losses, their distance from the first, and bytes as they were counted."""
    if not lines:
        return NOT_YET
    head = ["configuration"]
    for view in VIEWS:
        head += [view, "Δ"]
    head += [
        "between the stages of a replica, a round",
        "up of a replica, a round",
        "down, pipelined",
        "tokens",
    ]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, row in rows_at(SCALES[NAME]).items():
        cells = _cells(lines[name], lines.get(row.against)) if name in lines else ["not run yet"]
        rows.append([row.title, *cells, *[""] * (len(head) - 1 - len(cells))])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def _cells(line: Line, base: Line | None) -> list[str]:
    cells = []
    for view in VIEWS:
        gap = f"{percent(line, base, view):+.2f} %" if base else ""
        cells += [f"{line[f'loss_{view}']:.3f}", gap]
    edge = line["round_bytes"]["edge"]
    between = sum(edge[purpose] for purpose in STAGE_PURPOSES)
    return [*cells, size(between), size(edge["payload_up"]), size(edge["payload_down"]),
            f"{line['tokens'] / 1e6:.1f} M"]  # fmt: skip


def percent(line: Line, base: Line, view: str) -> float:
    """How far this line's loss is above the other's."""
    theirs = base[f"loss_{view}"]
    return 100 * (line[f"loss_{view}"] - theirs) / theirs


def fullsize_claim(lines: Mapping[str, Line]) -> str:
    """Is the recommended row as far below the paper's mixed one as it should be, by the paper's score?"""
    if "recommended" not in lines or "het-8" not in lines:
        return "not run yet"
    found = percent(lines["recommended"], lines["het-8"], "mixed")
    word = "reached" if found <= -WANTED else "**not reached**"
    return f"{found:+.2f} % (one seed), wanted: at most {-WANTED:+g} %: {word}"


def fullsize_facts(lines: Mapping[str, Line]) -> str:
    """Where the lines come from, and what they took."""
    if not lines:
        return ""
    head = ["row", "recipe", "seed", "learning rate", "speed", "time", "memory, predicted and measured",
            "device", "commit"]  # fmt: skip
    rows = [head, ["---"] * len(head)]
    for name, line in lines.items():
        rate, whole = line["tokens_per_second"] / 1e3, line["sustained_tokens_per_second"] / 1e3
        rows.append([
            f"`{name}`", f"`{line['digest']}`", str(line["seed"]),
            f"{stored_recipe(line['recipe']).inner.lr:g}",
            f"{rate:,.0f} k tokens/s in the median round, {whole:,.0f} k with compilation",
            duration(line["seconds"]),
            f"{line['predicted_bytes'] / 2**30:.1f} and {line['peak_bytes'] / 2**30:.1f} GiB",
            f"{line['device']}, torch {line['torch']}, {line['precision']}", f"`{line['commit']}`",
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def fullsize_setup(lines: Mapping[str, Line]) -> str:
    """What the rows have in common."""
    if not lines:
        return ""
    line = next(iter(lines.values()))
    recipe = stored_recipe(line["recipe"])
    model, inner, outer = recipe.model, recipe.inner, recipe.outer
    held_out = recipe.data.eval_batches * inner.batch * model.context
    return (
        f"{line['parameters'] / 1e6:.1f} M parameters: width {model.width:,}, {model.layers} layers, "
        f"vocabulary {model.vocab:,}, context {model.context:,}; {recipe.num_replicas} replicas, "
        f"{inner.batch} x {model.context:,} tokens each per inner step, {outer.rounds} rounds of "
        f"H = {outer.inner_steps}, {inner.warmup_steps} steps of warm-up, then a cosine to the end. "
        f"{line['tokens'] / line['corpus_tokens']:.2f} passes over a text of "
        f"{line['corpus_tokens'] / 1e6:.1f} M tokens; {held_out:,} held-out tokens, the same at every score."
    )
