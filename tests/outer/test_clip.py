"""The clip of a round that counts one update or two."""

import pytest
import torch

from isthmus.config import OuterConfig
from isthmus.outer import outer_method
from isthmus.outer.clip import history_factor
from isthmus.outer.sparseloco import plain_round


@pytest.mark.parametrize(
    ("norm", "earlier", "factor"),
    [
        (9e9, [], 1.0),
        (9e9, [1.0], 1.0),  # from the third update on
        (12.0, [1.0, 3.0], 0.5),
        (6.0, [1.0, 3.0], 1.0),
        (30.0, [1.0, 1.0, 1.0, 500.0, 500.0], 0.1),
        (0.0, [1.0, 1.0], 1.0),
    ],
)
def test_an_update_is_brought_to_three_times_the_median_before_it(norm, earlier, factor):
    assert history_factor(norm, earlier) == pytest.approx(factor)


@pytest.mark.parametrize("kind", ["fp32", "fp64", "2bit"])
def test_a_clipped_round_of_two_has_the_bits_of_the_plain_round(kind: str):  # eq. 2
    config = OuterConfig(keep=40, values=kind, lr=0.8)
    dtype = torch.float64 if kind == "fp64" else torch.float32

    def random(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shapes = {"w": (128, 192), "norm": (192,), "odd": (67, 131)}
        return {n: torch.randn(shape, generator=generator, dtype=dtype) for n, shape in shapes.items()}

    anchor, theta = random(0), random(0)
    feedback, plain = ([random(m) for m in (1, 2)] for _ in range(2))
    method = outer_method(config, anchor)
    params, factors = [random(3), random(4)], [1.0, 0.3]
    method.apply(method.contribute_all(params, feedback), None, factors)
    plain_round(theta, params, plain, config, factors=factors)
    for name in anchor:
        assert torch.equal(anchor[name], theta[name])
