"""`LLM`: text in, text out, in this process.

    llm = LLM("demo")
    print(llm.generate("The sky is").text)
    for delta in llm.chat([{"role": "user", "content": "Why is it blue?"}], stream=True):
        print(delta.text, end="", flush=True)

One prompt gives one `Completion`, a list of prompts gives a list; with stream=True both give an iterator of
`Delta`. The engine runs while the iterator is read; an iterator that is dropped or closed ends its requests.

Threads may share an LLM: their requests are computed together, each thread taking its turn with a step. So
`await asyncio.to_thread(llm.generate, prompt)` is how to wait for an answer without blocking an event loop.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, Self, cast, overload

from isthmus.config import DEFAULT_PARALLEL, RunOptions
from isthmus.engine.answer import Answer, Completion, Delta, Timings
from isthmus.engine.engine import Engine
from isthmus.engine.packed_cache import Progress
from isthmus.engine.request import ModelInfo, Request, SamplingParams
from isthmus.engine.turns import Turns
from isthmus.errors import UsageError
from isthmus.models.table import check_architecture
from isthmus.resolve import resolve_model
from isthmus.tokenizer import ChatTemplate, Tokenizer
from isthmus.weights.source import open_weights

__all__ = ["LLM", "Completion", "Delta", "Timings"]

Prompt = str | list[int]  # text (never parsed for special tokens), or token ids as they are
Message = Mapping[str, Any]  # {"role": ..., "content": ...}


class LLM:
    """A model with its tokenizer and chat template; `with LLM(...) as llm:` gives its memory back at the end.

    model: what every command takes: a .gguf file (any shard of a split one), owner/repo:QUANT of a downloaded
    model, "demo", or "dummy:SHAPE".
    progress: called with (bytes done, bytes in all) while it loads.
    options: the fields of isthmus.config.RunOptions, among them context_tokens (of one request), parallel
    (requests computed together), threads, kv_dtype, packed_cache, strategy, device and gpu_memory ("20GiB").

    Raises UsageError, ModelFileError, NotEnoughMemoryError or DeviceError, before weights are read.
    """

    def __init__(self, model: str | Path, *, progress: Progress | None = None, **options: Any) -> None:
        run_options = RunOptions.from_kwargs(**({"parallel": DEFAULT_PARALLEL} | options))
        path = resolve_model(str(model), progress=progress)
        # Tokenizer and template first: what is wrong with them is said before gigabytes are read.
        with closing(open_weights(path)) as source:
            check_architecture(source.metadata.get("general.architecture"))
            tokenizer = Tokenizer.from_gguf(source.metadata)
            template = ChatTemplate.for_tokenizer(tokenizer) if tokenizer.chat_template else None
            engine = Engine(path, run_options, progress, source)
        self._assemble(engine, tokenizer, template)

    @classmethod
    def from_parts(
        cls, engine: Engine, tokenizer: Tokenizer, chat_template: ChatTemplate | None = None
    ) -> LLM:
        """An LLM of parts that exist already."""
        llm = cls.__new__(cls)
        llm._assemble(engine, tokenizer, chat_template)
        return llm

    def _assemble(self, engine: Engine, tokenizer: Tokenizer, chat_template: ChatTemplate | None) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._chat_template = chat_template
        self._ids = itertools.count()
        self._turns = Turns()  # all of the engine, and what follows, is for one thread at a time
        self._answers: dict[str, Answer] = {}
        self._dropped: deque[Answer] = deque()  # by iterators that nobody reads to their end
        self._closed = False

    def __repr__(self) -> str:
        if not isinstance(self.engine, Engine):
            return f"LLM({self.engine!r})"
        info, closed = self.info, ", closed" if self._closed else ""
        size = f"{info.weight_bytes / 1e9:.2f} GB"
        return (
            f"LLM({info.name!r}: {info.architecture}, {size}, {info.strategy}, "
            f"context {info.context_tokens}{closed})"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def info(self) -> ModelInfo:
        return self.engine.info

    @property
    def chat_template(self) -> ChatTemplate:
        """The file's template; if it has none, its family's, with a warning when first used."""
        if self._chat_template is None:
            self._chat_template = ChatTemplate.for_tokenizer(self.tokenizer)
        return self._chat_template

    def close(self) -> None:
        """Gives the model's memory back. Afterwards all that asks, open streams too, gets a UsageError."""
        with self._turns:
            if not self._closed:
                self._closed = True
                self.engine.close()

    @overload
    def generate(  # type: ignore[overload-overlap]  # an empty list: of prompts, says the implementation
        self, prompts: Prompt, params: SamplingParams | None = None, *, stream: Literal[False] = False
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
    ) -> list[Completion]: ...
    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
    ) -> Generator[Delta, None, None]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
    ) -> Completion | list[Completion] | Generator[Delta, None, None]:
        """Continues one prompt or several, each a text or a list of token ids, without a chat template.

        Raises UsageError and ContextLengthError before anything runs.
        """
        one = isinstance(prompts, str) or _is_token_ids(prompts)
        inputs = cast("list[Prompt]", [prompts] if one else list(prompts))
        answers = self._start([self._encoded(prompt) for prompt in inputs], params, continues=True)
        if stream:
            return self._stream(answers)
        completions = self._finished(answers)
        return completions[0] if one else completions

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
    ) -> Completion: ...
    @overload
    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, stream: Literal[True]
    ) -> Generator[Delta, None, None]: ...

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, stream: bool = False
    ) -> Completion | Generator[Delta, None, None]:
        """Answers the last of `messages`: mappings with `role` and `content`, as OpenAI's protocol has them.

        Raises TemplateError, UsageError and ContextLengthError before anything runs.
        """
        _check_messages(messages)
        segments = self.chat_template.render([dict(message) for message in messages])
        answers = self._start([self.tokenizer.encode_segments(segments)], params, continues=False)
        return self._stream(answers) if stream else self._finished(answers)[0]

    def _encoded(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special=True, parse_special=False)
        if not _is_token_ids(prompt) and prompt != []:
            raise UsageError(_no_prompt(prompt))
        try:
            return [operator.index(token) for token in prompt]
        except TypeError:
            raise UsageError(
                "a list of token ids holds whole numbers alone; several prompts are a list of lists"
            ) from None

    def _start(
        self, prompts: list[list[int]], params: SamplingParams | None, *, continues: bool
    ) -> list[Answer]:
        """Queues all prompts, or none if one is refused."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            name = type(params).__name__
            raise UsageError(f"params must be SamplingParams, as SamplingParams(temperature=0), got {name}")
        stop_ids = frozenset(self.tokenizer.stop_ids | set(params.stop_token_ids))
        answers: list[Answer] = []
        with self._turns:
            self._check_open()
            self._cancel_dropped()
            try:
                for index, prompt in enumerate(prompts):
                    request = Request(f"llm-{next(self._ids)}", prompt, params, stop_ids)
                    answer = Answer(request, index, self.tokenizer, continues=continues)
                    self.engine.add(request)
                    self._answers[request.id] = answer
                    answers.append(answer)
            except BaseException:  # Ctrl-C too
                self._dropped += answers
                self._cancel_dropped()
                raise
        return answers

    def _finished(self, answers: list[Answer]) -> list[Completion]:
        for _ in self._stream(answers):
            pass
        return [answer.completion for answer in answers if answer.completion]

    def _stream(self, answers: list[Answer]) -> Generator[Delta, None, None]:
        """The deltas of these answers. Dropping the iterator ends them, even if it was never read."""
        deltas = self._deltas(answers)
        next(deltas)
        return deltas

    def _deltas(self, answers: list[Answer]) -> Generator[Delta, None, None]:
        """Runs the engine until these are done. Answers of other iterators get their share of each step."""
        try:
            yield Delta(0, "", 0)  # into the try block: _stream takes this one
            while ready := self._next(answers):
                yield from ready
        finally:
            self._drop(answers)

    def _next(self, answers: list[Answer]) -> list[Delta]:
        """What has come of these since the last call, after steps if nothing has; nothing once all is out."""
        with self._turns:
            while not any(answer.deltas for answer in answers):
                if all(answer.completion for answer in answers):
                    return []
                self._check_open()
                self._cancel_dropped()
                self._step()
            return [answer.deltas.popleft() for answer in answers for _ in range(len(answer.deltas))]

    def _drop(self, answers: list[Answer]) -> None:
        """Ends these where they are; at once, unless a thread has the engine: then with its next step."""
        self._dropped += [answer for answer in answers if answer.completion is None]
        if self._turns.enter_if_free():
            try:
                self._cancel_dropped()
            finally:
                self._turns.leave()

    def _cancel_dropped(self) -> None:
        while self._dropped:
            request_id = self._dropped.popleft().request.id
            self.engine.cancel(request_id)
            self._answers.pop(request_id, None)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the model is closed; make another LLM")

    def _step(self) -> None:
        before = time.perf_counter()
        outputs = self.engine.step()
        now = time.perf_counter()
        for output in outputs:
            answer = self._answers.get(output.request_id)
            if answer is None:
                continue  # dropped before; its "cancelled" comes now
            if answer.take(output, before, now):
                self.engine.cancel(output.request_id)
            if answer.completion is not None:
                del self._answers[output.request_id]
        told = {output.request_id for output in outputs}
        for request_id, answer in self._answers.items():
            num_computed = self.engine.num_computed(request_id)
            if request_id not in told and num_computed:
                answer.computed(num_computed, before)


def _is_token_ids(prompt: object) -> bool:
    """UsageError for what is neither that nor a list of prompts."""
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise UsageError(_no_prompt(prompt))
    return bool(prompt) and hasattr(prompt[0], "__index__")


def _no_prompt(came: object) -> str:
    return f"a prompt is a text or a list of token ids, got {type(came).__name__}"


def _check_messages(messages: object) -> None:
    """UsageError unless it is a list of mappings; what is in them the template checks."""
    example = "[{'role': 'user', 'content': 'Hello'}]"
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise UsageError(f"messages must be a list such as {example}, got {type(messages).__name__}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            name = type(message).__name__
            raise UsageError(f"messages[{index}] must be a mapping as in {example}, got {name}")
