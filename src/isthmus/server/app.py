"""The ASGI application: routes over a service, guards around them, the engine's life with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from isthmus import __version__
from isthmus.engine.process import EngineProcess
from isthmus.server import errors
from isthmus.server.guards import HostCheck, KeyCheck
from isthmus.server.options import ServerOptions
from isthmus.server.routes import ROUTES
from isthmus.server.service import Service

if TYPE_CHECKING:
    from isthmus.server.text_process import LongTexts
    from isthmus.tokenizer import ChatTemplate, Tokenizer


def create_app(
    engine: EngineProcess,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    names: tuple[str, ...],
    options: ServerOptions,
    *,
    long_texts: LongTexts | None = None,
) -> FastAPI:
    """The server for one model, called by any of `names`. The engine starts and ends with the application.

    long_texts: where long ones are worked on; None: in a thread.
    """
    service = Service(engine, tokenizer, template, names, options, long_texts)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await engine.close()
            service.close()

    # No documentation pages: they load scripts from other hosts. /openapi.json stays.
    app = FastAPI(
        title="Isthmus",
        version=__version__,
        lifespan=life,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    errors.install(app)
    for build in ROUTES:
        app.include_router(build(service))
    # Each is put around what stands before it, so that the Host check comes first.
    if options.api_key is not None:
        app.add_middleware(KeyCheck, key=options.api_key)
    if options.cors_origins:  # before the key: a browser's preflight carries none
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    if options.is_loopback:
        app.add_middleware(HostCheck, host=options.host)
    return app
