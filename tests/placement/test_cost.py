"""The estimate, by arithmetic that fits on a page: bytes over bandwidth, one place after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.config import RunOptions
from isthmus.placement.cost import (
    CORES,
    CPU_PRODUCTS,
    DEPTH_TOKENS,
    EXPECTED,
    GPU_MEMORY,
    GPU_PRODUCTS,
    HANDOFF,
    LINK,
    RAM,
    Estimate,
    Speed,
)
from isthmus.placement.machine import Machine
from isthmus.placement.nvidia import Gpu
from isthmus.placement.plan import Plan, plan
from isthmus.placement.profile import Profile
from isthmus.weights.dummy import DummySource

GIB = 1 << 30
CARD = Gpu(0, "card", 80 * GIB, 80 * GIB, "9.0", pcie_gb_s=20.0, memory_gb_s=1000.0, bf16_tflops=100.0)
MACHINE = Machine(32, 600 * GIB, 600 * GIB, read_gb_s=200.0, gpus=(CARD,), isa=("scalar", "avx2", "amx"))
KV = DEPTH_TOKENS * 61 * 576 * 2


@pytest.fixture(scope="module")
def source() -> DummySource:
    return DummySource("dummy:deepseek-v3")


def made(source: DummySource, strategy: str, machine: Machine = MACHINE) -> Plan:
    return plan(machine, source, RunOptions(strategy=strategy))  # type: ignore[arg-type]


def estimated(source: DummySource, strategy: str, machine: Machine = MACHINE) -> Estimate:
    found = made(source, strategy, machine).estimate
    assert found is not None
    return found


def decoded(source: DummySource, strategy: str, machine: Machine = MACHINE) -> Speed:
    found = estimated(source, strategy, machine).decode
    assert found is not None
    return found


def prefilled(source: DummySource, strategy: str, machine: Machine = MACHINE) -> Speed:
    found = estimated(source, strategy, machine).prefill
    assert found is not None
    return found


def routed(source: DummySource) -> float:
    """Bytes of 8 of 256 experts in every layer: what issue a token of DeepSeek-V3 reads, 11.5 to 12.5 GB."""
    return sum(raw.nbytes for raw in source.tensors.values() if "_exps" in raw.name) * 8 / 256


def dense_on_gpu(source: DummySource) -> float:
    """Weights of the device less the embedding, of which one row of 129280 is read."""
    device = made(source, "hybrid").devices[0]
    embedding = source.tensors["token_embd.weight"].nbytes
    return device.weight_bytes - embedding + embedding / 129280


def test_hybrid_is_dense_parts_and_cache_on_the_card_then_experts_in_ram_then_hand_offs(
    source: DummySource,
) -> None:
    found = decoded(source, "hybrid")
    assert 11.5e9 < routed(source) < 12.5e9
    expected = {
        GPU_MEMORY: (dense_on_gpu(source) + KV) / (EXPECTED.gpu_memory * 1000e9),
        RAM: routed(source) / (EXPECTED.ram * 200e9),
        HANDOFF: 58 * (EXPECTED.handoff_s + 4 * 7168 / 20e9),
    }
    assert found.seconds == pytest.approx(expected)
    assert found.tok_s == pytest.approx(1 / sum(expected.values()))
    assert found.bound == RAM
    assert found.low < found.tok_s < found.high


def test_stream_moves_the_same_experts_over_the_link(source: DummySource) -> None:
    found = decoded(source, "stream")
    assert found.seconds[LINK] == pytest.approx(routed(source) / 20e9)
    assert RAM not in found.seconds
    assert found.bound == LINK


def test_cpu_reads_what_a_decoded_token_reads(source: DummySource) -> None:
    whole = made(source, "cpu")
    # The cache's latents are read too, but their products with 128 heads take longer.
    assert decoded(source, "cpu").seconds[RAM] == pytest.approx(
        whole.decode_weight_bytes / (EXPECTED.ram * 200e9), rel=1e-4
    )
    products = 2 * DEPTH_TOKENS * 61 * 128 * (512 + 64 + 512)
    rate = 32 * CORES["amx"].whole * CORES["amx"].attention_gflops * 1e9
    assert decoded(source, "cpu").seconds[CPU_PRODUCTS] == pytest.approx(products / rate)


def test_a_prompt_on_the_cpu_is_bound_by_products_unless_the_cores_are_many(source: DummySource) -> None:
    """512 rows that choose 8 of 256 touch every expert, with 16 rows each."""
    assert prefilled(source, "cpu").bound == CPU_PRODUCTS
    experts = sum(raw.nbytes for raw in source.tensors.values() if "_exps" in raw.name)
    many = prefilled(source, "hybrid", replace(MACHINE, cores=4000, gpus=(replace(CARD, pcie_gb_s=1.0),)))
    assert many.seconds[RAM] == pytest.approx(experts / (EXPECTED.ram * 200e9) / 512, rel=1e-6)


def test_products_of_a_prompt_by_hand() -> None:
    """One layer with experts of qwen3-30b-a3b: 604 M weights, 32 rows an expert."""
    source = DummySource("dummy:qwen3-30b-a3b?layers=1")
    slow = replace(MACHINE, read_gb_s=1e5)
    core = CORES["amx"]
    touched = 1 - (1 - 8 / 128) ** 512
    experts = 128 * touched * 3 * 768 * 2048 / 1024 * (core.unpack_ns + 32 / touched * core.row_ns)
    attention = 2 * 2048 * (32 + 4) * 128 / 1024 * (core.unpack_ns + 512 * core.row_ns)
    router = 128 * 2048 / 1024 * (core.unpack_ns + 512 * core.row_ns)
    scores = 2 * 512 * 1024 * 32 * 256 / core.attention_gflops
    cores = 32 * core.whole
    head = source.tensors["output.weight"].nbytes / core.unpack_gb_s / 32 / 1e9  # of the last row alone
    found = prefilled(source, "cpu", slow).seconds[CPU_PRODUCTS] * 512
    assert found == pytest.approx((experts + attention + router + scores) / cores / 1e9 + head, rel=1e-3)


def test_a_hybrid_streams_a_prompts_experts_where_that_is_faster(source: DummySource) -> None:
    slow_cores = replace(MACHINE, cores=1)
    assert prefilled(source, "hybrid", slow_cores).bound == LINK
    assert prefilled(source, "hybrid", slow_cores).tok_s == pytest.approx(
        prefilled(source, "stream", slow_cores).tok_s
    )


def test_a_model_on_the_card_alone_prefills_by_its_products() -> None:
    source = DummySource("dummy:qwen3-30b-a3b")
    assert decoded(source, "gpu").bound == GPU_MEMORY
    assert prefilled(source, "gpu").bound in (GPU_PRODUCTS, GPU_MEMORY)
    faster = replace(MACHINE, gpus=(replace(CARD, bf16_tflops=1e5, memory_gb_s=1e5),))
    assert prefilled(source, "gpu", faster).tok_s > 10 * prefilled(source, "gpu").tok_s


def test_formats_that_are_slow_to_unpack_bind_few_cores() -> None:
    """IQ1_S is read at 5.9 GB/s a core: two cores cannot use 200 GB/s."""
    source = DummySource("dummy:qwen3-30b-a3b?quant=iq1_s&layers=4")
    two = decoded(source, "cpu", replace(MACHINE, cores=2))
    assert two.bound == CPU_PRODUCTS
    assert decoded(source, "cpu", replace(MACHINE, cores=64)).bound == RAM


def test_hot_experts_take_their_share_of_uses_off_the_host() -> None:
    source = DummySource("dummy:qwen3-30b-a3b")
    small = replace(CARD, free_bytes=10 * GIB)
    machine = replace(MACHINE, gpus=(small,))
    skewed = Profile("m", 1, {i: (97, *[1] * 127) for i in range(48)})  # one expert has 97 of 224 uses
    without = decoded(source, "hybrid", machine)
    hot = plan(machine, source, RunOptions(strategy="hybrid"), profile=skewed)
    resident = sum(len(table.resident) for table in hot.experts.values())
    assert hot.estimate is not None
    assert hot.estimate.decode is not None
    assert 48 < resident < 48 * 128
    layer_bytes = [0] * 48
    for raw in source.tensors.values():
        if "_exps" in raw.name:
            layer_bytes[int(raw.name.split(".")[1])] += raw.nbytes
    left = 0.0
    for layer, table in hot.experts.items():
        uses = sum(97 if expert == 0 else 1 for expert in table.resident)
        left += layer_bytes[layer] * (1 - uses / 224)
    expected = without.seconds[RAM] * left / sum(layer_bytes)
    assert hot.estimate.decode.seconds[RAM] == pytest.approx(expected)
    assert expected < 0.4 * without.seconds[RAM]


SMALL_CARD = replace(MACHINE, gpus=(replace(CARD, free_bytes=20 * GIB),))
CACHE = 8 * GIB


def decode_of(machine: Machine, profile: Profile | None = None, **options: object) -> tuple[Plan, Speed]:
    """qwen3-30b-a3b under hybrid."""
    source = DummySource("dummy:qwen3-30b-a3b")
    made = plan(machine, source, RunOptions(strategy="hybrid", **options), profile=profile)  # type: ignore[arg-type]
    assert made.estimate is not None
    assert made.estimate.decode is not None
    return made, made.estimate.decode


def test_a_cache_takes_its_share_of_even_choices_and_says_that_it_assumes_them() -> None:
    """Experts of 128 in 48 layers, 3 x 768 x 2048 at Q4_K_M: 8 GiB are 60-odd places a layer."""
    _, plain = decode_of(SMALL_CARD)
    made, cached = decode_of(SMALL_CARD, expert_cache=CACHE)
    spare = {table.spare for table in made.experts.values()}
    assert len(spare) == 1
    (places,) = spare
    assert 55 < places < 75
    assert cached.seconds[RAM] == pytest.approx(plain.seconds[RAM] * (1 - places / 128))
    assert cached.seconds[GPU_MEMORY] > plain.seconds[GPU_MEMORY]
    assert made.estimate is not None
    assert "without --profile all experts are chosen equally often" in made.estimate.assumed[0]


def test_a_cache_beside_a_profile_holds_what_is_used_most_of_the_rest() -> None:
    """Every layer: experts 0 to 9 have 90 of 1000 uses each, the other 118 share 100."""
    counts = {layer: (*[90] * 10, *[100 / 118] * 118) for layer in range(48)}
    profile = Profile("m", 1, {layer: tuple(round(1000 * n) for n in c) for layer, c in counts.items()})
    room = replace(SMALL_CARD, gpus=(replace(CARD, free_bytes=13 * GIB),))
    _, plain = decode_of(room)
    made, cached = decode_of(room, profile, expert_cache=CACHE)
    held = 0.0
    for layer, table in made.experts.items():
        left = [count for e, count in enumerate(counts[layer]) if e not in table.resident]
        held += sum(counts[layer][e] for e in table.resident) + sum(sorted(left)[-table.spare :])
    missed = 1 - held / 48 / 1000
    assert missed < 0.1
    assert cached.seconds[RAM] == pytest.approx(missed * plain.seconds[RAM], rel=0.01)  # Q6_K in some layers
    assert made.estimate is not None
    assert "that the profile counts most" in made.estimate.assumed[0]


def test_deferral_hides_late_experts_behind_the_device_at_best_and_pays_a_second_hand_off() -> None:
    _, plain = decode_of(MACHINE)
    made, late = decode_of(MACHINE, defer_experts=4)
    assert late.seconds[HANDOFF] == pytest.approx(2 * plain.seconds[HANDOFF])
    device = late.seconds[GPU_MEMORY] + late.seconds[HANDOFF]
    assert late.hidden_s == pytest.approx(min(4 / 8 * late.seconds[RAM], device))
    assert 1 / late.tok_s == pytest.approx(sum(late.seconds.values()) - late.hidden_s)
    assert late.low < plain.low  # in the bad case nothing is hidden, and there are two hand-offs
    assert made.estimate is not None
    assert "hides what the late experts take" in made.estimate.assumed[0]


@pytest.mark.parametrize(("cores", "longer"), [(4, "cpu"), (4000, "device")])
def test_overlap_of_a_prompt_is_the_longer_of_both_lanes_of_two_halves(cores: int, longer: str) -> None:
    """Half as many rows twice: experts that both halves choose are read twice. The card has no room for a
    ring."""
    slow_link = replace(MACHINE, cores=cores, gpus=(replace(CARD, pcie_gb_s=0.5, free_bytes=3000 << 20),))
    source = DummySource("dummy:qwen3-30b-a3b")

    def prefill(**more: bool) -> Speed:
        whole = plan(slow_link, source, RunOptions(strategy="hybrid", **more))  # type: ignore[arg-type]
        assert not whole.ring
        assert whole.estimate is not None
        assert whole.estimate.prefill is not None
        return whole.estimate.prefill

    both = prefill(overlap=True)
    cpu = both.seconds.get(RAM, 0.0) + both.seconds.get(CPU_PRODUCTS, 0.0)
    device = sum(both.seconds.values()) - cpu
    assert LINK not in both.seconds
    assert longer == ("cpu" if cpu > device else "device")
    assert both.hidden_s == pytest.approx(min(cpu, device))
    assert both.tok_s == pytest.approx(1 / max(cpu, device))
    assert sum(both.seconds.values()) > sum(prefill().seconds.values())


@pytest.mark.parametrize("machine", [replace(MACHINE, cores=1), replace(MACHINE, read_gb_s=1e4, cores=4000)])
def test_one_request_has_nothing_to_overlap_in_decoding_and_steps_that_may_stream_stay_whole(
    source: DummySource, machine: Machine
) -> None:
    """Whether any expert streams in the end or not: modules/split.py asks for the ring alone."""
    assert decode_of(MACHINE, overlap=True)[1] == decode_of(MACHINE)[1]
    whole = prefilled(source, "hybrid", machine)
    assert (LINK in whole.seconds) == (machine.cores == 1)
    both = plan(machine, source, RunOptions(strategy="hybrid", overlap=True))
    assert both.ring
    assert both.estimate is not None
    assert both.estimate.prefill == whole
    assert "hides nothing of a prompt" in both.estimate.assumed[0]


def test_experts_whose_tiles_no_gpu_reads_stay_with_the_cpu_and_need_no_ring() -> None:
    """However slow it is."""
    source = DummySource("dummy:qwen3-30b-a3b?quant=iq2_xxs")
    slow = replace(MACHINE, cores=1, gpus=(replace(CARD, pcie_gb_s=1000.0),))
    found = plan(slow, source, RunOptions(strategy="hybrid"))
    assert not found.ring
    assert not any("ring" in note for note in found.notes)
    assert found.estimate is not None
    assert found.estimate.prefill is not None
    assert found.estimate.prefill.bound == CPU_PRODUCTS
    assert LINK not in found.estimate.prefill.seconds


def test_cores_that_multiply_faster_take_so_much_less_for_products() -> None:
    source = DummySource("dummy:qwen3-30b-a3b?layers=2")
    machine = replace(MACHINE, isa=("scalar", "avx2", "avx512"), read_gb_s=1e5)
    rate = 32 * CORES["avx512"].multiply_gops
    as_measured = prefilled(source, "cpu", replace(machine, multiply_gops=rate))
    assert as_measured == prefilled(source, "cpu", machine)
    twice = prefilled(source, "cpu", replace(machine, multiply_gops=2 * rate))
    # One row times the head is unpacking, which the rate says nothing of.
    head = source.tensors["output.weight"].nbytes / CORES["avx512"].unpack_gb_s / 1e9 / 32 / 512
    expected = (as_measured.seconds[CPU_PRODUCTS] - head) / 2 + head
    assert twice.seconds[CPU_PRODUCTS] == pytest.approx(expected)
    # AMX's products do not follow such a loop, see CORES.
    assert prefilled(source, "cpu", replace(MACHINE, multiply_gops=1.0)) == prefilled(source, "cpu", MACHINE)


def test_attention_multiplies_in_bf16_where_avx512_has_it() -> None:
    """129 GFLOPS a core beside 75: of the 512 rows' products with 1024 keys of each of two layers."""
    source = DummySource("dummy:qwen3-30b-a3b?layers=2")
    machine = replace(MACHINE, isa=("scalar", "avx2", "avx512"), read_gb_s=1e5)
    fp32, bf16 = (
        prefilled(source, "cpu", replace(machine, avx512_bf16=has)).seconds[CPU_PRODUCTS]
        for has in (False, True)
    )
    flop = 2 * 2 * 512 * 1024 * 32 * 256
    less = flop * (1 / 75e9 - 1 / 129e9) / (32 * CORES["avx512"].whole)
    assert 512 * (fp32 - bf16) == pytest.approx(less, rel=1e-6)
    # avx2 has no such products, whatever the CPU has.
    narrow = replace(machine, isa=("scalar", "avx2"))
    assert prefilled(source, "cpu", narrow) == prefilled(source, "cpu", replace(narrow, avx512_bf16=True))


