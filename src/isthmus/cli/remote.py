"""A running server in the place of a loaded model: the same questions, the same deltas.

Any server with OpenAI's protocol will do; what Isthmus adds to it (timings, the context) is used if there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import httpx

from isthmus.engine.answer import Completion, Delta, Timings
from isthmus.engine.request import FinishReason, SamplingParams
from isthmus.errors import IsthmusError, UsageError

# Between two bytes: a long prompt on a slow machine says nothing for a while but sends comments meanwhile.
_READ_S = 300.0


@dataclass(frozen=True)
class RemoteInfo:
    """What `/v1/models` says of the model; context_tokens is 0 where it does not say."""

    name: str
    context_tokens: int = 0


class Remote:
    """`url`: the server's, with or without /v1. `model`: one of its names; None: its first."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        """Asks for the models. UsageError for a URL that is none or a model that is not served."""
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--url must begin with http:// or https://, got {url!r}")
        base = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(10.0, read=_READ_S)
        self._client = httpx.Client(base_url=f"{base}/v1/", headers=headers, timeout=timeout)
        served = self._json(self._client.build_request("GET", "models"))["data"]
        self.info = _find(served, model)

    def close(self) -> None:
        self._client.close()

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, *, stream: Literal[True] = True
    ) -> Generator[Delta, None, None]:
        """The answer as it comes; the last delta has the completion."""
        return self._ask("chat/completions", {"messages": list(messages)}, params)

    def generate(
        self, prompt: str, params: SamplingParams, *, stream: Literal[True] = True
    ) -> Generator[Delta, None, None]:
        """A text continued as it is."""
        limit = {} if params.max_tokens is not None else {"max_tokens": 2**31 - 1}
        return self._ask("completions", {"prompt": prompt} | limit, params)

    def _ask(self, path: str, body: dict[str, Any], params: SamplingParams) -> Generator[Delta, None, None]:
        body |= _changed(params) | {"model": self.info.name, "stream": True}
        body["stream_options"] = {"include_usage": True}
        answer = _Answer()
        try:
            with self._client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise _error_of(response)
                for line in response.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield from answer.take(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        yield answer.last()

    def _json(self, request: httpx.Request) -> Any:
        try:
            response = self._client.send(request)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.status_code != 200:
            raise _error_of(response)
        try:
            return response.json()
        except ValueError:
            raise IsthmusError(f"{request.url} does not answer in JSON; is it an OpenAI server?") from None

    def _unreachable(self, error: httpx.HTTPError) -> IsthmusError:
        return IsthmusError(f"the server at {self._client.base_url} cannot be reached: {error}")


class _Answer:
    """Chunks of a stream into deltas."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._first: float | None = None
        self._text = ""
        self._thinking = False
        self._reason: Any = None
        self._usage: dict[str, Any] = {}

    def take(self, chunk: dict[str, Any]) -> Iterator[Delta]:
        if "error" in chunk:
            raise IsthmusError(f"the server ended the answer: {chunk['error'].get('message')}")
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            text = self._shown(choice)
            self._reason = choice.get("finish_reason") or self._reason
            if text:
                self._first = self._first or time.monotonic()
                self._text += text
                yield Delta(0, text, 0)

    def _shown(self, choice: dict[str, Any]) -> str:
        """Thoughts are shown as a model writes them, between <think> and </think>."""
        delta = choice.get("delta") or {"content": choice.get("text")}
        thoughts, content = delta.get("reasoning_content"), delta.get("content")
        text = ""
        if thoughts:
            text = thoughts if self._thinking else f"<think>\n{thoughts}"
            self._thinking = True
        if content:
            text += f"\n</think>\n\n{content}" if self._thinking else content
            self._thinking = False
        return text

    def last(self) -> Delta:
        now = time.monotonic()
        first = self._first or now
        num_prompt, num_output = (self._usage.get(f"{name}_tokens", 0) for name in ("prompt", "completion"))
        timings = Timings(num_prompt, num_output, first - self._started, now - first)
        reason: FinishReason = "length" if self._reason == "length" else "stop"
        return Delta(0, "", 0, Completion(self._text, [], reason, num_prompt, timings))


def _find(served: list[dict[str, Any]], model: str | None) -> RemoteInfo:
    names = [each["id"] for each in served]
    if not names:
        raise IsthmusError("the server has no model")
    if model is not None and model not in names:
        raise UsageError(f"the server has no model {model!r}; it has {', '.join(names[:10])}")
    found = served[names.index(model) if model is not None else 0]
    return RemoteInfo(found["id"], found.get("max_model_len") or 0)


def _changed(params: SamplingParams) -> dict[str, Any]:
    """The parameters that are not the default, by their names in the protocol, which are the same."""
    default = asdict(SamplingParams())
    return {name: value for name, value in asdict(params).items() if value != default[name]}


def _error_of(response: httpx.Response) -> IsthmusError:
    """What the server says is wrong, in one line."""
    try:
        said = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = response.text[:200]
    return IsthmusError(f"the server says ({response.status_code}): {said}")
