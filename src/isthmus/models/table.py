"""Which architecture of a GGUF file is which class. Imported on use: a model pays for no other."""

from __future__ import annotations

import importlib
from typing import Any

from isthmus.errors import UnsupportedError

MODELS = {
    "llama": "isthmus.models.llama:Llama",
    "qwen2": "isthmus.models.qwen:Qwen",
    "qwen2moe": "isthmus.models.qwen:Qwen",
    "qwen3": "isthmus.models.qwen:Qwen",
    "qwen3moe": "isthmus.models.qwen:Qwen",
    "deepseek2": "isthmus.models.deepseek2:DeepSeek2",
    "glm4moe": "isthmus.models.glm4moe:Glm4Moe",
    "minimax-m2": "isthmus.models.glm4moe:Glm4Moe",
    "dots1": "isthmus.models.glm4moe:Glm4Moe",
    "ernie4_5-moe": "isthmus.models.glm4moe:Glm4Moe",
    "gpt-oss": "isthmus.models.gpt_oss:GptOss",
}


def check_architecture(architecture: object) -> None:
    """UnsupportedError unless there is a class for it, which is not imported."""
    if architecture not in MODELS:
        raise UnsupportedError(
            f"architecture {architecture!r} is not supported; supported: {', '.join(sorted(MODELS))}"
        )


def model_class(architecture: str) -> Any:
    """The class: called with (build, metadata) it makes a models.base.Model."""
    check_architecture(architecture)
    module, name = MODELS[architecture].split(":")
    return getattr(importlib.import_module(module), name)
