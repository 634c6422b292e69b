"""A client that leaves: its request ends within one step, wherever it was. The test grants every step."""

from contextlib import ExitStack

import httpx
import pytest
from harness import RawStream, Server, chat_body, wait_for

STREAMED_AND_WHOLE = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


def added(server: Server, count: int) -> list[str]:
    """Ids of the requests the engine has taken, once there are `count`."""

    def ids() -> list[str]:
        return [line.removeprefix("add ") for line in server.log() if line.startswith("add ")]

    wait_for(lambda: len(ids()) == count)
    return ids()


def assert_answers(server: Server) -> None:
    """The server is well: an ordinary request is answered right."""
    with RawStream(server, chat_body("well")) as client:
        server.grant(6)
        assert b'"content":"well"' in client.read_all()


@STREAMED_AND_WHOLE
def test_in_prefill(gated: Server, stream: bool) -> None:
    with RawStream(gated, chat_body("never", script={"prefill": 1000}, stream=stream)):
        (request,) = added(gated, 1)
        gated.grant(2)
        wait_for(lambda: gated.steps_of(request) == 2)
    wait_for(lambda: gated.engine.num_requests == 0)
    gated.grant(1)  # the step in progress
    wait_for(lambda: f"cancel {request}" in gated.log())
    assert gated.steps_of(request) == 3
    assert_answers(gated)
    assert gated.steps_of(request) == 3


@STREAMED_AND_WHOLE
def test_in_decode(gated: Server, stream: bool) -> None:
    with RawStream(gated, chat_body("a long answer", stream=stream)) as client:
        (request,) = added(gated, 1)
        gated.grant(4)  # one of prefill, three tokens
        if stream:
            client.read_until(b'l"},"logprobs"')
        wait_for(lambda: gated.steps_of(request) == 4)
    wait_for(lambda: gated.engine.num_requests == 0)
    gated.grant(1)
    wait_for(lambda: f"cancel {request}" in gated.log())
    assert gated.steps_of(request) == 5
    assert_answers(gated)


@STREAMED_AND_WHOLE
def test_in_the_queue(gated: Server, stream: bool) -> None:
    """The one that leaves costs no step at all, and the one before it goes on."""
    with RawStream(gated, chat_body("first")) as first:
        (first_id,) = added(gated, 1)
        with RawStream(gated, chat_body("second", stream=stream)):
            wait_for(lambda: gated.engine.num_requests == 2)
        wait_for(lambda: gated.engine.num_requests == 1)
        gated.grant(7)
        assert b'"content":"first"' in first.read_all()
    _, second_id = added(gated, 2)
    wait_for(lambda: f"cancel {second_id}" in gated.log())
    assert gated.steps_of(second_id) == 0
    assert gated.steps_of(first_id) == 7


@STREAMED_AND_WHOLE
def test_while_the_template_renders(gated: Server, stream: bool) -> None:
    """The engine never hears of it. Meanwhile the event loop answers others, however long it takes."""
    gated.template.hold.clear()
    with RawStream(gated, chat_body("never", stream=stream)):
        wait_for(lambda: gated.template.waiting == 1)
        assert httpx.get(f"{gated.url}/health").status_code == 200
    wait_for(lambda: gated.service.num_requests == 0)
    gated.template.hold.set()
    assert_answers(gated)
    assert len(added(gated, 1)) == 1


def test_gone_clients_free_their_places_in_the_queue(gated: Server) -> None:
    """More than the queue holds come and go; afterwards all of it is free again."""
    for _ in range(2):
        with ExitStack() as clients:
            for _ in range(20):
                clients.enter_context(RawStream(gated, chat_body("x", stream=True)))
            wait_for(lambda: gated.engine.num_requests == 20)
        wait_for(lambda: gated.engine.num_requests == 0)
    gated.grant(1)  # the step that was in progress when all had left
    assert_answers(gated)
