"""What compression costs in loss: Tables 1 and 2 of arXiv 2601.02360.

These are the paper's numbers for its 512M model on 10 B tokens, single runs. Other models and other text lose
other amounts; the numbers are shown so that a k/d is not chosen by seconds alone.
"""

from fractions import Fraction

DENSE = 2.73
LOSSES: dict[Fraction, tuple[float, float]] = {  # k/d: all replicas compressed, half of them
    Fraction(1, 8): (2.84, 2.82),
    Fraction(1, 24): (2.89, 2.88),
    Fraction(1, 96): (2.96, 2.94),
    Fraction(1, 192): (3.03, 2.97),
    Fraction(1, 384): (3.04, 2.99),
    Fraction(1, 768): (3.07, 3.00),
}
LABEL = "the paper's 512M model, all / half of its replicas compressed"


def loss_at(ratio: Fraction | None) -> str:
    """`2.84 / 2.82`; between two that the paper has, both; beyond them, the nearest."""
    if ratio is None or ratio == 1:
        return f"{DENSE:.2f}"
    if ratio in LOSSES:
        return _pair(ratio)
    milder = [known for known in LOSSES if known > ratio]
    stronger = [known for known in LOSSES if known < ratio]
    if not milder:
        return f"at most {_pair(max(LOSSES))}"
    if not stronger:
        return f"above {_pair(min(LOSSES))}"
    return f"between {_pair(min(milder))} and {_pair(max(stronger))}"


def _pair(ratio: Fraction) -> str:
    return " / ".join(f"{loss:.2f}" for loss in LOSSES[ratio])


def penalty(ratio: Fraction | None) -> str:
    """One clause for a table or a reason: the loss, what it is without compression, and whose it is."""
    if ratio is None:
        return f"no compression, no loss from it ({DENSE:.2f} in the paper's 512M runs)"
    return f"loss {loss_at(ratio)} against {DENSE:.2f} without ({LABEL})"
