"""A link over sockets: frames arrive as they were sent, both ways at once, and every fault names the link."""

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from link_pairs import EARLY, LATE, Wire, close, in_folder, link_pair, unix_endpoint

from isthmus.errors import RunError
from isthmus.replica.framing import BEAT, BULK, CHUNK_BYTES, CONTROL, HEADER, receive_into
from isthmus.replica.links import TensorSpec
from isthmus.replica.socket_link import SocketLink

# 30 + 84 bytes
FORWARD = (TensorSpec("activations", (3, 5, 1), torch.bfloat16), TensorSpec("tokens", (3, 7), torch.int32))
BACK = (TensorSpec("gradients", (2,), torch.float64),)
NORMS = (TensorSpec("control", (3,), torch.float64),)
LARGE = (TensorSpec("activations", (3_000_000,), torch.uint8),)  # more than the sockets hold


def frame(i):
    generator = torch.Generator().manual_seed(i)
    stream = torch.randn(3, 5, 1, generator=generator).bfloat16()
    return {"activations": stream, "tokens": torch.randint(0, 2**31 - 1, (3, 7), generator=generator).int()}


def noise(i, size=3_000_000):
    return torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(i)).to(torch.uint8)


class RawNeighbour:
    """The other ends of a link's connections, for a test that speaks for the neighbour byte by byte."""

    def __init__(self):
        self.ours, self.theirs = {}, {}
        for outward in (True, False):
            self.ours[outward], self.theirs[outward] = socket.socketpair()
        self.hears, self.says = self.theirs[True], self.theirs[False]

    def open(self, outward):
        return self.ours[outward]

    def close(self):
        pass

    def end(self):
        for link in self.theirs.values():
            link.close()


@pytest.fixture
def raw():
    neighbour = RawNeighbour()
    yield neighbour
    neighbour.end()


def link_to(raw, silence_seconds=20.0):
    return SocketLink(raw, LATE, torch.device("cpu"), 20.0, silence_seconds=silence_seconds)


@pytest.fixture(params=["tls", "unix"])
def pair(request, tmp_path):
    if request.param == "tls":
        early, late = link_pair()
    else:
        here, there = unix_endpoint(tmp_path / "links", 0), unix_endpoint(tmp_path / "links", 1)
        early, late = link_pair(here, there, in_folder(tmp_path / "links", 0))
    yield early, late
    close(early, late)


def test_frames_arrive_in_order_and_as_they_were_sent_and_are_counted_by_purpose(pair):
    early, late = pair
    late.expect([FORWARD] * 5, ahead=2)
    early.expect([BACK], ahead=2)
    late.send({"gradients": torch.tensor([1.0, 2.0], dtype=torch.float64)})
    for i in range(5):
        early.send(frame(i))
        stream, tokens = late.receive()
        assert torch.equal(stream, frame(i)["activations"])
        assert torch.equal(tokens, frame(i)["tokens"])
    assert early.receive()[0].tolist() == [1.0, 2.0]
    assert early.counts == {"activations": 150, "gradients": 0, "tokens": 420, "control": 0}
    assert late.counts == {"activations": 0, "gradients": 16, "tokens": 0, "control": 0}


def test_messages_of_any_length_cross_beside_the_frames(pair):
    early, late = pair
    late.expect([FORWARD], 1)
    for message in (b"", b"\0", b"x" * 1_000_000):
        early.send_message(message)
        late.send_message(message + b"!")
    early.send(frame(0))
    assert torch.equal(late.receive()[0], frame(0)["activations"])
    for message in (b"", b"\0", b"x" * 1_000_000):
        assert late.receive_message() == message
        assert early.receive_message() == message + b"!"


@pytest.mark.parametrize("bytes_of_a_key", [2**38, 4_000_000], ids=["one key", "a key for each 4 MB"])
def test_both_directions_carry_large_frames_at_once_under_keys_that_end(bytes_of_a_key):
    """Neither side reads before it has sent more than the sockets hold, so the directions do not wait for
    each other; and a new connection in the middle of a frame loses nothing."""
    early, late = link_pair(bytes_of_a_key=bytes_of_a_key)
    opened = []
    for link in (early, late):
        link.connections.open = lambda outward, it=link.connections.open: (
            opened.append(outward) or it(outward)
        )

    def exchange(end, seed):
        end.expect([LARGE] * 8, ahead=8)
        for i in range(8):
            end.send({"activations": noise(seed + i)})
        return [end.receive()[0] for _ in range(8)]

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(exchange, early, 0), pool.submit(exchange, late, 100)
        for i, (here, there) in enumerate(zip(one.result(), two.result(), strict=True)):
            assert torch.equal(here, noise(100 + i))
            assert torch.equal(there, noise(i))
    close(early, late)
    # 24 MB each way: five keys of a little more than 4 MB end, at both ends of both connections
    assert len(opened) == (0 if bytes_of_a_key > 10**9 else 2 * 2 * 5)


