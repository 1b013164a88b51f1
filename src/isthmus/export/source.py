"""The newest model of a run: from its run directory, or from its bucket while the run continues."""

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from isthmus.config import Member, Recipe
from isthmus.data.corpus import Corpus, open_corpus, open_here
from isthmus.errors import ConfigError
from isthmus.layout.stages import EMBEDDING
from isthmus.model import checkpoint
from isthmus.model.checkpoint import load_tensors
from isthmus.model.initial import first_params
from isthmus.model.llama import init_tensor
from isthmus.printing import visible
from isthmus.protocol.access import bucket_to_read, open_ledger
from isthmus.protocol.ledger import Ledger, Manifest
from isthmus.protocol.replay import Replay
from isthmus.runlog import REAL, RunDir
from isthmus.subspace.boundaries import BasisSet


@dataclass(frozen=True)
class Trained:
    """theta^(round) of a run, with its boundaries, its corpus and its tokenizer."""

    where: str
    recipe: Recipe
    params: dict[str, Tensor]
    bases: BasisSet
    table: Tensor  # what compressed boundaries subtract: the embedding, unless it was frozen
    round: int
    tokens: int  # trained on so far, over all replicas
    corpus: Corpus

    def on(self, device: torch.device) -> "Trained":
        """The same on another device."""
        bases = BasisSet(self.recipe, device, self.bases.dtype)
        bases.bases = {key: basis.to(device) for key, basis in self.bases.bases.items()}
        bases.begin_round(self.round)
        params = {name: tensor.to(device) for name, tensor in self.params.items()}
        own = self.table is self.params[EMBEDDING]
        table = params[EMBEDDING] if own else self.table.to(device)
        return replace(self, params=params, bases=bases, table=table)


def pipelined_member(recipe: Recipe, name: str | None = None) -> Member | None:
    """The replica whose boundaries a pipelined forward uses: by name, or the first that is compressed, or the
    first that has stages. None if the run has no pipelined replica."""
    fleet = [member for member in recipe.fleet() if member.config.stages > 1]
    if name is not None:
        for member in fleet:
            if name in (member.name, member.config.name):
                return member
        names = ", ".join(member.name for member in fleet)
        raise ConfigError(f'there is no pipelined replica "{name}" in this run; it has {names or "none"}')
    return next((m for m in fleet if m.config.compressed), fleet[0] if fleet else None)


def is_run_or_bucket(spec: str) -> bool:
    path = Path(spec)
    return "://" in spec or (path / "recipe.toml").is_file() or (path / "run.json").is_file()


def open_trained(spec: str, corpus: str | None = None) -> Trained:
    """`spec`: a run directory, or the URL or folder of a bucket. `corpus`: its text on this machine, if not
    where the recipe says."""
    if "://" in spec or ((Path(spec) / "run.json").is_file() and not (Path(spec) / "recipe.toml").is_file()):
        return _from_bucket(spec, spec, corpus)
    run = RunDir.open(spec)
    rows, found = run.rows(), newest_params(run)
    if found is None and has_bucket(run):
        return _from_bucket(bucket_to_read(run, spec), spec, corpus)
    if found is None:
        raise ConfigError(f"{run.path} has no finished round yet; there is no model to take from it")
    round_number, params, bases = found
    if run.recipe.subspace.grassmann_every and not bases:
        raise ConfigError(f"{run.path} has turned its U and lost its state/; its boundaries cannot be made")
    text = open_corpus(corpus) if corpus else open_here(run.recipe.data.corpus)
    wanted = run.about.get("tokenizer_sha256")
    if wanted and text.tokenizer_sha256 != wanted:
        raise ConfigError(
            f"the corpus {corpus or run.recipe.data.corpus} has another tokenizer than the run; give --corpus"
        )
    tokens = next((row["tokens"] for row in reversed(rows) if row["round"] <= round_number), 0)
    first = None
    if not run.recipe.subspace.adaptation:
        first = first_params(run.recipe, run.about.get("start_sha256"))[EMBEDDING]
    return _trained(spec, run.recipe, params, bases, first, round_number, tokens, text)


def newest_params(run: RunDir) -> tuple[int, dict[str, Tensor], dict[str, Tensor]] | None:
    """(round, weights, every U that was turned) of the newest round that the folder itself holds."""
    for _ in range(5):  # a simulation under way may remove the state that we are reading
        try:
            found = _from_state(run)
            break
        except FileNotFoundError:
            time.sleep(0.2)
    else:
        raise ConfigError(f"{run.state_path} changes while it is read; try again")
    rows = run.rows()
    if found is None and run.model_path.is_file() and rows:
        found = rows[-1].round, load_tensors(run.model_path), {}
    return found if found and found[0] else None


