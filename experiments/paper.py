"""The paper's rows and tables, with its numbers beside them. Standard library only."""

from experiments.tables import FINISHES, Row, Scale, Shown, Table, rung


def paper_rows(scale: Scale) -> list[Row]:
    h, rounds = scale.inner_steps, scale.rounds
    steps, turn = h * rounds, h * min(10, rounds // 2)  # 500 inner steps with H = 50, as in the paper
    more = scale.more_rounds or rounds * 6 // 5  # of Table 3; the paper's own run has 12B tokens
    # Table 1's *: 3910 of 19,550 inner steps of warm-up and an outer learning rate of 0.8.
    tuned = (f"inner.warmup_steps={steps // 5}", "outer.lr=0.8")
    rows = [Row("dense", "SparseLoCo", "dense"), Row("dense-star", "SparseLoCo*", "dense", tuned)]
    for fleet, words in (("pp", "PP-Compress"), ("het", "Het-PP-Compress (1/2)")):
        title = f"SparseLoCo + {words}"
        for ratio in scale.ladder():
            setting = f"replicas.edge.compression={ratio}"
            rows.append(Row(rung(fleet, ratio), f"{title}, k/d = {ratio}", fleet, (setting,)))
        rows += [
            Row(f"{fleet}-8-star", f"{title}*, k/d = 1/8", fleet, tuned),
            Row(f"{fleet}-8-more", f"{title}, 20 % more tokens", fleet, (f"outer.rounds={more}",)),
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
    return rows


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


PAPER_LADDER = {  # Table 2: k/d -> loss and its distance from the baseline in percent; uniform, then half
    "1/8": ((2.84, 4.0), (2.82, 3.3)),
    "1/24": ((2.89, 5.9), (2.88, 5.5)),
    "1/96": ((2.96, 8.4), (2.94, 7.7)),
    "1/192": ((3.03, 11.0), (2.97, 8.8)),
    "1/384": ((3.04, 11.4), (2.99, 9.5)),
    "1/768": ((3.07, 12.5), (3.00, 9.9)),
}


def paper_tables(scale: Scale) -> list[Table]:
    ladder = [Shown("dense", 2.73)]
    for at, fleet in enumerate(("pp", "het")):
        ladder += [Shown(rung(fleet, ratio), *PAPER_LADDER[ratio][at]) for ratio in scale.ladder()]
    return [
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
            Shown("dense", 2.73), Shown("dense-star"), Shown("pp-8-star", 2.82, 3.3),
            Shown("het-8-star", 2.80, 2.6))),
        Table("finish", "Finish dense: the last rounds with boundaries that open, all replicas compressed", (
            Shown("dense"), *(
                Shown(name)
                for ratio in scale.finished()
                for name in (rung("pp", ratio), *(finish_name(ratio, *one) for one in finishes(scale)))))),
    ]  # fmt: skip
