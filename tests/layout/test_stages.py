"""Layers to stages, by the stated rule."""

import pytest

from isthmus.config import PRESETS
from isthmus.layout.stages import boundaries, layers_per_stage, stage_names, stage_of


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [(9, 4, (2, 3, 3, 1)), (12, 4, (3, 4, 3, 2)), (16, 4, (4, 5, 4, 3)), (4, 4, (1, 1, 1, 1)), (4, 1, (4,))],
)
def test_embedding_and_head_weigh_one_layer_each(layers, stages, counts):
    assert layers_per_stage(layers, stages) == counts


@pytest.mark.parametrize("layers", range(1, 25))
def test_every_stage_has_a_layer_and_every_layer_a_stage(layers):
    for stages in range(1, layers + 1):
        counts = layers_per_stage(layers, stages)
        assert min(counts) >= 1
        assert sum(counts) == layers
        assert len(boundaries(layers, stages)) == stages - 1


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_stages_share_out_all_names_once_and_in_order(stages):
    model = PRESETS["178m"]
    names = [name for stage in stage_names(model, stages) for name in stage]
    assert names == list(model.shapes())
    assert stage_of("tok_embeddings.weight", 9, stages) == 0
    assert stage_of("output.weight", 9, stages) == stages - 1
