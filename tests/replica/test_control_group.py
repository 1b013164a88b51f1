"""What the processes of a replica share is read as if a stranger had written it."""

import queue
from concurrent.futures import ThreadPoolExecutor

import pytest
from link_pairs import close, link_pair
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage] - it is public

from isthmus.errors import RunError
from isthmus.replica import control_group
from isthmus.replica.control_group import (
    LinkControlGroup,
    StageControlGroup,
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
    assert numbers == [[[0, 7], [1, 7]]] * 2


class Pipe:
    """One end of a link that carries messages; a third end can say what it likes."""

    def __init__(self, out, into):
        self.out, self.into = out, into

    def send_message(self, data):
        self.out.put(data)

    def receive_message(self, timeout_seconds=None):
        return self.into.get(timeout=20)


def chain(size):
    """The control groups of stages that are joined by pipes."""
    forth, back = ([queue.Queue() for _ in range(size - 1)] for _ in range(2))
    return [
        LinkControlGroup(
            "edge",
            rank,
            size,
            Pipe(back[rank - 1], forth[rank - 1]) if rank else None,
            Pipe(forth[rank], back[rank]) if rank < size - 1 else None,
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_stages_share_over_their_links_what_each_said_by_rank(size):
    groups = chain(size)
    with ThreadPoolExecutor(size) as pool:
        for turn in range(3):
            said = [bytes([group.rank]) * (turn * 1000) for group in groups]
            shared = pool.map(lambda group, words=said: group.share(words[group.rank]), groups)
            assert list(shared) == [said] * size


def test_stages_share_over_socket_links():
    early, late = link_pair()
    groups = [LinkControlGroup("edge", 0, 2, None, early), LinkControlGroup("edge", 1, 2, late, None)]
    with ThreadPoolExecutor(2) as pool:
        numbers = list(pool.map(lambda g: share_json(g, [g.rank, 7], whole_numbers), groups))
    assert numbers == [[[0, 7], [1, 7]]] * 2
    close(early, late)


@pytest.mark.parametrize(
    "said",
    [b"", b"\0\0\0", b"\0\0\0\1", b"\0\0\0\1ab", b"\xff\xff\xff\xff", b"\0\0\0\0\0\0\0\0"],
    ids=["nothing", "torn", "short", "long", "huge", "two"],
)
def test_a_message_of_another_form_names_the_stage_and_can_pass(said):
    out, into = queue.Queue(), queue.Queue()
    into.put(said)
    group = LinkControlGroup("edge", 0, 2, None, Pipe(out, into))
    with pytest.raises(
        RunError, match="replica edge: stage 0 cannot read what its neighbour shared"
    ) as error:
        group.share(b"x")
    assert error.value.passes


def test_more_than_a_message_may_hold_is_refused_before_it_is_sent():
    with pytest.raises(ValueError, match="4194304 at most"):
        LinkControlGroup("edge", 0, 1, None, None).share(bytes(2**22 + 1))


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


@pytest.mark.parametrize("value", ["not hexadecimal", "ÿ", "00" * 65])
def test_a_value_in_the_store_that_is_no_share_is_a_lost_stage(value, monkeypatch):
    monkeypatch.setattr(control_group, "MAX_SHARED_BYTES", 64)
    store = HashStore()
    store.set("share/1/1", value)
    with pytest.raises(RunError, match="replica edge: stage 0 lost the other stages") as error:
        StageControlGroup("edge", 0, 2, store, timeout_seconds=5).share(b"x")
    assert error.value.passes
