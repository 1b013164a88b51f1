"""The model and its inner optimiser; `presets` names the sizes that come with Isthmus.

May import config, layout and data.
"""

from isthmus.config import PRESETS as presets
from isthmus.config import ModelConfig
from isthmus.model.llama import Llama

__all__ = ["Llama", "ModelConfig", "presets"]
