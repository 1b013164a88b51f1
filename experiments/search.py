"""The search for settings that lose less for the same bytes, as data: edit what is tried here.

Two questions: what a stage link should carry (`FRONTIER`), and what should be sent between replicas, how
often, and with which InnerOpt inside (`INNER`). Standard library only.
"""

from dataclasses import dataclass
from fractions import Fraction

from experiments.budget import fitting
from experiments.recommended import recommended
from experiments.tables import MUON, SEEDS, Row, Scale, Shown, Table, rung

ONE = SEEDS[:1]
LONG = "inner.warmup_steps=600"  # a fifth of a run at 12m, as the paper's starred settings have it
BOTH = ("stages", "replicas")

# Times fewer bytes between stages than bf16 has open -> the wires that are tried beside bf16 in k/d. Of each,
# k is the largest that fits into the bytes of bf16.
FRONTIER = {
    2: ("int8",),
    4: ("int8", "int6", "int5", "int4"),
    8: ("int8", "int6", "int5", "int4"),
    16: ("int6", "int5", "int4"),
    24: ("int6", "int5", "int4"),
    48: ("int5", "int4"),
    96: ("int6", "int5", "int4"),
    192: ("int4",),
}
# (times fewer, wire) where a difference matters: three seeds, with either InnerOpt.
MATTERS = {(8, "bf16"), (8, "int5"), (24, "bf16"), (24, "int4"), (96, "bf16"), (96, "int4")}


