"""The engine as a process: loading, death, the one restart, and what the server says meanwhile."""

import fcntl
import logging
import os
import resource
import signal
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest
from harness import RawStream, Server, chat_body, say, serving, wait_for

from isthmus import errors
from isthmus.config import RunOptions
from isthmus.engine import wire, worker
from isthmus.engine.request import (
    EngineStats,
    Grammar,
    ModelInfo,
    Output,
    Request,
    SamplingParams,
    SlotStats,
    TokenLogprob,
)


def health(server: Server) -> tuple[int, str]:
    answer = httpx.get(f"{server.url}/health")
    return answer.status_code, answer.json()["status"]


def ask(server: Server, text: str = "well") -> str | None:
    return (
        server.client().chat.completions.create(model="fake", messages=say(text)).choices[0].message.content
    )


def test_while_loading_health_and_chat_say_so(tmp_path: Path) -> None:
    with serving(tmp_path, ready=False, flags="slow") as server:
        assert health(server) == (503, "loading")
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat_body())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_loading")
        assert int(answer.headers["retry-after"]) > 0
        assert httpx.get(f"{server.url}/v1/models").status_code == 200
        server.grant(100)
        server.wait_ready()
        assert health(server) == (200, "ok")
        assert ask(server) == "well"


def test_model_that_does_not_load_is_not_tried_again(tmp_path: Path) -> None:
    with serving(tmp_path, ready=False, flags="fail") as server:
        wait_for(lambda: server.engine.state == "failed")
        assert isinstance(server.engine.failure, errors.NotEnoughMemoryError)
        assert str(server.engine.failure) == "need 9 GiB, have 4"
        assert server.engine.failure.need_bytes == 9 << 30
        assert server.engine.num_restarts == 0
        assert health(server) == (503, "failed")


def test_death_while_loading_is_a_failure(tmp_path: Path) -> None:
    with serving(tmp_path, ready=False, flags="crash") as server:
        wait_for(lambda: server.engine.state == "failed")
        assert "SIGKILL" in str(server.engine.failure)
        assert server.engine.num_restarts == 0


def test_crash_ends_the_request_and_the_engine_comes_back_once(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        for restarts in (1, 2):
            with pytest.raises(openai.InternalServerError, match="died"):
                server.client().chat.completions.create(model="fake", messages=say("", end="crash"))
            if restarts == 1:
                server.wait_ready()
                assert health(server) == (200, "ok")
                assert ask(server) == "well"
        wait_for(lambda: server.engine.state == "failed")
        assert server.engine.num_restarts == 1
        assert health(server) == (503, "failed")
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat_body())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")


def test_kill_in_the_middle_of_streams_and_queue(gated: Server) -> None:
    """kill -9 of the engine: a begun stream gets an error frame and [DONE], what has not begun a 500."""
    with (
        RawStream(gated, chat_body("begun", stream=True)) as begun,
        RawStream(gated, chat_body("waiting", stream=True)) as waiting,
        RawStream(gated, chat_body("waiting")) as whole,
    ):
        gated.grant(2)
        begun.read_until(b'"content":"b"')
        wait_for(lambda: gated.engine.num_requests == 3)
        assert gated.engine.pid is not None
        os.kill(gated.engine.pid, signal.SIGKILL)
        rest = begun.read_all()
        assert b'data: {"error":{"message":"the engine process died' in rest
        assert b"data: [DONE]\n\n" in rest
        assert waiting.read_all().startswith(b"HTTP/1.1 500 ")
        assert whole.read_all().startswith(b"HTTP/1.1 500 ")
    gated.wait_ready()
    gated.grant(6)
    assert ask(gated) == "well"


