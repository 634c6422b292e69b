"""`isthmus bench`: the shape of its result, and that its parts are what they say. No speed is asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cli.conftest import Here
from cli.terminal import isthmus
from isthmus.cli import bench, bench_ops, bench_sizes, bench_strategies, measure, options
from isthmus.config import RunOptions
from isthmus.engine.engine import Engine
from isthmus.engine.request import Output
from isthmus.errors import UsageError
from isthmus.placement.sizes import decode_weight_bytes
from isthmus.weights.dummy import DummySource
from models import tiny

KEYS = [
    "model",
    "isa",
    "threads",
    "strategy",
    "devices",
    "device_bytes",
    "handoff",
    "prefill_tok_s",
    "prefill_runs_tok_s",
    "multiply_gops",
    "decode_tok_s",
    "decode_slices_tok_s",
    "bytes_per_token",
    "read_gb_s",
    "read_limit_gb_s",
    "decode_share",
    "memory_states",
    "outside_products_share",
    "step_shares",
    "bus_bytes_per_token",
    "link_share",
    "handed_over",
    "experts",
    "peak_ram_bytes",
    "commit",
    "step_gb_s",
]


def test_json_is_one_object_with_exactly_these_keys(alphabet_model: Path) -> None:
    done = isthmus("bench", alphabet_model, "-p", "40", "-n", "15", "--json", "--threads", "1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert list(result) == KEYS
    assert result["model"] == "alphabet"
    assert result["threads"] == 1
    # The head (260 x 320 fp32), attention, FFN, norms, one row of the embedding: 706,560 bytes. A token of
    # cache is 128 bytes, and at least 41 of them are read.
    assert 706_560 + 41 * 128 <= result["bytes_per_token"] <= 706_560 + 4096 * 128
    assert result["read_gb_s"] == pytest.approx(result["bytes_per_token"] * result["decode_tok_s"] / 1e9)
    assert 0 < result["decode_share"] < 1
    assert 0 < result["outside_products_share"] < 1
    assert sum(result["step_shares"].values()) == pytest.approx(1)
    assert (result["strategy"], result["handed_over"]) == ("cpu", None)
    assert result["prefill_tok_s"] > 0
    assert result["multiply_gops"] > 0
    assert result["commit"]


def test_bytes_of_a_token_are_divided_among_the_operations_that_read_them() -> None:
    """deepseek-v2-lite, one of two layers with experts: 6 of 64 and two shared of 3 x 1408 x 2048 in F32."""
    source = DummySource("dummy:deepseek-v2-lite?layers=2&quant=f32")
    found = bench_ops.bytes_by_kind(source)
    assert found["experts"] == pytest.approx(4 * (6 + 2) * 3 * 1408 * 2048)
    assert found["head_linear"] == pytest.approx(4 * 2 * 512 * 16 * (128 + 128))  # kv_b of both layers
    attention = 16 * 192 * 2048 + (512 + 64) * 2048 + 2048 * 2048
    dense, router, head = 3 * 10944 * 2048, 64 * 2048, 102400 * 2048
    assert found["linear"] == pytest.approx(4 * (2 * attention + dense + router + head))
    assert sum(found.values()) == pytest.approx(decode_weight_bytes(source))


@pytest.mark.usefixtures("briefly_measured")
def test_operations_are_shown_with_what_they_read(alphabet_model: Path, here: Here) -> None:
    done = here("bench", alphabet_model, "-p", "8", "-n", "1", "--ops", "--markdown")
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in rows[0]] == ["operation", "ms a token", "share", "GB/s", "of the limit"]
    (linear,) = (row for row in rows if row[0].strip() == "linear")
    assert float(linear[3]) > 0
    (rope,) = (row for row in rows if row[0].strip() == "rope")
    assert rope[3].strip() == ""


@pytest.mark.usefixtures("briefly_measured")
def test_without_json_it_reads_as_text(alphabet_model: Path, here: Here) -> None:
    done = here("bench", alphabet_model, "-p", "8", "-n", "1")
    assert done.returncode == 0, done.stderr
    assert "prefill" in done.stdout
    assert "of what this memory gives" in done.stdout
    assert done.stderr.count("\n") == 1  # what was loaded; progress is for a terminal


def test_experts_on_a_device_are_in_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = tiny.CASES["qwen3moe"]
    path = tiny.write_case(tmp_path / "tiny.gguf", case, tiny.build(case))
    monkeypatch.setattr(measure, "measure_decode", lambda *_: {})
    engine = Engine(path, RunOptions(strategy="stream", device="cpu", threads=1))
    (prefill,) = bench_sizes.run_tests(engine, [bench_sizes.Size(40)], 3, bench_sizes.Scales(), watch=str)
    use = measure.measure(engine, 40, 1, prefill.tok_s, prefill.multiply_gops)["experts"]
    prompts, one = 1 + 3, 3 * 64 * 32 * 4  # an expert in fp32
    assert use["streamed"] == prompts * 2 * 8  # all experts of both layers, for every prompt
    assert use["bytes_streamed"] == use["streamed"] * one
    assert (use["hits"], use["misses"]) == (prompts * 40 * 2 * 3, 0)


@pytest.mark.usefixtures("briefly_measured")
def test_lists_make_a_table_of_sizes(alphabet_model: Path, here: Here) -> None:
    done = here("bench", alphabet_model, "-p", "8,16", "-n", "4", "-b", "1,2", "-r", "2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    tests = result["tests"]
    # The first sizes are measured once: a decode of one sequence by slices beside the memory's.
    assert result["prefill_tok_s"] == tests[0]["tok_s"]
    assert result["decode_tok_s"] == tests[2]["tok_s"]
    assert [test["test"] for test in tests] == ["pp8", "pp16", "tg4", "tg4@b2"]
    assert [test["repetitions"] for test in tests] == [2, 2, len(result["decode_slices_tok_s"]), 2]
    for test in tests:
        assert 0 < test["tok_s_low"] <= test["tok_s"] <= test["tok_s_high"]


@pytest.mark.parametrize("given", ["0", "8,", "8,x", "1048577", "-1", "8;16"])
def test_sizes_that_are_no_numbers_are_refused(given: str) -> None:
    with pytest.raises(UsageError, match=f"-p must be a whole number from 1 to 1048576, .* got {given!r}"):
        options.counts("-p", given, 1 << 20)


def test_a_batch_counts_the_tokens_of_all_its_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock moves a second a step: two sequences, four steps after their first tokens."""
    case = tiny.CASES["qwen3"]
    path = tiny.write_case(tmp_path / "tiny.gguf", case, tiny.build(case))
    engine = Engine(path, RunOptions(threads=1, parallel=2))
    seconds = [0.0]
    step = engine.step

    def one_second() -> list[Output]:
        seconds[0] += 1
        return step()

    monkeypatch.setattr(engine, "step", one_second)
    monkeypatch.setattr(bench_sizes.time, "perf_counter", lambda: seconds[0])
    wanted, told = [bench_sizes.Size(8, 4, 2)], list[str]()
    (result,) = bench_sizes.run_tests(engine, wanted, 3, bench_sizes.Scales(), told.append)
    assert result.tok_s == (2.0, 2.0, 2.0)
    # Every step of every repetition is told, the first of them for nothing but warmth.
    assert len(told) == seconds[0]
    assert told[0].startswith("tg4@b2, warm-up: ")
    assert told[-1] == "tg4@b2, 3 of 3: 10 of 10 tokens"


