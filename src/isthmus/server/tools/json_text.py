"""A JSON value recognised character by character: the moment it goes wrong is known, and so is its end.

So the arguments of a call can be sent on as they arrive, and never more of them than is JSON.
"""

from __future__ import annotations

from typing import Literal

State = Literal["open", "done", "wrong"]

# As deep as any argument is in earnest; a client's own parser may refuse more.
MAX_DEPTH = 128

_SPACE = " \t\r\n"
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_HEX = frozenset("0123456789abcdefABCDEF")
_DIGITS = frozenset("0123456789")

# A number's grammar as states: what may follow each, and in which it may end.
_NUMBER = {
    "-": {"0": "0", **dict.fromkeys("123456789", "int")},
    "0": {".": ".", "e": "e", "E": "e"},
    "int": {**dict.fromkeys("0123456789", "int"), ".": ".", "e": "e", "E": "e"},
    ".": dict.fromkeys("0123456789", "frac"),
    "frac": {**dict.fromkeys("0123456789", "frac"), "e": "e", "E": "e"},
    "e": {**dict.fromkeys("0123456789", "exp"), "+": "sign", "-": "sign"},
    "sign": dict.fromkeys("0123456789", "exp"),
    "exp": dict.fromkeys("0123456789", "exp"),
}
_NUMBER_MAY_END = frozenset({"0", "int", "frac", "exp"})


class ObjectText:
    """One JSON object. `feed` each character; what it gives is the same value as strict JSON.

    A control character inside a string, which models write and JSON forbids, comes out escaped.
    """

    def __init__(self) -> None:
        self.state: State = "open"
        self._open: list[str] = []  # closing brackets that are due
        self._next = "{"  # what is expected: see _structure
        self._word = ""  # what is left of true, false, null
        self._number = ""  # a state of _NUMBER, or "" outside numbers
        self._string = ""  # "text", "escape" or the hex digits left ("u4"...), or "" outside strings

    @property
    def is_open(self) -> bool:
        return self.state == "open"

    def feed(self, character: str) -> str:
        """The text to send on: "" once it is wrong. Not to be called after the end."""
        if self._string:
            return self._in_string(character)
        if self._word:
            if character != self._word[0]:
                return self._fail()
            self._word = self._word[1:]
            return character
        if self._number:
            following = _NUMBER[self._number].get(character)
            if following is not None:
                self._number = following
                return character
            if self._number not in _NUMBER_MAY_END:
                return self._fail()
            self._number = ""
        if character in _SPACE:
            return character
        return character if self._structure(character) else self._fail()

    def _fail(self) -> str:
        self.state = "wrong"
        return ""

    def _in_string(self, character: str) -> str:
        if self._string == "escape":
            if character == "u":
                self._string = "u4"
            elif character in '"\\/bfnrt':
                self._string = "text"
            else:
                return self._fail()
        elif self._string != "text":
            if character not in _HEX:
                return self._fail()
            left = int(self._string[1]) - 1
            self._string = f"u{left}" if left else "text"
        elif character == '"':
            self._string = ""
        elif character == "\\":
            self._string = "escape"
        elif character < " ":
            return f"\\u{ord(character):04x}"
        return character

    def _structure(self, character: str) -> bool:
        """A character outside strings, words and numbers; False if it cannot stand here."""
        expected = self._next
        if character == "}" and self._open[-1:] == ["}"] and expected in ("key or }", ", or end"):
            return self._close()
        if character == "]" and self._open[-1:] == ["]"] and expected in ("value or ]", ", or end"):
            return self._close()
        if expected == "{":
            return character == "{" and self._push("}", "key or }")
        if expected in ("key or }", "key"):
            self._string, self._next = "text", ":"
            return character == '"'
        if expected == ":":
            self._next = "value"
            return character == ":"
        if expected == ", or end":
            self._next = "key" if self._open[-1] == "}" else "value"
            return character == ","
        return self._value(character)

    def _value(self, character: str) -> bool:
        self._next = ", or end"
        if character == "{":
            return self._push("}", "key or }")
        if character == "[":
            return self._push("]", "value or ]")
        if character == '"':
            self._string = "text"
        elif character in _LITERALS:
            self._word = _LITERALS[character][1:]
        elif character == "-" or character in _DIGITS:
            self._number = {"-": "-", "0": "0"}.get(character, "int")
        else:
            return False
        return True

    def _push(self, closing: str, following: str) -> bool:
        self._open.append(closing)
        self._next = following
        return len(self._open) <= MAX_DEPTH

    def _close(self) -> bool:
        self._open.pop()
        self._next = ", or end"
        if not self._open:
            self.state = "done"
        return True
