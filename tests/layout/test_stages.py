"""Layers to stages, by the stated rule."""

from dataclasses import replace

import pytest

from isthmus.config import PRESETS
from isthmus.layout.stages import boundaries, layers_per_stage, stage_names, stage_of


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [(9, 4, (2, 3, 3, 1)), (12, 4, (3, 4, 3, 2)), (16, 4, (4, 5, 4, 3)), (4, 4, (1, 1, 1, 1)), (4, 1, (4,))],
)
def test_embedding_and_head_weigh_one_layer_each(layers, stages, counts):
    assert layers_per_stage(replace(PRESETS["nano"], layers=layers), stages) == counts


@pytest.mark.parametrize("layers", range(1, 25))
def test_every_stage_has_a_layer_and_every_layer_a_stage(layers):
    for stages in range(1, layers + 1):
        for cut in ("layers", "flops"):
            model = replace(PRESETS["qwen3-0.6b"], layers=layers, stage_cut=cut)
            counts = layers_per_stage(model, stages)
            assert min(counts) >= 1
            assert sum(counts) == layers
            assert len(boundaries(model, stages)) == stages - 1


@pytest.mark.parametrize("preset", ["smollm2-135m", "qwen3-0.6b", "qwen2.5-0.5b", "llama3.2-1b", "178m"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_cut_by_flops_has_the_least_work_in_its_fullest_stage(preset, stages):
    model = replace(PRESETS[preset], stage_cut="flops")
    matrices = [shape for shape in model.layer_shapes().values() if len(shape) == 2]
    head = model.vocab * model.width / sum(rows * cols for rows, cols in matrices)

    def most(counts):
        return max(*counts[:-1], counts[-1] + head)

    ours = most(layers_per_stage(model, stages))
    by_layers = most(layers_per_stage(replace(model, stage_cut="layers"), stages))
    tried = [
        most((*[-(-(model.layers - last) // (stages - 1))] * (stages - 1), last))
        for last in range(1, model.layers)
    ]
    assert ours == min(tried) <= by_layers
    if (preset, stages) == ("qwen3-0.6b", 2):
        assert ours / most((19, 9)) == 1
        assert by_layers / 14 == pytest.approx(1.71, abs=0.01)  # against the stage before it


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_stages_share_out_all_names_once_and_in_order(stages):
    model = PRESETS["178m"]
    names = [name for stage in stage_names(model, stages) for name in stage]
    assert names == list(model.shapes())
    assert stage_of("tok_embeddings.weight", model, stages) == 0
    assert stage_of("output.weight", model, stages) == stages - 1
