"""`isthmus chat MODEL`: lines in, answers out, the conversation remembered until /clear."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli import options
from isthmus.cli.history import with_line_editing
from isthmus.cli.interrupt import Interrupt
from isthmus.cli.run import Answers, closing_line, find_answers
from isthmus.config import history_lines
from isthmus.engine.request import SamplingParams
from isthmus.errors import IsthmusError, UsageError

if TYPE_CHECKING:
    from isthmus.engine.answer import Completion

HELP = """\
/help                this text
/clear               forget the conversation (the system message stays)
/system [TEXT]       set the system message and forget the conversation; without TEXT show it
/set [NAME VALUE]    set a sampling parameter, e.g. /set temperature 0.2; without them show all
/stats               speed of the last answer and how full the context is
/bye                 leave (so do /exit, /quit and Ctrl-D); Ctrl-C stops an answer
arrow-up             what was typed before, in former chats too (ISTHMUS_HISTORY=0 keeps nothing)
\"\"\"                  begins and ends a message of several lines, which may begin with a slash"""
_LEAVE = ("/bye", "/exit", "/quit")

# Parameters that /set takes, and how their text is read. "none" stands for None where that is a value.
SETTABLE: dict[str, type] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
    "max_tokens": int,
}


@options.with_run_options()
@options.with_sampling_options
def chat(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="As for run; with --url one of the server's names.")
    ] = None,
    url: options.Url = None,
    api_key: options.ApiKey = None,
    *,
    params: SamplingParams,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    run_options: dict[str, Any],
    debug: options.Debug = False,
) -> None:
    """Chat with MODEL, or with the model of a running server (--url)."""
    options.configure_logging(debug)
    system = options.utf8(system, "--system") if system is not None else None
    kept_lines = history_lines()
    Chat(find_answers(model, url, api_key, run_options), params, system, kept_lines).run()


class Chat:
    """The loop and what it remembers."""

    def __init__(self, llm: Answers, params: SamplingParams, system: str | None, kept_lines: int) -> None:
        """kept_lines: how many of what is typed are there again in the next chat."""
        self.llm = llm
        self.params = params
        self.system = system
        self.messages: list[dict[str, str]] = []  # without the system message
        self.last: Completion | None = None
        self._keep = with_line_editing(kept_lines)

    def run(self) -> None:
        """Until /bye or the end of input."""
        print("/help shows the commands, Ctrl-D leaves")
        while True:
            try:
                text, is_command = self._read()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /bye leaves)")
                continue
            if is_command and text in _LEAVE:
                return
            try:
                if is_command:
                    print(self.command(text))
                elif text.strip():
                    self.answer(text)
            except IsthmusError as error:
                print(f"error: {error}", file=sys.stderr)

    def command(self, line: str) -> str:
        """Does what a line with a slash says, and returns what to show."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name in ("/help", "/?"):
            return HELP
        if name == "/clear":
            self.messages.clear()
            return "the conversation is forgotten"
        if name == "/system":
            if not rest:
                return self.system or "(no system message)"
            self.system, self.messages = rest, []
            return "the system message is set; a new conversation begins"
        if name == "/set":
            return self._set(rest)
        if name == "/stats":
            return self._stats()
        raise UsageError(
            f"unknown command {name}; /help shows the commands, and a message may begin with a blank"
        )

    def answer(self, text: str) -> None:
        """Writes an answer and adds both to the conversation. Ctrl-C ends the answer where it is."""
        question = {"role": "user", "content": text}
        system = [{"role": "system", "content": self.system}] if self.system else []
        written, completion = "", None
        with Interrupt(insist=False) as interrupt:
            deltas = self.llm.chat([*system, *self.messages, question], self.params, stream=True)
            for delta in deltas:
                print(delta.text, end="", flush=True)
                written += delta.text
                completion = delta.completion
                if interrupt.requested:
                    deltas.close()
                    break
        print(" (stopped)" if completion is None else "")
        self.messages += [question, {"role": "assistant", "content": written}]
        if completion is not None:
            self.last = completion
            if completion.error:
                print(f"error: the answer ended early: {completion.error}", file=sys.stderr)

    def _read(self) -> tuple[str, bool]:
        """A message, or a command: a line that begins with a slash."""
        line = self._typed(">>> ")
        if not line.startswith('"""'):
            return (line.strip(), True) if line.startswith("/") else (line, False)
        lines = [line[3:]]
        while not lines[-1].endswith('"""'):
            lines.append(self._typed("... "))
        return "\n".join(lines)[:-3], False

    def _typed(self, prompt: str) -> str:
        line = input(prompt)
        self._keep(line)
        return line

    def _set(self, rest: str) -> str:
        words = rest.split()
        if not words:
            return "\n".join(f"{f.name} = {getattr(self.params, f.name)}" for f in fields(self.params))
        if len(words) != 2 or words[0] not in SETTABLE:
            raise UsageError(f"/set NAME VALUE, with NAME one of {', '.join(SETTABLE)}; got {rest!r}")
        name, text = words
        value: Any = None
        if not (text == "none" and name in ("seed", "max_tokens")):
            try:
                value = SETTABLE[name](text)
            except ValueError:
                raise UsageError(f"{name} must be a number, got {text!r}") from None
        self.params = replace(self.params, **{name: value})
        return f"{name} = {value}"

    def _stats(self) -> str:
        if self.last is None:
            return "no answer yet"
        used = self.last.num_prompt_tokens + self.last.timings.num_output_tokens
        context_tokens = self.llm.info.context_tokens or "an unknown number of"
        return f"{closing_line(self.last.timings)}; {used} of {context_tokens} tokens of context"
