"""A model without a file through the whole engine; the same bytes for the same name: tests/weights."""

from isthmus import LLM, SamplingParams


def test_a_dummy_answers_in_the_words_of_its_vocabulary() -> None:
    """Logits that are not finite would end the answer with an error."""
    llm = LLM("dummy:deepseek-v2-lite?layers=1", context_tokens=64)
    answer = llm.generate("hello", SamplingParams(temperature=0, max_tokens=4))
    llm.close()
    assert (answer.finish_reason, answer.error) == ("length", None)
    assert len(answer.token_ids) == 4
    assert len(set(answer.token_ids)) > 1  # equal weights everywhere would repeat one token
    assert all(word.startswith("w") for word in answer.text.split())
