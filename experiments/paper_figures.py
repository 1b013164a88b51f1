"""Figures 2 and 3 of arXiv 2601.02360 from the closed formula (docs/plan.md, The paper's utilisation).

Every assumption is printed on the figure. matplotlib is loaded only to draw.
"""

import textwrap
from pathlib import Path
from typing import Any

from experiments.closed_form import closed_form
from isthmus.errors import ConfigError

RATIOS = (("1", 1.0), ("1/8", 1 / 8), ("1/24", 1 / 24), ("1/96", 1 / 96), ("1/768", 1 / 768))
COLOURS = ("#4a5560", "#c8590a", "#12806a", "#1f66c1", "#7a4bc2")
INK, SOFT, FAINT = "#1d2329", "#5d6770", "#e6e3dd"

# Figure 3: 512M (docs/method.md, Sizes), the paper's 391 rounds of 50 steps, and 20 % more tokens (Table 3).
WALLCLOCK = {"num_parameters": 512_398_848, "width": 1536, "mbps": 1000.0}
NUM_STEPS = 19_550
MORE_TOKENS = 1.2
PAPER_LOSS = ("2.73", "2.84 / 2.82", "2.89 / 2.88", "2.96 / 2.94", "3.07 / 3.00")  # all compressed / half


def utilisation_curves(points: int = 241) -> tuple[list[float], dict[str, list[float]]]:
    """(Mb/s from 10 to 10,000, utilisation in percent of every k/d): figure 2."""
    rates = [10 ** (1 + 3 * i / (points - 1)) for i in range(points)]
    curves = {
        name: [100 * closed_form(k_over_d=ratio, mbps=mbps).utilisation for mbps in rates]
        for name, ratio in RATIOS
    }
    return rates, curves


def pessimistic_curve(rates: list[float]) -> list[float]:
    """1/8 where transfers wait for compute and the seven other replicas' updates are read as well."""
    return [100 * closed_form(mbps=mbps, overlap=False, downloads=7).utilisation for mbps in rates]


def wallclock_hours(*, overlap: bool = True, flops_per_stage: float = 4e14) -> dict[str, dict[str, float]]:
    """Hours of the 512M run at 1 Gb/s for every k/d: the same tokens, and 20 % more for compressed ones."""
    hours = {}
    for name, ratio in RATIOS:
        form = closed_form(k_over_d=ratio, overlap=overlap, flops_per_stage=flops_per_stage, **WALLCLOCK)
        same = NUM_STEPS / form.inner_steps * form.round_seconds / 3600
        hours[name] = {"same_tokens": same, "more_tokens": same * (MORE_TOKENS if ratio < 1 else 1.0)}
    return hours


