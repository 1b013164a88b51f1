"""A run that lists its tensors instead of a [model]: what run.json must say, and how updates are cut."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from little import RECIPE, Little, rounds
from little import hasty as hasty

from isthmus.config import parse_recipe
from isthmus.errors import ConfigError
from isthmus.protocol.cut import cut_by_size
from isthmus.protocol.documents import Tensor
from isthmus.protocol.ledger import Ledger, parse_run, run_document
from isthmus.sparse import TopK, pack_many
from isthmus.store import Store

pytestmark = pytest.mark.usefixtures("hasty")
FULL = RECIPE.partition('[[replicas]]\nname = "c"')[0]
TENSORS = [["embed", [100, 8], "float32"], ["head.0.weight", [70, 65], "float32"], ["bias", [9], "float32"]]
START = "1" * 64


def stated(recipe: str = FULL, **changed: Any) -> bytes:
    parsed = parse_recipe(recipe)
    keys = {member.name: "0" * 64 for member in parsed.fleet()}
    body = json.loads(run_document(parsed, keys, ["a"], owner="0" * 64))
    more = {"requires": ["tensors"], "tensors": TENSORS, "shard_bytes": 5000, "start": START}
    return json.dumps(body | more | changed).encode()


def test_a_run_of_named_tensors_has_their_shapes_in_one_place():
    ledger = Ledger(Store("memory", None), parse_run(stated()))
    assert ledger.shapes == {name: tuple(shape) for name, shape, _ in TENSORS}
    assert ledger.shards == (("embed",), ("head.0.weight",), ("bias",))
    codec = TopK(
        ledger.run.recipe.outer.chunk_side, ledger.run.recipe.outer.keep, ledger.run.recipe.outer.values
    )
    for names, size in zip(ledger.shards, ledger.sizes, strict=True):
        packed = pack_many({name: codec.encode(torch.randn(ledger.shapes[name])) for name in names})
        assert len(packed) == size


@pytest.mark.parametrize(
    ("most", "shards"),
    [
        (3200, (("embed",), ("head.0.weight",), ("bias",))),
        (18236, (("embed",), ("head.0.weight", "bias"))),
        (10**6, (("embed", "head.0.weight", "bias"),)),
    ],
)
def test_a_shard_ends_before_the_tensor_that_makes_it_too_large(most: int, shards: tuple):
    assert cut_by_size([Tensor(name, tuple(shape), dtype) for name, shape, dtype in TENSORS], most) == shards


@pytest.mark.parametrize(
    "changed",
    [
        {"requires": []},
        {"tensors": []},
        {"tensors": [*TENSORS, TENSORS[0]]},
        {"tensors": [["x", [0], "float32"]]},
        {"tensors": [["x", [2**31], "float32"]]},
        {"tensors": [["../x", [3], "float32"]]},
        {"tensors": [["x", [3], "int8"]]},
        {"start": ""},
        {"shard_bytes": 0},
        {"shard_bytes": 1, "tensors": [[f"t{i}", [1], "float32"] for i in range(5000)]},
        {"room": [2]},
        {"recipe": RECIPE},
        {"overlap_steps": 3},
        {"kept_progress": 0.5},
        {"kept_progress": 1.5, "requires": ["tensors", "kept"]},
    ],
)
def test_what_does_not_go_together_in_run_json_is_one_line(changed: dict[str, Any]):
    with pytest.raises(
        ConfigError, match=r"run\.json in this bucket is not one of ours|2 stages for 1 layers"
    ) as caught:
        parse_run(stated(**changed))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["kept", "overlap", "published"])
def test_a_run_that_needs_what_comes_later_is_refused_by_its_name(name: str):
    with pytest.raises(ConfigError, match=f'requires "{name}", which this Isthmus does not know'):
        parse_run(stated(requires=["tensors", name], overlap_steps=3, kept_progress=0.5))


def test_a_run_of_an_older_version_is_one_line(folder_url: str, tmp_path: Path):
    rounds(Little(folder_url, tmp_path).replicas(), [1])
    body = json.loads(Path(folder_url, "run.json").read_bytes())
    older = "made by isthmus 0.2 or before; train or export it there"
    with pytest.raises(ConfigError, match=older):
        parse_run(json.dumps(body | {"format": 1, "keys": 3}).encode())
    with pytest.raises(ConfigError, match="of format 3; this Isthmus reads format 2"):
        parse_run(json.dumps(body | {"format": 3}).encode())