def has_bucket(run: RunDir) -> bool:
    """Does its bucket hold its weights? A simulation does not use the one that its recipe names."""
    bucket = run.recipe.bucket.url or str(run.path / "bucket")
    real = run.about.get("mode") == REAL
    return real and ("://" in bucket or (Path(bucket) / "run.json").is_file())


def _from_state(run: RunDir) -> tuple[int, dict[str, Tensor], dict[str, Tensor]] | None:
    """(round, anchor, every U) of a simulation's newest saved state, without its optimisers."""
    rounds = checkpoint.saved_rounds(run.state_path)
    if not rounds:
        return None
    folder = run.state_path / f"round-{rounds[-1]:06d}"
    extra = load_tensors(folder / "outer.safetensors") if (folder / "outer.safetensors").exists() else {}
    bases = {n.removeprefix("basis/"): t for n, t in extra.items() if n.startswith("basis/")}
    return rounds[-1], load_tensors(folder / "anchor.safetensors"), bases


def _from_bucket(url: str, where: str, corpus: str | None) -> Trained:
    """The newest anchor and the manifests after it, as every replica applies them."""
    ledger = open_ledger(url)
    recipe, last = ledger.run.recipe, ledger.last_round()
    if not last:
        raise ConfigError(f"{where} has no finished round yet; there is no model to take from it")
    text = open_corpus(corpus or recipe.data.corpus)
    if ledger.run.corpus and text.sha256 != ledger.run.corpus:
        if corpus is None:
            raise ConfigError(
                f"the corpus {recipe.data.corpus} here is not the one of this run; give --corpus its folder"
            )
        print("isthmus: --corpus is not the text of this run; its tokenizer must be", file=sys.stderr)
    replay = Replay(ledger, last, log=lambda text: print(f"isthmus: {text}", file=sys.stderr))
    if replay.round < last:
        print(f"isthmus: replaying rounds {replay.round + 1} to {last}", file=sys.stderr)
    while replay.step() is not None:
        pass
    tokens = sum(_tokens(ledger, manifest) for manifest in ledger.between(1, replay.round))
    first = (
        None
        if recipe.subspace.adaptation
        else init_tensor(EMBEDDING, recipe.model.shapes()[EMBEDDING], recipe.model, recipe.seed)
    )
    return _trained(where, recipe, replay.anchor, {}, first, replay.round, tokens, text)


def _trained(
    where: str,
    recipe: Recipe,
    params: dict[str, Tensor],
    saved: dict[str, Tensor],  # every U by its key, where the run has turned them
    first: Tensor | None,  # the frozen embedding, where the run does not adapt it
    round_number: int,
    tokens: int,
    corpus: Corpus,
) -> Trained:
    shapes = recipe.model.shapes()
    for name, shape in shapes.items():
        if name not in params or tuple(params[name].shape) != shape:
            raise ConfigError(f"{where} does not hold {name} as its recipe's model has it")
    width = recipe.model.width
    for key, basis in saved.items():
        if basis.ndim != 2 or f"{basis.shape[1]}" != key.partition("/")[0] or basis.shape[0] != width:
            raise ConfigError(
                f"{where} does not hold the U of its recipe's boundaries in basis/{visible(key)}"
            )
    if corpus.vocab_size > recipe.model.vocab:
        raise ConfigError(
            f"the corpus has a tokenizer of {corpus.vocab_size} tokens, the model only {recipe.model.vocab}; "
            "give the run's own by --corpus"
        )
    dtype = params[EMBEDDING].dtype
    bases = BasisSet(recipe, torch.device("cpu"), dtype)
    bases.bases = {key: basis.to(dtype) for key, basis in saved.items()}
    bases.begin_round(round_number)  # its boundaries are as far open as they were in this round
    params = {name: params[name] for name in shapes}
    table = params[EMBEDDING] if first is None else first.to(dtype)
    return Trained(where, recipe, params, bases, table, round_number, tokens, corpus)


def _tokens(ledger: Ledger, manifest: Manifest) -> int:
    """That the updates of a round were trained on."""
    recipe = ledger.at(manifest.round).recipe
    counted = {entry.replica for entry in manifest.entries}
    return recipe.tokens_of(member for member in recipe.fleet() if member.name in counted)
