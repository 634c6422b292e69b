"""What crosses the engine's boundary: sampling parameters, a request, its outputs, the engine's own facts.

Plain data without torch, because the HTTP process builds and reads these too. Everything a caller can get
wrong is found here, when the object is made, as a UsageError that says what came and the range; what needs
the model (vocabulary, context) is checked by `Engine.add`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from isthmus.config import check_choice, check_int
from isthmus.errors import UsageError

FinishReason = Literal["stop", "length", "cancelled", "error"]

# Bounds against requests that would cost memory or time out of all proportion; far above what clients send.
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20  # alternatives shown of a token, as OpenAI's top_logprobs
MAX_GRAMMAR_CHARACTERS = 1 << 20
MAX_SALT_CHARACTERS = 256
MAX_INT = 2**31 - 1
MAX_SEED = 2**64 - 1

# Below this the division of logits by the temperature says nothing more: it is taken as greedy.
GREEDY_TEMPERATURE = 1e-5


GrammarKind = Literal["json_object", "json_schema", "lark", "regex"]
GRAMMAR_KINDS = ("json_object", "json_schema", "lark", "regex")


@dataclass(frozen=True)
class Grammar:
    """What an answer must be. `text`: a JSON schema, a lark grammar, a regex; of json_object nothing."""

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        check_choice("the kind of a grammar", self.kind, GRAMMAR_KINDS)
        if not isinstance(self.text, str) or len(self.text) > MAX_GRAMMAR_CHARACTERS:
            raise UsageError(f"a grammar is a string of up to {MAX_GRAMMAR_CHARACTERS} characters")


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. The defaults change nothing: the model's own distribution.

    Order of application: repetition, frequency and presence penalty, logit bias, grammar, temperature, top_k,
    top_p, min_p. Log-probabilities are those of the model before any of these.
    """

    temperature: float = 1.0  # 0 (and anything below 1e-5): the most probable token, ties to the lower id
    top_k: int = 0  # 0: off; else only the k most probable
    top_p: float = 1.0  # smallest set of most probable tokens whose probabilities reach top_p
    min_p: float = 0.0  # only tokens with at least min_p times the probability of the most probable
    repetition_penalty: float = 1.0  # of prompt and answer: logits > 0 divided, others multiplied by it
    presence_penalty: float = 0.0  # subtracted once from each token of the answer
    frequency_penalty: float = 0.0  # subtracted for each time a token stands in the answer
    logit_bias: dict[int, float] = field(default_factory=dict)  # token id -> added to its logit
    seed: int | None = None  # None: a different answer each time
    stop: tuple[str, ...] = ()  # the answer ends before any of these; never part of the text
    stop_token_ids: tuple[int, ...] = ()  # end the answer as the model's own end token does
    max_tokens: int | None = None  # None: until the context is full
    logprobs: int | None = None  # log-probability of each token, and of so many most probable ones
    prompt_logprobs: int | None = None  # the same of the prompt's tokens; the first has none
    grammar: Grammar | None = None  # what the answer must be; None: anything

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, 10.0)
        check_int("top_k", self.top_k, 0, MAX_INT)
        _check_number("top_p", self.top_p, 0.0, 1.0, low_included=False)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            check_int("seed", self.seed, 0, MAX_SEED)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, MAX_INT)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise UsageError(f"grammar must be a Grammar or None, got {type(self.grammar).__name__}")
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_ids(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def penalised(self) -> bool:
        """Whether the choice depends on earlier tokens, so that they must be counted."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass
class Request:
    """One prompt to be continued. `stop_ids`: the tokenizer's end tokens and params.stop_token_ids.

    Several answers to one prompt are several requests: those that come while the first is computed wait for
    its blocks and share them. `cache_salt`: only requests of the same salt share cached prompts.
    """

    id: str
    prompt: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise UsageError("the prompt has no tokens; at least one is needed")
        if len(self.cache_salt) > MAX_SALT_CHARACTERS:
            raise UsageError(
                f"cache_salt may have {MAX_SALT_CHARACTERS} characters, got {len(self.cache_salt)}"
            )


@dataclass(frozen=True)
class TokenLogprob:
    """How probable the model found a token, and which it found the most probable ones.

    Natural logarithms, always finite, before penalties, bias, grammar and temperature.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), the most probable first


