"""A link over TLS: frames arrive as they were sent, both ways at once, and whatever else comes has a name."""

import os
import socket
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tls_pairs import Meeting, PairedChannels, Wire, tls_pair

from isthmus.errors import RunError
from isthmus.replica.links import TensorSpec

# 30 + 84 bytes
FORWARD = (TensorSpec("activations", (3, 5, 1), torch.bfloat16), TensorSpec("tokens", (3, 7), torch.int32))
BACK = (TensorSpec("gradients", (2,), torch.float64),)


def frame(i):
    generator = torch.Generator().manual_seed(i)
    stream = torch.randn(3, 5, 1, generator=generator).bfloat16()
    return {"activations": stream, "tokens": torch.randint(0, 2**31 - 1, (3, 7), generator=generator).int()}


def noise(i, size=300_000):
    return torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(i)).to(torch.uint8)


def close(*ends):
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda end: end.close(), ends))


def test_frames_arrive_in_order_and_as_they_were_sent_and_are_counted_by_purpose():
    early, late = tls_pair()
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
    close(early, late)


@pytest.mark.parametrize("bytes_of_a_key", [2**38, 1_000_000], ids=["one key", "a key for each MB"])
def test_both_directions_carry_large_frames_at_once_under_keys_that_end(bytes_of_a_key):
    """Neither side reads before it has sent more than the sockets hold: one direction does not wait for the
    other."""
    early, late = tls_pair(bytes_of_a_key=bytes_of_a_key)
    spec = (TensorSpec("activations", (300_000,), torch.uint8),)

    def exchange(end, seed):
        end.expect([spec] * 20, ahead=20)
        for i in range(20):
            end.send({"activations": noise(seed + i)})
        return [end.receive()[0] for _ in range(20)]

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(exchange, early, 0), pool.submit(exchange, late, 100)
        for i, (here, there) in enumerate(zip(one.result(), two.result(), strict=True)):
            assert torch.equal(here, noise(100 + i))
            assert torch.equal(there, noise(i))
    # four frames pass the end of a key; the last frame of each five opens the next connection
    assert early.channels.meeting.num_opened == (2 if bytes_of_a_key > 10**9 else 2 + 2 * 5)
    close(early, late)


def test_a_frame_of_another_size_is_refused_by_name():
    early, late = tls_pair()
    late.expect([FORWARD], 1)
    early.send({"gradients": torch.zeros(3)})
    with pytest.raises(RunError) as error:
        late.receive()
    assert str(error.value) == (
        "replica edge-0: stage 0 at 10.0.0.7 sent stage 1 frame 0 of 12 bytes, and frame 0 of 114 bytes was "
        "due; do both run one version of Isthmus?"
    )
    assert error.value.passes


def test_a_header_of_gigabytes_is_refused_before_a_byte_more_is_read():
    early, late = tls_pair()
    late.expect([FORWARD], 1)
    early.links[True].sendall(struct.pack(">QQ", 0, 2**60))
    with pytest.raises(RunError, match=r"sent stage 1 frame 0 of 1152921504606846976 bytes"):
        late.receive()


def test_a_bit_that_was_changed_on_the_wire_is_noticed_and_the_link_named():
    wire = Wire()
    early, late = tls_pair(wire=wire)
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
    assert error.value.passes


def test_what_crosses_the_wire_is_not_what_was_sent():
    heard = []

    class Tap(Wire):
        def _carry(self, source, sink):
            while data := source.recv(2**16):
                heard.append(data)
                sink.sendall(data)

    early, late = tls_pair(wire=Tap())
    late.expect([(TensorSpec("control", (4096,), torch.uint8),)], 1)
    early.send({"control": torch.full((4096,), 65, dtype=torch.uint8)})
    assert late.receive()[0].tolist() == [65] * 4096
    assert b"A" * 8 not in b"".join(heard)


def test_a_silent_neighbour_is_named_and_so_is_one_that_takes_nothing():
    early, late = tls_pair(timeout_seconds=0.3)
    late.expect([FORWARD], 1)
    with pytest.raises(RunError) as silent:
        late.receive()
    assert str(silent.value) == "replica edge-0: stage 1 heard nothing from stage 0 at 10.0.0.7 for 0.3 s"
    early, late = tls_pair(timeout_seconds=0.3)

    def fill():
        for i in range(200):  # more than the sockets hold
            early.send({"activations": noise(i)})

    with pytest.raises(RunError) as stuck:
        fill()
    assert str(stuck.value) == "replica edge-0: stage 1 at 10.0.0.7 took nothing from stage 0 for 0.3 s"
    early.close()  # without waiting for anything


def test_a_neighbour_that_dies_is_a_lost_link_and_what_it_sent_before_is_read():
    early, late = tls_pair()
    late.expect([FORWARD] * 2, 2)
    early.send(frame(0))
    late._wait(lambda: late.num_arrived, 20, "late")
    for link in early.links.values():
        socket.socket.shutdown(link, socket.SHUT_RDWR)
    late._wait(lambda: late.fault, 20, "late")
    assert torch.equal(late.receive()[0], frame(0)["activations"])
    for use in (late.receive, lambda: late.send(frame(1))):
        with pytest.raises(RunError, match=r"stage 1 lost its link to stage 0 .*: the connection was closed"):
            use()


def test_the_last_frames_arrive_although_the_sender_closes():
    early, late = tls_pair()
    late.expect([FORWARD] * 3, 3)
    for i in range(3):
        early.send(frame(i))
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(early.close)
        assert [torch.equal(late.receive()[0], frame(i)["activations"]) for i in range(3)] == [True] * 3
        late.close()
        closing.result()
    assert not early.broken
    assert not late.broken


ENDING = """
import sys, torch
from tls_pairs import tls_pair
from isthmus.replica.links import TensorSpec
early, late = tls_pair()
late.expect([(TensorSpec("control", (2**20,), torch.uint8),)] * 9, 9)
for i in range(9):
    early.send({"control": torch.zeros(2**20, dtype=torch.uint8)})
    late.receive() if i < 5 else None
sys.exit(75)
"""


def test_a_process_that_ends_in_the_middle_of_a_step_ends_with_its_own_status():
    """And is not aborted by a thread that still frees what it sent: a launcher would call that a crash."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert done.returncode == 75


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_frames_of_a_gpu_cross_through_pinned_memory_as_they_were_sent():
    early, late = tls_pair(device="cuda")
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


def test_ends_of_different_starts_do_not_meet_in_the_pairs_of_these_tests():
    meeting = Meeting()
    first, second = PairedChannels(meeting, 0).open(True), PairedChannels(meeting, 1).open(False)
    first.sendall(b"x")
    assert second.recv(1) == b"x"
