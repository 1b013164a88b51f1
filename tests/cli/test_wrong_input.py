"""A hundred wrong inputs of all commands: one line that starts with the command, exit status 2, no traceback,
nothing written. All in this process: none of them may get as far as to need another."""

import shutil
from pathlib import Path

import pytest
from fabricate import FULL, make_run, recipe
from small_recipes import RACK, recipe_text

from isthmus.cli.main import main

FOLDERS = ("run", "bucket", "text")
CASES = """
nonsense
simulat demo
demo
slurm bucket
logs run
reproduce 1
rotate bucket rack
new
new r.toml
new mine.toml --like nobody
new none/mine.toml
new mine.txt
plan
plan none.toml
plan dmo
plan broken.toml
plan text
plan r.toml --set outer.kep=3
plan r.toml --set outer.keep
plan r.toml --set outer.keep=lots
plan r.toml --tflops -1
plan r.toml --tflops lots
plan r.toml --scale
plan r.toml --device abacus
plan r.toml --price-per-hour lots
plan r.toml --price-per-hour rack=lots
plan r.toml --preset nano
plan --suggest none.toml
plan r.toml r.toml
doctor --seconds 0
doctor --preset enormous
doctor s4://x/y
doctor none.isthmus.toml
doctor --listen run --seconds 1
doctor a:b:c
simulate
simulate none.toml
simulate r.toml --mode both
simulate r.toml --device abacus
simulate r.toml --run text
simulate r.toml --run r.toml
simulate r.toml --log mlflow
simulate r.toml --set data.corpus=none
simulate --resume none
simulate --resume run --set seed=3
train
train broken.toml
train r.toml --run text
train r.toml --devise cpu
train --resume none
train --resume run
init r.toml
init none.toml new
init r.toml s4://x/y
init r.toml new --closers nobody
init r.toml new --room many
join
join none
join none.isthmus.toml
join text
join s4://x/y --replica rack
leave none
leave s4://x/y --replica rack
invite none d
invite none
revoke none d
members none
members run
extend none --rounds 3
extend run --rounds 0
extend run
relay --port many
relay --port 99999
status
status none
status text
status run
status s4://x/y
status r.toml
ledger
ledger show none
ledger verify text
ledger rebuild none --to x.safetensors
ledger sweep none
ledger repair none
compare
compare none
compare run text
compare run --metric loss_mixd
compare run --plot plot.docx
report none
report text
report run --to new
report s4://x/y --to new
watch none
watch text
watch run --port 99999
watch run --port many
watch run --open
doctor run/ --replica rack
watch run --log mlflow
export none --to hf new
export run --to hf new
export run --to onnx new
generate none hello
generate run hello --temperature -1
eval none
eval run --batches -1
eval run --harness ,
eval run --include text
data
data prepare none --to new
data prepare text --to new --vocab 3
data prepare text
data show none
data push none new
completion tcsh
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, one that cannot be read, a simulated run without weights, and a folder of text."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "r.toml").write_text(recipe_text(RACK))
    (folder / "broken.toml").write_text("[model\n")
    make_run(folder / "run", recipe(FULL), 3)
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("some words\n")
    return folder


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("words", [line for line in CASES.splitlines() if line])
def test_wrong_input_is_one_line_with_status_2_and_writes_nothing(words, made, tmp_path, monkeypatch, capsys):
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    before = contents(tmp_path)
    try:
        status = main(words.split())
    except SystemExit as ended:  # argparse
        status = ended.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, ""), err
    assert err.startswith("isthmus")
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    assert contents(tmp_path) == before