def test_fewer_layers_are_extrapolated_by_the_bytes_of_a_token() -> None:
    assert bench_sizes.Scales.of_model("dummy:qwen3-30b-a3b") == bench_sizes.Scales()
    scales = bench_sizes.Scales.of_model("dummy:qwen3-30b-a3b?layers=12")
    assert scales.prefill == pytest.approx(12 / 48, rel=0.02)  # a prompt reads the head once
    assert 12 / 48 < scales.decode < 0.4
    result = bench_sizes.Result(bench_sizes.Size(128), (100.0,), scales.prefill)
    assert result.as_data()["extrapolated_tok_s"] == pytest.approx(100 * scales.prefill)
    assert "all layers (extrapolated)" in next(iter(bench_sizes.table([result], markdown=True)))


@pytest.mark.usefixtures("briefly_measured")
@pytest.mark.parametrize(
    ("strategy", "crossing"),
    [
        ("hybrid", 2 * (2 * 64 * 4 + 3 * (4 + 4))),  # x and y, and the routing, in both layers
        ("stream", 2 * 3 * 3 * 64 * 32 * 4),  # three experts of three matrices in both
    ],
)
def test_bytes_over_the_bus_are_those_of_a_token(tmp_path: Path, strategy: str, crossing: int) -> None:
    case = tiny.CASES["qwen3moe"]
    path = tiny.write_case(tmp_path / "tiny.gguf", case, tiny.build(case))
    engine = Engine(path, RunOptions(strategy=strategy, device="cpu", threads=1))
    found = measure.measure_decode(engine, 8, 1)
    assert found["bus_bytes_per_token"] == crossing
    assert found["link_share"] is None


def test_each_strategy_runs_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command[3:])
        rate = {"cpu": 2.0, "hybrid": 3.0}[command[command.index("--strategy") + 1]]
        one = {"prefill_tok_s": 10 * rate, "decode_tok_s": rate, "peak_ram_bytes": 5 * 10**9}
        one |= {"bus_bytes_per_token": 2e6, "link_share": None, "device_bytes": {}}
        return subprocess.CompletedProcess(command, 0, json.dumps(one))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["isthmus", "bench", "m.gguf", "--strategies=cpu,hybrid", "-p", "8"])
    words = bench.without(sys.argv[2:], bench_strategies.OWN_OPTIONS)
    found = bench_strategies.measure_each(["cpu", "hybrid"], words, False, lambda _: None)
    assert asked == [
        ["bench", "m.gguf", "-p", "8", "--strategy", "cpu", "--json"],
        ["bench", "m.gguf", "-p", "8", "--strategy", "hybrid", "--device", "cpu", "--json"],
    ]
    lines = [line.split() for line in bench_strategies.table(found, markdown=False)]
    assert lines[0] == ["cpu", "hybrid"]
    assert ["decode", "speed-up", "1.00", "1.50"] in lines
    assert ["VRAM", "GB"] in lines  # nothing is filled in
    assert lines[-1][:2] == ["No", "GPU:"]


def test_a_strategy_nobody_knows_is_refused(here: Here) -> None:
    done = here("bench", "demo", "--strategies", "cpu,magic")
    assert done.returncode == 2
    assert "--strategies must be one of cpu, stream, hybrid, gpu, got 'magic'" in done.stderr
