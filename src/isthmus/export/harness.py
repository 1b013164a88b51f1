"""Run the lm-evaluation-harness on an exported folder: an optional extra, loaded only here.

The harness gets a model and a tokenizer built here from our own classes. It never sees the folder, so nothing
in it (`auto_map`, .py files, adapters, pickles) can run.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from isthmus.errors import ConfigError, RunError
from isthmus.export.exported import ExportedFolder
from isthmus.model.hf import hf_config, hf_name, read_extra, read_params

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

# config.json's keys for boundaries: see `boundary_parts`.
KEPT_KEYS = (
    *("family", "attention_bias", "boundaries", "subspace_dims", "frozen_table", "learned_tables"),
    *("wire", "wire_version", "open_share"),
)


def require_harness() -> None:
    """Check that the harness is installed, before anything is measured or exported for it."""
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--harness needs the lm-evaluation-harness; install it with: pip install 'isthmus[eval]'"
        ) from None


def run_harness(folder: Path, tasks: list[str], include: str | None, device: str) -> dict[str, Any]:
    """Return scores by task, as the harness reports them. `include`: a folder with your own tasks."""
    require_harness()
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include)
    for task in tasks:
        if not manager.match_tasks([task]):
            raise ConfigError(f'the harness has no task "{task}"; `lm_eval --tasks list` names them')
    model, tokenizer = build(folder, device)
    try:
        found = lm_eval.simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer, backend="causal"),
            tasks=tasks,
            task_manager=manager,
            bootstrap_iters=0,
        )
    except Exception as error:  # the harness raises all kinds: no network, no memory
        words = str(error).splitlines() or [type(error).__name__]
        raise RunError(f"the harness failed on {folder}: {words[0]:.300}") from error
    assert found is not None  # only processes other than the first get None
    return {
        task: {name: value for name, value in scores.items() if isinstance(value, int | float)}
        for task, scores in found["results"].items()
    }


def build(folder: Path, device: str = "cpu") -> "tuple[PreTrainedModel, PreTrainedTokenizerFast]":
    """Build a folder's model and tokenizer as transformers would, but from our own classes."""
    import transformers
    from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedTokenizerFast

    from isthmus.export.modeling_isthmus import IsthmusConfig, IsthmusForCausalLM

    found = ExportedFolder.open(folder)
    encoder, half = found.encoder(), found.config.get("dtype") == "bfloat16"
    config = hf_config(found.model, encoder.end_id, "bf16" if half else "fp32")
    (architecture,), kind = config.pop("architectures"), config.pop("model_type")
    tensors = {hf_name(name): t for name, t in read_params(folder, found.model).items()}
    if found.pipelined:
        found.boundaries()  # ConfigError if they are invalid
        config |= {key: found.config[key] for key in KEPT_KEYS if key in found.config}
        tensors |= read_extra(folder, "boundary.")
        model = IsthmusForCausalLM(IsthmusConfig(**config))
    else:
        model = getattr(transformers, architecture)(CONFIG_MAPPING[kind](**config))
    dtype = torch.bfloat16 if half else torch.float32
    tensors = {name: t.to(dtype) for name, t in tensors.items()}
    if found.model.tie_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, strict=True, assign=True)
    model.tie_weights()
    torch.nn.Module.to(model, device)
    model.generation_config = GenerationConfig(
        bos_token_id=encoder.end_id, eos_token_id=encoder.end_id, pad_token_id=encoder.end_id
    )
    vocab = encoder.tokenizer.get_vocab()
    named = {key: found.special_token(key) for key in ("bos_token", "pad_token")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=encoder.tokenizer,
        eos_token=encoder.end_token,
        **{key: token if token in vocab else encoder.end_token for key, token in named.items()},
        model_max_length=found.model.context,
        clean_up_tokenization_spaces=False,
    )
    return model, tokenizer
