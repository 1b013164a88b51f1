"""Text in, token shards out: all of `isthmus data prepare`, in one streaming pass.

sources -> documents -> train or validation -> batches -> token ids -> shards -> manifest

The order of documents, the split and the tokens depend only on inputs and options. So a run that was killed
and continued writes the same bytes as an uninterrupted one.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from isthmus.data.corpus_folder import Journal, clear, fingerprint_in, finished, locked
from isthmus.data.documents import START, DocumentOrder, Position, batches, read_ahead
from isthmus.data.held_out import SHARE, enough_share, is_surely_enough, wanted_tokens
from isthmus.data.manifest import JOURNAL, MANIFEST, TOKENIZER, VERSION, Manifest, file_sha256
from isthmus.data.progress import Progress
from isthmus.data.readers import Source
from isthmus.data.shards import ShardWriter
from isthmus.data.survey import survey
from isthmus.data.tokenizer import (
    MIN_VOCAB,
    Encoder,
    read_tokenizer,
    sample,
    token_dtype,
    tokenizer_bytes,
    train_tokenizer,
)
from isthmus.disk import DiskFull, check_room, free_bytes, in_words, is_full
from isthmus.errors import ConfigError
from isthmus.files import own_size, replace_file

# Common vocabularies have 3 to 5 bytes of text per token, and JSON is larger than its text. This is a lower
# bound of what a file becomes, so nobody with enough space is refused.
MOST_BYTES_PER_TOKEN = 16
# A checkpoint follows this much text, or a full shard if that comes earlier.
CHECKPOINT_TEXT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """The options that decide a corpus's bytes."""

    vocab: int = 8192
    tokenizer: Path | None = None  # use this tokenizer.json instead of training one
    end_token: str | None = None
    # Share of documents to hold out, unless validation files are given. None: 1 %, or more if that is less
    # than a recipe scores.
    validation: float | None = None
    text_field: str = "text"
    limit_bytes: int | None = None
    seed: int = 0
    shard_tokens: int = 1 << 24

    def __post_init__(self) -> None:
        if self.tokenizer is None and not MIN_VOCAB <= self.vocab <= 1 << 20:
            raise ConfigError(
                f"--vocab is {self.vocab}; it must be {MIN_VOCAB} (256 bytes and <|endoftext|>) to {1 << 20}"
            )
        if self.validation is not None and not 0 < self.validation <= 0.5:
            raise ConfigError(f"--validation is {self.validation:g}; hold out a share above 0, up to 0.5")
        if self.limit_bytes is not None and self.limit_bytes < 1:
            raise ConfigError(f"--limit-bytes is {self.limit_bytes}; it must be at least 1")
        if self.shard_tokens < 1:
            raise ConfigError(f"--shard-tokens is {self.shard_tokens}; it must be at least 1")


