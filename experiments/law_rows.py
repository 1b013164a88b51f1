"""The rows of the law: the share of full replicas by H, as data. Standard library only."""

from experiments.tables import Row, Scale, Shown, Table

HS = (5, 30, 100)  # at the same tokens, so that within one H the rounds are the same for every share
OF = 8  # replicas
FULL = (0, 1, 2, 4, 6)  # of them full; with all of them nothing is compressed
SEEDS = (0, 1, 2, 3, 4)
NEW = ("subspace.decay_t_perp=false",)  # what is not compressed has it too: one digest and one commit for all


def law_name(h: int, full: int) -> str:
    return f"law-h{h}-{full}of{OF}"


def law_rows(scale: Scale) -> list[Row]:
    rows, steps = [], scale.inner_steps * scale.rounds
    if scale.replicas != OF:
        return []  # its shares are of eight
    for h in HS:
        for full in (*FULL, OF):
            fleet = {0: "pp", OF: "dense"}.get(full, "het")
            counts = (f"replicas.rack.count={full}", f"replicas.edge.count={OF - full}")
            settings = (*NEW, *(counts if fleet == "het" else ()), f"outer.inner_steps={h}",
                        f"outer.rounds={-(-steps // h)}")  # fmt: skip
            words = "nothing compressed" if full == OF else f"{full} of {OF} full, k/d = 1/8"
            title = f"SparseLoCo, H = {h}, {words}"
            rows.append(Row(law_name(h, full), title, fleet, settings, law_name(h, OF), seeds=SEEDS))
    return rows


def law_tables(scale: Scale) -> list[Table]:
    if scale.replicas != OF:
        return []
    shown = tuple(Shown(law_name(h, full)) for h in HS for full in (OF, *reversed(FULL)))
    return [Table("law", "The law: the share of full replicas by H", shown, views=("full", "pipelined"))]
