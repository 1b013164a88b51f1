"""Generate text from a run, a bucket or an exported folder, without transformers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isthmus.config import ModelConfig
from isthmus.data.tokenizer import Encoder, library_faults, tokenizer_bytes
from isthmus.errors import ConfigError, RunError
from isthmus.export.exported import ExportedFolder
from isthmus.export.source import Trained, is_run_or_bucket, open_trained, pipelined_member
from isthmus.layout.stages import EMBEDDING
from isthmus.model.decode import Decoder
from isthmus.model.hf import CONFIG, read_params
from isthmus.model.llama import BoundaryFunctions
from isthmus.subspace import OpenBoundary, SubspaceBoundary
from isthmus.subspace.boundaries import boundary_function, boundary_functions
from isthmus.subspace.boundary import OpeningBoundary
from isthmus.subspace.wire import LocalLink

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class TextGenerator:
    """Weights, boundary functions if any, and the tokenizer."""

    model: ModelConfig
    params: Mapping[str, Tensor]
    boundary_fns: BoundaryFunctions | None
    tokenizer: "Tokenizer"
    end_id: int
    about: str  # names the model, for the terminal

    def encode(self, text: str) -> list[int]:
        """Return token ids without a prefix, as in training. An empty text begins after the end token."""
        with library_faults():
            return self.tokenizer.encode(text, add_special_tokens=False).ids or [self.end_id]

    def tokens(
        self, prompt: list[int], max_tokens: int, *, temperature: float, top_p: float, seed: int
    ) -> Iterator[int]:
        """Continue the prompt up to the end of the text, `max_tokens` or a full context."""
        generator = torch.Generator().manual_seed(seed)
        decoder = Decoder(self.params, self.model, self.boundary_fns)
        fed = prompt
        for _ in range(min(self.model.context - len(prompt), max_tokens)):
            token = pick(decoder.feed(fed), temperature, top_p, generator)
            if token == self.end_id:
                return
            yield token
            fed = [token]


def pick(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Pick the likeliest token at temperature 0, else draw from the likeliest with `top_p` of the mass."""
    logits = logits.double().cpu()
    if not bool(logits.isfinite().all()):
        raise RunError("the model's logits are not finite; it has diverged and generates no text")
    if temperature == 0:
        return int(logits.argmax())
    # Subtract the largest first, so that a temperature near 0 does not overflow.
    shares, order = ((logits - logits.max()) / temperature).softmax(-1).sort(descending=True)
    before = shares.cumsum(-1) - shares
    kept = shares * (before < top_p)  # always keeps the first
    return int(order[torch.multinomial(kept, 1, generator=generator)])


class Text:
    """Turn tokens into text: it emits whole characters only, which join to the text of all tokens."""

    def __init__(self, tokenizer: "Tokenizer", prompt: list[int]) -> None:
        self.tokenizer, self.ids = tokenizer, list(prompt)
        self.num_emitted = len(self._all())  # characters

    def _all(self) -> str:
        with library_faults():
            return self.tokenizer.decode(self.ids, skip_special_tokens=False)

    def add(self, token: int) -> str:
        self.ids.append(token)
        # An incomplete character decodes to U+FFFD until its last bytes arrive.
        return self._from(self._all().rstrip("\ufffd"))

    def rest(self) -> str:
        return self._from(self._all())

    def _from(self, text: str) -> str:
        new, self.num_emitted = text[self.num_emitted :], max(self.num_emitted, len(text))
        return new


def open_generator(
    spec: str, as_: str = "auto", corpus: str | None = None, device: str = "cpu"
) -> TextGenerator:
    """Open a model. `spec`: a run directory, a bucket, or an exported folder. `as_`: "plain", "pipelined", or
    "auto": plain if any replica of the run trained so, else through the boundaries."""
    if not is_run_or_bucket(spec) and (Path(spec) / CONFIG).is_file():
        return from_folder(Path(spec), as_, torch.device(device))
    return from_trained(open_trained(spec, corpus).on(torch.device(device)), as_)


def from_trained(trained: Trained, as_: str) -> TextGenerator:
    recipe, corpus = trained.recipe, trained.corpus
    opened = trained.bases.opening and float(trained.bases.share) == 1.0
    dense = opened or any(not m.config.compressed for m in recipe.fleet())
    member = None
    if as_ == "pipelined" or (as_ == "auto" and not dense):
        member = pipelined_member(recipe)
        if member is None:
            raise ConfigError(f"{trained.where} has no pipelined replica, so no boundaries; drop --as")
    params = {name: t.to(torch.float32) for name, t in trained.params.items()}
    boundary_fns = None
    if member:
        boundary_fns = boundary_functions(recipe, [member], trained.bases, trained.table, params=params)
    path = corpus.tokenizer_path
    encoder = Encoder(tokenizer_bytes(path), corpus.manifest.end_token, str(path))
    how = f"through the boundaries of {member.name}" if member else "as a plain model"
    about = f"{recipe.name}, round {trained.round}, {how}"
    return TextGenerator(recipe.model, params, boundary_fns, encoder.tokenizer, encoder.end_id, about)


def from_folder(folder: Path, as_: str, device: torch.device) -> TextGenerator:
    found = ExportedFolder.open(folder)
    if as_ == "pipelined" and not found.pipelined:
        raise ConfigError(f"{folder} is a plain model, without boundaries; drop --as")
    encoder = found.encoder()
    params = {name: t.to(device) for name, t in read_params(folder, found.model).items()}
    boundary_fns = None
    if found.pipelined and as_ != "plain":
        boundary_fns = folder_boundaries(found, params[EMBEDDING])
    how = "through its boundaries" if boundary_fns else "a plain model"
    about = f"{folder}, {how}"
    return TextGenerator(found.model, params, boundary_fns, encoder.tokenizer, encoder.end_id, about)


def folder_boundaries(found: ExportedFolder, embedding: Tensor, rows: int = 1) -> BoundaryFunctions:
    """Return an exported folder's boundaries, for batches of `rows` sequences: the same functions as in
    modeling_isthmus.py."""
    kept = found.boundaries()
    table = embedding if kept.table is None else kept.table.to(embedding.device)
    bases = [basis.to(embedding.device) for basis in kept.bases]
    tables = {layer: learned.to(embedding.device) for layer, learned in kept.learned.items()}
    functions = {}
    for layer, number in kept.layers.items():
        if number is None:
            boundary = OpenBoundary()
        elif kept.open_share is None:
            boundary = SubspaceBoundary(bases[number], table)
        else:
            share = torch.tensor(kept.open_share, device=embedding.device)
            boundary = OpeningBoundary(bases[number], table, share)
        learned = tables.get(layer)
        functions[layer] = [(slice(0, rows), boundary_function(boundary, LocalLink(kept.wire), learned))]
    return functions
