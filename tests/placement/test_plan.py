"""The plan, by numbers small enough to add up by hand."""

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from isthmus.config import RunOptions
from isthmus.errors import MalformedFileError, NotEnoughMemoryError, UsageError
from isthmus.formats.spec import by_name
from isthmus.placement.machine import Machine
from isthmus.placement.plan import plan
from isthmus.placement.sizes import decode_weight_bytes, kv_token_bytes, weight_bytes
from isthmus.weights.metadata import Metadata
from isthmus.weights.source import RawTensor

GIB = 1 << 30
LARGE = Machine(cores=8, total_bytes=1024 * GIB, available_bytes=1000 * GIB)

METADATA = {
    "general.architecture": "llama",
    "llama.context_length": 32768,
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.feed_forward_length": 128,
    "llama.expert_count": 8,
    "llama.expert_used_count": 2,
}


def tensor(name: str, format_name: str, *shape: int) -> RawTensor:
    spec = by_name(format_name)
    nbytes = prod(shape) // spec.block_columns * spec.block_bytes
    return RawTensor(name, shape, spec, memoryview(bytes(nbytes)), Path("model.gguf"))


@dataclass
class Source:
    metadata: Metadata
    tensors: dict[str, RawTensor]
    path: Path = Path("model.gguf")

    def release(self, name: str) -> None: ...

    def close(self) -> None: ...


def source(*tensors: RawTensor, **changes: Any) -> Source:
    metadata = METADATA | {key.replace("__", "."): value for key, value in changes.items()}
    return Source(Metadata(metadata, Path("model.gguf")), {t.name: t for t in tensors})


MODEL = [
    tensor("token_embd.weight", "q8_0", 100, 64),  # 100 * 2 blocks * 34 bytes = 6800
    tensor("output.weight", "q8_0", 100, 64),  # 6800
    tensor("blk.0.attn_norm.weight", "f32", 64),  # 256
    tensor("blk.0.ffn_gate_inp.weight", "f32", 8, 64),  # 2048
    tensor("blk.0.ffn_up_exps.weight", "q8_0", 8, 128, 64),  # 8 * 128 * 2 * 34 = 69632
]


def test_weight_bytes_are_the_files() -> None:
    assert weight_bytes(source(*MODEL)) == 6800 + 6800 + 256 + 2048 + 69632


def test_a_decoded_token_reads_the_chosen_experts_and_one_row_of_the_embedding() -> None:
    assert decode_weight_bytes(source(*MODEL)) == 68 + 6800 + 256 + 2048 + 69632 * 2 / 8


def test_a_tied_embedding_is_read_in_full_as_the_head() -> None:
    tied = [t for t in MODEL if t.name != "output.weight"]
    assert decode_weight_bytes(source(*tied)) == 6800 + 256 + 2048 + 69632 * 2 / 8


def test_a_router_and_norms_are_fp32_whatever_the_file_holds() -> None:
    router = tensor("blk.0.ffn_gate_inp.weight", "bf16", 8, 64)
    norm = tensor("blk.0.attn_norm.weight", "f16", 64)
    assert weight_bytes(source(router, norm)) == 4 * 8 * 64 + 4 * 64


LATENT = {  # 2 heads, each 48 rows of keys and 16 of values, over a latent of 64
    "llama__attention__kv_lora_rank": 64,
    "llama__rope__dimension_count": 16,
    "llama__attention__key_length": 64,
    "llama__attention__value_length": 16,
}
Q8 = 34 / 32  # bytes a value


def test_keys_of_latent_attention_are_kept_twice_and_read_once() -> None:
    joined = source(tensor("blk.0.attn_kv_b.weight", "q8_0", 2 * 64, 64), **LATENT)
    keys, values = 2 * 48 * 64, 2 * 16 * 64
    assert weight_bytes(joined) == (keys + values) * Q8 + keys * 2  # BF16 for the transposed copy
    assert weight_bytes(joined, exact_batching=True) == values * Q8 + keys * 2
    assert decode_weight_bytes(joined) == values * Q8 + keys * 2


def test_split_keys_decode_as_the_file_has_them_and_a_joined_copy_is_not_loaded() -> None:
    k_b = tensor("blk.0.attn_k_b.weight", "q8_0", 2, 64, 64)
    v_b = tensor("blk.0.attn_v_b.weight", "q8_0", 2, 16, 64)
    joined = tensor("blk.0.attn_kv_b.weight", "q8_0", 2 * 80, 64)
    split = source(k_b, v_b, joined, **LATENT)
    assert weight_bytes(split) == k_b.nbytes + v_b.nbytes + 2 * 2 * 64 * 64
    assert weight_bytes(split, exact_batching=True) == k_b.nbytes + v_b.nbytes
    assert decode_weight_bytes(split) == k_b.nbytes + v_b.nbytes


