"""Write a folder for `model.start`: config.json and weights with Hugging Face's names, and no tokenizer.

`export` writes more: it measures the model and adds its corpus's tokenizer. Further training needs neither.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from isthmus.config import ModelConfig
from isthmus.errors import ConfigError
from isthmus.export.hf import as_json, new_folder
from isthmus.files import replace_file
from isthmus.model.checkpoint import save_tensors
from isthmus.model.hf import CONFIG, WEIGHTS, hf_config, hf_name


def write_start(folder: Path, model: ModelConfig, params: Mapping[str, Tensor]) -> None:
    if model.boundary_tables:
        raise ConfigError(
            "this model has tables at its boundaries, which such a folder cannot hold; give --to a file "
            "that ends in .safetensors"
        )
    config = hf_config(model, 0, "fp32")
    del config["bos_token_id"], config["eos_token_id"]  # the corpus defines them
    tensors = {hf_name(name): tensor for name, tensor in params.items()}
    with new_folder(folder, tensors, "the folder") as fresh:
        save_tensors(fresh / WEIGHTS, tensors)
        replace_file(fresh / CONFIG, as_json(config))