def draw(name: str, path: Path) -> dict[str, Any]:
    """Write the figure; returns the numbers in it."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f'--to is "{path}"; the name must end in .png or .svg')
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--to is {path}, but there is no folder {path.parent}; make it first")
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "isthmus"  # the same figure is the same file
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 5.6), dpi=160, facecolor="white")
    facts = {"utilisation": _utilisation, "wallclock": _wallclock}[name](figure)
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise ConfigError(
            f"cannot write the figure {path}: {error.strerror}; give --to another name"
        ) from None
    return facts


def _frame(figure: Any, title: str, under: str, notes: str) -> Any:
    axes = figure.add_axes((0.095, 0.285, 0.85, 0.585))
    figure.text(0.03, 0.945, title, fontsize=12.5, fontweight="bold", color=INK)
    figure.text(0.03, 0.905, under, fontsize=9.5, color=SOFT)
    small = {"fontsize": 7.9, "color": SOFT, "linespacing": 1.45}
    figure.text(0.03, 0.205, textwrap.fill(notes, 138), va="top", **small)
    axes.set_axisbelow(True)
    axes.tick_params(colors=SOFT, labelsize=9, length=0, which="both")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(SOFT)
    return axes


def _utilisation(figure: Any) -> dict[str, Any]:
    rates, curves = utilisation_curves()
    form = closed_form()
    notes = (
        "Assumed: N = 70 B in S = 4 stages, d = 8192; b = 32 sequences of L = 2048 per replica and "
        "inner step, H = 50; one H100 at 40 % for a stage (F = 4e14 FLOP/s), so t_c = 6 (N/S) b L / F = "
        f"{form.compute_seconds:.1f} s. Links of B bit/s each way at once, bf16, 16-bit token ids where "
        "compressed: t_l = b L (16 k + 16) / B. Transfers overlap compute perfectly; no pipeline "
        "bubble, no latency. Outer update over the same link, its upload only, 32 of 4096 entries at 14 "
        "bits: t_o = (N/S) (32/4096) 14 / B. U = H t_c / (H max(t_c, t_l) + t_o). Dashed: H t_c / (H "
        "(t_c + 2 t_l) + 8 t_o), nothing overlaps and the updates of 7 other replicas are read too."
    )
    axes = _frame(
        figure,
        "Compute utilisation against the bandwidth between stages",
        "70 B parameters, 4 stages, SparseLoCo with H = 50; after figure 2 of arXiv 2601.02360",
        notes,
    )
    for (name, values), colour in zip(curves.items(), COLOURS, strict=True):
        axes.plot(rates, values, color=colour, linewidth=2.2, label=f"k/d = {name}", solid_capstyle="round")
    axes.plot(rates, pessimistic_curve(rates), color=COLOURS[1], linewidth=1.4, linestyle=(0, (4, 3)))
    axes.set_xscale("log")
    axes.set_xlim(10, 10_000)
    axes.set_ylim(0, 103)
    axes.set_xticks([10, 30, 100, 300, 1000, 3000, 10_000])
    axes.set_xticklabels(["10 Mb/s", "30", "100", "300", "1 Gb/s", "3", "10 Gb/s"])
    axes.set_xticks([], minor=True)
    axes.tick_params(axis="x", pad=9)
    axes.set_yticks(range(0, 101, 20))
    axes.set_yticklabels([f"{tick} %" for tick in range(0, 101, 20)])
    axes.grid(axis="both", color=FAINT, linewidth=0.9)
    axes.annotate(
        f"{100 * form.utilisation:.1f} % at 100 Mb/s\nfrom k/d = 1/8 on",
        (100, 100 * form.utilisation),
        (78, 73),
        fontsize=8.8,
        color=INK,
        arrowprops={"arrowstyle": "-", "color": SOFT, "linewidth": 0.9},
    )
    for text, x, y, colour in (
        ("k/d = 1", 200, 34, COLOURS[0]),
        ("1/8", 32.5, 44, COLOURS[1]),
        ("1/24", 15.3, 60, COLOURS[2]),
        ("1/96, 1/768", 10.5, 97.2, COLOURS[4]),
        ("1/8 where nothing overlaps\nand all updates are read", 620, 70, COLOURS[1]),
    ):
        axes.text(x, y, text, color=colour, fontsize=9.5, fontweight="bold", va="center")
    return {
        "mbps": [10, 80, 100, 300, 1000, 10_000],
        "utilisation": {
            name: [
                closed_form(k_over_d=ratio, mbps=mbps).utilisation
                for mbps in (10, 80, 100, 300, 1000, 10_000)
            ]
            for name, ratio in RATIOS
        },
    }


def _wallclock(figure: Any) -> dict[str, Any]:
    overlapped, serial = wallclock_hours(), wallclock_hours(overlap=False)
    form = closed_form(k_over_d=1.0, **WALLCLOCK)
    notes = (
        "Assumed: 512,398,848 parameters in S = 4 stages, d = 1536; b = 32, L = 2048, H = 50; 19,550 "
        "inner steps (10.25 B tokens over 8 replicas). One H100 at 40 % for a stage (4e14 FLOP/s): t_c "
        f"= {form.compute_seconds:.3f} s an inner step. Links of 1 Gb/s each way at once, bf16, 16-bit "
        f"token ids where compressed: t_l = {form.link_seconds:.3f} s uncompressed. No bubble, no "
        "latency; outer upload of 32 of 4096 entries at 14 bits, no downloads. Overlapped: a step takes "
        "max(t_c, t_l); in turns: t_c + 2 t_l. Losses: the paper's, 512M, all replicas compressed / "
        "half of them. Pale: 20 % more tokens, with which its Table 3 reaches 2.78 / 2.75 at 1/8; "
        "beyond 1/8 it does not test them."
    )
    axes = _frame(
        figure,
        "Hours to train 512 M parameters over 1 Gb/s between stages",
        "loss-equivalent: compressed runs train on 20 % more tokens; after figure 3 of arXiv 2601.02360",
        notes,
    )
    axes.set_position((0.2, 0.285, 0.745, 0.585))
    ticks = []
    for i, ((name, _), colour, loss) in enumerate(zip(RATIOS, COLOURS, PAPER_LOSS, strict=True)):
        for hours, offset, alpha in ((overlapped[name], -0.2, 1.0), (serial[name], 0.2, 0.55)):
            same, more = hours["same_tokens"], hours["more_tokens"]
            axes.barh(i + offset, more, height=0.36, color="white")  # no grid shines through
            axes.barh(i + offset, same, height=0.36, color=colour, alpha=alpha)
            axes.barh(i + offset, more - same, left=same, height=0.36, color=colour, alpha=0.28 * alpha)
            kind = "overlapped" if offset < 0 else "in turns"
            text = f"{same:.2f} h" if more == same else f"{same:.2f} h, with 20 % more tokens {more:.2f} h"
            words = axes.text(
                more + 0.15, i + offset, f"{text}  ({kind})", va="center", fontsize=8.4, color=INK
            )
            words.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1.2})
        ticks.append(f"k/d = {name}\nloss {loss}")
    axes.set_yticks(range(len(RATIOS)))
    axes.set_yticklabels(ticks, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 22.5)
    axes.set_xticks(range(0, 21, 4))
    axes.set_xticklabels([f"{tick} h" for tick in range(0, 21, 4)])
    axes.grid(axis="x", color=FAINT, linewidth=0.9)
    return {"overlapped": overlapped, "serial": serial}
