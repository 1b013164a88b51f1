"""Long documents among short ones give the tokens of each."""

import numpy as np
from corpus_texts import json_lines, make_texts

from isthmus.data.corpus import open_corpus
from isthmus.data.tokenizer import Encoder


def test_a_long_document_and_short_ones_give_the_tokens_of_each(tmp_path, isthmus):
    texts = [text * (60 if number % 7 == 0 else 1) for number, text in enumerate(make_texts(60))]
    (tmp_path / "a.jsonl").write_bytes(json_lines(texts))
    small = ("--vocab", 300, "--validation", 0.2)
    assert isthmus("data", "prepare", tmp_path / "a.jsonl", "--to", tmp_path / "corpus", *small)[0] == 0
    corpus = open_corpus(tmp_path / "corpus")
    encoder = Encoder(corpus.tokenizer_path.read_bytes())
    ids = [tokens.tobytes() for tokens in encoder.encode(texts)]
    stored = np.concatenate([corpus.train.slice(0, len(corpus.train))]).astype("<u2")
    ends = np.flatnonzero(stored == corpus.end_id) + 1
    assert {part.tobytes() for part in np.split(stored, ends)[:-1]} <= set(ids)
