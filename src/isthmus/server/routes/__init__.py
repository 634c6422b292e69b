"""The endpoints, one file each. A new one is its file and a line here."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter

from isthmus.server.routes import (
    chat_completions,
    completions,
    health,
    messages,
    metrics,
    models,
    ollama,
    responses,
    slots,
    tokenize,
)
from isthmus.server.service import Service

ROUTES: tuple[Callable[[Service], APIRouter], ...] = (
    health.build,
    models.build,
    chat_completions.build,
    completions.build,
    messages.build,
    responses.build,
    ollama.build,
    tokenize.build,
    metrics.build,
    slots.build,
)
