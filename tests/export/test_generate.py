"""`isthmus generate`: transformers' greedy text, sound draws, whole characters."""

import io
import json
import os
import random
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from isthmus.cli.main import main
from isthmus.data.corpus import BUILTIN_FOLDER
from isthmus.export.source import open_trained, pipelined_member
from isthmus.export.text_generator import Text, from_trained, pick
from isthmus.model.decode import Decoder
from isthmus.model.llama import forward, rope_table
from isthmus.subspace.boundaries import boundary_functions

PROMPT = "It was the best of times"


def said(capsys, *arguments):
    capsys.readouterr()
    assert main(["generate", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["full", "mixed", "finished"])
def test_greedy_text_is_that_of_transformers(runs, folders, capsys, name):
    ours = said(capsys, runs[name], PROMPT, "--temperature", 0, "--max-tokens", 12)
    model = AutoModelForCausalLM.from_pretrained(folders[name])
    tokenizer = AutoTokenizer.from_pretrained(folders[name])
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    theirs = model.generate(ids, max_new_tokens=12, do_sample=False)[0]
    assert PROMPT + ours["text"] == tokenizer.decode(theirs, skip_special_tokens=True)
    assert ours["text"] == said(capsys, folders[name], PROMPT, "--temperature", 0, "--max-tokens", 12)["text"]


def test_greedy_text_through_boundaries_is_that_of_transformers(runs, tmp_path, capsys):
    folder = tmp_path / "pp"
    assert main(["export", str(runs["compressed"]), "--to", "hf", str(folder), "--as", "pipelined"]) == 0
    arguments = (PROMPT, "--temperature", 0, "--max-tokens", 12)
    ours = said(capsys, runs["compressed"], *arguments)  # every replica is compressed: by itself
    assert ours["text"] == said(capsys, folder, *arguments)["text"]
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    theirs = model.generate(ids, max_new_tokens=12, do_sample=False)[0]
    assert PROMPT + ours["text"] == tokenizer.decode(theirs, skip_special_tokens=True)


@pytest.mark.parametrize("through", [False, True])
def test_the_cache_gives_the_logits_of_a_whole_forward(runs, through, monkeypatch):
    monkeypatch.setattr("isthmus.model.decode.FIRST_ROOM", 3)  # so that it grows
    trained = open_trained(str(runs["mixed"]))
    model, member = trained.recipe.model, pipelined_member(trained.recipe)
    boundary_fns = (
        boundary_functions(trained.recipe, [member], trained.bases, trained.table, params=trained.params)
        if through
        else None
    )
    tokens = trained.corpus.validation.slice(0, model.context).tolist()
    decoder = Decoder(trained.params, model, boundary_fns)
    cached = [decoder.feed(tokens[:5]), *(decoder.feed([token]) for token in tokens[5:])]
    whole = forward(
        trained.params, torch.tensor([tokens]), model, rope_table(model, model.context), boundary_fns
    )[0, 4:]
    # bf16 on the wire: a rounding may fall to the other side.
    torch.testing.assert_close(torch.stack(cached), whole, atol=5e-4 if through else 1e-5, rtol=0)
    with pytest.raises(ValueError, match="do not fit"):
        decoder.feed([1])


def test_a_seed_gives_its_text_again_and_another_seed_another(runs, capsys):
    texts = [
        said(capsys, runs["full"], PROMPT, "--seed", seed, "--temperature", 1.0, "--top-p", 1.0)["text"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_draws_come_from_the_smallest_set_that_holds_top_p():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[torch.tensor([2, 0, 3, 1])]
    generator = torch.Generator().manual_seed(0)
    draws = [pick(logits, 1.0, 0.7, generator) for _ in range(2000)]
    assert set(draws) == {1, 3}  # 0.5 and 0.3: the first two whose sum reaches 0.7
    assert abs(draws.count(1) / 2000 - 0.5 / 0.8) < 0.05
    assert {pick(logits, 1.0, 1e-9, generator) for _ in range(20)} == {1}
    assert {pick(logits, 0.0, 1.0, generator) for _ in range(5)} == {1}
    for cold in (1e-40, 5e-324):  # which no float holds as 1 / T
        assert {pick(logits, cold, 1.0, generator) for _ in range(5)} == {1}
    hot = [pick(logits, 100.0, 1.0, generator) for _ in range(2000)]
    assert all(abs(hot.count(i) / 2000 - 0.25) < 0.06 for i in range(4))


def test_streamed_pieces_add_up_and_hold_no_half_character():
    tokenizer = Tokenizer.from_file(str(BUILTIN_FOLDER / "tokenizer.json"))
    text = "naïve — 雪の日 👩‍🚀 end"
    ids = tokenizer.encode(text).ids
    stream = Text(tokenizer, ids[:1])
    pieces = [stream.add(token) for token in ids[1:]] + [stream.rest()]
    assert tokenizer.decode(ids[:1]) + "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    draw = random.Random(0)
    for _ in range(50):  # any bytes at all, sound text or not
        ids = [draw.randrange(1, 1024) for _ in range(30)]
        stream = Text(tokenizer, ids[:1])
        pieces = [stream.add(token) for token in ids[1:]] + [stream.rest()]
        start = len(tokenizer.decode(ids[:1], skip_special_tokens=False))
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)[start:]


def test_it_stops_at_the_end_of_text_at_max_tokens_and_at_a_full_context(runs):
    generator = from_trained(open_trained(str(runs["full"])), "auto")
    prompt = generator.encode(PROMPT)
    settings = {"temperature": 0.0, "top_p": 1.0, "seed": 0}
    free = list(generator.tokens(prompt, 1000, **settings))
    assert len(prompt) + len(free) == generator.model.context
    assert list(generator.tokens(prompt, 4, **settings)) == free[:4]
    from dataclasses import replace

    ending = replace(generator, end_id=free[2])
    assert list(ending.tokens(prompt, 1000, **settings)) == free[: free.index(free[2])]


class Output(io.TextIOWrapper):
    """A stdout that keeps what had been written at each flush."""

    def __init__(self, encoding="utf-8", terminal=False):
        super().__init__(io.BytesIO(), encoding=encoding)
        self.terminal, self.flushed = terminal, []

    def isatty(self):
        return self.terminal

    def flush(self):
        super().flush()
        if not self.buffer.closed:
            self.flushed.append(self.buffer.getvalue())


def generated(monkeypatch, output, *arguments):
    monkeypatch.setattr(sys, "stdout", output)
    assert main(["generate", *map(str, arguments)]) == 0
    return list(filter(None, output.flushed))


def test_text_is_streamed_to_stdout_while_it_is_made(runs, monkeypatch, capsys):
    arguments = (runs["full"], PROMPT, "--temperature", 0, "--max-tokens", 8)
    flushed = generated(monkeypatch, Output(), *arguments)
    assert flushed[0].decode() == PROMPT
    assert len(set(flushed)) > 4  # one flush for each token that ends a character
    assert flushed[-1].endswith(b"\n")
    notes = capsys.readouterr().err
    assert "as a plain model" in notes
    assert "8 tokens" in notes


def test_a_terminal_gets_no_escape_sequence_and_a_pipe_gets_every_byte(runs, monkeypatch):
    prompt = "a\x1b[31mb\u009bc\t\u202e\n"
    arguments = (runs["full"], prompt, "--max-tokens", 1, "--temperature", 0)
    shown = generated(monkeypatch, Output(terminal=True), *arguments)[-1].decode()
    assert shown.startswith("a\\x1b[31mb\\x9bc\t\\u202e\n")
    assert generated(monkeypatch, Output(), *arguments)[-1].decode().startswith(prompt)


def test_a_model_that_has_diverged_is_named_in_one_line(folders, tmp_path, capsys):
    folder = tmp_path / "diverged"
    shutil.copytree(folders["full"], folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= 100
    tensors["lm_head.weight"].fill_(3e38)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for temperature in ("0", "1"):
        assert main(["generate", str(folder), PROMPT, "--json", "--temperature", temperature]) == 1
        assert capsys.readouterr().err.splitlines()[-1].endswith("it has diverged and generates no text")


def test_a_folder_without_a_tokenizer_is_refused(folders, tmp_path, capsys):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folders["full"] / name).read_bytes())
    assert main(["generate", str(tmp_path), PROMPT]) == 2
    assert "tokenizer.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{full}", "word " * 200], "the model's context 32; shorten it"),
        (["{full}", "a", "--max-tokens", "0"], "at least 1"),
        (["{full}", "a", "--temperature", "nan"], "--temperature is nan"),
        (["{full}", "a", "--top-p", "0"], "at most 1"),
        (["{full}", "a", "--as", "pipelined"], "no boundaries"),
        (["{full}", "a", "--seed", "-1"], "--seed is -1"),
        (["{full}", os.fsdecode(b"caf\xe9")], "not UTF-8"),
    ],
)
def test_bad_input_is_one_line_and_status_2(runs, capsys, arguments, says):
    filled = [word.format(full=runs["full"], none=runs["full"] / "none") for word in arguments]
    assert main(["generate", *filled]) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
