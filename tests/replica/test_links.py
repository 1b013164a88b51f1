"""Links by local queues and by gloo: frames arrive as they were sent, and faults have names.

A link needs no process of its own, so both ends live in this one, each brought up by a thread.
"""

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from isthmus.errors import ConfigError, RunError
from isthmus.replica.links import TensorSpec, local_pair
from isthmus.replica.process_groups import connect, open_store, own_address
from isthmus.runtime.addresses import LOOPBACK, free_port

# 30 + 84 bytes
FORWARD = (TensorSpec("activations", (3, 5, 1), torch.bfloat16), TensorSpec("tokens", (3, 7), torch.int32))
BACK = (TensorSpec("gradients", (2,), torch.float64),)


def connected(num_stages=2, sessions=None, **settings):
    """connect() of every stage, each in a thread; what it returned or raised."""
    port = free_port()
    sessions = sessions or ["run"] * num_stages
    settings = {"timeout_seconds": 10, "join_seconds": 20} | settings

    def join(stage):
        store = open_store(
            replica="edge-0", rank=stage, host=LOOPBACK, port=port, session=sessions[stage], join_seconds=20
        )
        return connect(
            replica="edge-0",
            stage=stage,
            num_stages=num_stages,
            store=store,
            address=LOOPBACK,
            **settings,
        )

    with ThreadPoolExecutor(num_stages) as pool:
        waiting = [pool.submit(join, stage) for stage in range(num_stages)]
        return [w.exception() or w.result() for w in waiting]


def frame(i):
    generator = torch.Generator().manual_seed(i)
    stream = torch.randn(3, 5, 1, generator=generator).bfloat16()
    return {"activations": stream, "tokens": torch.randint(0, 2**31 - 1, (3, 7), generator=generator).int()}


@pytest.mark.parametrize("how", ["local", "process"])
def test_frames_arrive_in_order_and_as_they_were_sent_and_are_counted_by_purpose(how):
    if how == "local":
        early, late = local_pair()
    else:
        (_, early), (late, _) = connected()
    late.expect([FORWARD] * 5, ahead=2)
    early.expect([BACK], ahead=2)
    late.send({"gradients": torch.tensor([1.0, 2.0], dtype=torch.float64)})
    with ThreadPoolExecutor(1) as pool:  # more frames than may wait to be sent
        sending = pool.submit(lambda: [early.send(frame(i)) for i in range(5)])
        if how == "local":
            sending.result()
        for i in range(5):
            stream, tokens = late.receive()
            assert torch.equal(stream, frame(i)["activations"])
            assert torch.equal(tokens, frame(i)["tokens"])
        sending.result()
    assert early.receive()[0].tolist() == [1.0, 2.0]
    assert early.counts == {"activations": 150, "gradients": 0, "tokens": 420, "control": 0}
    assert late.counts == {"activations": 0, "gradients": 16, "tokens": 0, "control": 0}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda end: end.close(), (early, late)))


def test_a_frame_of_another_shape_is_refused_inside_one_process():
    early, late = local_pair()
    late.expect([BACK], 1)
    early.send({"gradients": torch.zeros(3)})
    with pytest.raises(ValueError, match="gradients came as"):
        late.receive()


def test_a_silent_neighbour_is_named_and_so_is_one_that_takes_nothing(monkeypatch):
    (_, early), (late, _) = connected(timeout_seconds=0.5)
    late.expect([FORWARD], 1)
    with pytest.raises(RunError) as silent:
        late.receive()
    assert str(silent.value) == "replica edge-0: stage 1 heard nothing from stage 0 at 127.0.0.1 for 0.5 s"
    (_, early), (late, _) = connected(timeout_seconds=0.5)
    early.send(frame(0))
    with pytest.raises(RunError) as stuck:
        early.send(frame(1))
    assert str(stuck.value) == "replica edge-0: stage 1 at 127.0.0.1 took nothing from stage 0 for 0.5 s"
    monkeypatch.setattr(early, "_wait", None)
    early.close()  # without waiting for anything


def test_every_listener_is_on_the_address_given():
    links = connected(3)
    own = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_is_socket(fd)}
    listening = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}") as file:
            rows = [line.split() for line in file][1:]
        listening += [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
    assert len(listening) >= 1 + 2 * 2 * 2  # the store, and both groups of both ends of two links
    assert {address.split(":")[0] for address in listening} == {"0100007F"}
    assert links[0][0] is None
    assert links[2][1] is None


@pytest.mark.parametrize("said", ["", "x", "example.invalid", "1" * 5000])
def test_an_address_that_a_neighbour_made_up_is_named_and_can_pass(said):
    store = open_store(replica="edge-0", rank=0, host=LOOPBACK, port=free_port())
    store.set("stage/1", said)
    with pytest.raises(RunError, match="replica edge-0: stage 1 gave the address") as error:
        connect(replica="edge-0", stage=0, num_stages=2, store=store, address=LOOPBACK, join_seconds=5)
    assert error.value.passes
    assert len(str(error.value)) < 400


def test_a_machine_knows_the_address_from_which_it_reaches_another():
    assert own_address(LOOPBACK, 29500) == LOOPBACK


def fd_is_socket(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:
        return False


def test_a_master_that_does_not_answer_is_one_line_within_the_time_stated():
    with pytest.raises(ConfigError) as error:
        open_store(replica="edge-0", rank=1, host=LOOPBACK, port=free_port(), join_seconds=1)
    assert "replica edge-0: no stage 0 at 127.0.0.1:" in str(error.value)
    assert "within 1 s" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_neighbour_that_never_comes_is_named():
    store = open_store(replica="edge-0", rank=0, host=LOOPBACK, port=free_port())
    with pytest.raises(RunError, match="replica edge-0: stage 1 did not join within 1 s"):
        connect(replica="edge-0", stage=0, num_stages=2, store=store, address=LOOPBACK, join_seconds=1)


def test_a_stage_of_another_run_is_turned_away():
    first, second = connected(sessions=["run-a", "run-b"], join_seconds=2)
    assert isinstance(second, ConfigError)
    assert "another run" in str(second)
    assert isinstance(first, RunError)


def test_a_port_that_is_taken_and_a_stage_that_is_not_there():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match="cannot listen on 127"),
    ):
        open_store(replica="edge-0", rank=0, host=LOOPBACK, port=taken.getsockname()[1])
    with pytest.raises(ConfigError, match="its stages are 0 to 1"):
        connect(replica="edge-0", stage=2, num_stages=2, store=None, address="127.0.0.1")