# Learned tables at the boundaries, by times fewer bytes between stages: the wire. They are sent between
# replicas with the rest. EVEN_KEEP of 4096 in 2 bits, tables counted, take no more bytes than the paper's 32
# in fp32 do without tables.
ANCHORS = {8: "int5", 24: "int4", 96: "int4"}
EVEN_KEEP = 72


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One way to train between two exchanges and to exchange, nothing compressed between stages."""

    inner: str = "muon"
    method: str = "sparseloco"  # or "diloco"; "adamw": averaged at every step
    keep: int = 128  # of 4096; of SparseLoCo only
    values: str = "2bit"
    h: int = 0  # 0: the scale's
    outer_lr: float = 0.0  # 0: the method's
    also: tuple[str, ...] = ()  # further settings, as `--set` takes them
    words: str = ""  # for them, in the title; and in the name, short
    seeds: tuple[int, ...] = ONE

    @property
    def name(self) -> str:
        parts = [self.inner]
        if self.method != "sparseloco":
            parts.append("step" if self.method == "adamw" else self.method)
        else:
            parts.append(f"k{self.keep}-{self.values}")
        parts += [f"h{self.h}"] * bool(self.h)
        parts += [f"outer{self.outer_lr:g}"] * bool(self.outer_lr)
        return "-".join([*parts, *filter(None, [self.words.replace(" ", "-")])])

    @property
    def title(self) -> str:
        inner = {"adamw": "AdamW", "muon": "Muon"}[self.inner]
        if self.method == "adamw":
            return f"{inner}, averaged at every step" + f", {self.words}" * bool(self.words)
        if self.method == "diloco":
            sent = f"DiLoCo, {inner} inside"
        else:
            sent = f"SparseLoCo, {inner} inside, {self.keep} of 4096 in {self.values}"
        parts = [sent] + [f"H = {self.h}"] * bool(self.h)
        parts += [f"outer lr {self.outer_lr:g}"] * bool(self.outer_lr)
        return ", ".join([*parts, *filter(None, [self.words])])

    @property
    def tuned_as(self) -> str:
        """The method whose learning rate it takes."""
        if self.inner == "adamw":
            return self.method
        return {"sparseloco": "muon", "diloco": "muon-diloco", "adamw": "muon-step"}[self.method]

    def row(self, scale: Scale) -> Row:
        settings = [f"inner.optimizer={self.inner}", f"outer.method={self.method}"]
        if self.method == "sparseloco":
            settings += [f"outer.keep={self.keep}", f"outer.values={self.values}"]
        if self.h:
            steps = scale.inner_steps * scale.rounds
            settings += [f"outer.inner_steps={self.h}", f"outer.rounds={-(-steps // self.h)}"]
        settings += [f"outer.lr={self.outer_lr:g}"] * bool(self.outer_lr)
        settings += self.also
        return Row(self.name, self.title, "dense", tuple(settings), "dense", self.tuned_as, self.seeds)


INNER = (
    # SparseLoCo's own paper: a density of one to three in a hundred, 2 bits; and no sparsity at all.
    Try(inner="adamw", keep=128, seeds=SEEDS),
    Try(inner="adamw", keep=64, seeds=SEEDS),
    Try(inner="adamw", keep=4096, seeds=SEEDS),
    Try(inner="adamw", keep=512),
    Try(inner="adamw", keep=512, values="fp32"),
    Try(keep=32, values="fp32"),
    Try(keep=32),
    Try(keep=128, values="fp32"),
    Try(keep=512, values="fp32"),
    Try(keep=512, seeds=SEEDS),
    Try(keep=128, h=15),
    Try(keep=128, h=10),
    Try(keep=128, h=5),
    Try(keep=256, h=10, seeds=SEEDS),
    Try(keep=256, h=5),
    Try(keep=512, h=15),
    # Just below a hundredth of the bytes of averaging at every step:
    Try(keep=384, h=5, also=("inner.lr=0.004",), words="lr 0.004", seeds=SEEDS),
    Try(keep=896, h=10, also=("inner.lr=0.004",), words="lr 0.004", seeds=SEEDS),
    Try(keep=896, h=10, also=("inner.lr=0.006",), words="lr 0.006"),
    Try(keep=1344, h=15, also=("inner.lr=0.004",), words="lr 0.004", seeds=SEEDS),
    Try(keep=1344, h=15, also=("inner.lr=0.003",), words="lr 0.003"),
    Try(keep=1344, h=15, also=("inner.lr=0.002",), words="lr 0.002"),
    Try(keep=2048, h=15, also=("inner.lr=0.003",), words="lr 0.003"),
    Try(keep=2048, h=15, also=("inner.lr=0.004",), words="lr 0.004"),
    # What may bring it nearer at no more bytes, the likeliest first: a long warm-up; a larger outer step (the
    # more entries are sent, the less the mean over contributors enlarges it); then feedback and bits.
    Try(keep=1344, h=15, also=("inner.lr=0.004", LONG), words="lr 0.004 warm-up 600"),
    Try(keep=1344, h=15, also=("inner.lr=0.003", LONG), words="lr 0.003 warm-up 600"),
    Try(keep=1344, h=15, outer_lr=1.25, also=("inner.lr=0.004",), words="lr 0.004"),
    Try(keep=1344, h=15, outer_lr=1.25, also=("inner.lr=0.003", LONG), words="lr 0.003 warm-up 600"),
    Try(
        keep=1344, h=15, also=("inner.lr=0.004", "outer.feedback_decay=0.99"), words="lr 0.004 feedback 0.99"
    ),
    Try(keep=896, h=10, also=("inner.lr=0.003",), words="lr 0.003"),
    *(
        Try(
            keep=keep,
            h=h,
            outer_lr=outer_lr,
            also=(f"inner.lr={lr}", f"outer.feedback_decay={beta}"),
            words=f"lr {lr} feedback {beta}",
        )
        for keep, h, lr, beta, outer_lr in (
            (1344, 15, 0.003, 0.99, 0),
            (896, 10, 0.003, 0.99, 0),
            (1344, 15, 0.004, 1, 0),
            # A smaller outer step may let the inner one be larger (results/README.md).
            (1344, 15, 0.004, 0.99, 0.8),
            (1344, 15, 0.006, 0.99, 0.8),
            (1344, 15, 0.006, 0.99, 0.6),
            (1344, 15, 0.009, 0.99, 0.6),
            (896, 10, 0.006, 0.99, 0.8),
            (896, 10, 0.009, 0.99, 0.6),
            (1344, 15, 0.012, 0.99, 0.6),
            (1344, 15, 0.012, 0.99, 0.45),
            (1792, 20, 0.009, 0.99, 0.6),
            (2688, 30, 0.009, 0.99, 0.6),
            # On a CPU a small H was better with these steps (results/README.md); at 12m H = 10 was not.
            (384, 5, 0.009, 0.99, 0.6),
            (720, 8, 0.009, 0.99, 0.6),
        )
    ),
    *(
        Try(
            keep=keep,
            h=15,
            outer_lr=outer_lr,
            also=(f"inner.lr={lr}", "outer.feedback_decay=0.99", LONG),
            words=f"lr {lr} feedback 0.99 warm-up 600",
        )
        for keep, lr, outer_lr in (
            (1344, 0.012, 0.45),
            (2048, 0.012, 0.45),
            (1344, 0.016, 0.45),
            (1344, 0.016, 0.35),
        )
    ),
    Try(inner="adamw", method="adamw", also=(LONG, "inner.final_lr=0.3"), words="warm-up 600 final 0.3"),
    Try(inner="adamw", method="adamw", also=(LONG, "inner.lr=0.006"), words="warm-up 600 lr 0.006"),
    Try(inner="adamw", method="adamw", also=(LONG, "inner.beta2=0.99"), words="warm-up 600 beta2 0.99"),
    Try(inner="adamw", method="adamw", also=("inner.warmup_steps=1000",), words="warm-up 1000"),
    Try(keep=384, values="bf16", h=15, also=("inner.lr=0.004",), words="lr 0.004"),
    Try(inner="adamw", method="adamw", also=(LONG,), words="warm-up 600"),  # the baseline is given the same
    # All entries: no more bytes than half of them, since none needs an index.
    Try(keep=4096, h=15, also=("inner.lr=0.003",), words="lr 0.003"),
    Try(keep=4096, h=15, also=("inner.lr=0.004",), words="lr 0.004"),
    Try(keep=4096, h=15),
    Try(keep=4096),
    Try(outer_lr=0.8),
    Try(outer_lr=1.25),
    Try(also=("outer.feedback_decay=0.9",), words="feedback 0.9"),
    Try(also=("outer.feedback_decay=0.99",), words="feedback 0.99"),
    *(
        Try(
            inner="adamw",
            keep=32,
            values="fp32",
            also=(f"outer.feedback_decay={beta}",),
            words=f"feedback {beta}",
        )
        for beta in ("0.9", "0.99")
    ),
    Try(inner="adamw", keep=32, values="fp32", outer_lr=0.8),
    Try(inner="adamw", keep=32, values="fp32", outer_lr=1.25),
    Try(method="diloco", seeds=SEEDS),
    Try(method="diloco", outer_lr=0.5),
    Try(method="diloco", also=("outer.momentum=0.8",), words="momentum 0.8"),
    Try(method="adamw", seeds=SEEDS),
)
STEMS = {"": ("dense", "sparseloco", ()), "muon-": ("muon", "muon", MUON)}  # what is compressed: by its name


def frontier_name(stem: str, factor: int, wire: str) -> str:
    """AdamW with bf16 is the paper's ladder; there the name says k/d alone."""
    name = f"{stem}{rung('pp', f'1/{factor}')}"
    return name if (stem, wire) == ("", "bf16") else f"{name}-{wire}"