def test_engine_that_reports_its_fall_is_quoted(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        with pytest.raises(openai.InternalServerError, match="the fake engine fell"):
            server.client().chat.completions.create(model="fake", messages=say("", end="fall"))
        server.wait_ready()
        assert ask(server) == "well"


def test_where_the_engine_is_comes_with_its_steps(gated: Server) -> None:
    """A request in its prompt, which gives no token yet; then at rest."""
    with RawStream(gated, chat_body("answer", script={"prefill": 3})) as stream:
        gated.grant(1)
        wait_for(lambda: gated.engine.stats.num_running == 1)
        gated.grant(100)
        stream.read_all()
    wait_for(lambda: gated.engine.stats.num_running == 0)


def test_engine_ends_with_the_server(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        pid = server.engine.pid
        assert pid is not None
    assert not Path(f"/proc/{pid}").exists()
    assert server.log()[-1] == "closed"


def channels() -> tuple[socket.socket, wire.Channel]:
    ours, theirs = socket.socketpair()
    return ours, wire.Channel(theirs)


def test_commands_survive_the_wire_in_any_pieces() -> None:
    params = SamplingParams(temperature=0, logit_bias={7: -100.0}, seed=2**64 - 1, stop=("é",), max_tokens=3)
    params = replace(params, logprobs=5, prompt_logprobs=0, grammar=Grammar("regex", "[a-z]+"))
    request = Request("r", [1, 2**31 - 1], params, frozenset({2, 3}), "salt")
    commands = [wire.Start("m.gguf", RunOptions(threads=2)), wire.Add(request), wire.Cancel("r")]
    sent = b"".join(map(wire.encode, commands))
    for size in (1, 5, len(sent)):
        ours, channel = channels()
        received: list[wire.Command] = []
        for start in range(0, len(sent), size):
            ours.sendall(sent[start : start + size])
            received += channel.receive(wait=False)
        assert received == commands
        ours.close()
        with pytest.raises(EOFError):
            channel.receive(wait=True)
        channel.close()


def test_idle_engine_waits_for_a_whole_command() -> None:
    ours, channel = channels()
    frame = wire.encode(wire.Cancel("r"))
    ours.sendall(frame[:3])
    rest = threading.Timer(0.05, ours.sendall, [frame[3:]])
    rest.start()
    assert channel.receive(wait=True) == [wire.Cancel("r")]
    rest.join()
    ours.close()
    channel.close()


def test_a_process_with_thousands_of_open_files_has_a_wire_too() -> None:
    """select() has no descriptors from 1024 on; a server with many connections hands such a one on."""
    ours, theirs = socket.socketpair()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        high = socket.socket(fileno=fcntl.fcntl(theirs, fcntl.F_DUPFD, 1024))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with ours, theirs, high:
        channel = wire.Channel(high)
        assert channel.receive(wait=False) == []
        ours.sendall(wire.encode(wire.Cancel("a")))
        assert channel.receive(wait=True) == [wire.Cancel("a")]


def test_events_survive_the_wire() -> None:
    info = ModelInfo("m", "llama", 9, 8, "avx2", 2, 1, 1, 0.5)
    told = TokenLogprob(5, -0.5, ((7, -0.25), (5, -0.5)))
    outputs = [
        Output("r", 5, num_cached_tokens=64, logprob=told, prompt_logprobs=(None, told)),
        Output("r", None, "error", "why", 3, 1),
    ]
    stats = EngineStats(num_running=1, slots=(SlotStats("r", False, 9, 8, 8, 0),))
    for event in (wire.Progress(1, 2), wire.Ready(info), wire.Outputs(outputs), wire.Outputs([], stats)):
        assert wire.decode_event(wire.encode(event)[4:]) == event


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.ContextLengthError("long", num_prompt_tokens=9, context_tokens=8), errors.ContextLengthError),
        (errors.UsageError("bad"), errors.UsageError),
        (ZeroDivisionError("oops"), errors.EngineError),
    ],
)
def test_errors_keep_their_kind_text_and_numbers(error: Exception, kind: type) -> None:
    revived = wire.revive(wire.Failure(*wire.describe(error)))
    assert type(revived) is kind
    assert str(error) in str(revived)
    numbers = {name: value for name, value in vars(error).items()}
    assert vars(revived) == numbers


def test_frame_beyond_the_limit_is_refused() -> None:
    with pytest.raises(errors.EngineError, match="exceeds"):
        wire.payload_bytes((wire.MAX_FRAME_BYTES + 1).to_bytes(4, "little"))


def test_tracebacks_of_failed_steps_are_for_the_servers_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """At this level the step loop writes them."""
    log = logging.getLogger("isthmus.engine.loop")
    levels: list[int] = []
    monkeypatch.setattr(log, "setLevel", levels.append)
    monkeypatch.setattr(worker, "run", lambda sock: sock.detach())
    with socket.socket() as ours:
        monkeypatch.setattr(sys, "argv", ["worker", str(ours.fileno())])
        assert worker.main() == ours.fileno()
    assert levels == [logging.INFO]
