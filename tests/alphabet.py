"""A model whose answers can be read off without running it.

The next token after a byte is that byte's successor; after Z comes A, and z ends the answer. So a prompt
that ends in "x" is answered "yz", and one that ends in "A" with the alphabet until something stops it. It is
a real GGUF file of architecture llama: attention and FFN are zero, the head's row of each token looks for its
predecessor in the embedding.
"""

from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = 256 + 1 + len(CONTROL)  # bytes, one merge (BPE needs one), control tokens
HIDDEN = 320
CONTEXT = 4096

# The turn of the assistant begins with "w": the answer is "xyz". Asked for something endless, with "A".
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ 'A' if 'endless' in messages[-1].content else 'w' }}{% endif %}"
)


def successor(token: int) -> int:
    if token == ord("Z"):
        return ord("A")
    if token == ord("z"):
        return VOCAB - 1  # <|im_end|>
    return token + 1 if token < 255 else 0


def byte_characters() -> list[str]:
    """GPT-2's visible character for each byte: itself where it is printable, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


def write_alphabet_model(
    path: Path, *, template: str | None = TEMPLATE, context: int = CONTEXT, hole: int = 0
) -> Path:
    """Writes the model; without `template` it is a base model. `hole`: bytes of one more, sparse tensor."""
    w = gguf.GGUFWriter(path, "llama")
    w.add_block_count(1)
    w.add_context_length(context)
    w.add_embedding_length(HIDDEN)
    w.add_feed_forward_length(32)
    w.add_head_count(2)
    w.add_head_count_kv(1)
    w.add_key_length(32)
    w.add_value_length(32)
    w.add_rope_dimension_count(32)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list([*byte_characters(), "Ġt", *CONTROL])
    w.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL] * len(CONTROL))
    w.add_token_merges(["Ġ t"])
    w.add_eos_token_id(VOCAB - 1)
    w.add_add_bos_token(False)
    if template is not None:
        w.add_chat_template(template)
    for name, tensor in _tensors().items():
        w.add_tensor(name, tensor)
    if hole:
        w.add_tensor_info("blk.0.hole.weight", (hole // 4096, 1024), np.dtype(np.float32), hole)
        w.tensors[-1]["blk.0.hole.weight"].tensor = Hole(hole)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


class Hole:
    """Stands in for an array where gguf-py writes one: a sparse stretch of file.

    A page in the middle is written, since a tensor that is all hole is taken for an interrupted download.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def tofile(self, file: BinaryIO) -> None:
        begin = file.tell()
        file.seek(begin + self.nbytes // 2)
        file.write(bytes(4096))
        file.seek(begin + self.nbytes - 1)
        file.write(b"\0")


def _tensors() -> dict[str, np.ndarray]:
    embedding = np.eye(VOCAB, HIDDEN, dtype=np.float32)
    head = np.zeros((VOCAB, HIDDEN), np.float32)
    for token in range(256):
        head[successor(token), token] = 1.0
    head[ord("t"), 256] = 1.0
    zeros = {
        "attn_q": (64, HIDDEN),
        "attn_k": (32, HIDDEN),
        "attn_v": (32, HIDDEN),
        "attn_output": (HIDDEN, 64),
        "ffn_gate": (32, HIDDEN),
        "ffn_up": (32, HIDDEN),
        "ffn_down": (HIDDEN, 32),
    }
    return {
        "token_embd.weight": embedding,
        "output.weight": head,
        "output_norm.weight": np.ones(HIDDEN, np.float32),
        "blk.0.attn_norm.weight": np.ones(HIDDEN, np.float32),
        "blk.0.ffn_norm.weight": np.ones(HIDDEN, np.float32),
        **{f"blk.0.{name}.weight": np.zeros(shape, np.float32) for name, shape in zeros.items()},
    }
