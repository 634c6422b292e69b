"""One request as text: events of the engine in, pieces of text and at last a `Completion` out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from isthmus.engine.request import FinishReason, Output, Request, TokenLogprob
from isthmus.tokenizer import Detokenizer, Tokenizer


@dataclass(frozen=True)
class Timings:
    """Seconds from the first step of a request to its first token, and from there to its last."""

    num_prompt_tokens: int
    num_output_tokens: int
    prefill_s: float
    decode_s: float

    @property
    def prefill_tok_s(self) -> float:
        return self.num_prompt_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tok_s(self) -> float:
        """The first token belongs to the prefill; 0 for an answer of one token."""
        return (self.num_output_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(frozen=True)
class Completion:
    """A finished answer. If finish_reason is "error", `error` says why; text is what there was until then."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    num_prompt_tokens: int
    timings: Timings
    error: str | None = None
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    logprobs: list[TokenLogprob] | None = None  # of token_ids, if params.logprobs asks for them
    prompt_logprobs: list[TokenLogprob | None] | None = (
        None  # of the prompt's, if params.prompt_logprobs does
    )


@dataclass(frozen=True)
class Delta:
    """One step of a stream. `text` may be empty: a chunk of the prompt was computed, or text is held back."""

    index: int  # which of the prompts
    text: str
    num_computed: int  # tokens of prompt and answer in the cache: how far the prompt is
    completion: Completion | None = None  # with the last one


class Answer:
    """A request under way. `deltas` fills as events are taken; the last one has the completion."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer, *, continues: bool) -> None:
        """`continues`: the answer goes on from the prompt's text, as against a turn of its own."""
        self.request = request
        self.deltas: deque[Delta] = deque()
        self.completion: Completion | None = None
        self._index = index
        self._detokenizer = Detokenizer(tokenizer, request.params.stop, continues=continues)
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob | None] | None = None
        self._started: float | None = None
        self._first_token: float | None = None
        self._last_token: float | None = None

    def computed(self, num_computed: int, step_started: float) -> None:
        """Part of the prompt was computed in a step that began at `step_started`."""
        self._started = step_started if self._started is None else self._started
        self.deltas.append(Delta(self._index, "", num_computed))

    def take(self, output: Output, step_started: float, now: float) -> bool:
        """Turns an event into text; True if a stop string ended the answer and the engine must be told."""
        self._started = step_started if self._started is None else self._started
        text, reason = "", output.finish_reason
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = list(output.prompt_logprobs)
        if output.token is not None:
            self._first_token = now if self._first_token is None else self._first_token
            self._last_token = now
            self._token_ids.append(output.token)
            if output.logprob is not None:
                self._logprobs.append(output.logprob)
            text = self._detokenizer.push(output.token)
        if reason is not None and self._detokenizer.stopped is None:
            text += self._detokenizer.finish()
        stopped = self._detokenizer.stopped is not None
        if stopped:
            reason = "stop"
        self._text += text
        if reason is not None:
            self.completion = self._completed(reason, output, now)
        num_computed = output.num_prompt_tokens + max(output.num_output_tokens - 1, 0)
        self.deltas.append(Delta(self._index, text, num_computed, self.completion))
        return stopped and output.finish_reason is None

    def _completed(self, reason: FinishReason, output: Output, now: float) -> Completion:
        started = self._started if self._started is not None else now
        first = self._first_token if self._first_token is not None else now
        last = self._last_token if self._last_token is not None else now
        num_prompt_tokens = len(self.request.prompt)
        timings = Timings(num_prompt_tokens, len(self._token_ids), first - started, last - first)
        return Completion(
            self._text,
            self._token_ids,
            reason,
            num_prompt_tokens,
            timings,
            output.error,
            output.num_cached_tokens,
            None if self.request.params.logprobs is None else self._logprobs,
            self._prompt_logprobs,
        )
