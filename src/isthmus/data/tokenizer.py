"""The byte-level BPE: trained on a bounded sample of the text, or read from a file."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from isthmus import reading
from isthmus.data.readers import END_OF_TEXT, Source, cut
from isthmus.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_TOKENIZER_BYTES = 64 << 20  # of the file; the largest public vocabularies have 35 MB
MIN_VOCAB = 257  # the bytes and <|endoftext|>
# BPE statistics settle long before this; more text costs memory and hardly changes a merge.
SAMPLE_BYTES = 48 << 20
SAMPLE_SOURCES = 512
# The library buffers many texts at about 100 bytes per token, so it gets long ones in pieces.
PIECE_CHARACTERS = 1 << 20
END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[SEP]")


def sample(
    sources: Sequence[Source], field: str, keep: Callable[[str], bool], limit_bytes: int | None
) -> Iterator[str]:
    """Yield the first documents of each source, evenly over at most SAMPLE_SOURCES of them.

    A run limited to the first `limit_bytes` of a large collection samples those same documents.
    """
    budget = SAMPLE_BYTES if limit_bytes is None else min(limit_bytes, SAMPLE_BYTES)
    in_order = budget == limit_bytes
    chosen = sources if in_order else sources[:: math.ceil(len(sources) / SAMPLE_SOURCES)]
    for position, source in enumerate(chosen):
        # The next files share what a small one leaves unused.
        share = budget if in_order else budget // (len(chosen) - position)
        budget -= share
        for text in source.documents(field):
            if share <= 0:
                break
            share -= len(text.encode())
            if keep(text):
                yield text[:SAMPLE_BYTES]
        budget += share


def train_tokenizer(texts: Iterable[str], vocab: int) -> str:
    """Train a byte-level BPE and return its tokenizer.json: <|endoftext|> is 0, every byte has a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces = (piece for text in texts for piece in cut(text, PIECE_CHARACTERS >> 4))
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer.to_str(pretty=False)


def tokenizer_bytes(path: Path) -> bytes:
    try:
        return reading.read_bytes(path, MAX_TOKENIZER_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"cannot read the tokenizer {path}: no such file") from None


def read_tokenizer(path: Path) -> bytes:
    """Read a tokenizer.json, or the one in a folder, and check that it is a tokenizer."""
    if path.is_dir():
        found = [path / name for name in ("tokenizer.json", "tokenizer.model")]
        path = next((file for file in found if file.exists()), found[0])
    if path.suffix == ".model":
        raise ConfigError(
            f"{path} is a SentencePiece model; write a tokenizer.json of it with transformers, "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(NEW), and give that"
        )
    data = tokenizer_bytes(path)
    load(data, str(path))
    return data


def load(data: bytes, where: str) -> "Tokenizer":
    from tokenizers import Tokenizer

    with library_faults(f"{where} is not a tokenizer.json of the tokenizers library"):
        tokenizer = Tokenizer.from_buffer(data)
        tokenizer.no_padding()  # a file may ask for padding to a billion tokens
        tokenizer.no_truncation()
        return tokenizer


@contextmanager
def library_faults(words: str = "the tokenizer fails on this text") -> Iterator[None]:
    """Turn the library's faults into one line. It raises bare Exceptions, and for internal faults
    BaseExceptions: for example if a pattern in a stranger's file takes too long on a text."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError | GeneratorExit):
            raise
        raise ConfigError(f"{words} ({' '.join(str(error).split())[:200]})") from error


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the type that stores ids of such a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class Encoder:
    """Encode texts into token ids, ending each document with the end token."""

    def __init__(self, data: bytes, end_token: str | None = None, where: str = "tokenizer.json") -> None:
        self.tokenizer = load(data, where)
        # A document that merely mentions <|endoftext|> does not end there.
        self.tokenizer.encode_special_tokens = True
        vocab = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1  # ids may have gaps
        self.dtype = token_dtype(self.vocab_size)
        candidates = (end_token,) if end_token else END_TOKENS
        found = next((token for token in candidates if token in vocab), None)
        if found is None:
            raise ConfigError(
                f"{where} has no token {' or '.join(candidates)}; name what ends a document by --end-token"
            )
        self.end_token = found
        self.end_id: int = vocab[found]

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return one array of ids per text, the end token last."""
        pieces = [list(cut(text, PIECE_CHARACTERS)) for text in texts]
        encoded = self._encode_pieces([piece for parts in pieces for piece in parts])
        end = np.array([self.end_id], self.dtype)
        return [np.concatenate([*(next(encoded) for _ in parts), end]) for parts in pieces]

    def _encode_pieces(self, pieces: list[str]) -> Iterator[np.ndarray]:
        """Encode in groups: the library's large objects never hold a huge document as a whole."""
        first = 0
        while first < len(pieces):
            last, size = first, 0
            while last < len(pieces) and size < 2 * PIECE_CHARACTERS:
                # A byte may be a token, and a character has up to four bytes.
                size += len(pieces[last]) * (1 if pieces[last].isascii() else 4)
                last += 1
            with library_faults():
                found = self.tokenizer.encode_batch_fast(pieces[first:last], add_special_tokens=False)[::-1]
            while found:
                yield np.asarray(found.pop().ids, self.dtype)
            first = last