def frontier_rows(scale: Scale) -> list[Row]:
    """All replicas compressed. What a wire of few bits cannot reach has no row."""
    rows = []
    for stem, (base, method, settings) in STEMS.items():
        words = "AdamW inside" if method == "sparseloco" else "Muon inside"
        for factor, wires in FRONTIER.items():
            for wire in ("bf16", *wires):
                ratio = ratio_at(scale, factor, wire)
                if ratio is None:
                    continue
                sent = (f"replicas.edge.wire={wire}", f"replicas.edge.compression={ratio}")
                seeds = SEEDS if (factor, wire) in MATTERS else ONE
                name = frontier_name(stem, factor, wire)
                title = f"{factor} x less: {wire} in {ratio}, {words}"
                rows.append(Row(name, title, "pp", (*settings, *sent), base, method, seeds))
    ladder = {rung("pp", ratio) for ratio in scale.ladder()}  # the paper's own rows
    return [row for row in rows if row.name not in ladder]


def ratio_at(scale: Scale, factor: int, wire: str) -> str | None:
    """k/d on this wire in the bytes of bf16 at 1/factor; None where no dimension is left."""
    if factor > scale.width:
        return None
    return f"1/{factor}" if wire == "bf16" else fitting(wire, Fraction(1, factor), scale.model)


