"""What a long preparation says in a log."""

from types import SimpleNamespace

from isthmus.data.progress import Lines


def test_a_log_soon_says_how_much_time_is_left(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr("isthmus.data.progress.time", SimpleNamespace(monotonic=lambda: now))
    lines = Lines()
    lines.phase("encoding", 1000)
    for second in range(1, 21):
        now = float(second)
        lines.update(10 * second, f"{second} MB of text")
    assert capsys.readouterr().err.splitlines() == [
        "encoding",
        "encoding 2%, about 1 min 38 s left 2 MB of text",
        "encoding 12%, about 1 min 28 s left 12 MB of text",
    ]
