"""The process for long texts: started by text_process.py as `python -m isthmus.server.text_worker FD`."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.priority import lower_own_priority, take_only_idle_cores
from isthmus.server.errors import as_api_error
from isthmus.server.text_process import Ask, Begin, Refusal, Reply, receive, send
from isthmus.server.text_work import WORK, TextSide
from isthmus.tokenizer.from_file import open_texts
from isthmus.tokenizer.template_process import Limits

if TYPE_CHECKING:
    from isthmus.tokenizer import ChatTemplate, Tokenizer

# Beside a busy engine a rendering may have a tenth of a core; its process ends what takes longer in all.
_RENDERING_S = 60.0

Load = Callable[[Begin], "tuple[Tokenizer, ChatTemplate]"]


def load(begin: Begin) -> tuple[Tokenizer, ChatTemplate]:
    return open_texts(Path(begin.model), limits=Limits(seconds=_RENDERING_S))


def run(sock: socket.socket, load: Load = load) -> None:
    """Serves the other end of `sock` until it closes. What it starts has its priority too."""
    lower_own_priority()
    with contextlib.suppress(EOFError, OSError):
        begin = receive(sock, Begin)
        side = TextSide.of(*load(begin), begin.parsers, begin.names)
        if begin.only_idle:
            take_only_idle_cores()
        send(sock, Reply())
        try:
            while True:
                send(sock, _answer(side, receive(sock, Ask)))
        finally:
            side.prompts.template.close()


def _answer(side: TextSide, ask: Ask) -> Reply:
    try:
        return Reply(WORK[ask.what](side, ask.data, ask.context_tokens))
    except Exception as error:
        return Reply(refusal=Refusal.of(as_api_error(error)))


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s: %(message)s")
    run(socket.socket(fileno=int(sys.argv[1])))
