"""The larger run on the page, from its line alone. Standard library only."""

from collections.abc import Mapping, Sequence

from experiments.estimates import VIEWS
from experiments.lines import Line
from isthmus.config import parse_recipe
from isthmus.runlog import STAGE_PURPOSES
from isthmus.runlog.words import duration, fleet_in_words, size


def larger_table(lines: Sequence[Line]) -> str:
    """The last of the finished runs, one fact to a row."""
    if not lines:
        return "Not run yet: `isthmus reproduce larger --corpus DIR --device cuda` runs it."
    line = lines[-1]
    rows = [("of the run", ""), ("---", "---"), *facts(line)]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
    others = len(lines) - 1
    return text + (f"\n\n{others} earlier run{'s' * (others > 1)} kept and not shown." if others else "")


def facts(line: Line) -> list[tuple[str, str]]:
    """One line of results as rows of a table."""
    recipe = parse_recipe(line["recipe"])
    model, inner, outer = recipe.model, recipe.inner, recipe.outer
    predicted, peak = line["predicted_bytes"], line["peak_bytes"]
    held_out = recipe.data.eval_batches * inner.batch * model.context
    return [
        ("parameters", f"{line['parameters'] / 1e6:.1f} M: width {model.width:,}, {model.layers} layers, "
         f"vocabulary {model.vocab:,}, context {model.context:,}"),
        ("fleet", fleet_in_words(recipe)),
        ("inner step", f"{inner.batch} x {model.context:,} tokens a replica; learning rate {inner.lr:g}, "
         f"{inner.warmup_steps} steps of warm-up, then a cosine to the end"),
        ("round", f"H = {outer.inner_steps}; of a chunk of {outer.chunk_side} x {outer.chunk_side} entries "
         f"{outer.keep} are sent, values {outer.values}"),
        ("tokens", f"{line['tokens'] / 1e6:.1f} M in {outer.rounds} rounds: "
         f"{line['tokens'] / line['corpus_tokens']:.2f} passes over a text of "
         f"{line['corpus_tokens'] / 1e6:.1f} M"),
        *((f"held-out loss, {view}", f"{line[f'loss_{view}']:.3f}") for view in VIEWS),
        ("held-out text", f"{held_out:,} tokens, the same at every round"),
        ("speed", f"{line['tokens_per_second'] / 1e3:,.0f} k tokens/s in the median round, exchange and "
         f"scores counted, the first left out; {line['sustained_tokens_per_second'] / 1e3:,.0f} k over the "
         "whole run, compilation and all else counted"),
        ("time", f"{duration(line['seconds'])} in all"),
        ("memory", f"{predicted / 2**30:.1f} GiB predicted, {peak / 2**30:.1f} GiB measured: "
         f"{predicted / peak:.2f} of it"),
        *((f"bytes of one replica a round, {name}", _sent(counts))
          for name, counts in line["round_bytes"].items()),
        ("device", f"{line['device']}, torch {line['torch']}, {line['precision']}"),
        ("commit", f"`{line['commit']}`"),
        ("recipe, seed", f"`{line['digest']}`, {line['seed']}"),
    ]  # fmt: skip


def _sent(counts: Mapping[str, int]) -> str:
    words = f"{size(counts['payload_up'])} up, {size(counts['payload_down'])} down"
    between = sum(counts[purpose] for purpose in STAGE_PURPOSES)
    return words + (f", {size(between)} between its stages" if between else "")
