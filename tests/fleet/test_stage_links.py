"""Neighbouring stages make their links over TLS: through the gate of the earlier one, or a relay.

The stages are threads of this process, on loopback, which the code under test takes for a network.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage] - it is public

from isthmus.errors import RunError, Unreachable
from isthmus.protocol.trust import Signer, save_secret
from isthmus.replica.links import TensorSpec
from isthmus.runtime.addresses import Address, Meeting
from isthmus.runtime.arrivals import Handover, LaunchersGate, OwnGate
from isthmus.runtime.gate import LOOPBACK, Gate, NotYet, enter, knock
from isthmus.runtime.handshake import FORTH, Credentials, Purpose, Stranger
from isthmus.runtime.relay import Relay
from isthmus.runtime.stage_links import at_address, at_relay, connect_secured

HOLDER = Credentials("run", Signer("edge-0", b"k" * 32))
NEIGHBOUR = Credentials("run", Signer("edge-1", b"x" * 32))  # a valid key, of another replica
CONTROL = (TensorSpec("control", (3,), torch.uint8),)
NOBODY = Address(LOOPBACK, 1)


@contextmanager
def a_relay() -> Iterator[Relay]:
    relay = Relay(LOOPBACK, 0)
    thread = threading.Thread(target=relay.serve, daemon=True)
    thread.start()
    try:
        yield relay
    finally:
        relay.stopped = True
        thread.join()


class Stages:
    """What each stage of a replica brings along."""

    def __init__(self, num_stages: int = 2, relay: Relay | None = None, holders: dict | None = None) -> None:
        self.num_stages, self.store, self.holders = num_stages, HashStore(), holders or {}
        self.at = Address(LOOPBACK, relay.port) if relay else None
        self.gates: dict[int, Gate] = {}
        for stage in range(num_stages - 1):
            place = Meeting(self.at, HOLDER, stage) if self.at else Address(LOOPBACK, 0)
            self.gates[stage] = Gate(place, self.holders.get(stage, HOLDER))

    def connect(self, stage: int, join_seconds: float = 30.0):
        holder = self.holders.get(stage, HOLDER)
        return connect_secured(
            stage=stage,
            num_stages=self.num_stages,
            store=self.store,
            credentials=holder,
            address="there",
            arrivals=OwnGate(self.gates[stage]) if stage in self.gates else None,
            find=at_relay(self.at, holder) if self.at else at_address("edge-0", self.gates[0].place),
            timeout_seconds=30.0,
            join_seconds=join_seconds,
        )

    def connected(self, **how):
        with ThreadPoolExecutor(self.num_stages) as pool:
            waiting = [pool.submit(self.connect, stage, **how) for stage in range(self.num_stages)]
            return [each.exception() or each.result() for each in waiting]


def says(sender, receiver, words: bytes) -> bool:
    receiver.expect([CONTROL], 1)
    sender.send({"control": torch.tensor(list(words), dtype=torch.uint8)})
    return bytes(receiver.receive()[0].tolist()) == words


def close(links) -> None:
    ends = [end for pair in links for end in pair if end]
    with ThreadPoolExecutor(len(ends)) as pool:
        list(pool.map(lambda end: end.close(), ends))


@pytest.mark.parametrize("relayed", [False, True], ids=["direct", "through a relay"])
def test_three_stages_meet_and_each_neighbour_is_heard_both_ways(relayed):
    with ExitStack() as stack:
        stages = Stages(3, stack.enter_context(a_relay()) if relayed else None)
        links = stages.connected()
        (none, first), (second, third), (fourth, also_none) = links
        assert none is None
        assert also_none is None
        assert says(first, second, b"abc")
        assert says(second, first, b"def")
        assert says(third, fourth, b"ghi")
        assert says(fourth, third, b"jkl")
        close(links)


def listening() -> set[str]:
    """This process's listeners, by address and port."""
    own = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    with open("/proc/self/net/tcp") as file:
        rows = [line.split() for line in file][1:]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def test_a_stage_that_has_a_neighbour_after_it_opens_one_port_and_the_last_one_none():
    before = listening()
    links = Stages(3).connected()
    assert len(listening() - before) == 2
    close(links)


def test_behind_a_relay_no_stage_listens():
    with a_relay() as relay:
        before = listening()
        stages = Stages(2, relay)
        links = stages.connected()
        assert listening() == before
        close(links)


def test_a_connection_is_handed_over_by_the_launcher_to_the_worker_that_came_last(tmp_path):
    folder = tmp_path / ("long" * 30) / "handover"
    Handover(folder)  # of a launcher that was killed
    gate, handover = Gate(Address(LOOPBACK, 0), HOLDER), Handover(folder)
    handover.serve(gate)
    assert os.stat(folder).st_mode & 0o77 == 0  # nobody else enters
    old, new = LaunchersGate(str(folder)), LaunchersGate(str(folder))
    assert new.address == str(gate.place)
    with pytest.raises(NotYet):  # of the start before
        enter(gate.place, HOLDER, Purpose(FORTH, 1, old.session))
    stages = Stages(2)
    stages.gates[0] = gate

    def first():
        return connect_secured(
            stage=0,
            num_stages=2,
            store=stages.store,
            credentials=HOLDER,
            address="",
            arrivals=new,
            find=at_address("edge-0", NOBODY),
        )

    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(first), pool.submit(stages.connect, 1)
        links = [each.result() for each in waiting]
    assert says(links[0][1], links[1][0], b"abc")
    assert says(links[1][0], links[0][1], b"def")
    close(links)
    handover.close()
    gate.close()
    assert not folder.exists()
    with pytest.raises(RunError, match="the launcher of this machine does not answer"):
        LaunchersGate(str(folder))