@dataclass(frozen=True)
class Output:
    """One event of a request. The event with a finish_reason is its last.

    `token` is None when the event brings none: a stop token was chosen (it is not part of the answer and not
    counted), the request was cancelled, or it failed (`error` says why).
    """

    request_id: str
    token: int | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    logprob: TokenLogprob | None = None  # of `token`, if params.logprobs asks for it
    # With the first event after the prompt, if params.prompt_logprobs asks for it: one of each prompt token
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(frozen=True)
class SlotStats:
    """One request under way. `waiting`: not admitted yet, or preempted."""

    request_id: str
    waiting: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int  # of prompt and answer; below num_prompt_tokens: its prefill is at work
    num_output_tokens: int


@dataclass(frozen=True)
class TierStats:
    """One place below the cache where blocks are kept: what it holds, and blocks counted since the start."""

    name: str  # ram, disk
    num_blocks: int
    num_bytes: int
    read: int = 0  # found there, and right
    written: int = 0
    dropped: int = 0  # not written, since too much waited to be
    failed: int = 0  # damaged, gone, or not to be read or written


@dataclass(frozen=True)
class EngineStats:
    """Where the engine is, and what it has done since it was loaded."""

    num_waiting: int = 0
    num_loading: int = 0  # of those waiting, whose prefix is being read from a tier below
    num_running: int = 0
    num_blocks: int = 0  # of the cache, each of block_tokens
    num_used_blocks: int = 0  # held by running requests
    num_cached_blocks: int = 0  # of the others, those that hold prefixes that may come again
    block_tokens: int = 0
    prompt_tokens: int = 0  # of all requests admitted
    cached_tokens: int = 0  # of these, found in the prefix cache
    output_tokens: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0  # by speculation
    accepted_tokens: int = 0  # of these
    steps: int = 0
    step_seconds: float = 0.0
    # Of routed experts in host memory, by this process's threads: chosen ones once a layer and step
    expert_read_bytes: int = 0
    expert_seconds: float = 0.0  # in the operator that reads them
    slots: tuple[SlotStats, ...] = ()
    tiers: tuple[TierStats, ...] = ()  # in the order in which they are asked


@dataclass(frozen=True)
class ModelInfo:
    """What the engine has loaded, for `/v1/models`, the closing line and the bench."""

    name: str  # file name without .gguf
    architecture: str
    vocab_size: int
    context_tokens: int  # prompt + answer of one request
    isa: str
    threads: int
    weight_bytes: int
    kv_bytes: int  # of the whole cache
    load_seconds: float
    nodes: int = 1  # NUMA nodes that the weights are split over
    nodes_reason: str = ""  # what was measured to choose them, if anything
    strategy: str = "cpu"  # see placement/strategies
    devices: dict[str, str] = field(default_factory=dict)  # device of modules -> its name; none: the CPU's
    device_bytes: dict[str, int] = field(default_factory=dict)  # of each GPU, taken when it was loaded
    handoff: str = ""  # by which experts are given to the CPU: see native/handoff
    parallel: int = 1  # requests computed together
    kv_tokens: int = 0  # that the whole cache holds, shared by them


def _check_number(name: str, value: object, low: float, high: float, *, low_included: bool = True) -> None:
    """UsageError unless `value` is a finite int or float in the range."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not (low <= value <= high) or (value == low and not low_included):  # type: ignore[operator]
        above = "from" if low_included else "above"
        raise UsageError(f"{name} must be a number {above} {low:g} up to {high:g}, got {value!r}")


def _checked_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, dict):
        raise UsageError(f"logit_bias must map token ids to numbers, got {type(bias).__name__}")
    if len(bias) > MAX_LOGIT_BIAS:
        raise UsageError(f"logit_bias may have {MAX_LOGIT_BIAS} entries, got {len(bias)}")
    for token, value in bias.items():
        check_int("a token id in logit_bias", token, 0, MAX_INT)
        _check_number(f"logit_bias[{token}]", value, -100.0, 100.0)
    return {token: float(value) for token, value in bias.items()}


def _checked_stop(stop: object) -> tuple[str, ...]:
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) for text in stop):
        raise UsageError("stop must be a string or a list of strings")
    if len(stop) > MAX_STOP_STRINGS:
        raise UsageError(f"stop may have {MAX_STOP_STRINGS} strings, got {len(stop)}")
    for text in stop:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise UsageError(f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters, got {len(text)}")
    return tuple(stop)


def _checked_ids(ids: object) -> tuple[int, ...]:
    if not isinstance(ids, list | tuple):
        raise UsageError(f"stop_token_ids must be a list of token ids, got {type(ids).__name__}")
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise UsageError(f"stop_token_ids may have {MAX_STOP_TOKEN_IDS} entries, got {len(ids)}")
    for token in ids:
        check_int("a stop token id", token, 0, MAX_INT)
    return tuple(ids)
