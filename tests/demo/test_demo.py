"""The demo model end to end: the same text on every instruction set, the same bits over a split."""

from __future__ import annotations

from cli.terminal import isthmus
from isthmus import native

QUESTION = "Why is the sky blue?"
# Four driver settings, one text; AMX has the vectors of avx512 and differs from it in the GEMM driver only.
PLAIN_ISAS = [name for name in native.isa_names() if name != "amx"]


def answer(isa: str) -> str:
    command = ["run", "demo", QUESTION, "--temperature", "0", "--max-tokens", "40", "--exact-batching"]
    done = isthmus(*command, ISTHMUS_ISA=isa)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_same_text_on_every_instruction_set() -> None:
    answers = {isa: answer(isa) for isa in PLAIN_ISAS}
    assert "atmosphere" in answers["scalar"]
    assert set(answers.values()) == {answers["scalar"]}