def test_bytes_of_a_token_in_the_cache() -> None:
    # 2 layers, 2 heads of keys and of values, 64 / 4 = 16 values each, 2 bytes a value
    assert kv_token_bytes(source().metadata, "bf16") == 2 * 2 * (16 + 16) * 2
    assert kv_token_bytes(source().metadata, "f32") == 2 * 2 * (16 + 16) * 4
    wide = source(llama__attention__key_length=96, llama__attention__value_length=32)
    assert kv_token_bytes(wide.metadata, "bf16") == 2 * 2 * (96 + 32) * 2
    assert kv_token_bytes(wide.metadata, "q8_0") == 2 * 2 * (3 + 1) * 34  # 34 bytes for 32 values


def test_latent_attention_caches_576_values_a_token_and_layer() -> None:
    latent = source(llama__attention__kv_lora_rank=512, llama__rope__dimension_count=64)
    assert kv_token_bytes(latent.metadata, "bf16") == 2 * 576 * 2
    assert kv_token_bytes(latent.metadata, "q8_0") == 2 * 18 * 34


@pytest.mark.parametrize(
    ("trained", "asked", "got"), [(32768, None, 8192), (4096, None, 4096), (32768, 20000, 20000)]
)
def test_the_context_is_what_was_asked_or_the_smaller_of_8192_and_the_models(
    trained: int, asked: int | None, got: int
) -> None:
    made = plan(LARGE, source(*MODEL, llama__context_length=trained), RunOptions(context_tokens=asked))
    assert made.context_tokens == got
    assert made.num_blocks * 64 >= got > (made.num_blocks - 1) * 64


def test_a_context_beyond_the_models_is_a_mistake_of_the_user() -> None:
    with pytest.raises(UsageError, match="context of 40000 tokens is asked for; this model's limit is 32768"):
        plan(LARGE, source(*MODEL), RunOptions(context_tokens=40000))


def test_without_a_wish_the_context_shrinks_to_what_fits() -> None:
    needed = plan(LARGE, source(*MODEL), RunOptions())
    tight = replace(LARGE, available_bytes=needed.need_bytes - 1)
    made = plan(tight, source(*MODEL), RunOptions())
    assert made.context_tokens == 8192 - 64
    with pytest.raises(NotEnoughMemoryError, match=r"a shorter context \(--ctx\)"):
        plan(tight, source(*MODEL), RunOptions(context_tokens=8192))


def test_requests_computed_together_get_contexts_of_their_own_as_far_as_half_of_what_is_left_goes() -> None:
    alone = plan(LARGE, source(*MODEL), RunOptions(context_tokens=1024))
    four = RunOptions(context_tokens=1024, parallel=4)
    assert (alone.num_blocks, plan(LARGE, source(*MODEL), four).num_blocks) == (16, 64)
    for blocks_left, shared in ((0, 0), (1, 0), (10, 5), (200, 48)):
        left = blocks_left * 64 * alone.kv_token_bytes
        tight = plan(replace(LARGE, available_bytes=alone.need_bytes + left), source(*MODEL), four)
        assert (tight.context_tokens, tight.num_blocks) == (1024, 16 + shared)
        assert tight.need_bytes == alone.need_bytes + shared * 64 * alone.kv_token_bytes


def test_a_model_that_does_not_fit_is_refused_with_need_and_have_in_gib() -> None:
    huge = replace(MODEL[0], name="blk.0.ffn_down.weight", data=Sized(600 * GIB))  # type: ignore[arg-type]
    small = Machine(cores=2, total_bytes=24 * GIB, available_bytes=22 * GIB)
    with pytest.raises(
        NotEnoughMemoryError, match=r"needs 600\.\d GiB \(weights 600\.0, .* 22\.0 GiB"
    ) as caught:
        plan(small, source(*MODEL, huge), RunOptions())
    assert caught.value.have_bytes == 22 * GIB
    assert caught.value.need_bytes > 600 * GIB


def test_mapped_weights_need_no_memory_but_their_vectors_do() -> None:
    """Matrices are pages of a file, which the kernel takes back; norms are copied, as fp32."""
    huge = replace(MODEL[0], name="blk.0.ffn_down.weight", data=Sized(600 * GIB))  # type: ignore[arg-type]
    small = Machine(cores=2, total_bytes=24 * GIB, available_bytes=22 * GIB)
    made = plan(small, source(*MODEL, huge), RunOptions(), mapped=True)
    in_memory = plan(LARGE, source(*MODEL, huge), RunOptions())
    assert made.weight_bytes == in_memory.weight_bytes
    vectors = sum(4 * prod(t.shape) for t in MODEL if len(t.shape) == 1)
    assert vectors
    assert made.need_bytes == vectors + made.kv_bytes + made.scratch_bytes
    with pytest.raises(NotEnoughMemoryError, match="or `isthmus pack`"):
        plan(small, source(*MODEL, huge), RunOptions())


