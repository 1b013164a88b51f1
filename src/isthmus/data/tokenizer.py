"""The byte-level BPE: trained on a bounded sample of the text, or a tokenizer that is read from a file."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from isthmus.data.readers import END_OF_TEXT, Source, cut
from isthmus.data.sentencepiece_file import converted
from isthmus.data.tokenizer_file import check_tokenizer, tokenizer_bytes
from isthmus.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MIN_VOCAB = 257  # the bytes and <|endoftext|>
# BPE statistics settle long before this; more text costs memory and changes almost no merge.
SAMPLE_BYTES = 48 << 20
SAMPLE_SOURCES = 512
# The library buffers many texts at once, at about 100 bytes per token: long ones go in pieces.
PIECE_CHARACTERS = 1 << 20
END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[SEP]")


def sample(
    sources: Sequence[Source], field: str, keep: Callable[[str], bool], limit_bytes: int | None
) -> Iterator[str]:
    """The first documents of each source, evenly over at most SAMPLE_SOURCES of them.

    A run that reads only the first `limit_bytes` of a large collection samples those same documents.
    """
    budget = SAMPLE_BYTES if limit_bytes is None else min(limit_bytes, SAMPLE_BYTES)
    in_order = budget == limit_bytes
    chosen = sources if in_order else sources[:: math.ceil(len(sources) / SAMPLE_SOURCES)]
    for position, source in enumerate(chosen):
        # The files after a small one share what it leaves of its share.
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
    """A byte-level BPE as the text of its tokenizer.json: <|endoftext|> is 0, and every byte has a token."""
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


def read_tokenizer(path: Path) -> bytes:
    """The bytes of a tokenizer.json (or of the one in a folder), checked to be a tokenizer. SentencePiece's
    tokenizer.model is converted to one."""
    if path.is_dir():
        named = [path / name for name in ("tokenizer.json", "tokenizer.model")]
        path = next((file for file in named if file.exists()), named[0])
    data = tokenizer_bytes(path)
    if not data.lstrip().startswith(b"{") and path.suffix != ".json":
        data = converted(data, str(path))
    load(data, str(path))
    return data


def load(data: bytes, where: str) -> "Tokenizer":
    from tokenizers import Tokenizer

    check_tokenizer(data, where)
    with library_faults(f"{where} is not a tokenizer.json of the tokenizers library"):
        tokenizer = Tokenizer.from_buffer(data)
        tokenizer.no_padding()  # which may be to a billion tokens
        tokenizer.no_truncation()
        return tokenizer


@contextmanager
def library_faults(words: str = "the tokenizer fails on this text") -> Iterator[None]:
    """As one line. The library raises bare Exception, and a fault inside it is a BaseException: a pattern in
    the file of a stranger, for one, that takes too long on a text."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError | GeneratorExit):
            raise
        raise ConfigError(f"{words} ({' '.join(str(error).split())[:200]})") from error


def token_dtype(vocab_size: int) -> np.dtype:
    """How ids of such a vocabulary are stored."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class Encoder:
    """Texts -> token ids, each document closed by the end token."""

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
        """One array of ids per text, the end token last."""
        pieces = [list(cut(text, PIECE_CHARACTERS)) for text in texts]
        encoded = self._encode_pieces([piece for parts in pieces for piece in parts])
        end = np.array([self.end_id], self.dtype)
        return [np.concatenate([*(next(encoded) for _ in parts), end]) for parts in pieces]

    def _encode_pieces(self, pieces: list[str]) -> Iterator[np.ndarray]:
        """In groups: a huge document is never in memory as a whole in the library's large objects."""
        first = 0
        while first < len(pieces):
            last, size = first, 0
            while last < len(pieces) and size < 2 * PIECE_CHARACTERS:
                # A byte may be a token, and a character has up to four.
                size += len(pieces[last]) * (1 if pieces[last].isascii() else 4)
                last += 1
            with library_faults():
                found = self.tokenizer.encode_batch_fast(pieces[first:last], add_special_tokens=False)[::-1]
            while found:
                yield np.asarray(found.pop().ids, self.dtype)
            first = last
