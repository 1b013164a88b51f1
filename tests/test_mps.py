"""Apple GPUs, as far as they can be tested without one: the CPU stands in for a device without float64."""

from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from returning import small
from small_recipes import EDGE, RACK, recipe_text
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from isthmus import gpu
from isthmus.config import parse_recipe
from isthmus.data.corpus import open_corpus
from isthmus.data.tokens import Batches
from isthmus.errors import ConfigError
from isthmus.outer.aggregate import _halved
from isthmus.replica.full import FullReplica
from isthmus.replica.links import TensorSpec, pack, unpack
from isthmus.replica.picks import pick_device, pick_precision
from isthmus.replica.pipelined import PipelinedReplica
from isthmus.subspace.wire import LEAST, rounded

CPU, MPS = torch.device("cpu"), torch.device("mps")


class NoDouble(TorchDispatchMode):
    """Refuses what MPS would: any float64 result, but in `gpu.in_double`, which goes to the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = out if isinstance(out, tuple | list) else (out,)
        if not self.allowed and any(isinstance(t, torch.Tensor) and t.dtype == torch.float64 for t in found):
            raise TypeError(f"{func} made a float64 tensor")
        return out


@pytest.fixture
def without_double(monkeypatch):
    """The CPU as a device without float64; `with it():` refuses any."""
    plain = gpu.in_double

    @contextmanager
    def refused():
        with NoDouble() as mode:

            def in_double(work, tensor):
                mode.allowed += 1
                try:
                    return plain(work, tensor)
                finally:
                    mode.allowed -= 1

            with monkeypatch.context() as patch:
                patch.setattr(gpu, "NO_DOUBLE", frozenset({"cpu"}))
                patch.setattr(gpu, "in_double", in_double)
                yield

    return refused


def test_mps_where_there_is_none_is_one_line_with_the_cure(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"no Apple GPU .* use --device cpu"):
        pick_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("mps") == MPS
    with pytest.raises(ConfigError, match="of that name"):
        pick_device("mps:1")
    assert pick_device("auto").type != "mps"  # nobody has tried it yet


def test_float64_is_refused_before_anything_starts_and_the_default_is_fp32():
    with pytest.raises(ConfigError, match="set fp32"):
        pick_precision(small(precision="fp64"), MPS)
    assert pick_precision(small(precision="auto"), MPS) == "fp32"
    assert pick_precision(small(precision="fp64"), CPU) == "fp64"


def test_the_outer_step_is_the_cpus():
    assert gpu.outer_device(MPS) == CPU
    assert gpu.outer_device(CPU) == CPU


def test_an_inner_step_of_a_full_replica_needs_no_float64(without_double):
    recipe = parse_recipe(recipe_text(RACK))
    batches = Batches.of(recipe, open_corpus(recipe.data.corpus).train)
    (member,) = recipe.fleet()
    replica = FullReplica(recipe, member, batches, device=CPU, precision="fp32")
    with without_double():
        loss = replica.inner_step(0)
    assert loss.dtype == torch.float32
    assert float(loss) > 0
    with pytest.raises(TypeError, match="float64"), NoDouble():  # the net would hold
        torch.zeros(1).double()


def test_stages_train_as_they_do_elsewhere(monkeypatch):
    recipe = parse_recipe(recipe_text(EDGE))
    batches = Batches.of(recipe, open_corpus(recipe.data.corpus).train)
    (member,) = recipe.fleet()

    def losses() -> list[float]:
        replica = PipelinedReplica.in_one_process(recipe, member, batches, device=CPU, precision="fp32")
        return [float(replica.inner_step(i)) for i in range(2)]

    usual = losses()
    monkeypatch.setattr(gpu, "NO_DOUBLE", frozenset({"cpu"}))
    assert losses() == pytest.approx(usual, rel=1e-5)


@pytest.mark.parametrize("bits", [5, 8])
def test_a_wire_of_few_bits_has_the_same_codes(bits, without_double):
    z = torch.randn(2, 16, 8)
    usual = rounded(z, bits, LEAST["forward"])
    with without_double():
        found = rounded(z, bits, LEAST["forward"])
    assert torch.equal(found.codes, usual.codes)
    assert torch.equal(found.at, usual.at)


def test_norms_need_no_float64_of_the_device(without_double):
    values = torch.randn(5, 64)
    usual = _halved(values)
    with without_double():
        found = _halved(values)
    assert (usual.dtype, found.dtype) == (torch.float64, torch.float32)
    assert_close(found, usual.float(), rtol=1e-5, atol=1e-6)


def test_frames_in_float64_stay_on_the_host(monkeypatch):
    monkeypatch.setattr(gpu, "NO_DOUBLE", frozenset({"meta"}))
    control, plain = torch.arange(5, dtype=torch.float64), torch.arange(4, dtype=torch.float32)
    frame = TensorSpec("control", (5,), torch.float64), TensorSpec("gradients", (4,), torch.float32)
    buffer = torch.empty(sum(spec.num_bytes for spec in frame), dtype=torch.uint8)
    pack({"control": control, "gradients": plain}, buffer)
    found = unpack(buffer, frame, torch.device("meta"))
    assert torch.equal(found[0], control)
    assert found[1].device.type == "meta"


def test_missing_operations_fall_back_to_the_cpu():
    import os

    import isthmus

    assert Path(isthmus.__file__).exists()
    assert os.environ["PYTORCH_ENABLE_MPS_FALLBACK"] == "1"
