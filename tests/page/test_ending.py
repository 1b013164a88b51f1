"""However a run ends, its folder says how, and the user is told how to go on."""

import errno

import pytest
from fabricate import make_run, recipe

from isthmus.errors import RunError
from isthmus.page.ending import ending
from isthmus.runlog import RunDir

GO_ON = "go on with: isthmus train --resume runs/one"


@pytest.fixture
def run(tmp_path) -> RunDir:
    made = make_run(tmp_path / "run", recipe(), 2)
    (made.path / "report.html").unlink(missing_ok=True)
    return made


def how_it_ended(run):
    return run.about["status"], run.about["error"], (run.path / "report.html").is_file()


def stopped_before_it_began(run):
    with ending(run, GO_ON) as end:
        end.resumable = False
        raise KeyboardInterrupt


@pytest.mark.parametrize("status", ["finished", "interrupted"])
def test_a_run_says_its_status_and_what_it_measured(run, status):
    with ending(run, GO_ON) as end:
        end.status = status
        end.facts["peak_bytes"] = 17
    assert how_it_ended(run) == (status, None, True)
    assert run.about["peak_bytes"] == 17


def test_a_stop_says_how_to_go_on_once_there_is_something_to_go_on_with(run):
    with pytest.raises(KeyboardInterrupt, match=f"^interrupted; {GO_ON}$"), ending(run, GO_ON):
        raise KeyboardInterrupt
    assert how_it_ended(run) == ("interrupted", None, True)
    with pytest.raises(KeyboardInterrupt) as raised:
        stopped_before_it_began(run)
    assert str(raised.value) == "interrupted"


def test_a_fault_is_kept_by_its_first_line_and_goes_on_as_it_is(run):
    fault = RunError("replica edge-0: no answer\nand more")
    with pytest.raises(RunError) as raised, ending(run, GO_ON):
        raise fault
    assert raised.value is fault
    assert how_it_ended(run) == ("failed", "replica edge-0: no answer", True)


@pytest.mark.parametrize("named", [True, False])
def test_a_full_disk_is_one_line_that_says_where_and_how_to_go_on(run, named):
    line = f"the disk of {run.path} is full .*; make room there, then {GO_ON}$"
    file = str(run.path / "metrics.jsonl") if named else None  # a write to an open file names none
    with pytest.raises(RunError, match=line), ending(run, GO_ON):
        raise OSError(errno.ENOSPC, "No space left on device", file)
    assert how_it_ended(run)[0] == "failed"
    with pytest.raises(PermissionError), ending(run, GO_ON):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_a_report_that_cannot_be_written_does_not_hide_why_a_run_ended(run):
    (run.path / "report.html").mkdir()
    with pytest.raises(RunError, match="the reason"), ending(run, GO_ON):
        raise RunError("the reason")
    assert run.about["status"] == "failed"
