"""Text in, text out, over an executor that answers each request with the bytes of a script."""

import gc
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from alphabet import write_alphabet_model
from isthmus import LLM, SamplingParams
from isthmus.engine.answer import Completion, Delta
from isthmus.engine.loop import StepLoop
from isthmus.engine.scheduler import Scheduler, StepPlan
from isthmus.engine.turns import Turns
from isthmus.errors import ContextLengthError, ModelFileError, UsageError
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


@pytest.mark.parametrize(
    ("whole", "broken", "said"),
    [
        ("gpt2", "gpt9", "tokenizer.ggml.model is 'gpt9'"),
        ("Ġ t", "Ġ ~", r"tokenizer.ggml.merges\[0\] is 'Ġ ~', but 'Ġ~' is not among the 260 tokens"),
    ],
)
def test_a_broken_vocabulary_is_said_before_a_tensor_is_touched(
    alphabet_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: str, broken: str, said: str
) -> None:
    data = alphabet_model.read_bytes()
    assert data.count(whole.encode()) == 1
    path = tmp_path / "broken.gguf"
    path.write_bytes(data.replace(whole.encode(), broken.encode()))
    monkeypatch.setattr("isthmus.weights.gguf._File.tensor", lambda *_: pytest.fail("a tensor was touched"))
    with pytest.raises(ModelFileError, match=said):
        LLM(path)


def test_threads_share_a_model_and_their_prompts_are_computed_together(alphabet_model: Path) -> None:
    """Without turns two threads step at once, and both find the scheduler changed under them."""
    scripts = {letter: bytes([letter.encode()[0]] * 40) for letter in "abcdefgh"}
    llm = scripted_llm(read_tokenizer(alphabet_model), scripts, parallel=8)
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda letter: llm.generate(letter, GREEDY).text, "abcdefgh" * 4))
    assert texts == [letter * 40 for letter in "abcdefgh"] * 4
    assert llm.engine._executor.steps < 32 * 41  # what they would take one after the other


def test_a_thread_that_only_reads_its_stream_keeps_none_out(alphabet_model: Path) -> None:
    """Each step is a turn: of two streams in two threads the shorter one ends in the middle of the longer."""
    llm = scripted_llm(read_tokenizer(alphabet_model), {"a": b"x" * 200, "b": b"y" * 9}, parallel=2)
    begun, read = threading.Event(), []

    def read_long() -> None:
        for delta in llm.generate("a", GREEDY, stream=True):
            read.append(delta)
            begun.set()
            time.sleep(0.001)

    reader = threading.Thread(target=read_long)
    reader.start()
    begun.wait()
    assert llm.generate("b", GREEDY).text == "y" * 9
    assert len(read) < 200
    reader.join()
    assert joined(read) == "x" * 200


def test_turns_are_given_in_the_order_in_which_they_were_asked_for() -> None:
    turns, order = Turns(), list[int]()

    def take(number: int) -> None:
        with turns:
            order.append(number)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(6)]
    with turns:
        assert not turns.enter_if_free()
        for count, thread in enumerate(threads, 1):
            thread.start()
            while len(turns._waiting) < count:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert order == [*range(6)]
    assert turns.enter_if_free()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A process that a shell put into the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_who_is_interrupted_while_it_waits_for_its_turn_is_not_given_it() -> None:
    turns, held, interrupted = Turns(), threading.Event(), threading.Event()

    def hold() -> None:
        with turns:
            held.set()
            while not turns._waiting:
                time.sleep(0.001)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            interrupted.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    with pytest.raises(KeyboardInterrupt), turns:
        pass
    interrupted.set()
    holder.join()
    assert turns.enter_if_free()


def test_a_stream_that_is_dropped_while_a_thread_has_the_engine_ends_with_the_next_step(llm: LLM) -> None:
    """A finaliser must not wait: Python may run it in the thread that has the engine."""
    stream = llm.generate("c", GREEDY, stream=True)
    next(stream)
    with llm._turns:
        stream.close()
        assert llm.engine.has_work
    assert llm.generate("a", GREEDY).text == "one two three"
    assert not llm.engine.has_work


def test_a_closed_model_says_so(alphabet_model: Path) -> None:
    with LLM(alphabet_model, context_tokens=512) as llm:
        assert repr(llm) == "LLM('alphabet': llama, 0.00 GB, cpu, context 512)"
        stream = llm.generate("A", GREEDY, stream=True)
        assert next(stream).text == "B"
    assert repr(llm).endswith(", closed)")
    with pytest.raises(UsageError, match="the model is closed"):
        llm.generate("A")
    with pytest.raises(UsageError, match="the model is closed"):
        next(stream)
    llm.close()


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (None, "a prompt is a text or a list of token ids, got NoneType"),
        (b"abc", "a prompt is a text or a list of token ids, got bytes"),
        ({"prompt": "a"}, "a prompt is a text or a list of token ids, got dict"),
        (torch.tensor([1, 2]), "a prompt is a text or a list of token ids, got Tensor"),
        (["a", None], "a prompt is a text or a list of token ids, got NoneType"),
        ([1, "a"], "a list of token ids holds whole numbers alone"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(llm: LLM, prompts: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        llm.generate(prompts)
    assert not llm.engine.has_work


def test_params_and_messages_of_another_type_are_refused_by_name(llm: LLM) -> None:
    wrong: Any = {"temperature": 0}
    with pytest.raises(UsageError, match=r"SamplingParams\(temperature=0\), got dict"):
        llm.generate("a", wrong)
    for messages, said in [("hi", "got str"), (["hi"], r"messages\[0\] must be a mapping .*, got str")]:
        with pytest.raises(UsageError, match=said):
            llm.chat(messages)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_the_weights_go_with_the_model_and_wait_for_no_garbage_collection(
    alphabet_model: Path, how: str
) -> None:
    """A cycle would keep gigabytes until Python looks for cycles, perhaps beside the next model."""
    gc.collect()
    gc.disable()
    try:
        llm = LLM(alphabet_model, context_tokens=512)
        llm.generate("A", SamplingParams(temperature=0.0, max_tokens=3))
        model = weakref.ref(llm.engine._runner.model)
        if how == "closed":
            llm.close()
        else:
            del llm
        assert model() is None
    finally:
        gc.enable()