def prepare(
    inputs: Sequence[Source],
    validation: Sequence[Source],
    folder: Path,
    config: PrepareConfig,
    overwrite: bool = False,
    progress: Progress | None = None,
    skip_bad: bool = False,
) -> tuple[Manifest, bool]:
    """Make the corpus in `folder`, or continue it. Return (manifest, False) if it was already there.

    Bad input deletes the shards made from it. After a kill or a full disk, the same call continues. With
    `skip_bad` the corpus consists of the readable files.
    """
    progress = progress or Progress()
    given = read_tokenizer(config.tokenizer) if config.tokenizer else None
    found = survey(inputs, validation, config.text_field, skip_bad)
    inputs, validation = found.inputs, found.validation
    order = DocumentOrder(
        inputs, validation, config.validation or SHARE, config.seed, config.text_field, config.limit_bytes
    )
    vocab = Encoder(given, config.end_token).vocab_size if given else config.vocab
    wanted = wanted_tokens(vocab)
    with locked(folder):
        sources, arguments, fingerprint = identity(order, config, given)
        # Keep the 1 % of corpora that older versions made or began.
        is_ours = not overwrite and fingerprint_in(folder) == fingerprint
        if config.validation is None and not (validation or is_ours or is_surely_enough(order, wanted)):
            order = replace(order, share=enough_share(order, wanted))
            sources, arguments, fingerprint = identity(order, config, given)
        if (done := finished(folder, fingerprint, overwrite)) is not None:
            (folder / JOURNAL).unlink(missing_ok=True)
            return done, False
        check_before(folder, order, token_dtype(vocab).itemsize)
        if order.share != (config.validation or SHARE):
            progress.note(
                f"1 % of the documents is too little to score: {order.share:.0%} are held out "
                f"(--validation {SHARE:g} for 1 %)"
            )
        if overwrite:
            clear(folder)
        try:
            work = Work(order, folder, config, fingerprint, progress)
            is_continued = work.journal.position != START
            try:
                encoder = work.encoder(given)
                writers = work.encode(encoder)
            except ConfigError:
                clear(folder)
                raise
            manifest = Manifest(
                vocab_size=encoder.vocab_size,
                dtype=encoder.dtype.name,
                end_token=encoder.end_token,
                end_id=encoder.end_id,
                tokenizer_sha256=file_sha256(folder / TOKENIZER),
                train=writers["train"].to_split(),
                validation=writers["validation"].to_split(),
                sources=sources,
                arguments=arguments,
                fingerprint=fingerprint,
            )
            replace_file(folder / MANIFEST, manifest.to_json())
            (folder / JOURNAL).unlink()
        except OSError as error:
            if not is_full(error):
                raise
            free = in_words(free_bytes(folder))
            cure = "make room there, then the same command continues"
            raise DiskFull(f"the disk of {folder} is full ({free} free); {cure}") from None
    for line in found.notes(is_continued):
        progress.note(line)
    if (tokens := manifest.validation.tokens) < wanted:
        progress.note(
            f"{tokens:,} tokens are held out; a recipe of this vocabulary scores {wanted:,} by default: "
            "hold out more by --validation or --validation-from, or lower data.eval_batches"
        )
    return manifest, True


def check_before(folder: Path, order: DocumentOrder, token_bytes: int) -> None:
    """Raise ConfigError if even a lower bound of this text's shards does not fit.

    Existing files of the corpus count as free: they are continued or replaced.
    """
    total = sum(source.size for source in order.inputs)
    if order.limit_bytes is not None:
        total = min(total, order.limit_bytes)
    there = sum(path.stat().st_size for path in folder.glob("*.bin*")) if folder.is_dir() else 0
    needed = total // MOST_BYTES_PER_TOKEN * token_bytes - there
    try:
        check_room(folder, max(needed, 0), f"a corpus of {in_words(total)} of text, at the very least,")
    except ConfigError as error:
        raise ConfigError(f"{error}, or give --to a folder on another disk") from None


def identity(
    order: DocumentOrder, config: PrepareConfig, given: bytes | None
) -> tuple[list[dict], dict, str]:
    """Return sources and arguments as the manifest lists them, and their fingerprint, which never changes."""
    arguments = {
        "vocab": None if given else config.vocab,
        "tokenizer": hashlib.sha256(given).hexdigest() if given else None,
        "end_token": config.end_token,
        "validation": [source.describe() for source in order.validation] or order.share,
        "text_field": config.text_field,
        "limit_bytes": config.limit_bytes,
        "seed": config.seed,
        "shard_tokens": config.shard_tokens,
    }
    sources = [source.describe() for source in order.inputs]
    text = json.dumps([VERSION, sources, arguments], sort_keys=True)
    return sources, arguments, hashlib.sha256(text.encode()).hexdigest()


