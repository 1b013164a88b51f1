"""Hugging Face LLaMA folders: their names, their config, their weights.

Their LLaMA and ours are the same function. RoPE pairs entry i of a head with entry i + head_dim / 2 in both,
so no matrix is permuted. Nothing is unpickled: weights are read from safetensors only.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from isthmus import reading
from isthmus.config import ModelConfig
from isthmus.errors import ConfigError

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
MAX_JSON_BYTES = 16 << 20  # an index of many thousand tensors has 2 MB
PIPELINED = "isthmus_pipelined"  # model_type of a folder that keeps the boundaries

# key of config.json -> field of [model]
FIELDS = {
    "vocab_size": "vocab",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn",
    "max_position_embeddings": "context",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
}
MATRICES = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}
OUTSIDE = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def hf_name(name: str) -> str:
    """`layers.7.attention.wq.weight` -> `model.layers.7.self_attn.q_proj.weight`."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, number, rest = name.split(".", 2)
    return f"model.layers.{number}.{MATRICES[rest.removesuffix('.weight')]}.weight"


def hf_config(model: ModelConfig, end_id: int, dtype: str) -> dict[str, Any]:
    """config.json of a plain LLaMA. Documents end by one token and begin right after it, so bos is eos."""
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{key: getattr(model, field) for key, field in FIELDS.items()},
        "num_key_value_heads": model.heads,
        "head_dim": model.width // model.heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        # transformers 4 reads the first of each pair, 5 the second.
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "torch_dtype": dtype,
        "dtype": dtype,
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        "use_cache": True,
    }


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = reading.read_json(path, MAX_JSON_BYTES)
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} holds no {path.name}; give a Hugging Face LLaMA folder") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a JSON object; give a Hugging Face LLaMA folder")
    return found


def read_config(folder: Path) -> ModelConfig:
    """The model of a Hugging Face LLaMA folder; ConfigError where ours cannot compute it."""
    config = read_json(folder / CONFIG)
    kind = config.get("model_type")
    if kind not in ("llama", PIPELINED):
        raise ConfigError(f'{folder} holds a model of type "{kind!s:.40}"; Isthmus trains "llama" models')
    try:
        values = {field: config[key] for key, field in FIELDS.items() if key != "initializer_range"}
        std = config.get("initializer_range", 0.02)
        heads, width = values["heads"], values["width"]
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
        scaling = rope.get("rope_type", rope.get("type", "default"))
        _refuse(folder, config, scaling, heads, width)
        return ModelConfig(
            vocab=int(values["vocab"]),
            width=int(values["width"]),
            layers=int(values["layers"]),
            heads=int(values["heads"]),
            ffn=int(values["ffn"]),
            context=int(values["context"]),
            rope_theta=float(theta),
            norm_eps=float(values["norm_eps"]),
            init_std=float(std),
        )
    except KeyError as error:
        raise ConfigError(f"{folder / CONFIG} does not state {error.args[0]}; is the folder whole?") from None
    except (TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{folder / CONFIG} holds values of the wrong kind ({error})") from None


def _refuse(folder: Path, config: Mapping[str, Any], scaling: str, heads: int, width: int) -> None:
    kv_heads = config.get("num_key_value_heads") or heads
    if kv_heads != heads:
        raise ConfigError(
            f"{folder} shares {kv_heads} key and value heads among {heads} (grouped-query attention); "
            "Isthmus trains models in which every head has its own"
        )
    head_dim = config.get("head_dim") or width // heads
    wrong = {
        "head_dim": (head_dim, width // heads),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "rope_type": (scaling, "default"),
        "attention_bias": (bool(config.get("attention_bias")), False),
        "mlp_bias": (bool(config.get("mlp_bias")), False),
        "quantization_config": (config.get("quantization_config"), None),
    }
    for key, (found, ours) in wrong.items():
        if found != ours:
            raise ConfigError(f"{folder / CONFIG} has {key} = {found!s:.60}; Isthmus has only {ours}")


def check_same(folder: Path, there: ModelConfig, model: ModelConfig) -> None:
    """Compare the recipe's model with the folder's, dimension by dimension; its context may be shorter."""
    differ = []
    for field in ("vocab", "width", "layers", "heads", "ffn", "rope_theta", "norm_eps"):
        found, wanted = getattr(there, field), getattr(model, field)
        if found != wanted:
            differ.append((field, found, wanted))
    if model.context > there.context:
        differ.append(("context", there.context, model.context))
    if differ:
        said = ", ".join(f"{field} is {found} there and {wanted} here" for field, found, wanted in differ)
        cure = " ".join(f"model.{field}={found}" for field, found, _ in differ)
        raise ConfigError(f"{folder} is another model than the recipe's: {said}; set {cure}")


def read_params(folder: Path, model: ModelConfig) -> dict[str, Tensor]:
    """The folder's weights in float32 under our names, every shape checked."""
    wanted = model.shapes()
    params: dict[str, Tensor] = {}
    with ExitStack() as stack:
        where = _tensors(folder, stack)
        tied = OUTSIDE["output.weight"] not in where and read_json(folder / CONFIG).get("tie_word_embeddings")
        for name, shape in wanted.items():
            # A tied head begins as a copy of the embedding; from there it trains on its own.
            source = OUTSIDE["tok_embeddings.weight"] if tied and name == "output.weight" else hf_name(name)
            if source not in where:
                raise ConfigError(f"{folder} has no tensor {source}; is the folder whole?")
            try:
                found = where[source].get_tensor(source)
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{folder}: {source} cannot be read ({error})") from None
            if tuple(found.shape) != shape:
                raise ConfigError(
                    f"{folder}: {source} has the shape {tuple(found.shape)}; config.json implies {shape}"
                )
            if found.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
                raise ConfigError(f"{folder}: {source} is {found.dtype}; weights are floating point")
            params[name] = found.to(torch.float32, copy=True)
            if not bool(params[name].isfinite().all()):
                raise ConfigError(f"{folder}: {source} holds values that are not finite")
    return params


def read_extra(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Tensors beside the model's own whose names start with `prefix`."""
    with ExitStack() as stack:
        where = _tensors(folder, stack)
        return {name: where[name].get_tensor(name) for name in where if name.startswith(prefix)}


def _tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """The open file of each tensor: one file for all, or the several of an index."""
    if (folder / INDEX).is_file():
        listed = read_json(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise ConfigError(f"{folder / INDEX} has no weight_map of names to files")
        files = sorted(set(listed.values()))
    elif (folder / WEIGHTS).is_file():
        files = [WEIGHTS]
    else:
        pickled = any(folder.glob("*.bin"))
        why = "only pickled weights (.bin), which may run code" if pickled else f"no {WEIGHTS}"
        raise ConfigError(f"{folder} holds {why}; save it as safetensors")
    where: dict[str, Any] = {}
    for name in files:
        if Path(name).name != name:
            raise ConfigError(f"{folder / INDEX} names a file outside the folder: {name!s:.80}")
        try:
            reading.stat_regular(folder / name)  # the library would wait for the writer of a pipe
            opened = stack.enter_context(safe_open(folder / name, framework="pt", device="cpu"))
            where |= dict.fromkeys(opened.keys(), opened)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{folder / name} cannot be read ({error}); copy the folder again") from None
    return where
