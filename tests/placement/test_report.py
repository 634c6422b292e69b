"""What `isthmus plan` answers: the figures of the models and machines that people ask about."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.config import RunOptions
from isthmus.placement.cost import RAM
from isthmus.placement.describe import ROUTED, SHARED, component_of
from isthmus.placement.described import described_machine
from isthmus.placement.plan import Plan
from isthmus.placement.profile import Profile
from isthmus.placement.report import (
    Report,
    decode_tok_s,
    every_strategy,
    largest_that_fits,
    make_report,
)
from isthmus.placement.show_report import count, digits, duration, report_lines
from isthmus.resolve import open_headers
from isthmus.weights.headers import quantised_bytes, requantised
from isthmus.weights.shapes import SHAPES
from isthmus.weights.source import WeightSource

SERVER = described_machine(gpu="rtx4090", ram="512GB", ram_bandwidth="300GB/s", cores=32, isa="amx")
SMALL = described_machine(gpu="rtx4090", ram="192GB", ram_bandwidth="300GB/s", cores=32, isa="amx")


@pytest.fixture(scope="module")
def deepseek() -> WeightSource:
    return open_headers("deepseek-v3", "q4_k_m")


@pytest.fixture(scope="module")
def report(deepseek: WeightSource) -> Report:
    return make_report("deepseek-v3 Q4_K_M", SERVER, deepseek, RunOptions())


def test_deepseek_v3_in_q4_k_m_is_the_404_gb_people_download(report: Report, deepseek: WeightSource) -> None:
    """Not the 180 to 220 GB, nor the 150 MB an expert, that guides have: 671 B parameters at 4.8 bits."""
    model = report.model
    assert model.nbytes / 1e9 == pytest.approx(404, rel=0.02)
    assert 11.5e9 < model.routed_bytes < 12.5e9
    one_matrix = deepseek.tensors["blk.5.ffn_up_exps.weight"].nbytes / 256
    assert 3 * one_matrix / 1e6 == pytest.approx(24.8, abs=0.05)
    assert model.kv_token_bytes / 1024 == pytest.approx(68.6, abs=0.05)


def test_its_hybrid_decode_is_bound_by_ram(report: Report) -> None:
    made = report.plans["hybrid"]
    assert isinstance(made, Plan)
    assert made is report.best
    assert made.estimate is not None
    assert made.estimate.decode is not None
    assert made.estimate.decode.bound == RAM
    assert report.changes[0].what.startswith("twice the RAM bandwidth")
    assert 1.3 < report.changes[0].decode < 2


def test_people_read_the_figures_that_they_look_for(report: Report) -> None:
    text = "\n".join(report_lines(report))
    for expected in (
        "671 B parameters (37 B active)",
        "of it routed experts",
        "cache: 68.6 KiB a token",
        "hybrid *",
        "gpu: no, not enough GPU memory",
        "what would help most (hybrid",
    ):
        assert expected in text
    assert max(len(line) for line in text.splitlines()) < 150


def test_a_machine_too_small_is_told_which_quantisation_fits(deepseek: WeightSource) -> None:
    small = make_report("deepseek-v3", SMALL, deepseek, RunOptions())
    assert small.best is None
    assert small.instead is not None
    assert small.instead.quant == "iq2_xxs"
    assert small.instead.nbytes < 192e9
    text = "\n".join(report_lines(small))
    assert "it does not fit this machine" in text
    assert "IQ2_XXS" in text


def test_the_quantisation_that_fits_is_the_largest_one(deepseek: WeightSource) -> None:
    found = largest_that_fits(replace(SMALL, available_bytes=500 * 10**9), deepseek, RunOptions())
    assert found is not None
    assert found.quant == "iq4_xs"  # the next below the model's own, which fits too


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_can_be_planned_and_its_components_are_all_of_it(shape: str) -> None:
    source = open_headers(shape)
    machine = replace(SERVER, available_bytes=2000 * 10**9, total_bytes=2000 * 10**9)
    model = make_report(shape, machine, source, RunOptions()).model
    assert sum(part.nbytes for part in model.components.values()) == model.nbytes
    assert model.components[ROUTED].parameters > 0.8 * model.parameters
    assert model.active_parameters < model.parameters
    shared = any("shexp" in name for name in source.tensors)
    assert (SHARED in model.components) == shared
    assert {component_of(raw) for raw in source.tensors.values()} == set(model.components)


def test_a_model_is_imagined_in_another_quantisation_as_llama_cpp_would_write_it() -> None:
    """The same as the shape in that quantisation from the start."""
    q4 = open_headers("qwen3-30b-a3b", "q4_k_m")
    q8 = open_headers("qwen3-30b-a3b", "q8_0")
    other = requantised(q4, "q8_0")
    assert {n: t.format.name for n, t in other.tensors.items()} == {
        n: t.format.name for n, t in q8.tensors.items()
    }
    nbytes = sum(raw.nbytes for raw in q8.tensors.values())
    assert quantised_bytes(q4, ["q8_0"]) == {"q8_0": nbytes}
    assert sum(raw.nbytes for raw in other.tensors.values()) == nbytes


def test_json_has_every_strategy_or_why_not(report: Report) -> None:
    data = report.as_data()
    assert data["best"] == "hybrid"
    assert data["strategies"]["hybrid"]["decode"]["bound"] == RAM
    assert data["strategies"]["gpu"] == {"fits": False, "reason": report.plans["gpu"]}


def test_without_a_gpu_one_is_suggested_and_the_cpu_is_planned() -> None:
    machine = described_machine(ram="64GB", ram_bandwidth="80GB/s", cores=8, isa="avx2", gpu="none")
    made = make_report("m", machine, open_headers("qwen3-30b-a3b"), RunOptions())
    assert made.best is not None
    assert made.best.strategy == "cpu"
    assert made.plans["hybrid"] == "needs a GPU; the machine has none"
    assert any(change.what.startswith("a GPU") for change in made.changes)


def test_what_only_hybrid_takes_is_told_where_there_is_none() -> None:
    machine = described_machine(ram="64GB", ram_bandwidth="80GB/s", cores=8, isa="avx2", gpu="none")
    chosen = RunOptions(expert_cache=1 << 30, defer_experts=2)
    made = make_report("m", machine, open_headers("qwen3-30b-a3b"), chosen)
    said = "--expert-cache, --defer-experts is for strategy hybrid, which cannot be had here"
    assert f"note: {said}" in list(report_lines(made))
    assert made.as_data()["unused"] == said
    assert not make_report("m", SERVER, open_headers("qwen3-30b-a3b"), chosen).unused


@pytest.mark.parametrize(("quant", "cache"), [("q4_k_m", 64 << 20), ("iq2_xxs", 1 << 30)])
def test_a_card_that_is_only_imagined_need_not_suit_the_cache_asked_for(quant: str, cache: int) -> None:
    machine = described_machine(ram="64GB", ram_bandwidth="80GB/s", cores=8, isa="avx2", gpu="none")
    source = open_headers("qwen3-30b-a3b", quant)
    made = make_report("m", machine, source, RunOptions(expert_cache=cache))
    assert made.unused.startswith("--expert-cache is for strategy hybrid")
    assert any(change.what.startswith("a GPU") for change in made.changes)


def test_a_quantisation_whose_experts_no_card_takes_is_compared_without_the_cache() -> None:
    chosen = RunOptions(expert_cache=1 << 30)
    made = make_report("m", SERVER, open_headers("qwen3-30b-a3b"), chosen, ["iq2_xxs"])
    (fit,) = made.compared
    assert fit.plan is not None
    assert fit.plan.estimate is not None
    assert not fit.plan.estimate.assumed


@pytest.mark.parametrize(
    ("number", "text"), [(671.03e9, "671 B"), (1.0264e12, "1,026 B"), (3.3e9, "3.3 B"), (900, "900")]
)
def test_counts(number: float, text: str) -> None:
    assert count(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(2.64, "2.6 s"), (67.4, "67 s"), (809, "13 min")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_profile_puts_hot_experts_on_the_card_under_hybrid_alone(tmp_path: Path) -> None:
    counts = {layer: (97, *[1] * 127) for layer in range(48)}  # of each layer's 128 experts, one is used most
    file = tmp_path / "profile.json"
    file.write_text(Profile("m", 1, counts).to_json())
    source = open_headers("qwen3-30b-a3b")
    machine = replace(SERVER, gpus=(replace(SERVER.gpus[0], free_bytes=10 << 30),))
    plain = make_report("m", machine, source, RunOptions()).plans
    hot = make_report("m", machine, source, RunOptions(profile=str(file))).plans
    for strategy, faster in (("cpu", False), ("hybrid", True)):
        before, after = plain[strategy], hot[strategy]
        assert isinstance(before, Plan)
        assert isinstance(after, Plan)
        assert (decode_tok_s(after) > 1.1 * decode_tok_s(before)) == faster


def test_the_worked_example_of_the_docs_is_what_is_computed() -> None:
    """docs/planning.md: the command's speeds, as in its table."""
    machine = described_machine(gpu="rtx4090d", ram="1TB", ram_bandwidth="260GB/s", cores=32, isa="amx")
    source = open_headers("deepseek-v3")
    rows = {}
    for title, chunk, phase in (
        ("| **decode, tok/s** |", 512, "decode"),
        ("| prefill in steps of 512, tok/s |", 512, "prefill"),
        ("| in steps of 2048 |", 2048, "prefill"),
    ):
        plans = every_strategy(machine, source, RunOptions(chunk_tokens=chunk))
        found = [getattr(made.estimate, phase) for made in plans.values() if isinstance(made, Plan)]
        rows[title] = [[digits(value) for value in (f.tok_s, f.low, f.high)] for f in found]
    text = (Path(__file__).parent.parent.parent / "docs" / "planning.md").read_text()
    for title, cells in rows.items():
        line = next(line for line in text.splitlines() if line.startswith(title))
        shown = [re.findall(r"\d[\d.]*", cell) for cell in line.removeprefix(title).split("|")[:3]]
        for cell, expected in zip(shown, cells, strict=True):
            tolerance = 0.051 if "decode" in title else 0.51  # of the last digit that is shown
            assert [float(n) for n in cell] == pytest.approx([float(n) for n in expected], abs=tolerance)