def test_rows_of_q8_0_take_avx2_longer() -> None:
    """Its codes do not fit sums of pairs in 16 bits: 30 + 1.5 x 10.6 ns a row beside 30 + 10.6."""
    machine = replace(MACHINE, isa=("scalar", "avx2"), read_gb_s=1e5)
    seconds = [
        prefilled(DummySource(f"dummy:qwen3-30b-a3b?layers=2&quant={quant}"), "cpu", machine).seconds
        for quant in ("q4_0", "q8_0")
    ]
    one, eight = (found[CPU_PRODUCTS] for found in seconds)
    assert 1.3 * one < eight < 1.5 * one  # attention and unpacking are the same


def test_an_instruction_set_that_is_asked_for_is_predicted() -> None:
    source = DummySource("dummy:qwen3-30b-a3b?layers=2")
    found = plan(MACHINE, source, RunOptions(strategy="cpu", isa="avx2")).estimate
    assert found is not None
    assert found.prefill == prefilled(source, "cpu", replace(MACHINE, isa=("scalar", "avx2")))


def test_a_bandwidth_that_is_not_known_gives_no_figure(source: DummySource) -> None:
    unknown = estimated(source, "hybrid", replace(MACHINE, read_gb_s=0.0))
    assert unknown.decode is None
    assert unknown.prefill is None
    assert unknown.missing == "RAM's read bandwidth"
    card = replace(MACHINE, gpus=(replace(CARD, pcie_gb_s=0.0, memory_gb_s=0.0),))
    assert estimated(source, "stream", card).missing == "the memory bandwidth of cuda:0, the link of cuda:0"


def test_what_only_prompts_need_leaves_decoding_its_figure(source: DummySource) -> None:
    found = estimated(source, "hybrid", replace(MACHINE, gpus=(replace(CARD, bf16_tflops=0.0),)))
    assert found.decode is not None
    assert found.prefill is None
    assert found.missing == "the TFLOPS of cuda:0"
