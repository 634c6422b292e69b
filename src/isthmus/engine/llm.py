"""`LLM`: text in, text out, in this process.

    llm = LLM("demo")
    print(llm.generate("The sky is").text)
    for delta in llm.chat([{"role": "user", "content": "Why is it blue?"}], stream=True):
        print(delta.text, end="", flush=True)

One prompt gives one `Completion`, a list of prompts gives a list; with stream=True both give an iterator of
`Delta`. The engine runs while the iterator is read; an iterator that is dropped or closed ends its requests.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, cast, overload

from isthmus.config import DEFAULT_PARALLEL, RunOptions
from isthmus.engine.answer import Answer, Completion, Delta, Timings
from isthmus.engine.engine import Engine
from isthmus.engine.packed_cache import Progress
from isthmus.engine.request import ModelInfo, Request, SamplingParams
from isthmus.resolve import resolve_model
from isthmus.tokenizer import ChatTemplate, Tokenizer
from isthmus.weights.source import open_weights

__all__ = ["LLM", "Completion", "Delta", "Timings"]

Prompt = str | list[int]  # text (never parsed for special tokens), or token ids as they are
Message = Mapping[str, Any]  # {"role": ..., "content": ...}


class LLM:
    """A model with its tokenizer and chat template. `options` are the fields of RunOptions."""

    def __init__(self, model: str | Path, *, progress: Progress | None = None, **options: Any) -> None:
        run_options = RunOptions.from_kwargs(**({"parallel": DEFAULT_PARALLEL} | options))
        path = resolve_model(str(model), progress=progress)
        # Tokenizer and template first: what is wrong with them is said before gigabytes are read.
        with closing(open_weights(path)) as source:
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
        self._answers: dict[str, Answer] = {}

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
        """Continues one prompt or several. Raises UsageError and ContextLengthError before anything runs."""
        several = not isinstance(prompts, str) and not (prompts and isinstance(prompts[0], int))
        inputs = cast("list[Prompt]", list(prompts) if several else [prompts])
        answers = self._start([self._encoded(prompt) for prompt in inputs], params, continues=True)
        if stream:
            return self._stream(answers)
        completions = self._finished(answers)
        return completions if several else completions[0]

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
        """Answers the last of `messages`. Raises TemplateError, UsageError and ContextLengthError."""
        segments = self.chat_template.render([dict(message) for message in messages])
        answers = self._start([self.tokenizer.encode_segments(segments)], params, continues=False)
        return self._stream(answers) if stream else self._finished(answers)[0]

    def _encoded(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special=True, parse_special=False)
        return list(prompt)

    def _start(
        self, prompts: list[list[int]], params: SamplingParams | None, *, continues: bool
    ) -> list[Answer]:
        """Queues all prompts, or none if one is refused."""
        params = params or SamplingParams()
        stop_ids = frozenset(self.tokenizer.stop_ids | set(params.stop_token_ids))
        answers: list[Answer] = []
        try:
            for index, prompt in enumerate(prompts):
                request = Request(f"llm-{next(self._ids)}", prompt, params, stop_ids)
                answer = Answer(request, index, self.tokenizer, continues=continues)
                self.engine.add(request)
                self._answers[request.id] = answer
                answers.append(answer)
        except Exception:
            self._drop(answers)
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
            while True:
                for answer in answers:
                    while answer.deltas:
                        yield answer.deltas.popleft()
                if all(answer.completion for answer in answers):
                    return
                self._step()
        finally:
            self._drop(answers)

    def _drop(self, answers: list[Answer]) -> None:
        for answer in answers:
            self.engine.cancel(answer.request.id)
            self._answers.pop(answer.request.id, None)

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
