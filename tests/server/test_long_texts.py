"""Texts of 64k characters and more: in a process apart, with the answers that short ones get."""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from harness import ByteTokenizer, PlainTemplate, wait_for
from serve_process import Serve
from test_bad_input import assert_shape

from isthmus.config import LONG_TEXT_CHARACTERS, LOW_PRIORITY_NICE
from isthmus.errors import EngineError, IsthmusError
from isthmus.server.errors import ApiError, as_api_error
from isthmus.server.text_lanes import InThread
from isthmus.server.text_process import Ask, Begin, LongTexts, Reply, TextProcess, receive
from isthmus.server.text_work import CHAT, COMPLETION, TextSide, unpacked

_PARSERS, _NAMES = ("auto", "auto"), ("fake",)
_LONG = 'ab <|im_end|>\n<a href="é">[x](y)</a> ' * (LONG_TEXT_CHARACTERS // 30)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "log").touch()
    return tmp_path / "log"


@pytest.fixture
def texts(log: Path) -> Iterator[LongTexts]:
    worker = Path(__file__).with_name("fake_text_worker.py")
    begin = Begin("none.gguf", _PARSERS, _NAMES, only_idle=True)
    opened = LongTexts(begin, [sys.executable, str(worker), str(log)])
    yield opened
    opened.close()


def tokenize(text: str) -> Ask:
    return Ask("/tokenize", json.dumps({"content": text}).encode(), None)


def test_every_kind_of_work_gives_what_it_gives_in_a_thread(texts: LongTexts) -> None:
    here = InThread(TextSide.of(ByteTokenizer(), PlainTemplate(), _PARSERS, _NAMES))
    chat = {"messages": [{"role": "user", "content": "é </s>"}]}
    conversation = {**chat, "tools": None, "options": {"add_generation_prompt": None}}
    completion = {"texts": ["ab</s>", [97, 98]], "add_special": True}
    for what, given in (
        ("/tokenize", {"content": "a</s>", "with_pieces": True}),
        ("/tokenize", {"messages": [{"role": "user", "content": "</s>"}]}),
        ("/detokenize", {"tokens": [97, 258]}),
        ("/apply-template", {"messages": [{"role": "user", "content": "é </s>"}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "é"}]}),
        (CHAT, conversation),
        (COMPLETION, completion),
    ):
        ask = Ask(what, json.dumps(given).encode(), 100)
        assert texts.ask(ask) == here.ask(ask), what
    ask = Ask(COMPLETION, json.dumps(completion).encode(), 100)
    assert unpacked(texts.ask(ask)).prompts == [[256, 97, 98, 258], [97, 98]]


@pytest.mark.parametrize(
    ("what", "given"),
    [
        ("/tokenize", {"content": 7}),
        ("/tokenize", {"content": "x", "model": "gpt"}),
        ("/detokenize", {"tokens": [400]}),
        ("/apply-template", {"messages": [{"role": "user", "content": "fail"}]}),
        (COMPLETION, {"texts": ["x" * 9], "add_special": False}),
    ],
)
def test_an_error_is_what_it_is_in_a_thread(texts: LongTexts, what: str, given: dict) -> None:
    here = InThread(TextSide.of(ByteTokenizer(), PlainTemplate(), _PARSERS, _NAMES))
    ask = Ask(what, json.dumps(given).encode(), 9)
    with pytest.raises(ApiError) as apart:
        texts.ask(ask)
    with pytest.raises((ApiError, IsthmusError)) as expected:
        here.ask(ask)
    assert vars(apart.value) == vars(as_api_error(expected.value))
    assert texts.ask(tokenize("a"))


