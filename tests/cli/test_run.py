"""`isthmus run` with a prompt: the answer on stdout, everything else on stderr."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from cli.conftest import Here
from cli.terminal import COMMAND, TIMEOUT_S, Terminal, environment, isthmus
from isthmus import native


def test_only_the_answer_goes_to_stdout(alphabet_model: Path) -> None:
    done = isthmus("run", alphabet_model, "hello", "--temperature", "0")
    assert done.returncode == 0
    assert done.stdout == "xyz\n"
    assert "loading" not in done.stderr  # the bar is for terminals
    loaded, closing = done.stderr.strip().splitlines()
    assert "alphabet: llama" in loaded
    assert "context 4096 tokens" in loaded
    assert "prompt tokens at" in closing
    assert "3 tokens at" in closing


def test_more_threads_than_cpus_on_pretended_nodes(
    alphabet_model: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISTHMUS_FAKE_NUMA", "2")
    done = here("run", alphabet_model, "hello", "--temperature", "0", "--threads", "64")
    assert (done.returncode, done.stdout) == (0, "xyz\n")
    assert "64 threads on 2 NUMA nodes" in done.stderr


def test_raw_continues_the_text(alphabet_model: Path, here: Here) -> None:
    assert here("run", alphabet_model, "up to r", "--raw", "--temperature", "0").stdout == "stuvwxyz\n"


@pytest.mark.parametrize("prompt", [["-"], []])
def test_the_prompt_may_come_from_a_pipe(alphabet_model: Path, here: Here, prompt: list[str]) -> None:
    done = here("run", alphabet_model, *prompt, "--raw", "--temperature", "0", stdin="from u")
    assert (done.returncode, done.stdout) == (0, "vwxyz\n")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["up", "to", "q"], "rstuvwxyz\n"),
        (["first", "-"], "vwxyz\n"),
        (["-", "then", "w"], "xyz\n"),
        (["first", "-", "then", "w"], "xyz\n"),
    ],
)
def test_a_prompt_of_several_words_has_standard_input_where_the_dash_is(
    alphabet_model: Path, here: Here, words: list[str], answer: str
) -> None:
    done = here("run", alphabet_model, *words, "--raw", "--temperature", "0", stdin="from u")
    assert (done.returncode, done.stdout) == (0, answer)


def test_a_dash_at_a_terminal_says_what_it_waits_for(alphabet_model: Path) -> None:
    terminal = Terminal.start("run", alphabet_model, "5", "-", "3", "--raw", "--temperature", "0")
    terminal.expect("- stands for standard input: type it, and Ctrl-D at its end")
    terminal.type("\x03")
    assert terminal.wait() == 130
    terminal.close()


def test_standard_input_that_is_not_read_is_said(alphabet_model: Path) -> None:
    done = isthmus("run", alphabet_model, "hello", "--temperature", "0", stdin="a text")
    assert done.stdout == "xyz\n"
    assert "standard input is not read: write - where its text belongs" in done.stderr
    assert "standard input" not in isthmus("run", alphabet_model, "hello", "--max-tokens", "1").stderr


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (["--max-tokens", "4"], "BCDE\n"),
        (["--stop", "GH"], "BCDEF\n"),
        (["--stop", "GH", "--stop", "E"], "BCD\n"),
        (["--ctx", "8"], "BCDEFGH\n"),  # the prompt's one token and 7 more
    ],
)
def test_what_ends_an_endless_answer(
    alphabet_model: Path, here: Here, options: list[str], answer: str
) -> None:
    assert here("run", alphabet_model, "A", "--raw", "--temperature", "0", *options).stdout == answer


def test_a_seed_repeats_an_answer(alphabet_model: Path, here: Here) -> None:
    options = ["--raw", "--temperature", "5", "--top-p", "1", "--max-tokens", "20"]
    first, again, other = (
        here("run", alphabet_model, "A", *options, "--seed", seed).stdout for seed in ("1", "1", "2")
    )
    assert first == again
    assert first != other


def test_the_environment_can_force_an_instruction_set(
    alphabet_model: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISTHMUS_ISA", "scalar")
    done = here("run", alphabet_model, "hi", "--temperature", "0")
    assert done.stdout == "xyz\n"
    assert ", scalar," in done.stderr
    assert ", scalar," not in here("run", alphabet_model, "hi", "--isa", native.isa_names()[-1]).stderr


def test_the_bar_is_drawn_on_a_terminal(alphabet_model: Path) -> None:
    terminal = Terminal.start("run", alphabet_model, "hi", "--temperature", "0", TERM="xterm")
    try:
        terminal.expect("loading")
        terminal.expect("xyz")
        assert terminal.wait() == 0
    finally:
        terminal.close()


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
