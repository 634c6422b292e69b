"""`isthmus serve MODEL`: the HTTP server over an engine process.

The port is taken first. Then the engine's process starts, and while that imports and loads, this one makes
what texts and routes need. What is wrong with either is said as soon as it is known, and ends both. While the
weights load, /health answers 503.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli import options
from isthmus.config import DEFAULT_PARALLEL

if TYPE_CHECKING:
    from pathlib import Path

    from isthmus.engine.request import ModelInfo
    from isthmus.server.run import Runner


@options.with_run_options(parallel=DEFAULT_PARALLEL)
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
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of prompt and answer of one request. Default: the context.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Web page that may call, as http://localhost:3000; repeatable.")
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(help="Certificate (chain) for https, a PEM file.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Its private key, a PEM file.")] = None,
    tool_parser: Annotated[
        str, typer.Option(help="Syntax of tool calls; auto: as the chat template shows; none.")
    ] = "auto",
    reasoning_parser: Annotated[
        str, typer.Option(help="Syntax of thoughts; auto: as the chat template shows; none.")
    ] = "auto",
    drain: Annotated[float, typer.Option(help="Seconds that answers may take to end after SIGTERM.")] = 30.0,
    *,
    run_options: dict[str, Any],
    debug: options.Debug = False,
) -> None:
    """Serve MODEL over HTTP, in the protocols of OpenAI, Anthropic and Ollama."""
    import asyncio
    from contextlib import ExitStack, closing

    from isthmus.cli.load import bar, say
    from isthmus.cli.pull import offer
    from isthmus.config import RunOptions
    from isthmus.engine.process import EngineProcess
    from isthmus.resolve import resolve_model
    from isthmus.server.options import ServerOptions
    from isthmus.server.start import base_url, listen, start

    options.configure_logging(debug)
    logging.getLogger("isthmus.server").setLevel(logging.INFO)  # a line for each request
    server_options = ServerOptions(
        host=host, port=port, api_key=api_key, insecure=insecure, max_queue=max_queue, drain_s=drain,
        max_model_len=max_model_len, cors_origins=tuple(cors_origin or ()), tls_cert=tls_cert,
        tls_key=tls_key, tool_parser=tool_parser, reasoning_parser=reasoning_parser,
    )  # fmt: skip
    checked = RunOptions.from_kwargs(**run_options)
    offer(model)
    with closing(listen(server_options)) as listener, ExitStack() as while_loading:
        progress = while_loading.enter_context(bar(model))
        path = resolve_model(model, progress=progress)
        names = tuple(dict.fromkeys([*(alias or ()), _default_name(model, path)]))
        engine = EngineProcess(path, checked, on_progress=progress)

        def make_runner() -> Runner:
            """Half a second of imports, and as much for a vocabulary of 150,000 tokens."""
            from isthmus.server.app import create_app
            from isthmus.server.run import Runner
            from isthmus.server.text_process import Begin, LongTexts
            from isthmus.tokenizer.from_file import open_texts

            tokenizer, template = open_texts(path)  # its header alone is read
            long_texts = LongTexts(Begin(str(path), server_options.parsers, names, only_idle=True))
            app = create_app(engine, tokenizer, template, names, server_options, long_texts=long_texts)
            return Runner(app, engine, listener, server_options)

        def loaded(info: ModelInfo | None) -> None:
            while_loading.close()
            if info is not None:
                url = base_url(listener, server_options.scheme)
                say(ready_text(info, names[0], url, with_key=api_key is not None))

        asyncio.run(start(engine, make_runner, loaded))


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


def _default_name(model: str, path: Path) -> str:
    """What the user typed if it is a name (`demo`), else the file's name without .gguf."""
    return path.name.removesuffix(".gguf") if "/" in model or model.endswith(".gguf") else model
