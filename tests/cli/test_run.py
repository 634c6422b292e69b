"""`isthmus run` with a prompt: the answer on stdout, everything else on stderr."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from cli.terminal import COMMAND, TIMEOUT_S, Terminal, environment, isthmus


def test_only_the_answer_goes_to_stdout(alphabet_model: Path) -> None:
    done = isthmus("run", alphabet_model, "hello", "--temperature", "0")
    assert done.returncode == 0
    assert done.stdout == "xyz\n"
    loaded, closing = done.stderr.strip().splitlines()
    assert "alphabet: llama" in loaded
    assert "context 4096 tokens" in loaded
    assert "prompt tokens at" in closing
    assert "3 tokens at" in closing


def test_raw_continues_the_text(alphabet_model: Path) -> None:
    done = isthmus("run", alphabet_model, "up to r", "--raw", "--temperature", "0")
    assert done.stdout == "stuvwxyz\n"


@pytest.mark.parametrize("prompt", [["-"], []])
def test_the_prompt_may_come_from_a_pipe(alphabet_model: Path, prompt: list[str]) -> None:
    done = isthmus("run", alphabet_model, *prompt, "--raw", "--temperature", "0", stdin="from u")
    assert done.stdout == "vwxyz\n"


def test_max_tokens_stop_and_context_end_an_endless_answer(alphabet_model: Path) -> None:
    def answer(*options: str) -> str:
        return isthmus("run", alphabet_model, "A", "--raw", "--temperature", "0", *options).stdout

    assert answer("--max-tokens", "4") == "BCDE\n"
    assert answer("--stop", "GH") == "BCDEF\n"
    assert len(answer("--ctx", "64")) == 63 + 1  # the prompt's one token, 63 more, and the line's end


def test_a_seed_repeats_an_answer(alphabet_model: Path) -> None:
    options = ["--raw", "--temperature", "5", "--top-p", "1", "--max-tokens", "20"]
    first, again, other = (
        isthmus("run", alphabet_model, "A", *options, "--seed", seed).stdout for seed in ("1", "1", "2")
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("isa", ["scalar", "avx2"])
def test_an_instruction_set_can_be_forced(alphabet_model: Path, isa: str) -> None:
    done = isthmus("run", alphabet_model, "hi", "--temperature", "0", ISTHMUS_ISA=isa)
    assert done.stdout == "xyz\n"
    assert f", {isa}," in done.stderr


def test_the_bar_is_drawn_on_a_terminal_only(alphabet_model: Path) -> None:
    terminal = Terminal.start("run", alphabet_model, "hi", "--temperature", "0")
    try:
        terminal.expect("loading")
        terminal.expect("xyz")
        assert terminal.wait() == 0
    finally:
        terminal.close()
    assert "loading" not in isthmus("run", alphabet_model, "hi").stderr


def test_ctrl_c_ends_a_single_answer_with_130_and_keeps_what_was_written(alphabet_model: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", str(alphabet_model), "A", "--raw", "--temperature", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout
    assert process.stdout.read(3) == b"BCD"
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert rest.endswith(b"\n")
    assert b"Traceback" not in errors


def test_a_reader_that_has_gone_is_no_fault(alphabet_model: Path) -> None:
    """`isthmus run ... | head -c 3`"""
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [*COMMAND, "run", str(alphabet_model), "A", "--raw", "--temperature", "0"],
        stdout=write_end,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    os.close(write_end)
    os.read(read_end, 3)
    os.close(read_end)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert b"Traceback" not in errors
    assert b"Exception" not in errors
