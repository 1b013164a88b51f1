"""What tests wait for has a deadline: a browser, and a process that prints nothing."""

import json
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress

import browser
import pytest
from deadlines import ended, first_line, until


@pytest.fixture
def server():
    """Calls the given function with each connection, once the client has asked for the upgrade."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def start(serve):
            def run():
                with suppress(OSError):
                    link, _ = listening.accept()
                    with link:
                        link.recv(4096)
                        serve(link)

            threading.Thread(target=run, daemon=True).start()
            return f"ws://127.0.0.1:{listening.getsockname()[1]}/tab"

        yield start


def test_a_browser_that_hangs_up_in_the_handshake_is_an_error(server):
    url = server(lambda link: link.sendall(b"HTTP/1.1 101"))
    with pytest.raises(ConnectionError, match="the browser has gone"):
        browser.WebSocket(url)


def test_a_browser_that_sends_events_and_no_answer_is_given_up(server, monkeypatch):
    monkeypatch.setattr(browser, "ANSWER_SECONDS", 0.3)
    event = json.dumps(
        {"method": "Network.requestWillBeSent", "params": {"request": {"url": "/state"}}}
    ).encode()

    def chatter(link):
        link.sendall(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
        while True:
            link.sendall(struct.pack(">BB", 0x81, len(event)) + event)

    with pytest.raises(AssertionError, match=r"does not answer Page\.enable"):
        browser.Page(server(chatter))


def process(code):
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_the_first_line_is_read_alone_and_the_rest_stays_in_the_pipe():
    with process("print('one'); print('two')") as talking:
        assert first_line(talking) == "one"
        assert talking.communicate(timeout=60)[0] == "two\n"
    with process("pass") as silent:
        assert first_line(silent) == ""  # it has ended


def test_a_process_that_prints_no_line_and_does_not_end_is_killed():
    with process("import time; print('no line', end='', flush=True); time.sleep(600)") as stuck:
        with pytest.raises(AssertionError, match="printed no line within 3 s"):
            first_line(stuck, 3.0)
        with pytest.raises(subprocess.TimeoutExpired):
            ended(stuck, 0.1)
        assert stuck.returncode == -9


def test_an_event_that_does_not_come_is_named():
    with pytest.raises(AssertionError, match=r"no round 3 within 0\.05 s"):
        until(lambda: None, "round 3", 0.05)
    assert until(iter([0, "", 7]).__next__, "number") == 7
