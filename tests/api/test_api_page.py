"""docs/api.md and the notebook: every example runs as it stands, and every name and argument is told."""

import inspect
import json
import re
from pathlib import Path

import pytest

import isthmus

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "api.md"
NOTEBOOK = ROOT / "examples" / "compression.ipynb"
SETTINGS = 'settings = {"outer.rounds": 6, "outer.inner_steps": 8, "inner.batch": 4, '


def test_the_examples_of_the_page_run_one_after_another(tmp_path, monkeypatch, capsys):
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 5
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    shown = capsys.readouterr().out
    assert 'inner.precision is "fp16"; it is one of' in shown
    assert "\n2 3\n" in shown  # stopped after round 2, resumed to round 3
    assert "finished 3 demo" in shown


def test_the_notebook_runs_and_has_the_outputs_of_a_run_in_it(tmp_path, monkeypatch, capsys):
    """With fewer steps and layers than it was run with."""
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell["outputs"] for cell in cells)
    assert not [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]
    assert NOTEBOOK.stat().st_size < 60_000
    assert "/tmp" not in NOTEBOOK.read_text()
    sources = ["".join(cell["source"]) for cell in cells]
    assert SETTINGS in sources[0]
    small = 'settings = {"outer.rounds": 1, "outer.inner_steps": 1, "inner.batch": 4, "model.layers": 2, '
    sources[0] = sources[0].replace(SETTINGS, small)
    names: dict[str, object] = {}
    for source in sources:
        exec(compile(source, str(NOTEBOOK), "exec"), names)
    assert "round 1: held-out" in capsys.readouterr().out


def test_the_page_tells_every_name_and_every_argument():
    told = set(re.findall(r"[A-Za-z_]+", " ".join(re.findall(r"`([^`\n]+)`", PAGE.read_text()))))
    assert {name for name in isthmus.__all__ if not name.startswith("_")} - told <= {"Results", "Run"}
    for function in (isthmus.simulate, isthmus.train, isthmus.resume, isthmus.plan, isthmus.open_run):
        arguments = set(inspect.signature(function).parameters) - {"options", "where"}
        assert arguments <= told, function
    public = {name for name in dir(isthmus.Run) if not name.startswith("_")}
    assert public <= told


def test_names_that_stay_can_be_imported():
    """What ../docs/api.md promises beside `isthmus.__all__`."""
    from isthmus.config import load_recipe
    from isthmus.model import Llama, presets
    from isthmus.outer import aggregate
    from isthmus.sparse import TopK, pack, unpack
    from isthmus.subspace import SubspaceBoundary, random_basis, reproject, split

    assert {"178m", "512m", "1b", "20m", "10m", "nano"} <= set(presets)
    kept = (
        load_recipe,
        Llama,
        aggregate,
        TopK,
        pack,
        unpack,
        SubspaceBoundary,
        random_basis,
        reproject,
        split,
    )
    assert all(callable(name) for name in kept)