def frontier(scale: Scale, stem: str, factor: int) -> list[str]:
    """The rows that send at most so much between stages, bf16 first."""
    wires = [wire for wire in ("bf16", *FRONTIER[factor]) if ratio_at(scale, factor, wire)]
    return [frontier_name(stem, factor, wire) for wire in wires]


def anchors(scale: Scale, factor: int) -> list[str]:
    """The row with learned anchors that sends no more than those of `frontier`, on either kind of link."""
    names = [f"{frontier_name('muon-', factor, ANCHORS[factor])}-anchors-even"] if factor in ANCHORS else []
    return [name for name in names if ratio_at(scale, factor, ANCHORS[factor])]


def anchor_rows(scale: Scale) -> list[Row]:
    """With Muon inside, all compressed, a table at each boundary: at the same keep, and at the same bytes."""
    rows = []
    for factor, wire in ANCHORS.items():
        name = frontier_name("muon-", factor, wire)
        fixed = next((row for row in frontier_rows(scale) if row.name == name), None)
        if fixed is None:
            continue
        learned = (*fixed.settings, "subspace.anchor=learned")
        even = (*learned, f"outer.keep={EVEN_KEEP}")
        rows += [
            Row(f"{name}-anchors", f"{fixed.title}, learned anchors", "pp", learned, "muon", "muon", ONE),
            Row(f"{name}-anchors-even", f"{fixed.title}, learned anchors, {EVEN_KEEP} of 4096", "pp", even,
                "muon", "muon", SEEDS),
        ]  # fmt: skip
    return rows


def recommended_rows(scale: Scale) -> list[Row]:
    ours = recommended(scale.model)
    return [
        Row("recommended", "half compressed, recommended settings", "het", ours, "dense", "muon"),
        Row("recommended-pp", "all compressed, recommended settings", "pp", ours, "dense", "muon"),
    ]


def search_rows(scale: Scale) -> list[Row]:
    muon = Row("muon", "SparseLoCo, Muon inside, 128 of 4096 in 2bit", "dense", MUON, "dense", "muon")
    inner = [one.row(scale) for one in INNER]
    return [muon, *frontier_rows(scale), *inner, *anchor_rows(scale), *recommended_rows(scale)]


def search_tables(scale: Scale) -> list[Table]:
    wire = ["dense", "muon"]
    for factor in FRONTIER:
        wire += [name for stem in STEMS for name in frontier(scale, stem, factor)]
    inner = ["adamw", "dense", "diloco", "muon", *(one.name for one in INNER)]
    learned = ["muon"]
    for row in anchor_rows(scale):
        learned += [row.name.partition("-anchors")[0], row.name]
    return [
        Table("recommended", "Recommended settings, and the paper's", tuple(
            map(Shown, ("dense", "het-8", "recommended", "pp-8", "recommended-pp"))), bytes=BOTH),
        Table("wire", "Between stages: the same bytes in other ways, all replicas compressed",
              tuple(map(Shown, wire)), bytes=BOTH, beside="dense", views=("full", "pipelined")),
        Table("inner", "Between replicas: what is sent, how often, and what trains inside",
              tuple(map(Shown, inner)), ("replicas",), ("full",), against="adamw", beside="dense"),
        Table("anchors", "Learned anchors at the boundaries, all replicas compressed",
              tuple(map(Shown, dict.fromkeys(learned))), BOTH, ("full", "pipelined"), beside="dense"),
    ]  # fmt: skip
