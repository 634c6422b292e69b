"""What the routes share: engine, tokenizer, chat template, and the way of a request into the engine.

Everything slow about a request's text (template, tokenizer) runs in threads, so that the event loop goes on
answering others; what can be wrong with it is found before the engine hears of it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from fastapi import Request as HttpRequest
from fastapi.responses import Response

from isthmus.engine.process import EngineProcess
from isthmus.engine.request import MAX_SEED, ModelInfo, Request, SamplingParams
from isthmus.server.answers import Answering, Answers
from isthmus.server.body import read_body
from isthmus.server.errors import ApiError, model_not_found, unavailable
from isthmus.server.generation import Choices, Generation
from isthmus.server.logprobs import TokenTexts
from isthmus.server.metrics import Metrics
from isthmus.server.options import ServerOptions
from isthmus.server.prompts import Prepared, check_params
from isthmus.server.schemas.base import Sampling
from isthmus.server.schemas.chat import ChatRequest
from isthmus.server.schemas.completions import CompletionRequest
from isthmus.server.sse import until_gone
from isthmus.server.text_lanes import TextLanes
from isthmus.server.text_work import TextSide
from isthmus.tokenizer import Detokenizer

if TYPE_CHECKING:
    from isthmus.server.text_process import LongTexts
    from isthmus.tokenizer import ChatTemplate, Tokenizer

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
        long_texts: LongTexts | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.names = names
        self.options = options
        self.created = int(time.time())
        self.metrics = Metrics(engine)
        self._num_admitted = 0
        side = TextSide.of(tokenizer, template, options.parsers, names)
        self.texts = TextLanes(side, long_texts, options.max_queue)
        self.answers = Answers(tokenizer, side.dialect)

    @property
    def model_id(self) -> str:
        return self.names[0]

    @property
    def num_requests(self) -> int:
        """Requests in progress: being prepared, waiting or running."""
        return self._num_admitted

    def close(self) -> None:
        self.texts.close()
        self.answers.close()
        self.template.close()

    def check_model(self, name: str | None) -> None:
        """ApiError 404 for a name that is not this model's."""
        if name is not None and name not in self.names:
            raise model_not_found(name, self.model_id)

    def context_tokens(self, info: ModelInfo) -> int:
        """What one request may use, prompt and answer together."""
        limit = self.options.max_model_len
        return info.context_tokens if limit is None else min(limit, info.context_tokens)

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

    async def start_chat(self, chat: ChatRequest, kind: str = "chatcmpl-") -> Choices:
        """The answers to a conversation, under way. The caller closes them."""
        info = self.require(chat.model)
        params = chat.sampling_params()
        check_params(params, info.vocab_size)
        limit = self.context_tokens(info)

        async def prepare() -> Prepared:
            made = await self.texts.of_chat(chat, limit)
            return Prepared(made.prompts, await self.answers.of(chat, inside=made.inside))

        ends = not chat.ignore_eos
        return await self.start(kind, prepare, params, chat, continues=chat.continues, ends=ends)

    async def start_completion(self, body: CompletionRequest) -> Choices:
        """The continuations of texts, under way. The caller closes them."""
        info = self.require(body.model)
        params = body.sampling_params()
        if body.echo and body.logprobs is not None:
            params = replace(params, prompt_logprobs=body.logprobs)
        check_params(params, info.vocab_size)
        limit = self.context_tokens(info)

        async def prepare() -> Prepared:
            return Prepared((await self.texts.of_completion(body, limit)).prompts)

        # After one token nothing comes: an end token is then told like any other, as its readers count on.
        ends = not (body.ignore_eos or (body.echo and body.logprobs is not None and body.token_limit == 1))
        return await self.start("cmpl-", prepare, params, body, continues=True, ends=ends)

    async def start(
        self,
        kind: str,
        prepare: Callable[[], Awaitable[Prepared]],
        params: SamplingParams,
        asked: Sampling,
        *,
        continues: bool,
        ends: bool,
    ) -> Choices:
        """As many answers as were asked for to each prompt; `prepare` makes those once there is a place.

        `continues`: the answers go on from the prompts' text. `ends`: the model's end tokens end them; where
        a grammar says that nothing may follow they always do.
        """
        choices = Choices(f"{kind}{uuid.uuid4().hex}", on_end=self._admit())
        try:
            made = await prepare()
            params = replace(params, grammar=made.answering.grammar)
            limit = self.context_tokens(self.require_ready())  # again: the engine may have died meanwhile
            ends = ends or params.grammar is not None
            stop_ids = (self.tokenizer.stop_ids if ends else frozenset()) | frozenset(params.stop_token_ids)
            num_requests = len(made.prompts) * asked.num_choices
            for index in range(num_requests):
                prompt = made.prompts[index // asked.num_choices]
                request = Request(
                    id=choices.id if num_requests == 1 else f"{choices.id}-{index}",
                    prompt=prompt,
                    params=_own_params(params, index, limit - len(prompt)),
                    stop_ids=stop_ids,
                    cache_salt=asked.cache_salt or "",
                )
                choices.generations.append(self._generation(request, choices, made.answering, continues))
            return choices
        except BaseException:
            choices.close()
            raise

    def _generation(
        self, request: Request, choices: Choices, answering: Answering, continues: bool
    ) -> Generation:
        with_texts = request.params.logprobs is not None
        return Generation(
            self.engine,
            request,
            Detokenizer(self.tokenizer, request.params.stop, continues=continues, shown=answering.shown),
            parser=answering.parser(),
            texts=TokenTexts(self.tokenizer, continues=continues) if with_texts else None,
            metrics=self.metrics,
            changed=choices.changed,
            on_end=choices.one_ended,
        )

    async def answer_of_text(self, path: str, request: HttpRequest) -> Response:
        """The answer to a request that asks of texts alone (text_work.py): no engine is needed."""
        body = await read_body(request, self.options)
        info = self.engine.info
        context_tokens = self.context_tokens(info) if info else None
        work = self.texts.answer(path, body, context_tokens)
        return Response(await until_gone(request.receive, work), media_type="application/json")

    def _admit(self) -> Callable[[], None]:
        """Takes a place among the requests in progress; the result, called once or more, gives it back."""
        parallel = self.engine.info.parallel if self.engine.info is not None else 1
        if self._num_admitted >= parallel + self.options.max_queue:
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


def _own_params(params: SamplingParams, index: int, num_left: int) -> SamplingParams:
    """Those of one choice: a seed of its own, the first one the seed alone, and no more than fits."""
    seed = None if params.seed is None else (params.seed + index) & MAX_SEED
    return replace(params, seed=seed, max_tokens=min(params.max_tokens or num_left, num_left))
