"""Read and write Hugging Face folders of LLaMA, Mistral, Qwen 2 and Qwen 3: names, config, weights.

Their models and ours compute the same function. Both pair entry i of a head with entry i + head_dim / 2 in
RoPE, so no matrix is permuted. Nothing is unpickled: weights come only from safetensors.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from isthmus import reading
from isthmus.config import ModelConfig, toml_line
from isthmus.config.model import RopeScaling
from isthmus.errors import ConfigError

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
MAX_JSON_BYTES = 16 << 20  # an index of many thousand tensors has 2 MB
PIPELINED = "isthmus_pipelined"  # model_type of a folder with boundaries
CLASSES = {  # by model_type; a Mistral without its window is a LLaMA
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

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
NUMBERS = ("norm_eps", "init_std")  # the others are whole
MATRICES = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
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
    """Translate `layers.7.attention.wq.weight` to `model.layers.7.self_attn.q_proj.weight`."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, number, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")  # kind: weight or bias
    return f"model.layers.{number}.{MATRICES[module]}.{kind}"


def family(model: ModelConfig) -> str:
    """Return the transformers model_type that computes this model."""
    return "qwen2" if model.attention_bias else "qwen3" if model.qk_norm else "llama"


def hf_config(model: ModelConfig, end_id: int, dtype: str) -> dict[str, Any]:
    """Return config.json of a plain model. One token ends a document and precedes the next: bos is eos."""
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    rope: dict[str, Any] = {"rope_type": "default"}
    if model.rope_scaling.type != "default":
        rope = {"rope_type": model.rope_scaling.type} | asdict(model.rope_scaling)
        del rope["type"]
    return {
        "architectures": [CLASSES[family(model)]],
        "model_type": family(model),
        **{key: getattr(model, field) for key, field in FIELDS.items()},
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "attention_bias": model.attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": model.tie_embeddings,
        "use_sliding_window": False,
        "sliding_window": None,
        # transformers 4 reads the first two and the first of each pair, version 5 the others.
        "rope_theta": model.rope_theta,
        "rope_scaling": rope if len(rope) > 1 else None,
        "rope_parameters": rope | {"rope_theta": model.rope_theta},
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
        raise ConfigError(f"{path.parent} holds no {path.name}; give a Hugging Face folder") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a JSON object; give a Hugging Face folder")
    return found


def read_config(folder: Path) -> ModelConfig:
    """Return the model of a Hugging Face folder; ConfigError if ours cannot compute it."""
    config = read_json(folder / CONFIG)
    kind = config.get("model_type")
    kind = config.get("family", "llama") if kind == PIPELINED else kind
    if kind not in CLASSES:
        known = ", ".join(f'"{name}"' for name in CLASSES)
        raise ConfigError(f'{folder} holds a model of type "{kind!s:.40}"; Isthmus trains {known} models')
    try:
        sizes: dict[str, Any] = {
            field: int(config[key]) for key, field in FIELDS.items() if field not in NUMBERS
        }
        heads, width = sizes["heads"], sizes["width"]
        # transformers has different defaults for these two, so they must be stated.
        kv_heads = int(
            (config.get if kind == "llama" else config.__getitem__)("num_key_value_heads") or heads
        )
        head_dim = int((config.__getitem__ if kind == "qwen3" else config.get)("head_dim") or width // heads)
        rope = _rope(config)
        _refuse(folder, config, kind, rope)
        return ModelConfig(
            **sizes,
            kv_heads=0 if kv_heads == heads else kv_heads,
            head_dim=0 if head_dim == width // heads else head_dim,
            tie_embeddings=bool(config.get("tie_word_embeddings")) and not _has_head(folder),
            qk_norm=kind == "qwen3",
            attention_bias=kind == "qwen2",
            rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
            rope_scaling=_scaling(rope),
            norm_eps=float(config["rms_norm_eps"]),
            init_std=float(config.get("initializer_range", 0.02)),
        )
    except KeyError as error:
        raise ConfigError(f"{folder / CONFIG} does not state {error.args[0]}; is the folder whole?") from None
    except (TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{folder / CONFIG} holds values of the wrong kind ({error})") from None


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE scaling, in either spelling; transformers prefers the older one."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return rope | {"rope_type": rope.get("rope_type", rope.get("type", "default"))}


def _scaling(rope: Mapping[str, Any]) -> RopeScaling:
    if rope["rope_type"] == "default":
        return RopeScaling()
    factors = {name: float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    original = int(rope["original_max_position_embeddings"])
    return RopeScaling(type=rope["rope_type"], original_max_position_embeddings=original, **factors)


def _window(config: Mapping[str, Any], kind: str) -> int | None:
    """Return the sliding window, if it has an effect. Qwen states one next to the switch that enables it."""
    types = config.get("layer_types") or ["sliding_attention"]
    if kind == "llama" or (kind != "mistral" and not config.get("use_sliding_window")):
        return None
    window = config["sliding_window"] if "sliding_attention" in types else None
    return None if window is None or window >= config["max_position_embeddings"] else window


def _refuse(folder: Path, config: Mapping[str, Any], kind: str, rope: Mapping[str, Any]) -> None:
    """Refuse features that a model of this type may have and ours lacks."""
    nested = any(isinstance(value, dict) for value in rope.values())  # different angles in some layers
    turned = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    wrong = {
        "hidden_act": (config.get("hidden_act", "silu"), ("silu",)),
        "rope_type": ("one for each kind of layer" if nested else rope["rope_type"], ("default", "llama3")),
        "partial_rotary_factor": (turned or 1.0, (1.0,)),
        # Qwen 2 always has it on q, k and v, whatever the file says; in the others it is also on o.
        "attention_bias": (kind != "qwen2" and bool(config.get("attention_bias")), (False,)),
        "mlp_bias": (bool(config.get("mlp_bias")), (False,)),
        "sliding_window": (_window(config, kind), (None,)),
        "quantization_config": (config.get("quantization_config"), (None,)),
    }
    for key, (found, ours) in wrong.items():
        if found not in ours:
            only = " and ".join(str(each) for each in ours)
            raise ConfigError(f"{folder / CONFIG} has {key} = {found!s:.60}; Isthmus has only {only}")


def check_same(folder: Path, there: ModelConfig, model: ModelConfig) -> None:
    """Compare the recipe's model with the folder's, dimension by dimension. Its context may be shorter, and
    its head may have its own table, which begins as a copy."""
    found, wanted = _facts(there), _facts(model)
    differ = [key for key in wanted if found[key] != wanted[key]]
    if model.context > there.context:
        differ.append("context")
    if model.tie_embeddings and not there.tie_embeddings:
        differ.append("tie_embeddings")
    if differ:
        found |= {"context": there.context, "tie_embeddings": False}
        wanted |= {"context": model.context, "tie_embeddings": True}
        said = ", ".join(f"{key} is {found[key]} there and {wanted[key]} here" for key in differ)
        cure = " ".join(toml_line(f"model.{key}", found[key]).replace(" = ", "=") for key in differ)
        raise ConfigError(f"{folder} is another model than the recipe's: {said}; set {cure}")


def _facts(model: ModelConfig) -> dict[str, Any]:
    """Return what two models must have in common, by key in [model]."""
    names = (
        "vocab",
        "width",
        "layers",
        "heads",
        "ffn",
        "qk_norm",
        "attention_bias",
        "rope_theta",
        "norm_eps",
    )
    facts = {name: getattr(model, name) for name in names} | {"kv_heads": model.num_kv_heads}
    facts["head_dim"] = 0 if model.head_size == model.width // model.heads else model.head_dim
    scaling = asdict(model.rope_scaling if model.rope_scaling.type != "default" else RopeScaling())
    return facts | {f"rope_scaling.{name}": value for name, value in scaling.items()}


def read_params(folder: Path, model: ModelConfig) -> dict[str, Tensor]:
    """Read the folder's weights in float32 under our names, and check every shape."""
    wanted = model.shapes()
    params: dict[str, Tensor] = {}
    with ExitStack() as stack:
        where = _tensors(folder, stack)
        tied = OUTSIDE["output.weight"] not in where and read_json(folder / CONFIG).get("tie_word_embeddings")
        for name, shape in wanted.items():
            # A tied head begins as a copy of the embedding, and then trains separately.
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


def _has_head(folder: Path) -> bool:
    """Return whether there is a head. It may exist despite a stated tie, which transformers then ignores."""
    with ExitStack() as stack:
        return OUTSIDE["output.weight"] in _tensors(folder, stack)


def read_extra(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Read tensors besides the model's own whose names start with `prefix`."""
    with ExitStack() as stack:
        where = _tensors(folder, stack)
        return {name: where[name].get_tensor(name) for name in where if name.startswith(prefix)}


def _tensors(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Map each tensor to its open file: one file for all, or the several of an index."""
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
            reading.stat_regular(folder / name)  # the library would wait for a pipe's writer
            opened = stack.enter_context(safe_open(folder / name, framework="pt", device="cpu"))
            where |= dict.fromkeys(opened.keys(), opened)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{folder / name} cannot be read ({error}); copy the folder again") from None
    return where
