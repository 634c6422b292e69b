"""What was typed in one chat is there in the next: arrow-up in a real terminal, and the file behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.terminal import Terminal, isthmus
from isthmus.cli.history import History
from isthmus.config import DEFAULT_HISTORY_LINES, history_lines
from isthmus.errors import UsageError

UP = "\x1b[A"


def chat(model: Path, *typed: str, **environment: str) -> str:
    """Types each and waits for the next prompt; what the terminal showed behind the first."""
    terminal = Terminal.start("run", model, "--temperature", "0", "--ctx", "2048", **environment)
    try:
        terminal.expect(">>> ")
        shown = ""
        for keys in typed:
            terminal.type(keys + "\n")
            shown += terminal.expect(">>> ")
        terminal.type("/bye\n")
        assert terminal.wait() == 0
        return shown
    finally:
        terminal.close()


def test_arrow_up_brings_back_the_lines_of_the_chat_before(alphabet_model: Path, tmp_path: Path) -> None:
    environment = {"ISTHMUS_CACHE": str(tmp_path), "ISTHMUS_HISTORY": "100"}
    chat(alphabet_model, "näive question", "/set top_k 7", **environment)
    file = tmp_path / "chat_history"
    assert file.read_text("utf-8").split("\n") == ["näive question", "/set top_k 7", "/bye", ""]
    assert file.stat().st_mode & 0o777 == 0o600
    assert "top_k = 7" in chat(alphabet_model, UP + UP, **environment)  # behind /bye


def test_none_is_kept_where_none_is_asked_for_or_nobody_types(alphabet_model: Path, tmp_path: Path) -> None:
    chat(alphabet_model, "hello", ISTHMUS_CACHE=str(tmp_path), ISTHMUS_HISTORY="0")
    piped = isthmus("chat", alphabet_model, stdin="hello\n", ISTHMUS_CACHE=str(tmp_path), ISTHMUS_HISTORY="5")
    assert piped.returncode == 0, piped.stderr
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_cannot_be_written_is_no_reason_not_to_chat(
    alphabet_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    environment = {"ISTHMUS_CACHE": str(tmp_path / "file"), "ISTHMUS_HISTORY": "100"}
    assert "xyz" in chat(alphabet_model, "hello", **environment)


def test_a_number_of_lines_that_cannot_be_meant_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    done = isthmus("chat", tmp_path / "no.gguf", ISTHMUS_HISTORY="many")
    assert done.returncode == 2
    assert "ISTHMUS_HISTORY must be a whole number from 0 to 100000, got 'many'" in done.stderr


def test_the_environment_says_how_many() -> None:
    assert history_lines({}) == history_lines({"ISTHMUS_HISTORY": ""}) == DEFAULT_HISTORY_LINES
    assert history_lines({"ISTHMUS_HISTORY": "0"}) == 0
    with pytest.raises(UsageError, match="ISTHMUS_HISTORY"):
        history_lines({"ISTHMUS_HISTORY": "-1"})


def test_the_last_lines_count_and_the_file_is_cut_to_them(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_text("one\ntwo\n\nthree\n")
    path.chmod(0o644)
    history = History(path, 2)
    assert history.lines == ["two", "three"]
    assert path.read_text() == "two\nthree\n"
    assert path.stat().st_mode & 0o777 == 0o600
    history.keep("four")
    assert History(path, 2).lines == ["three", "four"]


def test_two_chats_at_once_both_keep_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "history"
    first, second = History(path, 10), History(path, 10)
    first.keep("a")
    second.keep("b")
    first.keep("c")
    assert History(path, 10).lines == ["a", "b", "c"]


@pytest.mark.parametrize("line", ["", "  ", "again", "nul\0"])
def test_what_nobody_wants_back(tmp_path: Path, line: str) -> None:
    history = History(tmp_path / "history", 10)
    history.keep("again")
    history.keep(line)
    assert History(tmp_path / "history", 10).lines == ["again"]


def test_bytes_that_are_no_text_come_back_as_they_were(tmp_path: Path) -> None:
    line = b"caf\xe9 \xe2\x80\xa8 \x0b".decode("utf-8", "surrogateescape")
    History(tmp_path / "history", 10).keep(line)
    assert History(tmp_path / "history", 10).lines == [line]
