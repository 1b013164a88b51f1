"""Held-out text: as much as a recipe scores where the documents give it, and one line where they do not."""

import random
from pathlib import Path

import numpy as np
import pytest
from corpus_texts import contents, json_lines, make_texts

from isthmus.data.corpus import TokenView, open_corpus
from isthmus.data.tokens import num_scored, validation_batches

WORDS = ["river", "mill", "geese", "quarrel", "over", "grains", "of", "rye", "and", "too", "many"]


def texts_of(num_documents: int, num_words: int) -> list[str]:
    rng = random.Random(0)
    return [f"{n} " + " ".join(rng.choices(WORDS, k=num_words)) for n in range(num_documents)]


def prepared(isthmus, tmp_path: Path, texts: list[str], *options) -> tuple[Path, str]:
    path, to = tmp_path / "in.jsonl", tmp_path / "corpus"
    path.write_bytes(json_lines(texts))
    status, _, err = isthmus("data", "prepare", path, "--to", to, *options)
    assert status == 0, err
    return to, err


@pytest.mark.parametrize(("num_documents", "num_words", "least"), [(300, 1500, 16_384), (577, 60, 2_000)])
def test_the_share_is_raised_where_one_percent_is_too_little(
    num_documents, num_words, least, tmp_path, isthmus
):
    to, err = prepared(isthmus, tmp_path, texts_of(num_documents, num_words), "--vocab", 400)
    manifest = open_corpus(to).manifest
    assert 0.01 < manifest.arguments["validation"] <= 0.1
    assert manifest.validation.tokens >= least
    assert f"{manifest.arguments['validation']:.0%} are held out" in err
    # What is still too little is said.
    assert ("a recipe of this vocabulary scores 16,384" in err) == (manifest.validation.tokens < 16_384)


def test_a_handful_of_documents_holds_one_out(tmp_path, isthmus):
    to, _ = prepared(isthmus, tmp_path, texts_of(4, 3000), "--vocab", 300)
    manifest = open_corpus(to).manifest
    assert manifest.validation.documents >= 1
    assert manifest.train.documents >= 1


def test_a_corpus_that_was_made_with_one_percent_stays_as_it_is(tmp_path, isthmus):
    """Older versions always held out 1 %: the same command finds their corpus, and continues it."""
    texts = texts_of(1500, 60)
    to, err = prepared(isthmus, tmp_path, texts, "--vocab", 300, "--validation", 0.01)
    assert "are held out (" not in err
    before = contents(to)
    assert "already" in prepared(isthmus, tmp_path, texts, "--vocab", 300)[1]
    assert contents(to) == before


def test_a_larger_share_holds_out_the_same_documents_and_more(tmp_path, isthmus):
    held = []
    for share in (0.05, 0.2):
        folder = tmp_path / str(share)
        folder.mkdir()
        to, _ = prepared(isthmus, folder, make_texts(400), "--vocab", 300, "--validation", share)
        held.append(open_corpus(to).manifest.validation.documents)
    assert held[0] < held[1]


def test_what_is_scored_is_counted_as_it_is_dealt():
    class Held:
        def __init__(self, tokens: int) -> None:
            self.validation = TokenView("validation", [np.zeros(tokens, np.uint16)])

    for tokens in (9, 17, 40, 100, 1000):
        for batch, num_batches in ((1, 4), (3, 2), (8, 4)):
            found = validation_batches(Held(tokens), batch, 8, num_batches)  # pyright: ignore[reportArgumentType]
            assert num_scored(Held(tokens).validation, batch, 8, num_batches) == sum(map(len, found))


def test_a_run_says_that_its_corpus_holds_out_less_than_the_recipe_scores(tmp_path, isthmus):
    to, _ = prepared(isthmus, tmp_path, texts_of(100, 400), "--vocab", 300, "--validation", 0.02)
    tokens = open_corpus(to).manifest.validation.tokens
    recipe = tmp_path / "little.toml"
    recipe.write_text(
        f"""
name = "little"
[data]
corpus = "{to}"
eval_batches = 64
[model]
preset = "nano"
width = 32
layers = 2
heads = 2
ffn = 64
context = 64
[inner]
batch = 2
micro_batches = 1
[outer]
rounds = 1
inner_steps = 1
[[replicas]]
name = "a"
"""
    )
    status, out, err = isthmus("simulate", recipe, "--run", tmp_path / "run", "--device", "cpu")
    assert status == 0, err
    assert f"holds out {tokens:,} tokens" in out + err
    assert "not the 8,192 of data.eval_batches x inner.batch x context" in out + err
    status, out, err = isthmus(
        "simulate", recipe, "--run", tmp_path / "b", "--device", "cpu", "--set", "data.eval_batches=1"
    )
    assert status == 0, err
    assert "holds out" not in out + err
