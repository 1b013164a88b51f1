"""README.md of an exported folder: what the model is, how it was trained, and its scores."""

from dataclasses import replace
from pathlib import Path

from isthmus.config import Member, dump_recipe
from isthmus.export.measure import Losses
from isthmus.export.source import Trained
from isthmus.model.hf import CLASSES, family

PLAIN = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
```"""
PIPELINED = """This folder keeps the stage boundaries of the replica `{replica}`: the model was trained
through them. `modeling_isthmus.py` is code: read it, then load it with

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("{folder}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{folder}")
```"""


def model_card(trained: Trained, losses: Losses, folder: str, dtype: str, member: Member | None) -> str:
    recipe, model = trained.recipe, trained.recipe.model
    use = PIPELINED.format(folder=folder, replica=member.name) if member else PLAIN.format(folder=folder)
    forwards = [
        ("plain model, as written here" if not member else "plain model, without boundaries", losses.plain),
        ("full forward of the run", losses.full),
        ("pipelined forward of the run", losses.pipelined),
        ("mixed: mean over the run's replicas as each trained", losses.mixed),
    ]
    table = "\n".join(f"| {name} | {loss:.4f} |" for name, loss in forwards if loss is not None)
    kinds = "\n".join(
        f"- {r.count} x {r.name}: {r.kind}" + (f", {r.stages} stages, k/d {r.compression}" * (r.stages > 1))
        for r in recipe.replicas
    )
    computed = str(trained.bases.dtype).removeprefix("torch.")
    # The card may be published, so it does not name this machine's bucket or folders.
    public = replace(
        recipe,
        bucket=replace(recipe.bucket, url=""),
        data=replace(recipe.data, corpus=trained.corpus.name),
        model=replace(model, start=Path(model.start).name),
    )
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [{family(model)}, isthmus]
---

# {recipe.name}

A {CLASSES[family(model)]} of {model.num_parameters:,} parameters (width {model.width}, {model.layers} layers,
{model.heads} heads, {model.num_kv_heads} for keys and values,
context {model.context}, vocabulary {model.vocab}), weights in {dtype}.
Trained by Isthmus for {trained.round} of {recipe.outer.rounds} outer rounds, {trained.tokens:,} tokens,
on `{trained.corpus.name}`.

{use}

Text ends with `{trained.corpus.manifest.end_token}`; nothing is put in front of it.

## Held-out loss

Nats per token on {losses.num_tokens:,} held-out tokens, computed in {computed}.

| forward | loss |
|---|---:|
{table}

## The fleet

{kinds}

## The recipe

```toml
{dump_recipe(public)}```
"""
