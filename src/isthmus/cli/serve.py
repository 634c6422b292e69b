"""`isthmus serve MODEL`: the HTTP server over an engine process.

The port is taken first and the file's header read next, so that what is wrong with either is said before
anything is loaded. While the weights load, /health answers 503.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli import options

if TYPE_CHECKING:
    from pathlib import Path

    from isthmus.engine.request import ModelInfo
    from isthmus.tokenizer import ChatTemplate, Tokenizer


@options.with_run_options()
def serve(
    model: options.Model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8080,
    api_key: Annotated[str | None, typer.Option(help="Ask for this key (all routes but /health).")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let other machines in without a key.")
    ] = False,
    alias: Annotated[
        list[str] | None, typer.Option(help="Name of the model for clients; repeatable.")
    ] = None,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; more get 503.")] = 32,
    drain: Annotated[float, typer.Option(help="Seconds that answers may take to end after SIGTERM.")] = 30.0,
    *,
    run_options: dict[str, Any],
    debug: options.Debug = False,
) -> None:
    """Serve MODEL over HTTP with OpenAI's protocol."""
    import asyncio
    from contextlib import ExitStack, closing

    from isthmus.cli.load import bar, say
    from isthmus.config import RunOptions
    from isthmus.engine.process import EngineProcess
    from isthmus.resolve import resolve_model
    from isthmus.server.app import create_app
    from isthmus.server.options import ServerOptions
    from isthmus.server.run import Runner, base_url, listen

    options.configure_logging(debug)
    logging.getLogger("isthmus.server").setLevel(logging.INFO)  # a line for each request
    server_options = ServerOptions(
        host=host, port=port, api_key=api_key, insecure=insecure, max_queue=max_queue, drain_s=drain
    )
    checked = RunOptions.from_kwargs(**run_options)
    with closing(listen(server_options)) as listener, ExitStack() as while_loading:
        progress = while_loading.enter_context(bar(model))
        path = resolve_model(model, progress=progress)
        names = tuple(dict.fromkeys([*(alias or ()), _default_name(model, path)]))
        tokenizer, template = _text_side(path)
        engine = EngineProcess(path, checked, on_progress=progress)
        app = create_app(engine, tokenizer, template, names, server_options)

        def loaded(info: ModelInfo | None) -> None:
            while_loading.close()
            if info is not None:
                say(ready_text(info, names[0], base_url(listener), with_key=api_key is not None))

        asyncio.run(Runner(app, engine, listener, server_options).run(loaded))


def ready_text(info: ModelInfo, name: str, url: str, *, with_key: bool) -> str:
    """What was loaded, where it is, and a client to paste."""
    from isthmus.cli.load import describe

    key = "KEY" if with_key else "none"
    return (
        f"{describe(info)}\n\n{name} is ready at {url}\n\n"
        f"    from openai import OpenAI\n"
        f'    client = OpenAI(base_url="{url}", api_key="{key}")\n'
        f'    messages = [{{"role": "user", "content": "Why is the sky blue?"}}]\n'
        f'    answer = client.chat.completions.create(model="{name}", messages=messages)\n'
        "    print(answer.choices[0].message.content)\n"
    )


def _text_side(path: Path) -> tuple[Tokenizer, ChatTemplate]:
    """What the HTTP process needs of the file: its header alone is read."""
    from contextlib import closing

    from isthmus.tokenizer import ChatTemplate, Tokenizer
    from isthmus.weights.source import open_weights

    with closing(open_weights(path)) as source:
        tokenizer = Tokenizer.from_gguf(source.metadata)
    return tokenizer, ChatTemplate.for_tokenizer(tokenizer)


def _default_name(model: str, path: Path) -> str:
    """What the user typed if it is a name (`demo`), else the file's name without .gguf."""
    return path.name.removesuffix(".gguf") if "/" in model or model.endswith(".gguf") else model
