"""How often each expert was chosen, as counted over some text: what says which experts are worth VRAM.

    {"model": "qwen3-30b-a3b", "tokens": 10000, "counts": {"0": [12, 907, ...], "1": [...]}}

counts: by layer one number per expert, how many of the tokens chose it. Layers without experts are left out.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from isthmus.errors import UsageError

MAX_COUNT = 1 << 60


@dataclass(frozen=True)
class Profile:
    model: str
    tokens: int
    counts: dict[int, tuple[int, ...]]  # layer -> of each expert

    @classmethod
    def read(cls, path: Path) -> Profile:
        try:
            return cls.from_json(path.read_text(), source=str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path}: the profile cannot be read: {error}") from None

    @classmethod
    def from_json(cls, text: str, *, source: str = "the profile") -> Profile:
        """Raises UsageError naming what is not as above. That it fits the model is checked by the plan."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise UsageError(f"{source} is no JSON: {error}") from None
        if not isinstance(data, dict) or set(data) != {"model", "tokens", "counts"}:
            raise UsageError(f"{source}: a profile is an object of model, tokens and counts")
        if not isinstance(data["model"], str) or not _is_count(data["tokens"]):
            raise UsageError(f"{source}: model must be a text and tokens a number")
        if not isinstance(data["counts"], dict):
            raise UsageError(f"{source}: counts must be an object of layers")
        counts = {}
        for layer, numbers in data["counts"].items():
            if not (layer.isascii() and layer.isdigit() and len(layer) <= 5):
                raise UsageError(f"{source}: counts has the key {layer!r}, needed is a layer's number")
            if not isinstance(numbers, list) or not numbers or not all(map(_is_count, numbers)):
                raise UsageError(f"{source}: counts of layer {layer} must be a list of numbers from 0 on")
            counts[int(layer)] = tuple(numbers)
        return cls(data["model"], data["tokens"], counts)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT
