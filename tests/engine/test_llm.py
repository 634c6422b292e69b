"""Text in, text out, over an executor that answers each request with the bytes of a script."""

import gc
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from alphabet import write_alphabet_model
from isthmus import LLM, SamplingParams
from isthmus.engine.answer import Completion, Delta
from isthmus.engine.loop import StepLoop
from isthmus.engine.scheduler import Scheduler, StepPlan
from isthmus.errors import ContextLengthError, UsageError
from isthmus.tokenizer import Tokenizer
from isthmus.weights.source import open_weights

GREEDY = SamplingParams(temperature=0.0)


class Scripted:
    """The answer to a prompt that ends in byte b is scripts[b], then the end token."""

    def __init__(self, vocab_size: int, end: int, scripts: dict[str, bytes]) -> None:
        self.vocab_size, self.end, self.scripts = vocab_size, end, scripts
        self.steps = 0

    def execute(self, plan: StepPlan) -> Tensor:
        self.steps += 1
        logits = torch.zeros(sum(part.num_logits for part in plan.slices), self.vocab_size)
        end = 0
        for part in plan.slices:
            end += part.num_logits
            if part.reaches_end:
                script = [*self.scripts[chr(part.sequence.request.prompt[-1])], self.end]
                logits[end - 1, script[part.sequence.num_output_tokens]] = 1.0
        return logits


def read_tokenizer(path: Path) -> Tokenizer:
    with closing(open_weights(path)) as source:
        return Tokenizer.from_gguf(source.metadata)


def scripted_llm(tokenizer: Tokenizer, scripts: dict[str, bytes], parallel: int = 1) -> LLM:
    """Context 256 tokens, prompts in chunks of 8."""
    assert tokenizer.eos_id is not None
    executor = Scripted(tokenizer.vocab_size, tokenizer.eos_id, scripts)
    scheduler = Scheduler(parallel * 64, 4, 256, chunk_tokens=8, max_running=parallel)
    loop = StepLoop(executor, scheduler, tokenizer.vocab_size)
    return LLM.from_parts(loop, tokenizer)


@pytest.fixture
def llm(alphabet_model: Path) -> LLM:
    scripts = {"a": b"one two three", "b": "näive 🌊 né".encode(), "c": b"x" * 500, "d": b"ab\xff"}
    return scripted_llm(read_tokenizer(alphabet_model), scripts)


