"""Links that somebody planted where a command writes: whatever it ends with, nothing outside is changed."""

import os
import re
import shutil
from pathlib import Path

import pytest
from small_recipes import recipe_text, replicas

from isthmus.cli.main import main
from isthmus.errors import ConfigError
from isthmus.files import open_own, overwrite_own, own_folder, replace_file
from isthmus.model import checkpoint
from isthmus.runtime.liveness import AliveFile
from isthmus.runtime.process import lock_file

RECIPE = recipe_text(
    replicas("rack") + replicas("desk"), name="tiny", outer={"inner_steps": 1, "rounds": 2, "keep": 8}
)


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder, with the bytes of files."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(stopped after one round, finished) of the same run."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "r.toml").write_text(RECIPE)
    half, whole = folder / "half", folder / "whole"
    simulate = ["simulate", str(folder / "r.toml"), "--quiet", "--run"]
    assert main([*simulate, str(whole)]) == 0
    assert main([*simulate, str(half), "--set", "outer.rounds=1"]) == 0
    (half / "recipe.toml").write_text((whole / "recipe.toml").read_text())
    return half, whole


def test_a_run_that_goes_on_changes_nothing_outside_its_folder(runs, tmp_path, capsys):
    half, whole = runs
    names = sorted({str(path.relative_to(run)) for run in runs for path in run.rglob("*")})
    assert {"metrics.jsonl", "about.json", "report.html", "model.safetensors", "state"} <= set(names)
    names += [f"state/{folder}-000002" for folder in ("part", "gone", "round")]
    for number, name in enumerate(names):
        run, outside = tmp_path / f"run-{number}", tmp_path / f"outside-{number}"
        shutil.copytree(half, run)
        outside.mkdir()
        if os.path.lexists(run / name):
            shutil.move(run / name, outside / "victim")
        elif (whole / name).is_dir() or "-000002" in name:
            (outside / "victim").mkdir()
            (outside / "victim" / "anchor.safetensors").write_bytes(b"mine")
        else:
            (outside / "victim").write_bytes(b"mine")
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).symlink_to(outside / "victim")
        before = tree(outside)
        capsys.readouterr()
        status = main(["simulate", "--resume", str(run), "--quiet"])
        said = capsys.readouterr().err
        assert tree(outside) == before, name
        assert status in (0, 1, 2), name
        assert "Traceback" not in said, name
        if status:
            assert said.count("\n") == 1, (name, said)


@pytest.mark.parametrize("name", ["report.html", "about.json"])
def test_report_replaces_a_link(runs, tmp_path, name):
    run = tmp_path / "run"
    shutil.copytree(runs[1], run)
    shutil.move(run / name, tmp_path / "victim")
    (run / name).symlink_to(tmp_path / "victim")
    before = (tmp_path / "victim").read_bytes()
    assert main(["report", str(run)]) == 0
    assert (tmp_path / "victim").read_bytes() == before
    assert not (run / "report.html").is_symlink()


@pytest.mark.parametrize("ending", [".png", ".svg"])
def test_compare_replaces_a_link(runs, tmp_path, ending):
    pytest.importorskip("matplotlib")
    plot = tmp_path / f"plot{ending}"
    (tmp_path / "victim").write_bytes(b"mine")
    plot.symlink_to(tmp_path / "victim")
    assert main(["compare", str(runs[0]), str(runs[1]), "--plot", str(plot)]) == 0
    assert (tmp_path / "victim").read_bytes() == b"mine"
    assert plot.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_what_must_be_new_is_refused_where_a_link_is(runs, tmp_path, capsys):
    (tmp_path / "r.toml").write_text(RECIPE)
    victim = tmp_path / "victim"
    victim.mkdir()
    link = tmp_path / "link"
    bucket, keys = tmp_path / "bucket", tmp_path / "keys"
    assert main(["init", str(tmp_path / "r.toml"), str(bucket), "--keys", str(keys)]) == 0
    commands = [
        ["export", str(runs[1]), "--to", "hf", str(link), "--force"],
        ["ledger", "rebuild", str(bucket), "--to", str(link)],
        ["init", str(tmp_path / "r.toml"), str(tmp_path / "other"), "--keys", str(link)],
    ]
    for target in (victim, tmp_path / "nowhere"):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        if target == victim:
            (victim / "rack.key").write_text("mine")
        for command in commands if target == victim else commands[:1]:
            capsys.readouterr()
            assert main(command) == 2, command
            assert capsys.readouterr().err.count("\n") == 1
        if target != victim:  # a link that leads nowhere is replaced
            assert main(commands[1]) == 0
        assert not (tmp_path / "nowhere").exists()
        assert tree(victim) == {"rack.key": b"mine"}


