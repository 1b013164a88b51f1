"""Text in, token shards out: the whole of `isthmus data prepare`, in one streaming pass.

    sources -> documents -> train or validation -> batches -> token ids -> shards -> manifest

The order of documents, the split and the tokens depend on inputs and options alone. A run that was killed
and continued therefore writes the same bytes as one that was not.
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
from isthmus.data.room import Outlook, check_before
from isthmus.data.shards import ShardWriter
from isthmus.data.survey import survey
from isthmus.data.tokenizer import MIN_VOCAB, Encoder, read_tokenizer, sample, token_dtype, train_tokenizer
from isthmus.data.tokenizer_file import tokenizer_bytes
from isthmus.errors import ConfigError
from isthmus.files import own_size, replace_file

# A checkpoint comes after this much text, or earlier when a shard is full.
CHECKPOINT_TEXT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """What decides the bytes of a corpus, apart from the text itself."""

    vocab: int = 8192
    tokenizer: Path | None = None  # a tokenizer.json instead of training one
    end_token: str | None = None
    # Share of documents held out; unused where validation files are given. None: 1 %, or more where that is
    # less than a recipe scores.
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
    """Make the corpus in `folder`, or continue it. Returns (manifest, False) where it was already there.

    Bad input takes its shards with it. After a kill or a full disk the same call continues. With `skip_bad`
    the corpus is that of the files which can be read.
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
        # What an older version made, or began, with 1 % stays as it is.
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
        with Outlook(folder, order).told_when_full() as outlook:
            work = Work(order, folder, config, fingerprint, progress, outlook)
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
    for line in found.notes(is_continued):
        progress.note(line)
    if (tokens := manifest.validation.tokens) < wanted:
        progress.note(
            f"{tokens:,} tokens are held out; a recipe of this vocabulary scores {wanted:,} by default: "
            "hold out more by --validation or --validation-from, or lower data.eval_batches"
        )
    return manifest, True


def identity(
    order: DocumentOrder, config: PrepareConfig, given: bytes | None
) -> tuple[list[dict], dict, str]:
    """Sources and arguments as the manifest has them, and their fingerprint: it names one corpus for good."""
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
    """One preparation under way, with the journal from which another process can continue it."""

    def __init__(
        self,
        order: DocumentOrder,
        folder: Path,
        config: PrepareConfig,
        fingerprint: str,
        progress: Progress,
        outlook: Outlook,
    ) -> None:
        self.order, self.folder, self.config, self.progress = order, folder, config, progress
        self.outlook = outlook
        found = Journal.read(folder)
        self.journal = found or Journal(fingerprint)
        if found is None:
            self.journal.write(folder)

    def encoder(self, given: bytes | None) -> Encoder:
        """The tokenizer of this corpus: the one a killed run had finished, the given one, or a new one."""
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
        # The next batch is read while the library's own threads encode this one.
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
                written = sum(writer.num_tokens for writer in writers.values()) * encoder.dtype.itemsize
                self.outlook.look(written, batch[-1].consumed, position)
                del batch, document, ids
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
        # Only now: a shard with a final name must be in the journal.
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
