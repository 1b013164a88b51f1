"""An exported model is causal on every wire, generates what was scored, and refuses the wire of before."""

import pytest
import torch
from torch.testing import assert_close

modeling = pytest.importorskip("isthmus.export.modeling_isthmus")

LENGTH, WIDTH = 16, 32
every_wire = pytest.mark.parametrize("wire", [*modeling.WIRES, *modeling.BITS])


def model_of(wire, dtype=torch.float64, **keys):
    stated = {
        "vocab_size": 100, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 2, "boundaries": [{"layer": 1, "basis": 0}, {"layer": 3, "basis": None}],
        "subspace_dims": [8], "frozen_table": False, "learned_tables": True, "open_share": None,
        "wire_version": modeling.WIRE_VERSION,
    }  # fmt: skip
    model = modeling.IsthmusForCausalLM(modeling.IsthmusConfig(**(stated | {"wire": wire} | keys)))
    generator = torch.Generator().manual_seed(0)
    model = model.to(dtype).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.dim() == 2:
                tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator, dtype=dtype))
            assert not name.startswith("boundary") or tensor.any()
    return model


def tokens_of():
    return torch.randint(100, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@every_wire
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_other_tokens_after_a_position_leave_the_logits_up_to_it(wire, dtype):
    model, tokens = model_of(wire, dtype), tokens_of()
    before = model(tokens).logits
    for t in (0, 3, LENGTH // 2, LENGTH - 2):
        changed = tokens.clone()
        changed[:, t + 1 :] = (changed[:, t + 1 :] + 7) % 100
        after = model(changed).logits
        assert torch.equal(after[:, : t + 1], before[:, : t + 1])
        assert not torch.equal(after[:, t + 1 :], before[:, t + 1 :])


@every_wire
@torch.no_grad()
def test_token_by_token_gives_the_logits_of_the_whole_sequence(wire):
    model, tokens = model_of(wire), tokens_of()
    whole, past = model(tokens).logits, None
    for t in range(LENGTH):
        out = model(tokens[:, t : t + 1], past_key_values=past, use_cache=True)
        past = out.past_key_values
        # RoPE's angles are float32 in transformers; they are the same here and there.
        assert_close(out.logits[:, 0], whole[:, t], rtol=0, atol=1e-9)


@pytest.mark.parametrize("wire", modeling.BITS)
@pytest.mark.parametrize("version", [1, 3])
def test_an_export_of_another_wire_says_in_one_line_how_to_export_again(wire, version):
    with pytest.raises(ValueError, match=r"^[^\n]*version 2; export its run again: isthmus export [^\n]*$"):
        model_of(wire, wire_version=version)


def test_a_folder_of_floats_does_not_depend_on_the_few_bit_wires():
    assert model_of("bf16", wire_version=1).bits is None