def test_control_waits_for_chunks_and_not_for_the_frames_before_it(raw):
    link = link_to(raw)
    link.expect([], ahead=4)
    for i in range(4):
        link.send({"activations": noise(i)})
    link.send({"control": torch.ones(3, dtype=torch.float64)})
    order, come = [], {}
    while CONTROL not in order:
        header = bytearray(HEADER.size)
        receive_into(raw.hears, memoryview(header))
        number, size, frame_number, total = HEADER.unpack(header)
        receive_into(raw.hears, memoryview(bytearray(size)))
        if number != BEAT:
            order.append(number)
            come[number] = frame_number, total
    assert come == {BULK: (0, 3_000_000), CONTROL: (0, 24)}
    assert len(order) * CHUNK_BYTES < 3_000_000  # most of the first large frame is still to come


def test_a_frame_of_another_size_is_refused_by_name():
    early, late = link_pair()
    late.expect([FORWARD], 1)
    early.send({"gradients": torch.zeros(3)})
    with pytest.raises(RunError) as error:
        late.receive()
    assert str(error.value) == (
        "replica edge-0: stage 0 at 10.0.0.7 sent stage 1 a frame of 12 bytes where 114 were due; do both "
        "run one version of Isthmus?"
    )
    assert error.value.passes
    close(early, late)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ((BULK, 2**16, 0, 2**60), "a frame of 1152921504606846976 bytes; 1073741824 at most are taken"),
        ((BULK, 2**16, 1, 2**16), "frame 1 where 0 was due"),
        ((BULK, 2**31, 0, 2**30), "a chunk of 2147483648 bytes that does not fit its frame of 1073741824"),
        ((BULK, 0, 0, 9), "a chunk of 0 bytes that does not fit its frame of 9"),
        ((9, 1, 0, 1), "a frame on channel 9, which there is not"),
    ],
)
def test_a_header_that_cannot_be_is_refused_before_a_byte_more_is_read(raw, header, words):
    link = link_to(raw)
    link.expect([LARGE], 1)
    raw.says.sendall(HEADER.pack(*header))
    with pytest.raises(RunError) as error:
        link.receive()
    assert f"sent stage 1 {words}" in str(error.value)
    link.close()


def test_a_neighbour_that_dies_in_the_middle_of_a_frame_is_a_lost_link_and_earlier_frames_are_read(raw):
    link = link_to(raw)
    link.expect([BACK, LARGE], 1)
    raw.says.sendall(HEADER.pack(BULK, 16, 0, 16) + bytes(16) + HEADER.pack(BULK, 2**16, 1, 3_000_000) + b"?")
    raw.end()
    assert link.receive()[0].tolist() == [0.0, 0.0]
    for use in (link.receive, lambda: link.send(frame(1))):
        with pytest.raises(RunError) as error:
            use()
        assert str(error.value) == (
            "replica edge-0: stage 1 lost its link to stage 0 at 10.0.0.7: the connection was closed"
        )
    link.close()


CHILD = """
import sys, torch
from link_pairs import LATE, in_folder, unix_endpoint
from pathlib import Path
from isthmus.replica.socket_link import SocketLink
folder = Path(sys.argv[1])
meeting = unix_endpoint(folder, 1).meet(0, LATE, in_folder(folder, 0), 20.0)
link = SocketLink(meeting, LATE, torch.device("cpu"), 20.0)
print("linked", flush=True)
while True:
    link.send({"activations": torch.zeros(3_000_000, dtype=torch.uint8)})
"""


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "stage 0 lost its link to stage 1 at 10.0.0.8: the connection was closed"),
        (signal.SIGSTOP, "stage 0 heard nothing from stage 1 at 10.0.0.8 for 0.5 s"),
    ],
    ids=["killed", "stopped"],
)
def test_a_neighbour_that_is_killed_or_stopped_while_it_sends_is_named(tmp_path, number, words):
    endpoint = unix_endpoint(tmp_path / "links", 0)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CHILD, str(tmp_path / "links")]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as child:
        try:
            meeting = endpoint.meet(1, EARLY, None, 60.0)
            link = SocketLink(meeting, EARLY, torch.device("cpu"), 60.0, silence_seconds=0.5)
            assert child.stdout.readline() == b"linked\n"
            link.expect([LARGE] * 1000, 2)
            link.receive()
            os.kill(child.pid, number)
            with pytest.raises(RunError) as error:
                [link.receive() for _ in range(999)]
            assert str(error.value) == f"replica edge-0: {words}"
            link.close()
            endpoint.close()
        finally:
            child.kill()


