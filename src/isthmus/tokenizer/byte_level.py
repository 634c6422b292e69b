"""GPT-2's byte-level alphabet: every byte as one printable character, so that BPE works on text.

The 188 bytes that Latin-1 prints stand for themselves; the other 68 are numbered from U+0100 in byte order.
"""

from __future__ import annotations

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in set(_PRINTABLE)]

CHARACTER = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + i) for i, byte in enumerate(_OTHERS)
}
_BYTE = {ord(character): byte for byte, character in CHARACTER.items()}

# Bytes that are no UTF-8, or only of control characters and of planes without assigned characters.
# Vocabularies of published models (SmolLM2, Falcon) lack some of them: nothing in their training text needed
# them.
RARE = frozenset([*range(0x09), 0x0B, 0x0C, *range(0x0E, 0x20), 0x7F, 0xC0, 0xC1, *range(0xF1, 0x100)])


def to_bytes(token: str) -> bytes:
    """The bytes a byte-level token stands for; a token outside the alphabet is its own UTF-8."""
    try:
        return bytes([_BYTE[ord(character)] for character in token])
    except KeyError:
        return token.encode("utf-8", "replace")
