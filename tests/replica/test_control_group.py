"""What the processes of a replica share is read as if a stranger had written it."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage] - it is public

from isthmus.errors import RunError
from isthmus.replica import control_group
from isthmus.replica.control_group import (
    StageControlGroup,
    collect,
    shard_texts,
    share_json,
    whole_number,
    whole_numbers,
)


class Shared:
    """A control group of two, in which the other process says what a test puts into its mouth."""

    rank, size = 0, 2

    def __init__(self, other: bytes) -> None:
        self.other = other

    def share(self, data: bytes) -> list[bytes]:
        return [data, self.other]

    def leave(self) -> None:
        pass


def test_every_process_has_what_all_have_shared():
    store = HashStore()
    groups = [StageControlGroup("edge", rank, 2, store, timeout_seconds=120) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        numbers = list(pool.map(lambda g: share_json(g, [g.rank, 7], whole_numbers), groups))
        texts = list(pool.map(lambda g: collect(g, {g.rank: f"text {g.rank}"}, 2), groups))
    assert numbers == [[[0, 7], [1, 7]]] * 2
    assert texts == [["text 0", "text 1"]] * 2


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "said", [b"", b"x", b"\xff", DEEP, b"null", b"{}", b"[1.5]", b"[-1]", b"[true]", b'["1"]']
)
def test_rounds_that_are_no_rounds_name_the_process_and_can_pass(said):
    with pytest.raises(RunError, match="process 1 of this replica shared what nobody asked for") as error:
        share_json(Shared(said), [1], whole_numbers)
    assert error.value.passes
    assert len(str(error.value)) < 400
    with pytest.raises(RunError):
        share_json(Shared(said), 1, whole_number)


@pytest.mark.parametrize(
    "said",
    [[], {"2": "a"}, {"-1": "a"}, {"x": "a"}, {"9" * 5000: "a"}, {"0": 1}, {"0": ["a"]}, {"1": "a" * 2000}],
)
def test_shards_that_are_none_of_ours_are_not_taken(said):
    with pytest.raises(RunError, match="process 1"):
        collect(Shared(json.dumps(said).encode()), {0: "a", 1: "b"}, 2)
    with pytest.raises((ValueError, AttributeError)):
        shard_texts(2)(said)


def test_a_shard_that_nobody_has_is_named():
    with pytest.raises(RunError, match="no process of this replica has shard 1"):
        collect(Shared(b'{"0": "b"}'), {0: "a"}, 2)


@pytest.mark.parametrize("value", ["not hexadecimal", "ÿ", "00" * 65])
def test_a_value_in_the_store_that_is_no_share_is_a_lost_stage(value, monkeypatch):
    monkeypatch.setattr(control_group, "MAX_SHARED_BYTES", 64)
    store = HashStore()
    store.set("share/1/1", value)
    with pytest.raises(RunError, match="replica edge: stage 0 lost the other stages") as error:
        StageControlGroup("edge", 0, 2, store, timeout_seconds=5).share(b"x")
    assert error.value.passes
