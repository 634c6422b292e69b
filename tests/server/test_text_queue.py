"""The line of requests that ask of texts alone: it has an end, and who leaves is out of it."""

import socket
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from harness import Server, serving, wait_for
from test_bad_input import assert_shape

from isthmus.config import LONG_TEXT_CHARACTERS
from isthmus.server.text_lanes import Lane

TEXT = {"messages": [{"role": "user", "content": "hi"}]}
LONG = {"messages": [{"role": "user", "content": "x" * LONG_TEXT_CHARACTERS}]}


def held(server: Server, clients: ThreadPoolExecutor, lane: Lane, body: dict) -> list[Future[httpx.Response]]:
    """As many requests as a lane and its line of one hold, none of which goes on."""
    server.template.hold.clear()
    threads = lane._threads._max_workers
    posts = [clients.submit(httpx.post, f"{server.url}/apply-template", json=body) for _ in range(threads)]
    wait_for(lambda: server.template.waiting >= threads)
    posts.append(clients.submit(httpx.post, f"{server.url}/apply-template", json=body))
    wait_for(lambda: lane.num_waiting == 1)
    return posts


@pytest.mark.parametrize("body", [TEXT, LONG], ids=["short", "long"])
def test_one_text_too_many_is_a_503_with_retry_after(tmp_path: Path, body: dict) -> None:
    with serving(tmp_path, max_queue=1) as server, ThreadPoolExecutor(4) as clients:
        texts = server.service.texts
        lane, other = (texts.short, texts.long) if body is TEXT else (texts.long, texts.short)
        posts = held(server, clients, lane, body)
        for path in ("/apply-template", "/tokenize", "/v1/messages/count_tokens"):
            answer = httpx.post(server.url + path, json=body)
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0
            if path.startswith("/v1/messages"):
                assert answer.json()["type"] == "error"
                assert answer.json()["error"]["type"] == "overloaded_error"
            else:
                assert assert_shape(answer, 503)["code"] == "queue_full"
        # Texts of the other kind have a line of their own.
        assert other.num_waiting == 0
        ids = {"tokens": [97] * (1 if other is texts.short else LONG_TEXT_CHARACTERS)}
        assert httpx.post(f"{server.url}/detokenize", json=ids).status_code == 200
        server.template.hold.set()
        assert [post.result().status_code for post in posts] == [200] * len(posts)
        assert httpx.post(f"{server.url}/apply-template", json=body).status_code == 200


def test_a_client_that_leaves_is_out_of_the_line(tmp_path: Path) -> None:
    with serving(tmp_path, max_queue=1) as server, ThreadPoolExecutor(2) as clients, ExitStack() as gone:
        lane = server.service.texts.short
        server.template.hold.clear()
        posts = [clients.submit(httpx.post, f"{server.url}/apply-template", json=TEXT) for _ in range(2)]
        wait_for(lambda: server.template.waiting == 2)
        leaving = gone.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        body = b'{"messages": [{"role": "user", "content": "gone"}]}'
        head = f"POST /apply-template HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        leaving.sendall(head.encode() + body)
        wait_for(lambda: lane.num_waiting == 1)
        assert_shape(httpx.post(f"{server.url}/tokenize", json={"content": "a"}), 503)
        leaving.close()
        wait_for(lambda: lane.num_waiting == 0)
        server.template.hold.set()
        assert [post.result().status_code for post in posts] == [200] * 2
        assert server.template.waiting == 2  # the third was never rendered
        assert httpx.post(f"{server.url}/tokenize", json={"content": "a"}).json()["count"] == 1


def test_a_chat_has_its_place_with_the_engine_and_waits_in_no_line_of_texts(tmp_path: Path) -> None:
    with serving(tmp_path, max_queue=1) as server, ThreadPoolExecutor(5) as clients:
        posts = held(server, clients, server.service.texts.short, TEXT)
        chat = clients.submit(
            httpx.post, f"{server.url}/v1/chat/completions", json={"messages": TEXT["messages"]}
        )
        wait_for(lambda: server.service.num_requests == 1)
        server.template.hold.set()
        assert chat.result().status_code == 200
        assert [post.result().status_code for post in posts] == [200] * 3
