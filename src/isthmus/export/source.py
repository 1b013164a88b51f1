"""A run's newest model: from its run directory, or from its bucket while the run continues."""

import sys
import time
from dataclasses import dataclass, replace
from functools import cached_property
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
from isthmus.protocol.access import open_ledger
from isthmus.protocol.ledger import Ledger, Manifest
from isthmus.protocol.place import find_place
from isthmus.protocol.replay import Replay
from isthmus.runlog import Row, RunDir
from isthmus.subspace.boundaries import BasisSet


@dataclass(frozen=True)
class Trained:
    """theta^(round) of a run, with boundaries, corpus and tokenizer."""

    where: str
    recipe: Recipe
    params: dict[str, Tensor]
    bases: BasisSet
    table: Tensor  # compressed boundaries subtract it: the embedding, unless it was frozen
    round: int
    corpus: Corpus
    history: Ledger | list[Row]  # the bucket's manifests, or the rows of the run directory

    @cached_property
    def tokens(self) -> int:
        """Tokens trained on so far, over all replicas. In a bucket this reads every manifest."""
        if isinstance(self.history, list):
            rows = reversed(self.history)
            return next((row.tokens for row in rows if row.round <= self.round), 0)
        return sum(_tokens(self.history, manifest) for manifest in self.history.between(1, self.round))

    def on(self, device: torch.device) -> "Trained":
        """Return a copy on another device."""
        bases = BasisSet(self.recipe, device, self.bases.dtype)
        bases.bases = {key: basis.to(device) for key, basis in self.bases.bases.items()}
        bases.begin_round(self.round)
        params = {name: tensor.to(device) for name, tensor in self.params.items()}
        own = self.table is self.params[EMBEDDING]
        table = params[EMBEDDING] if own else self.table.to(device)
        return replace(self, params=params, bases=bases, table=table)


def pipelined_member(recipe: Recipe, name: str | None = None) -> Member | None:
    """Return the replica whose boundaries a pipelined forward uses: by name, or the first compressed one, or
    the first with stages. None if the run has no pipelined replica."""
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
    """Open a model. `spec`: a run directory, or the URL or folder of a bucket. `corpus`: its text on this
    machine, if not where the recipe says."""
    place = find_place(spec)
    if place.run is None:
        return _from_bucket(place.bucket, spec, corpus)
    run = place.run
    found = newest_params(run)
    if found is None and place.bucket:
        return _from_bucket(place.bucket, spec, corpus)
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
    _check_shapes(spec, run.recipe, params)
    first = None
    if not run.recipe.subspace.adaptation:
        first = first_params(run.recipe, run.about.get("start_sha256"))[EMBEDDING]
    return _trained(spec, run.recipe, params, bases, first, round_number, text, run.rows())


def newest_params(run: RunDir) -> tuple[int, dict[str, Tensor], dict[str, Tensor]] | None:
    """Return (round, weights, every changed U) of the newest round in the folder itself."""
    for _ in range(5):  # a running simulation may remove the state while we read it
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


def _from_state(run: RunDir) -> tuple[int, dict[str, Tensor], dict[str, Tensor]] | None:
    """Return (round, anchor, every U) of a simulation's newest saved state, without its optimisers."""
    rounds = checkpoint.saved_rounds(run.state_path)
    if not rounds:
        return None
    folder = run.state_path / f"round-{rounds[-1]:06d}"
    extra = load_tensors(folder / "outer.safetensors") if (folder / "outer.safetensors").exists() else {}
    bases = {n.removeprefix("basis/"): t for n, t in extra.items() if n.startswith("basis/")}
    return rounds[-1], load_tensors(folder / "anchor.safetensors"), bases


def _from_bucket(url: str, where: str, corpus: str | None) -> Trained:
    """Apply the manifests after the newest anchor, as every replica does."""
    ledger = open_ledger(url)
    recipe, last = ledger.run.recipe, ledger.last_round()
    if ledger.run.tensors:
        raise ConfigError(
            f"the model of this run is a class in its users' own programs; its weights come with "
            f"`isthmus ledger rebuild {where} --to weights.safetensors`"
        )
    if not last:
        raise ConfigError(f"{where} has no finished round yet; there is no model to take from it")
    text = run_text(ledger, corpus)
    replay = replayed(ledger, last)
    first = (
        None
        if recipe.subspace.adaptation
        else init_tensor(EMBEDDING, recipe.model.shapes()[EMBEDDING], recipe.model, recipe.seed)
    )
    return _trained(where, recipe, replay.anchor, {}, first, replay.round, text, ledger)


def replayed(ledger: Ledger, round_number: int) -> Replay:
    """Return the newest anchor up to this round with the later rounds applied, as every replica does."""
    replay = Replay(ledger, round_number, log=lambda text: print(f"isthmus: {text}", file=sys.stderr))
    if replay.round < round_number:
        print(f"isthmus: replaying rounds {replay.round + 1} to {round_number}", file=sys.stderr)
    while replay.round < round_number and replay.step() is not None:
        pass
    return replay


def run_text(ledger: Ledger, corpus: str | None) -> Corpus:
    """Return the run's text on this machine: `corpus`, or where its recipe says."""
    named = ledger.run.recipe.data.corpus
    text = open_corpus(corpus or named)
    if ledger.run.corpus and text.sha256 != ledger.run.corpus:
        if corpus is None:
            raise ConfigError(f"the corpus {named} here is not the one of this run; give --corpus its folder")
        print("isthmus: --corpus is not the text of this run; its tokenizer must be", file=sys.stderr)
    return text


def _trained(
    where: str,
    recipe: Recipe,
    params: dict[str, Tensor],
    saved: dict[str, Tensor],  # every U by its key, if the run changes them
    first: Tensor | None,  # the frozen embedding, if the run does not adapt it
    round_number: int,
    corpus: Corpus,
    history: Ledger | list[Row],
) -> Trained:
    if corpus.vocab_size > recipe.model.vocab:
        raise ConfigError(
            f"the corpus has a tokenizer of {corpus.vocab_size} tokens, the model only {recipe.model.vocab}; "
            "give the run's own by --corpus"
        )
    dtype = params[EMBEDDING].dtype
    bases = BasisSet(recipe, torch.device("cpu"), dtype)
    bases.bases = {key: basis.to(dtype) for key, basis in saved.items()}
    bases.begin_round(round_number)  # open the boundaries as far as in this round
    params = {name: params[name] for name in recipe.model.shapes()}
    table = params[EMBEDDING] if first is None else first.to(dtype)
    return Trained(where, recipe, params, bases, table, round_number, corpus, history)


def _check_shapes(where: str, recipe: Recipe, params: dict[str, Tensor]) -> None:
    """Check shapes before theta^(0) is drawn: a recipe may state any size, unlike the file."""
    for name, shape in recipe.model.shapes().items():
        if name not in params or tuple(params[name].shape) != shape:
            raise ConfigError(f"{where} does not hold {name} as its recipe's model has it")


def _tokens(ledger: Ledger, manifest: Manifest) -> int:
    """Count the tokens that the round's updates were trained on."""
    recipe = ledger.at(manifest.round).recipe
    counted = {entry.replica for entry in manifest.entries}
    return recipe.tokens_of(member for member in recipe.fleet() if member.name in counted)