def test_what_finds_no_idle_core_is_done_at_a_low_priority(
    texts: LongTexts, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts.ask(tokenize("a"))
    monkeypatch.setattr(texts, "idle_patience_s", 0.3)
    for text in ("hang", "b", "c"):  # the last two are not tried again where the first found none
        assert json.loads(texts.ask(tokenize(text)))["count"] == len(text)
    assert log.read_text().split() == ["idle", "low"]
    texts.ask(Ask("/detokenize", b'{"tokens": [97]}', None))  # work of another kind is
    assert log.read_text().split() == ["idle", "low", "idle"]


def test_a_prompt_does_not_wait_behind_a_text_that_finds_no_idle_core(texts: LongTexts, log: Path) -> None:
    """Of the 60 s that the text sleeps there."""
    completion = json.dumps({"texts": ["ab"], "add_special": False}).encode()
    texts.ask(tokenize("a"))
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(texts.ask, tokenize("stuck"))
        wait_for(lambda: texts.idle.works)
        prompted = texts.ask(Ask(COMPLETION, completion, 9, for_answer=True))
        assert not asked.done()
        assert unpacked(prompted).prompts == [[97, 98]]
        texts.close()
        with pytest.raises(EngineError):
            asked.result()
    assert log.read_text().split() == ["idle", "low"]


def test_a_prompt_has_less_patience_with_busy_cores(
    texts: LongTexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    completion = json.dumps({"texts": ["hang"], "add_special": False}).encode()
    monkeypatch.setattr(texts, "idle_patience_s", 600)
    monkeypatch.setattr(texts, "idle_patience_for_prompts_s", 0.3)
    made = texts.ask(Ask(COMPLETION, completion, 9, for_answer=True))
    assert unpacked(made).prompts == [list(b"hang")]


def test_a_text_that_ends_the_process_or_takes_for_ever_is_an_error_and_the_next_one_is_well(
    texts: LongTexts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineError, match=r"ended \(status 3\)"):
        texts.ask(tokenize("die"))
    assert json.loads(texts.ask(tokenize("ab")))["tokens"] == [97, 98]
    monkeypatch.setattr(texts, "idle_patience_s", 0.2)
    texts.low.ask(tokenize("a"), 60)
    monkeypatch.setattr(texts, "patience_s", 0.2)
    with pytest.raises(EngineError, match="took longer than 0 s, and was given up"):
        texts.ask(tokenize("stuck"))
    monkeypatch.undo()
    assert json.loads(texts.ask(tokenize("ab")))["tokens"] == [97, 98]


def test_an_answer_that_comes_in_drops_has_no_longer_than_any_other() -> None:
    ours, theirs = socket.socketpair()
    enough = threading.Event()

    def drip() -> None:
        theirs.sendall((1000).to_bytes(4, "little"))
        while not enough.wait(0.02):
            theirs.sendall(b"x")

    with ours, theirs, ThreadPoolExecutor(1) as thread:
        dripping = thread.submit(drip)
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            receive(ours, Reply, started + 0.2)
        enough.set()
        dripping.result()
    assert time.monotonic() - started < 15  # of the 20 s that all of it would take


def test_closing_does_not_wait_for_what_is_worked_on(texts: LongTexts) -> None:
    texts.ask(tokenize("a"))
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(texts.ask, tokenize("stuck"))
        wait_for(texts.idle._lock.locked)
        started = time.monotonic()
        texts.close()
        with pytest.raises(EngineError, match="ended"):
            asked.result()
    assert time.monotonic() - started < 20  # of the 60 s that it would sleep
    assert texts.idle.pid is None


def test_one_that_died_while_nobody_asked_is_started_anew(texts: LongTexts, log: Path) -> None:
    texts.ask(tokenize("a"))
    assert texts.idle.pid is not None
    os.kill(texts.idle.pid, signal.SIGKILL)
    wait_for(lambda: texts.idle._process is None or texts.idle._process.poll() is not None)
    assert json.loads(texts.ask(tokenize("ab")))["tokens"] == [97, 98]
    assert log.read_text().split() == ["idle", "idle"]


def test_one_that_dies_as_it_starts_is_an_error_at_once() -> None:
    process = TextProcess(Begin("none.gguf", _PARSERS, _NAMES, True), [sys.executable, "-c", "exit(3)"])
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"did not start \(status 3\)"):
        process.ask(tokenize("a"), 60)
    assert time.monotonic() - started < 20  # of the 120 s that a start may take
    process.close()


def test_who_waits_when_it_is_closed_starts_none(texts: LongTexts, log: Path) -> None:
    texts.ask(tokenize("a"))
    with ThreadPoolExecutor(2) as threads:
        stuck = threads.submit(texts.idle.ask, tokenize("stuck"), 60)
        wait_for(lambda: texts.idle.works)
        waiting = threads.submit(texts.idle.ask, tokenize("b"), 60)
        time.sleep(0.05)
        texts.close()
        for asked in (stuck, waiting):
            with pytest.raises(EngineError):
                asked.result()
    assert texts.idle.pid is None
    assert log.read_text().split() == ["idle"]


def descendants(pid: int) -> list[int]:
    lists = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/children")]
    children = [int(child) for each in lists for child in each.split()]
    return [*children, *(found for child in children for found in descendants(child))]


def test_a_served_model_reads_long_texts_as_short_ones_on_cores_that_others_leave(demo: Serve) -> None:
    url = demo.wait_ready()
    root = url.removesuffix("/v1")

    def post(path: str, **body: object) -> httpx.Response:
        return httpx.post(root + path, json=body, timeout=120)

    short, long = ([{"role": "user", "content": text}] for text in ("TEXT", _LONG))
    prompt = post("/apply-template", messages=short).json()["prompt"].replace("TEXT", _LONG)
    assert post("/apply-template", messages=long).json() == {"prompt": prompt}
    ids = post("/tokenize", messages=long).json()["tokens"]
    assert post("/detokenize", tokens=ids).json()["content"] == prompt
    special = [ids.count(token) for token in (1, 2)]  # <|im_start|>, <|im_end|>: none is the user's
    assert special == [post("/tokenize", messages=short).json()["tokens"].count(token) for token in (1, 2)]
    assert post("/v1/messages/count_tokens", messages=long).json() == {"input_tokens": len(ids)}
    for path, body, param in (
        ("/v1/chat/completions", {"messages": long}, "messages"),
        ("/v1/completions", {"prompt": _LONG[:70_000]}, "prompt"),
    ):
        error = assert_shape(post(path, **body), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert error["n_ctx"] == 1024
    apart = [
        pid
        for pid in descendants(demo.process.pid)
        if b"text_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert apart
    (helper,) = descendants(apart[0])
    for pid in (apart[0], helper):
        assert os.sched_getscheduler(pid) == os.SCHED_IDLE
        own = os.getpriority(os.PRIO_PROCESS, demo.process.pid)
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(own + LOW_PRIORITY_NICE, 19)
        assert os.getsid(pid) == os.getsid(demo.process.pid)