@pytest.mark.parametrize(
    ("nodes", "fake", "said"),
    [
        (0, None, r"or `isthmus pack` to run it from disk"),
        (1, None, r"or `isthmus pack` to run it from disk"),
        (2, None, r"or `isthmus pack` and one NUMA node \(numactl --cpunodebind=0\) to run it from disk"),
        (2, 2, r"or `isthmus pack` and one NUMA node \(no ISTHMUS_FAKE_NUMA\) to run it from disk"),
    ],
)
def test_several_nodes_copy_a_cache_so_it_helps_with_one_of_them(
    nodes: int, fake: int | None, said: str
) -> None:
    huge = replace(MODEL[0], name="blk.0.ffn_down.weight", data=Sized(600 * GIB))  # type: ignore[arg-type]
    small = Machine(cores=2, total_bytes=24 * GIB, available_bytes=22 * GIB, nodes=nodes)
    with pytest.raises(NotEnoughMemoryError, match=said):
        plan(small, source(*MODEL, huge), RunOptions(fake_numa=fake))


def test_mapped_weights_that_leave_no_room_for_a_step_are_not_sent_to_the_disk_again() -> None:
    huge = replace(MODEL[0], name="blk.0.ffn_down.weight", data=Sized(600 * GIB))  # type: ignore[arg-type]
    made = plan(LARGE, source(*MODEL, huge), RunOptions(), mapped=True)
    for room, said in (
        (made.scratch_bytes - 1, r"GiB more, or shorter steps \(--chunk\)$"),
        (1, "GiB more$"),
    ):
        small = replace(LARGE, available_bytes=room)
        with pytest.raises(NotEnoughMemoryError, match=said):
            plan(small, source(*MODEL, huge), RunOptions(), mapped=True)


def test_a_limit_of_the_container_below_need_is_refused_with_its_numbers(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB",
        "proc/self/cgroup": "0::/job",
        "sys/fs/cgroup/job/memory.max": str(2 * GIB),
        "sys/fs/cgroup/job/memory.current": str(GIB),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    large = replace(MODEL[0], name="blk.0.ffn_down.weight", data=Sized(3 * GIB))  # type: ignore[arg-type]
    inside = Machine.detect(tmp_path, cpus={0})
    with pytest.raises(NotEnoughMemoryError, match=r"weights 3\.0, .* 1\.0 GiB are available"):
        plan(inside, source(*MODEL, large), RunOptions())
    assert plan(inside, source(*MODEL, large), RunOptions(), mapped=True).need_bytes < GIB


@dataclass
class Sized:
    """As a view into a mapped file: large, and never read."""

    nbytes: int


def test_threads_are_the_cores_unless_asked_for() -> None:
    assert plan(LARGE, source(*MODEL), RunOptions()).threads == 8
    assert plan(LARGE, source(*MODEL), RunOptions(threads=3)).threads == 3


@pytest.mark.parametrize(
    "missing", ["context_length", "block_count", "attention.head_count", "embedding_length"]
)
def test_metadata_that_cannot_be_planned_with_names_its_key(missing: str) -> None:
    broken = source(*MODEL)
    broken.metadata = Metadata(
        {k: v for k, v in METADATA.items() if k != f"llama.{missing}"}, Path("model.gguf")
    )
    with pytest.raises(MalformedFileError, match=f"llama.{missing}"):
        plan(LARGE, broken, RunOptions())


def test_layers_without_attention_have_no_cache() -> None:
    """Hybrids with recurrent layers write the heads of each layer, 0 where there is none."""
    made = source(*MODEL, llama__attention__head_count_kv=[0, 2])
    assert kv_token_bytes(made.metadata, "bf16") == 2 * (16 + 16) * 2  # of one layer: 64 wide, 4 heads
    none = source(*MODEL, llama__attention__head_count=0)
    with pytest.raises(
        MalformedFileError, match=r"attention.head_count' must be an integer of at least 1, got 0"
    ):
        plan(LARGE, none, RunOptions())


def test_more_experts_used_than_there_are_is_a_lie() -> None:
    with pytest.raises(MalformedFileError, match="expert_used_count' must be at most the 8 experts, got 9"):
        plan(LARGE, source(*MODEL, llama__expert_used_count=9), RunOptions())


def test_a_q8_0_cache_holds_1_88_times_the_tokens_and_is_said_to_be_approximate() -> None:
    made = source(llama__attention__key_length=64, llama__attention__value_length=64)
    small = replace(LARGE, available_bytes=GIB)
    plain, rounded = (plan(small, made, RunOptions(kv_dtype=dtype)) for dtype in ("bf16", "q8_0"))
    assert rounded.tokens_fit / plain.tokens_fit == pytest.approx(64 / 34, rel=1e-3)
    assert rounded.kv_bytes / plain.kv_bytes == 34 / 64
    assert plain.notes == ()
    (note,) = rounded.notes
    assert note == "approximate: keys and values are rounded to q8_0 (--kv-dtype)"
    assert note in str(rounded)