class Work:
    """A preparation in progress; another process can continue it from its journal."""

    def __init__(
        self,
        order: DocumentOrder,
        folder: Path,
        config: PrepareConfig,
        fingerprint: str,
        progress: Progress,
    ) -> None:
        self.order, self.folder, self.config, self.progress = order, folder, config, progress
        found = Journal.read(folder)
        self.journal = found or Journal(fingerprint)
        if found is None:
            self.journal.write(folder)

    def encoder(self, given: bytes | None) -> Encoder:
        """Return the tokenizer: the one that a killed run finished, the given one, or a newly trained one."""
        path = self.folder / TOKENIZER
        if own_size(path) is None:  # a link is replaced
            if given is None:
                self.progress.phase(f"training a tokenizer of {self.config.vocab:,} tokens", 0)
                given = train_tokenizer(self._sample(), self.config.vocab).encode()
            vocab_size = Encoder(given, self.config.end_token).vocab_size  # refused before it is written
            if self.config.tokenizer is None and vocab_size < self.config.vocab:
                self.progress.note(f"so little text gives a vocabulary of {vocab_size:,} tokens only")
            replace_file(path, given)
        return Encoder(tokenizer_bytes(path), self.config.end_token)

    def encode(self, encoder: Encoder) -> dict[str, ShardWriter]:
        """Write the shards that the journal does not list yet."""
        writers = self._writers(encoder)
        position = self.journal.position
        if position != START:
            self.progress.note(f"continuing after {writers['train'].num_tokens:,} tokens already written")
        total = sum(source.size for source in self.order.sources)
        self.progress.phase("encoding", total)
        num_shards, unsaved = num_whole(writers), 0
        # This reads the next batch while the library's own threads encode this one.
        with ThreadPoolExecutor(1) as reader:
            for batch in read_ahead(batches(self.order.after(position)), reader):
                for document, ids in zip(batch, encoder.encode([d.text for d in batch]), strict=True):
                    writers[document.split].append(ids, document.size)
                    unsaved += document.size
                position = batch[-1].after
                if num_whole(writers) > num_shards or unsaved >= CHECKPOINT_TEXT_BYTES:
                    self._save(position, writers)
                    num_shards, unsaved = num_whole(writers), 0
                text_bytes = sum(writer.state.bytes for writer in writers.values())
                self.progress.update(batch[-1].consumed, f"{text_bytes / 1e6:,.0f} MB of text")
        self.progress.update(total)
        for writer in writers.values():
            writer.close_shard()
        self._refuse_empty({split: writer.to_split().documents for split, writer in writers.items()})
        self._save(position, writers)
        return writers

    def _sample(self) -> Iterator[str]:
        for text in sample(
            self.order.inputs,
            self.config.text_field,
            lambda text: self.order.split_of(text.encode()) == "train",
            self.config.limit_bytes,
        ):
            self.progress.update(0)
            yield text

    def _writers(self, encoder: Encoder) -> dict[str, ShardWriter]:
        def make() -> dict[str, ShardWriter]:
            tokens = self.config.shard_tokens
            return {
                split: ShardWriter(self.folder, split, encoder.dtype, tokens, state)
                for split, state in (("train", self.journal.train), ("validation", self.journal.validation))
            }

        writers = make()
        if not all(writer.intact() for writer in writers.values()):
            self.progress.note("the unfinished shards do not match their journal: encoding them again")
            self.journal = Journal(self.journal.fingerprint)
            self.journal.write(self.folder)
            clear(self.folder, keep=(JOURNAL, TOKENIZER))
            writers = make()
        for writer in writers.values():
            writer.rename_whole()
        return writers

    def _save(self, position: Position, writers: dict[str, ShardWriter]) -> None:
        for writer in writers.values():
            writer.sync()
        states = {split: writer.state for split, writer in writers.items()}
        self.journal = Journal(self.journal.fingerprint, position, **states)
        self.journal.write(self.folder)
        # Not earlier: a shard with a final name must be in the journal.
        for writer in writers.values():
            writer.rename_whole()

    def _refuse_empty(self, num_documents: dict[str, int]) -> None:
        total = sum(num_documents.values())
        for split, count in num_documents.items():
            if not count and self.order.validation:
                option = "the inputs" if split == "train" else "the files of --validation-from"
                raise ConfigError(f"{option} hold no documents; they are empty")
            if not count:
                better = "larger" if split == "validation" else "smaller"
                raise ConfigError(
                    f"none of {total} documents fell to the {split} part by --validation "
                    f"{self.order.share:g}; choose a {better} share, such as 0.1, or give "
                    "--validation-from FILE"
                )


def num_whole(writers: dict[str, ShardWriter]) -> int:
    return sum(len(writer.state.shards) for writer in writers.values())
