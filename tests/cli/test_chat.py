"""`isthmus run` without a prompt: a chat in a terminal."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.terminal import Terminal

CTRL_C, CTRL_D = "\x03", "\x04"


@pytest.fixture
def chat(alphabet_model: Path) -> Iterator[Terminal]:
    terminal = Terminal.start("run", alphabet_model, "--temperature", "0", "--ctx", "2048")
    terminal.expect(">>> ")
    yield terminal
    terminal.close()


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(chat: Terminal) -> None:
    chat.type("an endless one\n")
    chat.expect("BCDEF")
    chat.type(CTRL_C)
    chat.expect("(stopped)")
    chat.expect(">>> ")
    chat.type("short\n")
    chat.expect("xyz")
    chat.expect(">>> ")
    chat.type("/bye\n")
    assert chat.wait() == 0


def test_ctrl_c_at_the_prompt_says_how_to_leave_and_ctrl_d_leaves(chat: Terminal) -> None:
    chat.press(CTRL_C, until="leaves")
    chat.expect(">>> ")
    chat.type(CTRL_D)
    assert chat.wait() == 0


def test_the_conversation_is_remembered_until_it_is_cleared(chat: Terminal) -> None:
    def prompt_tokens() -> int:
        chat.type("hello\n")
        chat.expect("xyz")
        chat.expect(">>> ")
        chat.type("/stats\n")
        chat.expect("/stats")
        count = chat.expect(" prompt tokens")
        chat.expect(">>> ")
        return int(count.split()[-1])

    first, second = prompt_tokens(), prompt_tokens()
    assert second > first
    chat.type("/clear\n")
    chat.expect("forgotten")
    chat.expect(">>> ")
    assert prompt_tokens() == first


def test_commands(chat: Terminal) -> None:
    for typed, shown in [
        ("/help", "Ctrl-C stops an answer"),
        ("/set max_tokens 2", "max_tokens = 2"),
        ("/set temperature hot", "error: temperature must be a number, got 'hot'"),
        ("/set top_p 7", "error: top_p must be a number above 0 up to 1, got 7.0"),
        ("/set colour red", "error: /set NAME VALUE"),
        ("/set max_tokens none", "max_tokens = None"),
        ("/system", "(no system message)"),
        ("/system Be brief.", "a new conversation begins"),
        ("/fly", "error: unknown command /fly"),
        ("/usr/bin is a folder", "a message may begin with a blank"),
        (" /usr/bin is a folder", "xyz"),
        ("/?", "Ctrl-C stops an answer"),
        ("", ">>> "),
    ]:
        chat.type(typed + "\n")
        chat.expect(shown)
    chat.type("/system\n")
    chat.expect("Be brief.")


def test_a_message_of_several_lines(chat: Terminal) -> None:
    chat.type('"""one\n')
    chat.expect("... ")
    chat.type('endless"""\n')
    chat.expect("BCD")
    chat.type(CTRL_C)
    chat.expect(">>> ")
    chat.type('"""/usr/bin\n')
    chat.expect("... ")
    chat.type('is no command"""\n')
    chat.expect("xyz")
    chat.expect(">>> ")
    chat.type("/exit\n")
    assert chat.wait() == 0


def test_a_conversation_that_outgrows_the_context_is_an_error_and_no_end(chat: Terminal) -> None:
    chat.type('"""' + "x" * 1500 + "\n")
    chat.expect("... ")
    chat.type("x" * 1500 + '"""\n')
    chat.expect("a context of 2048 takes 2047")
    chat.expect(">>> ")
    chat.type("short\n")
    chat.expect("xyz")
