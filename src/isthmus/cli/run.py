"""`isthmus run MODEL [PROMPT]`: one answer on stdout, or a chat; from a model or a running server."""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import termios
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import typer

from isthmus.cli import options
from isthmus.cli.interrupt import Interrupt
from isthmus.config import history_lines
from isthmus.engine.request import SamplingParams
from isthmus.errors import EngineError, UsageError

if TYPE_CHECKING:
    from isthmus.engine.answer import Completion, Delta, Timings
    from isthmus.engine.llm import LLM


_NEITHER = (
    "give MODEL (a .gguf file, owner/repo:QUANT, demo or dummy:SHAPE), or --url of a running server; "
    "isthmus run --help shows more"
)


class Answers(Protocol):
    """What answers: a loaded model (LLM) or a running server (Remote)."""

    @property
    def info(self) -> Any: ...  # with the context_tokens of the model

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, *, stream: Literal[True]
    ) -> Generator[Delta, None, None]: ...
    def generate(
        self, prompt: str, params: SamplingParams, *, stream: Literal[True]
    ) -> Generator[Delta, None, None]: ...


@options.with_run_options()
@options.with_sampling_options
def run(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A .gguf file (any shard of a split one), owner/repo:QUANT, demo, or dummy:SHAPE.",
        ),
    ] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="The question, in one or more words; - stands for standard input, as a pipe alone does; "
            "none: a chat.",
        ),
    ] = None,
    url: options.Url = None,
    api_key: options.ApiKey = None,
    *,
    params: SamplingParams,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue PROMPT as text, without a chat template.")
    ] = False,
    run_options: dict[str, Any],
    debug: options.Debug = False,
) -> None:
    """Answer PROMPT, or chat if there is none. Only the answer goes to standard output.

    With --url a running server answers: MODEL is then one of its names and may be left out.
    """
    options.configure_logging(debug)
    if url is None and model is None:
        raise UsageError(_NEITHER)
    words = words or []
    if url is not None and model is not None and not words:
        words, model = [model], None  # a name may be left out, a question is what one asks for
    system = options.utf8(system, "--system") if system is not None else None
    question = _question(words)
    if raw and question is None:
        raise UsageError("--raw continues a text; give PROMPT, or - to read it from standard input")
    if raw and system is not None:
        raise UsageError("--raw uses no chat template, so --system has no place; put it into PROMPT")

    kept_lines = history_lines() if question is None else 0
    answers = find_answers(model, url, api_key, run_options)
    if question is None:
        from isthmus.cli.chat import Chat

        Chat(answers, params, system, kept_lines).run()
    else:
        answer_once(answers, question, params, system=system, raw=raw)


def find_answers(
    model: str | None, url: str | None, api_key: str | None, run_options: dict[str, Any]
) -> Answers:
    """The server at `url`, or the model, loaded. UsageError for neither."""
    if url is not None:
        from isthmus.cli.remote import Remote

        return Remote(url, model, api_key)
    if model is None:
        raise UsageError(_NEITHER)
    if api_key is not None:
        raise UsageError("--api-key is for a server; give its --url too")
    return _load(model, run_options)


def answer_once(
    llm: Answers, question: str, params: SamplingParams, *, system: str | None, raw: bool
) -> None:
    """Writes the answer to stdout as it comes, then the closing line to stderr."""
    if raw:
        deltas = llm.generate(question, params, stream=True)
    else:
        messages = [{"role": "system", "content": system}] if system else []
        deltas = llm.chat([*messages, {"role": "user", "content": question}], params, stream=True)
    completion = None
    with Interrupt(insist=True) as interrupt:
        for delta in deltas:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            completion = delta.completion
            if interrupt.requested:
                break
    sys.stdout.write("\n")
    sys.stdout.flush()
    if completion is None:
        raise KeyboardInterrupt
    finish(completion)


def finish(completion: Completion) -> None:
    """The closing line; EngineError if the answer ended in one."""
    if completion.finish_reason == "error":
        raise EngineError(f"the answer ended early: {completion.error}")
    print(closing_line(completion.timings), file=sys.stderr)


def closing_line(timings: Timings) -> str:
    return (
        f"{timings.num_prompt_tokens} prompt tokens at {timings.prefill_tok_s:.1f} tok/s, "
        f"{timings.num_output_tokens} tokens at {timings.decode_tok_s:.1f} tok/s"
    )


def _question(words: list[str]) -> str | None:
    """The prompt's text; None for a chat. Raises UsageError for an empty one.

    Words are joined by blanks, as they were typed; where one is -, standard input stands on lines of its own.
    """
    if not words and sys.stdin.isatty():
        return None
    if words in ([], ["-"]):
        text, origin = _standard_input(), "standard input"
    else:
        if words.count("-") > 1:
            raise UsageError("standard input can be read once; give one - among the words of PROMPT")
        before, dash, after = _around_dash([options.utf8(word, "PROMPT") for word in words])
        parts = [before, _standard_input() if dash else "", after]
        text, origin = "\n".join(part for part in parts if part), "PROMPT"
        if not dash and _input_waits():
            print("standard input is not read: write - where its text belongs in PROMPT", file=sys.stderr)
    if not text.strip():
        raise UsageError(f"the prompt from {origin} is empty")
    return text


def _around_dash(words: list[str]) -> tuple[str, bool, str]:
    at = words.index("-") if "-" in words else len(words)
    return " ".join(words[:at]), at < len(words), " ".join(words[at + 1 :])


def _standard_input() -> str:
    if sys.stdin.isatty():  # perhaps the - of "5 - 3" was not meant so
        print("- stands for standard input: type it, and Ctrl-D at its end", file=sys.stderr)
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not valid UTF-8 (at byte {error.start})") from None


def _input_waits() -> bool:
    """Whether a pipe or a file with something in it is standard input. Looks, and never waits."""
    try:
        descriptor = sys.stdin.fileno()
        status = os.fstat(descriptor)
        if stat.S_ISFIFO(status.st_mode):
            waiting = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
            return bool(int.from_bytes(waiting, sys.byteorder))
        return stat.S_ISREG(status.st_mode) and status.st_size > os.lseek(descriptor, 0, os.SEEK_CUR)
    except (OSError, ValueError):
        return False


def _load(model: str, run_options: dict[str, Any]) -> LLM:
    from isthmus.cli.load import bar, describe, say
    from isthmus.cli.pull import offer
    from isthmus.config import RunOptions
    from isthmus.resolve import resolve_model

    # Mistakes in the options or the model's name are said before torch is imported.
    RunOptions.from_kwargs(**run_options).with_environment()
    offer(model)
    with bar(Path(model).name) as progress:
        path = resolve_model(model, progress=progress)
        from isthmus.engine.llm import LLM

        llm = LLM(path, progress=progress, **run_options)
    say(describe(llm.info))
    return llm