def test_a_neighbour_that_computes_for_long_is_not_silent_because_its_link_beats():
    early, late = link_pair(silence_seconds=0.4, beat_seconds=0.05)
    late.expect([FORWARD], 1)
    with pytest.raises(RunError) as error:
        late.receive(timeout_seconds=1.2)  # three times the silence that would end the link
    assert str(error.value) == "replica edge-0: stage 1 heard nothing from stage 0 at 10.0.0.7 for 1.2 s"
    assert not early.broken
    close(early, late)


def test_a_neighbour_that_takes_nothing_is_named(raw):
    link = link_to(raw, silence_seconds=0.5)
    link.expect([], 2)
    link.send({"activations": noise(0)})
    while not link.broken:
        raw.says.sendall(HEADER.pack(BEAT, 0, 0, 0))  # it lives
        with link.changed:
            link.changed.wait_for(lambda: link.fault, 0.1)
    with pytest.raises(RunError) as stuck:
        link.send(frame(0))
    assert str(stuck.value) == "replica edge-0: stage 0 at 10.0.0.7 took nothing from stage 1 for 0.5 s"
    link.close()


def test_a_bit_that_was_changed_on_the_wire_is_noticed_and_the_link_named():
    wire = Wire()
    early, late = link_pair(wire=wire)
    late.expect([FORWARD] * 2, 2)
    early.send(frame(0))
    assert torch.equal(late.receive()[0], frame(0)["activations"])
    wire.spoilt.set()
    early.send(frame(1))
    with pytest.raises(RunError) as error:
        late.receive()
    assert str(error.value).startswith(
        "replica edge-0: stage 1 lost its link to stage 0 at 10.0.0.7: what came was changed on its way"
    )
    close(early, late)


def test_what_crosses_the_wire_is_not_what_was_sent():
    wire = Wire()
    early, late = link_pair(wire=wire)
    early.send_message(b"A" * 4096)
    assert late.receive_message() == b"A" * 4096
    close(early, late)
    heard = b"".join(wire.heard)
    assert len(heard) > 4096
    assert b"A" * 8 not in heard


def test_the_last_frames_arrive_although_the_sender_closes():
    early, late = link_pair()
    late.expect([FORWARD] * 3, 3)
    early.expect([], 3)
    for i in range(3):
        early.send(frame(i))
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(early.close)
        assert [torch.equal(late.receive()[0], frame(i)["activations"]) for i in range(3)] == [True] * 3
        with pytest.raises(RunError, match="it has closed the link"):
            late.receive_message()
        late.close()
        closing.result()
    assert not early.broken
    assert not late.broken


def test_a_link_that_is_closed_in_the_middle_of_a_step_is_dropped_at_once():
    early, late = link_pair()
    late.expect([FORWARD], 1)
    early.expect([BACK], 1)
    early.close()
    with pytest.raises(RunError, match="the connection was closed"):
        late.receive()
    late.close()


ENDING = """
import sys, torch
from link_pairs import link_pair
from isthmus.replica.links import TensorSpec
early, late = link_pair()
late.expect([(TensorSpec("activations", (2**20,), torch.uint8),)] * 9, 9)
early.expect([], 9)
for i in range(9):
    early.send({"activations": torch.zeros(2**20, dtype=torch.uint8)})
    late.receive() if i < 5 else None
sys.exit(75)
"""


def test_a_process_that_ends_in_the_middle_of_a_step_ends_with_its_own_status():
    """A thread that still frees what it sent would abort it, and a launcher would call that a crash."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert done.returncode == 75


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_frames_of_a_gpu_cross_through_pinned_memory_as_they_were_sent():
    early, late = link_pair(device="cuda")
    late.expect([FORWARD] * 8, ahead=3)
    with ThreadPoolExecutor(1) as pool:
        frames = [{name: tensor.cuda() for name, tensor in frame(i).items()} for i in range(8)]
        sending = pool.submit(lambda: [early.send(each) for each in frames])
        for i in range(8):
            stream, tokens = late.receive()
            assert stream.is_cuda
            assert torch.equal(stream.cpu(), frame(i)["activations"])
            assert torch.equal(tokens.cpu(), frame(i)["tokens"])
        assert all(departure.at > 0 for departure in sending.result())
    close(early, late)
