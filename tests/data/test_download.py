"""`data prepare https://...`: the same corpus as from the file, whole or not at all."""

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from corpus_texts import contents, make_texts, write_format

OPTIONS = ("--vocab", 300, "--validation", 0.2)


class Handler(SimpleHTTPRequestHandler):
    asked: list[str]  # set on each server's own subclass
    cut = 0

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.asked.append(self.path)
        super().do_GET()

    def copyfile(self, source, outputfile):
        data = source.read()
        outputfile.write(data[: len(data) - self.cut])


@pytest.fixture
def site(tmp_path, monkeypatch):
    """(its folder, its address, the class that answers)"""
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "site"
    folder.mkdir()
    handler = type("Own", (Handler,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()


def test_a_file_at_an_address_gives_the_corpus_of_the_file_and_is_downloaded_once(tmp_path, isthmus, site):
    folder, address, handler = site
    path = write_format(folder, ".jsonl.gz", make_texts(60))
    prepare = ("data", "prepare", *OPTIONS, "--to")
    assert isthmus(*prepare, tmp_path / "a", path)[0] == 0
    status, _, err = isthmus(*prepare, tmp_path / "b", f"{address}/part.jsonl.gz?download=true")
    assert status == 0
    assert f"downloading {address}/part.jsonl.gz" in err
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert isthmus(*prepare, tmp_path / "c", f"{address}/part.jsonl.gz?download=true")[0] == 0
    assert handler.asked == ["/part.jsonl.gz?download=true"]


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("none.jsonl", 2, "/none.jsonl: the server answers 404 File not found"),
        ("part.pdf", 2, "/part.pdf does not end in the name of a text file; expected .txt"),
        ("", 2, "does not end in the name of a text file"),
    ],
)
def test_what_is_not_there_is_one_line(name, status, says, tmp_path, isthmus, site):
    _, address, _ = site
    found, out, err = isthmus("data", "prepare", f"{address}/{name}", "--to", tmp_path / "corpus")
    assert (found, out, err.splitlines()[-1].startswith("isthmus: http://")) == (status, "", True)
    assert says in err
    assert not (tmp_path / "corpus").exists()


def test_a_download_that_breaks_off_leaves_nothing_and_the_same_command_tries_again(tmp_path, isthmus, site):
    folder, address, handler = site
    write_format(folder, ".jsonl", make_texts(60))
    command = ("data", "prepare", f"{address}/part.jsonl", "--to", tmp_path / "corpus", *OPTIONS)
    handler.cut = 100
    status, _, err = isthmus(*command)
    assert status == 1
    assert "the same command tries again" in err
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    handler.cut = 0
    assert isthmus(*command)[0] == 0
