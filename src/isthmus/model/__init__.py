"""The model and its inner optimiser; `presets` names the sizes that come with Isthmus."""

from isthmus.config import PRESETS as presets
from isthmus.config import ModelConfig
from isthmus.model.llama import Llama

__all__ = ["Llama", "ModelConfig", "presets"]
