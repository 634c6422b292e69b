"""`isthmus run MODEL [PROMPT]`: one answer on stdout, or a chat."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli import options
from isthmus.cli.interrupt import Interrupt
from isthmus.errors import EngineError, UsageError

if TYPE_CHECKING:
    from isthmus.engine.answer import Completion, Timings
    from isthmus.engine.llm import LLM
    from isthmus.engine.request import SamplingParams


@options.with_run_options()
def run(
    model: options.Model,
    prompt: Annotated[
        str | None, typer.Argument(help="The question; - or a pipe: from standard input; none: a chat.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 always takes the most probable token.")] = 0.7,
    top_k: Annotated[int, typer.Option(help="Only the k most probable tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Only the most probable tokens up to this mass.")] = 0.95,
    min_p: Annotated[float, typer.Option(help="Only tokens this probable relative to the first.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: less of what was said.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer. Default: the context.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="The answer ends before this text.")] = None,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue PROMPT as text, without a chat template.")
    ] = False,
    *,
    run_options: dict[str, Any],
    debug: options.Debug = False,
) -> None:
    """Answer PROMPT, or chat if there is none. Only the answer goes to standard output."""
    from isthmus.engine.request import SamplingParams

    options.configure_logging(debug)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(options.utf8(text, "--stop") for text in stop or ()),
        max_tokens=max_tokens,
    )
    system = options.utf8(system, "--system") if system is not None else None
    question = _question(prompt)
    if raw and question is None:
        raise UsageError("--raw continues a text; give PROMPT, or - to read it from standard input")
    if raw and system is not None:
        raise UsageError("--raw uses no chat template, so --system has no place; put it into PROMPT")

    llm = _load(model, run_options)
    if question is None:
        from isthmus.cli.chat import Chat

        Chat(llm, params, system).run()
    else:
        answer_once(llm, question, params, system=system, raw=raw)


def answer_once(llm: LLM, question: str, params: SamplingParams, *, system: str | None, raw: bool) -> None:
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


def _question(prompt: str | None) -> str | None:
    """The prompt's text; None for a chat. Raises UsageError for an empty one."""
    if prompt is None and sys.stdin.isatty():
        return None
    if prompt is None or prompt == "-":
        try:
            text, origin = sys.stdin.buffer.read().decode(), "standard input"
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input is not valid UTF-8 (at byte {error.start})") from None
    else:
        text, origin = options.utf8(prompt, "PROMPT"), "PROMPT"
    if not text.strip():
        raise UsageError(f"the prompt from {origin} is empty")
    return text


def _load(model: str, run_options: dict[str, Any]) -> LLM:
    from isthmus.cli.load import bar, describe, say
    from isthmus.config import RunOptions
    from isthmus.resolve import resolve_model

    # Mistakes in the options or the model's name are said before torch is imported.
    RunOptions.from_kwargs(**run_options).with_environment()
    with bar(Path(model).name) as progress:
        path = resolve_model(model, progress=progress)
        from isthmus.engine.llm import LLM

        llm = LLM(path, progress=progress, **run_options)
    say(describe(llm.info))
    return llm
