"""As in a loaded engine: torch has one thread, since the native pool has the cores."""

import pytest
import torch

from isthmus.tokenizer import Tokenizer
from isthmus.weights.demo import carried_file
from isthmus.weights.source import open_weights

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    """The demo model's byte-level BPE."""
    source = open_weights(carried_file())
    tokenizer = Tokenizer.from_gguf(source.metadata)
    source.close()
    return tokenizer