def joined(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def last(deltas: list[Delta]) -> Completion:
    assert [delta.completion is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    completion = deltas[-1].completion
    assert completion
    return completion


def test_one_prompt_gives_one_completion_and_a_list_gives_a_list(llm: LLM) -> None:
    one = llm.generate("a", GREEDY)
    assert (one.text, one.finish_reason, one.num_prompt_tokens) == ("one two three", "stop", 1)
    assert bytes(one.token_ids) == b"one two three"
    assert [c.text for c in llm.generate(["a", "b"], GREEDY)] == ["one two three", "näive 🌊 né"]
    assert llm.generate([ord("z"), ord("a")], GREEDY).num_prompt_tokens == 2  # token ids as they are
    assert llm.generate([], GREEDY) == []


def test_a_stream_never_has_half_a_character(llm: LLM) -> None:
    deltas = list(llm.generate("b", GREEDY, stream=True))
    assert joined(deltas) == last(deltas).text == "näive 🌊 né"
    assert "🌊" in [delta.text for delta in deltas]  # its four bytes came as four tokens and one text
    assert not any("\ufffd" in delta.text for delta in deltas)


def test_bytes_that_are_no_character_become_one_replacement_at_the_end(llm: LLM) -> None:
    assert llm.generate("d", GREEDY).text == "ab\ufffd"


def test_a_stop_string_over_several_tokens_is_held_back_and_never_shown(llm: LLM) -> None:
    deltas = list(llm.generate("a", SamplingParams(temperature=0.0, stop=("two",)), stream=True))
    assert [delta.text for delta in deltas if delta.text] == ["o", "n", "e", " "]
    assert last(deltas).finish_reason == "stop"
    assert last(deltas).text == "one "
    assert not any(
        event.token for event in llm.engine.step()
    )  # the engine was told, it computes no more of it


def test_what_was_held_back_for_a_stop_string_that_did_not_come_is_shown(llm: LLM) -> None:
    deltas = list(llm.generate("a", SamplingParams(temperature=0.0, stop=("threesome",)), stream=True))
    assert joined(deltas) == "one two three"
    assert deltas[-1].text == "three"


def test_max_tokens_and_the_context_end_with_length(llm: LLM) -> None:
    short = llm.generate("a", SamplingParams(temperature=0.0, max_tokens=3))
    assert (short.text, short.finish_reason) == ("one", "length")
    full = llm.generate("c", GREEDY)
    assert (len(full.token_ids), full.finish_reason) == (255, "length")  # 1 + 255 = the context of 256


def test_the_progress_of_a_long_prompt_is_streamed(llm: LLM) -> None:
    deltas = list(llm.generate("-" * 19 + "a", GREEDY, stream=True))
    assert [(delta.num_computed, delta.text) for delta in deltas[:3]] == [(8, ""), (16, ""), (20, "o")]


def test_a_dropped_stream_ends_its_request_even_if_never_read(llm: LLM) -> None:
    for read in (0, 5):
        stream = llm.generate("c", GREEDY, stream=True)
        for _ in range(read):
            next(stream)
        del stream
        gc.collect()
        assert [event.finish_reason for event in llm.engine.step()] == ["cancelled"]
        assert not llm.engine.has_work
    assert llm.generate("a", GREEDY).text == "one two three"


def test_two_streams_may_be_read_in_turns(llm: LLM) -> None:
    first = llm.generate("a", GREEDY, stream=True)
    second = llm.generate("b", GREEDY, stream=True)
    texts = ["", ""]
    for a, b in zip(first, second, strict=False):
        texts[0] += a.text
        texts[1] += b.text
    texts[0] += joined(list(first))
    texts[1] += joined(list(second))
    assert texts == ["one two three", "näive 🌊 né"]


def test_a_refused_prompt_takes_the_whole_list_with_it(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="256 tokens; a context of 256 takes 255"):
        llm.generate(["a", "c" * 256], GREEDY)
    assert [event.finish_reason for event in llm.engine.step()] == ["cancelled"]
    assert not llm.engine.has_work


def test_stop_token_ids_end_the_answer(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, stop_token_ids=(ord("w"),))
    assert llm.generate("a", params).text == "one t"


def test_a_model_without_a_template_chats_in_its_familys_with_a_warning(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(write_alphabet_model(tmp_path / "base.gguf", template=None))
    llm = scripted_llm(tokenizer, {"\n": b"hello"})  # ChatML's prompt ends so
    with pytest.warns(UserWarning, match="chat_template is missing"):
        assert llm.chat([{"role": "user", "content": "a"}], GREEDY).text == "hello"


def test_an_empty_prompt_is_a_usage_error(llm: LLM) -> None:
    with pytest.raises(UsageError, match="no tokens"):
        llm.generate("")


def test_timings_count_what_happened(llm: LLM) -> None:
    timings = llm.generate("-" * 19 + "a", SamplingParams(temperature=0.0, max_tokens=5)).timings
    assert (timings.num_prompt_tokens, timings.num_output_tokens) == (20, 5)
    assert timings.prefill_tok_s == 20 / timings.prefill_s > 0
    assert timings.decode_tok_s == 4 / timings.decode_s > 0


def test_a_list_is_computed_together(alphabet_model: Path) -> None:
    llm = scripted_llm(read_tokenizer(alphabet_model), {"a": b"one two", "b": b"three"}, parallel=2)
    assert [c.text for c in llm.generate(["a", "b"], GREEDY)] == ["one two", "three"]
    assert llm.engine._executor.steps == 8  # the longer answer's 7 tokens and its end


def test_a_completion_has_log_probabilities_if_asked_and_says_what_was_cached(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=0)
    asked = llm.generate("xa", params)
    assert asked.logprobs
    assert [each.token for each in asked.logprobs] == asked.token_ids
    assert asked.prompt_logprobs
    assert [each and each.token for each in asked.prompt_logprobs] == [None, ord("a")]
    plain = llm.generate("-" * 19 + "a", GREEDY)
    assert (plain.logprobs, plain.prompt_logprobs, plain.num_cached_tokens) == (None, None, 0)
    assert llm.generate("-" * 19 + "a", GREEDY).num_cached_tokens == 19


def test_an_unknown_option_is_refused_before_the_model_is_looked_for() -> None:
    with pytest.raises(UsageError, match="unknown option 'contxt'; the options are context_tokens, threads"):
        LLM("/nowhere.gguf", contxt=5)
