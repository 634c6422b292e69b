"""Sampling parameters and run options: each bound, and what is said beyond it."""

import math
from pathlib import Path
from typing import Any

import pytest

from isthmus.config import RunOptions, cache_dir
from isthmus.engine.request import Grammar, Request, SamplingParams
from isthmus.errors import UsageError


def test_the_defaults_leave_the_distribution_alone() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert not params.penalised
    assert not params.greedy


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("temperature", [0, 0.7, 10.0]),
        ("top_k", [0, 1, 2**31 - 1]),
        ("top_p", [1e-9, 1]),
        ("min_p", [0, 1.0]),
        ("repetition_penalty", [0.01, 1, 10]),
        ("presence_penalty", [-2, 2.0]),
        ("frequency_penalty", [-2, 2.0]),
        ("seed", [None, 0, 2**64 - 1]),
        ("max_tokens", [None, 1, 2**31 - 1]),
        ("logit_bias", [{}, {0: -100, 5: 100.0}]),
        ("stop", [(), ["a"], ("x" * 1024,) * 64]),
        ("stop_token_ids", [(), [3, 4]]),
        ("logprobs", [None, 0, 20]),
        ("prompt_logprobs", [None, 0, 20]),
        ("grammar", [None, Grammar("json_object"), Grammar("regex", "a+")]),
    ],
)
def test_values_within_bounds_are_taken(name: str, good: list[Any]) -> None:
    for value in good:
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("temperature", [-0.1, 10.1, math.nan, math.inf, "1", True, None]),
        ("top_k", [-1, 2**31, 1.0, True]),
        ("top_p", [0, -0.5, 1.01, math.nan]),
        ("min_p", [-0.01, 1.01, math.nan]),
        ("repetition_penalty", [0, -1, 11, math.nan]),
        ("presence_penalty", [-2.1, 2.1, math.inf]),
        ("frequency_penalty", [-2.1, 2.1, 1e9]),
        ("seed", [-1, 2**64, 1.5, "7"]),
        ("max_tokens", [0, -1, 2**31, 1.5, "7"]),
        (
            "logit_bias",
            [{-1: 0.0}, {"1": 0.0}, {1: math.inf}, {1: 101.0}, [1], dict.fromkeys(range(1025), 0.0)],
        ),
        ("stop", [("",), ["a"] * 65, ("x" * 1025,), (1,), 3]),
        ("stop_token_ids", [(-1,), ("a",), 3, [2**31], list(range(1025))]),
        ("logprobs", [-1, 21, 1.0, True]),
        ("prompt_logprobs", [-1, 21, "5"]),
        ("grammar", ["a+", {"kind": "regex"}]),
    ],
)
def test_values_beyond_bounds_are_a_usage_error_that_names_them(name: str, bad: list[Any]) -> None:
    said = {"stop": "stop", "stop_token_ids": "stop.token.id", "logit_bias": "logit_bias"}.get(name, name)
    for value in bad:
        with pytest.raises(UsageError, match=said):
            SamplingParams(**{name: value})


def test_the_message_has_what_came_and_the_range() -> None:
    with pytest.raises(UsageError, match=r"top_p must be a number above 0 up to 1, got 1\.5"):
        SamplingParams(top_p=1.5)


def test_one_stop_string_may_stand_alone() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="no tokens"):
        Request("a", [])


@pytest.mark.parametrize(
    "bad",
    [
        {"context_tokens": 1},
        {"threads": 0},
        {"threads": True},
        {"isa": "sse2"},
        {"kv_dtype": "fp8"},
        {"chunk_tokens": 0},
        {"exact_batching": 1},
        {"contxt_tokens": 100},
    ],
)
def test_run_options_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad))):
        RunOptions.from_kwargs(**bad)


def test_an_option_wins_over_the_environment() -> None:
    environ = {"ISTHMUS_ISA": "scalar", "ISTHMUS_THREADS": "3", "ISTHMUS_FAKE_NUMA": "2"}
    assert RunOptions().with_environment(environ) == RunOptions(isa="scalar", threads=3, fake_numa=2)
    chosen = RunOptions(isa="avx2", threads=1, fake_numa=4)
    assert chosen.with_environment(environ) == chosen
    assert RunOptions().with_environment({"ISTHMUS_THREADS": ""}) == RunOptions()


@pytest.mark.parametrize(
    "environ",
    [
        {"ISTHMUS_ISA": "neon"},
        {"ISTHMUS_THREADS": "two"},
        {"ISTHMUS_THREADS": "0"},
        {"ISTHMUS_THREADS": "-1"},
        {"ISTHMUS_THREADS": "100000"},
        {"ISTHMUS_THREADS": "1" * 5000},
        {"ISTHMUS_THREADS": "٣"},
        {"ISTHMUS_FAKE_NUMA": "0"},
        {"ISTHMUS_FAKE_NUMA": "65"},
        {"ISTHMUS_FAKE_NUMA": "two"},
    ],
)
def test_a_malformed_environment_variable_is_an_error_not_a_default(environ: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=next(iter(environ))):
        RunOptions().with_environment(environ)


def test_the_cache_folder() -> None:
    assert cache_dir({"ISTHMUS_CACHE": "/data/isthmus"}) == Path("/data/isthmus")
    assert cache_dir({"XDG_CACHE_HOME": "/home/a/c"}) == Path("/home/a/c/isthmus")
    assert cache_dir({}) == Path.home() / ".cache" / "isthmus"
    with pytest.raises(UsageError, match="ISTHMUS_CACHE must be an absolute path"):
        cache_dir({"ISTHMUS_CACHE": "cache"})


def test_a_grammar_of_no_known_kind_or_without_end_is_refused() -> None:
    with pytest.raises(UsageError, match="kind of a grammar must be one of json_object, json_schema"):
        Grammar("ebnf", "x")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="up to 1048576 characters"):
        Grammar("regex", "a" * (2**20 + 1))
