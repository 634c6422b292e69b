"""Templates that loop, grow, reach for Python or are broken: an error each time, and the process lives on."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date

import pytest

from isthmus.errors import TemplateError, UsageError
from isthmus.tokenizer import ChatTemplate
from isthmus.tokenizer.template_process import Limits, TemplateProcess

_LIMITS = Limits(seconds=1.0, output_chars=1 << 20)
_MESSAGES = [{"role": "user", "content": "hello"}]

# source: what the error says
_HOSTILE = {
    "{% for i in range(10**12) %}{% endfor %}": "beyond its limits: Range too big",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "took longer than 1 s",
    "{{ 'a' * 10**10 }}": "beyond its limits: more memory",
    "{{ [0] * 10**9 }}": "beyond its limits: more memory",
    "{{ '%1000000000d' % 1 }}": "beyond its limits: more memory",
    "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}": "memory",
    "{% for i in range(9999) %}{{ 'x' * 1000 }}{% endfor %}": "more than 1048576 characters of output",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "nested too deeply",
    "{{ ''.__class__.__mro__ }}": "access to attribute '__class__'",
    "{{ cycler.__init__.__globals__ }}": "access to attribute '__init__'",
    "{{ lipsum.__globals__['os'] }}": "'lipsum' is undefined",
    "{{ (messages | attr('__class__')).__mro__ }}": "access to attribute '__class__'",
    "{{ messages.append(1) }}": "access to attribute 'append'",
    "{{ '{0.__class__.__mro__}'.format('') }}": "access to attribute '__class__'",
    "{% include '/etc/passwd' %}": "no loader for this environment",
    "{{ raise_exception('no tools <here>') }}": "refuses these messages: no tools <here>",
    "line one\n{% if %}": "not valid Jinja: line 2",
    "{{ 'a' + 1 }}": "failed: TypeError",
    "{{ nothing.at.all }}": "failed: UndefinedError: 'nothing' is undefined",
    "{{ 1 / 0 }}": "failed: ZeroDivisionError",
}


@pytest.mark.parametrize("source", _HOSTILE)
def test_hostile_templates_end_in_an_error(source: str) -> None:
    # Only the endless loop shall meet the clock, the others the limit that is theirs, on a slow machine too.
    limits = _LIMITS if "took longer" in _HOSTILE[source] else Limits(seconds=60, output_chars=1 << 20)
    chat = ChatTemplate(source, {}, special_literals=["<|im_end|>"], limits=limits)
    with pytest.raises(TemplateError, match="the chat template") as caught:
        chat.render(_MESSAGES)
    assert _HOSTILE[source] in str(caught.value)
    chat.close()


@pytest.fixture
def process() -> Iterator[TemplateProcess]:
    opened = TemplateProcess(_LIMITS)
    yield opened
    opened.close()


def _request(source: str) -> dict[str, object]:
    return {"source": source, "barrier": {}, "variables": {"messages": []}}


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_helper_starts_when_first_needed_and_is_used_again(process: TemplateProcess) -> None:
    assert process.pid is None
    assert process.ask(_request("a")) == {"text": "a"}
    first = process.pid
    assert process.ask(_request("{{ 1 / 0 }}"))["error"]["kind"] == "runtime"
    assert process.ask(_request("b")) == {"text": "b"}
    assert process.pid == first


def test_a_helper_that_overruns_is_killed_and_replaced(process: TemplateProcess) -> None:
    process.ask(_request("a"))
    first = process.pid
    assert first is not None
    with pytest.raises(TemplateError, match="took longer than 1 s and was stopped"):
        process.ask(
            _request("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
        )
    assert not _alive(first)
    assert process.ask(_request("b")) == {"text": "b"}
    assert process.pid != first


def test_a_helper_that_died_is_replaced(process: TemplateProcess) -> None:
    process.ask(_request("a"))
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    assert process.ask(_request("b")) == {"text": "b"}


def test_closing_ends_the_helper(process: TemplateProcess) -> None:
    process.ask(_request("a"))
    pid = process.pid
    assert pid is not None
    process.close()
    assert not _alive(pid)
    process.close()  # twice is no error


def test_closing_ends_a_rendering_under_way() -> None:
    process = TemplateProcess(Limits(seconds=20.0))
    process.ask(_request("a"))
    with ThreadPoolExecutor(1) as pool:
        source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        asked = pool.submit(process.ask, _request(source))
        while not process._lock.locked():
            time.sleep(0.001)
        process.close()
        with pytest.raises(TemplateError, match="ended its helper process"):
            asked.result()
    assert process.pid is None


def test_garbage_collection_ends_the_helper() -> None:
    process = TemplateProcess(_LIMITS)
    process.ask(_request("a"))
    pid = process.pid
    assert pid is not None
    del process
    assert not _alive(pid)


def test_megabytes_pass_through_both_pipes(process: TemplateProcess) -> None:
    text = "x" * (1 << 20)
    request = {
        "source": "{{ messages[0].content }}",
        "barrier": {},
        "variables": {"messages": [{"content": text}]},
    }
    assert process.ask(request) == {"text": text}


def test_the_helper_is_in_our_session_and_not_in_our_group(process: TemplateProcess) -> None:
    """In a session of its own it would have a share of the cores that its priority does not touch."""
    process.ask(_request("a"))
    assert process.pid is not None
    assert os.getsid(process.pid) == os.getsid(0)
    assert os.getpgid(process.pid) != os.getpgid(0)


@pytest.mark.parametrize("value", [2**70, -(2**70), 1e300, "\ud83d"])
def test_values_that_msgspec_has_not_pass_through(value: object, process: TemplateProcess) -> None:
    request = _request("{{ messages[0].v }}") | {"variables": {"messages": [{"v": value}]}}
    assert process.ask(request) == {"text": str(value)}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"x", {1}, date(2026, 1, 1)])
def test_options_that_json_has_not_are_refused(value: object) -> None:
    chat = ChatTemplate("x", {})
    with pytest.raises(UsageError, match="must be JSON values"):
        chat.render(_MESSAGES, option=value)
    chat.close()


def test_lone_surrogates_pass_through() -> None:
    chat = ChatTemplate("{{ messages[0].content }}", {})
    (segment,) = chat.render([{"role": "user", "content": "a\ud83d"}])
    assert segment.text == "a\ud83d"
    chat.close()


def test_options_that_are_no_json_and_nesting_without_end() -> None:
    chat = ChatTemplate("x", {})
    with pytest.raises(UsageError, match="must be JSON values"):
        chat.render(_MESSAGES, option=object())
    nested: list[object] = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(UsageError, match="nested too deeply"):
        chat.render(_MESSAGES, option=nested)
    chat.close()


def test_options_cannot_replace_what_isthmus_sets() -> None:
    chat = ChatTemplate("x", {"bos_token": "<s>"})
    with pytest.raises(UsageError, match="template option 'bos_token' is set by Isthmus"):
        chat.render(_MESSAGES, bos_token="y")
    chat.close()


def test_the_package_and_the_helper_import_neither_torch_nor_each_other() -> None:
    script = (
        "import sys, isthmus.tokenizer; light = set(sys.modules);"
        "from isthmus.tokenizer import ChatTemplate, Detokenizer, Tokenizer;"
        "print('tokenizers' in light, 'torch' in sys.modules, 'jinja2' in sys.modules)"
    )
    seen = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert seen.split() == ["False", "False", "False"]