@pytest.mark.parametrize("side", [0, 1])
def test_the_key_of_another_replica_makes_no_link(side):
    found = Stages(holders={side: NEIGHBOUR}).connected(join_seconds=3.0)
    assert all(isinstance(each, RunError) and each.passes for each in found)
    assert "it does not hold this replica's key for this run" in str(found[1])


@pytest.mark.parametrize(
    "said",
    ["", "tls", "tls x y", "tls 1 ", "tls 1 example.invalid:1", "tls 1 10.0.0.1:99999", "1" * 5000],
)
def test_what_a_neighbour_makes_up_is_named_and_can_pass(said):
    stages = Stages(3)
    stages.store.set("stage/1", said)
    with pytest.raises(RunError, match=r"replica edge-0: stage 1 (said|gave the address)") as error:
        stages.connect(2, join_seconds=2.0)
    assert error.value.passes
    assert len(str(error.value)) < 300


def test_a_neighbour_that_trusts_the_network_is_named():
    stages = Stages(2)
    stages.store.set("stage/0", "10.0.0.1")
    with pytest.raises(RunError, match="stage 0 was started with --trust-network, and stage 1 was not"):
        stages.connect(1)


def test_a_neighbour_that_never_comes_is_named():
    with pytest.raises(RunError, match="replica edge-0: stage 1 did not join within 1 s"):
        Stages(2).connect(0, join_seconds=1.0)


@pytest.mark.parametrize("relayed", [False, True], ids=["direct", "through a relay"])
def test_a_key_that_is_replaced_while_the_gate_stands_is_the_one_it_asks_for(tmp_path, relayed):
    """As `isthmus rotate` does: the file is replaced, and the launchers go on."""
    paths = [tmp_path / "gate.key", tmp_path / "guest.key"]
    for path in paths:
        save_secret(path, b"k" * 32)
    first, second = (Credentials("run", HOLDER.signer, path) for path in paths)
    with ExitStack() as stack:
        relay = stack.enter_context(a_relay()) if relayed else None
        at = Address(LOOPBACK, relay.port) if relay else None
        place = Meeting(at, first, 0) if at else Address(LOOPBACK, 0)
        gate = Gate(place, first)
        stack.callback(gate.close)
        found = Meeting(at, second, 0) if at else gate.place
        knock(found, second, 1, 20.0)
        for path in paths:
            save_secret(tmp_path / "new", b"n" * 32)
            os.replace(tmp_path / "new", path)
        assert first.public_key == second.public_key != HOLDER.public_key
        until(lambda: knocks(found, second))
        assert not knocks(Meeting(at, HOLDER, 0) if at else gate.place, HOLDER)


def knocks(place, holder: Credentials) -> bool:
    try:
        knock(place, holder, 1, 1.0)
    except (Unreachable, OSError):
        return False
    return True


def until(happened) -> None:
    deadline = time.monotonic() + 300
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Strangers


def strangers(place: Address, stack: ExitStack, many: int = 1000) -> None:
    """Silent ones, junk, half a hello, and the key of another replica."""
    for number in range(many):
        with suppress(OSError):
            link = stack.enter_context(socket.create_connection((place.host, place.port), 5.0))
            link.sendall((b"", b"GET / HTTP/1.1\r\n\r\n", b"isthmus-stages/2", os.urandom(100))[number % 4])
    with pytest.raises(Stranger):
        enter(place, NEIGHBOUR, Purpose(FORTH, 1, 7))


def test_a_thousand_strangers_at_the_gate_neither_get_in_nor_keep_a_neighbour_out():
    stages = Stages(2)
    with ExitStack() as stack:
        strangers(stages.gates[0].place, stack)
        links = stages.connected()
        assert says(links[0][1], links[1][0], b"abc")
        close(links)


def test_strangers_at_the_gate_do_not_touch_a_link_that_is_made():
    stages = Stages(2)
    links = stages.connected()
    seconds = []
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        flood = pool.submit(strangers, stages.gates[0].place, stack)
        while not flood.done():
            began = time.monotonic()
            assert says(links[0][1], links[1][0], b"abc")
            assert says(links[1][0], links[0][1], b"def")
            seconds.append(time.monotonic() - began)
        flood.result()
        assert says(links[0][1], links[1][0], b"ghi")
    print(f"{len(seconds)} round trips, the longest {max(seconds):.3f} s")
    close(links)


def test_a_stage_that_starts_again_meets_its_neighbours_again():
    """As after a kill: a new store, new workers, the same gate."""
    stages = Stages(2)
    for number in range(3):
        stages.store = HashStore()
        links = stages.connected()
        assert says(links[0][1], links[1][0], bytes([number] * 3))
        for end in (links[0][1], links[1][0]):
            end.fault = RunError("killed")
            end.channels.close = lambda: None  # a gate that stays: its launcher was not killed
            end.close()