@pytest.fixture(params=["symbolic", "hard", "pipe"])
def planted(request, tmp_path):
    """A name that leads elsewhere, and the file that must stay as it is."""
    victim, path = tmp_path / "victim", tmp_path / "folder" / "name"
    victim.write_bytes(b"mine")
    path.parent.mkdir()
    if request.param == "symbolic":
        path.symlink_to(victim)
    elif request.param == "hard":
        path.hardlink_to(victim)
    else:
        os.mkfifo(path)
    return path, victim


def test_a_known_name_is_opened_only_if_it_is_our_own_file(planted):
    path, victim = planted
    for write in (open_own, overwrite_own, lock_file, lambda path: open_own(path, append=True)):
        with pytest.raises(ConfigError, match="Isthmus writes only files of its own"):
            write(path)
    assert victim.read_bytes() == b"mine"
    replace_file(path, "new")
    assert (victim.read_bytes(), path.read_bytes()) == (b"mine", b"new")


def test_our_own_file_is_opened_again_and_a_note_replaces_the_one_before(tmp_path):
    overwrite_own(tmp_path / "note", "a long note")
    overwrite_own(tmp_path / "note", "short")
    assert (tmp_path / "note").read_text() == "short"
    for line in (b"one\n", b"two\n"):
        with open_own(tmp_path / "log", append=True) as file:
            file.write(line)
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"
    with pytest.raises(FileNotFoundError):
        open_own(tmp_path / "none", create=False)


def test_an_alive_file_that_is_a_link_writes_nothing_and_ends_nobody(planted, monkeypatch):
    path, victim = planted

    class Slept(BaseException):
        pass

    def sleep(seconds):
        raise Slept

    monkeypatch.setattr("time.sleep", sleep)
    with pytest.raises(Slept):
        AliveFile(path).run()
    assert victim.read_bytes() == b"mine"


def test_state_is_not_saved_through_a_link(tmp_path):
    (tmp_path / "elsewhere" / "round-000001").mkdir(parents=True)
    (tmp_path / "state").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="state is a symbolic link"):
        checkpoint.save(tmp_path / "state", 2, {})
    assert os.listdir(tmp_path / "elsewhere") == ["round-000001"]
    own_folder(tmp_path / "fresh")
    assert (tmp_path / "fresh").is_dir()


def test_only_files_py_opens_files_to_write():
    """A new writer has to go through isthmus.files, where links are refused."""
    writes = re.compile(
        r"""write_text\(|write_bytes\(|\.touch\(|open\([^)]*["']([rwa]b?\+|[wa]b?\+?["']|[rwa]\+b)"""
    )
    # Into a folder that was just made under a name that nobody knew; and by O_EXCL.
    apart = {"export/hf.py", "store/folder.py", "store/url.py", "protocol/trust.py", "files.py"}
    source = Path(__file__).parents[2] / "src" / "isthmus"
    found = [
        f"{path.relative_to(source)}: {line.strip()}"
        for path in source.rglob("*.py")
        if str(path.relative_to(source)) not in apart
        for line in path.read_text().splitlines()
        if writes.search(line)
    ]
    assert found == []
