"""What the routes share: engine, tokenizer, chat template, and the way of a request into the engine.

Everything slow about a request's text (template, tokenizer) runs in threads, so that the event loop goes on
answering others; what can be wrong with it is found before the engine hears of it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from isthmus.engine.process import EngineProcess
from isthmus.engine.request import MAX_SEED, ModelInfo, Request, SamplingParams
from isthmus.errors import ContextLengthError, UsageError
from isthmus.server.errors import ApiError, unavailable
from isthmus.server.events import Parser, PlainParser
from isthmus.server.generation import Choices, Generation
from isthmus.server.options import ServerOptions
from isthmus.server.parsing import parser_for
from isthmus.server.schemas.chat import ChatRequest
from isthmus.tokenizer import Detokenizer

if TYPE_CHECKING:
    from isthmus.tokenizer import ChatTemplate, Tokenizer

T = TypeVar("T")

# Tokenising leaves the GIL and is short; a second thread lets small prompts pass one of megabytes.
_TEXT_THREADS = 2

_LOADING_RETRY_S = 5
_FULL_RETRY_S = 2


class Service:
    """`names` are what clients may call the model, the first one being its id."""

    def __init__(
        self,
        engine: EngineProcess,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        names: tuple[str, ...],
        options: ServerOptions,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.names = names
        self.options = options
        self.created = int(time.time())
        self._num_admitted = 0
        self._max_token_bytes = max(
            len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)
        )
        self._threads = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="text")

    @property
    def model_id(self) -> str:
        return self.names[0]

    @property
    def num_requests(self) -> int:
        """Requests in progress: being prepared, waiting or running."""
        return self._num_admitted

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.template.close()

    def check_model(self, name: str | None) -> None:
        """ApiError 404 for a name that is not this model's."""
        if name is not None and name not in self.names:
            message = f"the model {name[:100]!r} is not served here; this server has {self.model_id!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def require(self, name: str | None) -> ModelInfo:
        """The model of a request that calls it `name`; ApiError 404 or 503."""
        self.check_model(name)
        return self.require_ready()

    def require_ready(self) -> ModelInfo:
        """The loaded model; ApiError 503 while there is none."""
        if self.engine.state == "loading":
            raise unavailable("the model is still loading", "model_loading", _LOADING_RETRY_S)
        if self.engine.state != "ready" or self.engine.info is None:
            message = f"the engine is not running: {self.engine.failure or self.engine.state}"
            raise ApiError(503, message, code="engine_dead")
        return self.engine.info

    async def start_chat(self, chat: ChatRequest) -> Choices:
        """The answers to a conversation, under way. The caller closes them."""
        info = self.require(chat.model)
        params = chat.sampling_params()
        _check_token_ids(params, info.vocab_size)

        async def prompts() -> list[list[int]]:
            return [await self._in_thread(lambda: self._prompt_of(chat, info))]

        return await self.start("chatcmpl", prompts, params, chat.num_choices, lambda: parser_for(chat))

    async def start(
        self,
        kind: str,
        prompts: Callable[[], Awaitable[list[list[int]]]],
        params: SamplingParams,
        num_choices: int = 1,
        parser: Callable[[], Parser] = PlainParser,
    ) -> Choices:
        """`num_choices` answers to each prompt, which are made once the request has its place."""
        choices = Choices(f"{kind}-{uuid.uuid4().hex}", on_end=self._admit())
        try:
            made = await prompts()
            self.require_ready()  # again: the engine may have died meanwhile
            stop_ids = self.tokenizer.stop_ids | frozenset(params.stop_token_ids)
            num_requests = len(made) * num_choices
            for index in range(num_requests):
                own = params if params.seed is None else replace(params, seed=_seed(params.seed, index))
                generation = Generation(
                    self.engine,
                    Request(
                        id=choices.id if num_requests == 1 else f"{choices.id}-{index}",
                        prompt=made[index // num_choices],
                        params=own,
                        stop_ids=stop_ids,
                    ),
                    Detokenizer(self.tokenizer, params.stop),
                    parser=parser(),
                    changed=choices.changed,
                    on_end=choices.one_ended,
                )
                choices.generations.append(generation)
            return choices
        except BaseException:
            choices.close()
            raise

    def _prompt_of(self, chat: ChatRequest, info: ModelInfo) -> list[int]:
        """Token ids of the rendered conversation; ContextLengthError if no token of an answer fits in."""
        messages = [each.for_template() for each in chat.messages]
        try:
            segments = self.template.render(messages, **chat.template_kwargs)
        except UsageError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_value") from error
        # No tokenizer makes fewer tokens than this; it spares megabytes that cannot fit their tokenising.
        num_bytes = sum(len(segment.text.encode()) for segment in segments)
        at_least = num_bytes // self._max_token_bytes
        prompt = self.tokenizer.encode_segments(segments) if at_least < info.context_tokens else []
        num_tokens = len(prompt) or at_least
        if num_tokens >= info.context_tokens:
            count = f"{num_tokens}" if prompt else f"at least {num_tokens}"
            raise ContextLengthError(
                f"the prompt has {count} tokens; the context of {info.context_tokens} must hold it and at "
                "least one of the answer: shorten the conversation, or start the server with a larger --ctx",
                num_prompt_tokens=num_tokens,
                context_tokens=info.context_tokens,
            )
        return prompt

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _admit(self) -> Callable[[], None]:
        """Takes a place among the requests in progress; the result, called once or more, gives it back."""
        if self._num_admitted > self.options.max_queue:
            message = f"{self._num_admitted} requests are in progress, which is all this server queues"
            raise unavailable(message, "queue_full", _FULL_RETRY_S)
        self._num_admitted += 1
        inside = True

        def leave() -> None:
            nonlocal inside
            if inside:
                self._num_admitted -= 1
            inside = False

        return leave


def _seed(seed: int, index: int) -> int:
    """Choices of one request differ; the first is that of the seed alone."""
    return (seed + index) & MAX_SEED


def _check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    for param, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token in ids:
            if token >= vocab_size:
                message = f"{param}: token id {token} does not exist; the model's are 0 to {vocab_size - 1}"
                raise ApiError(400, message, param=param, code="invalid_value")
