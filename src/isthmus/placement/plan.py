"""The plan: where each part of a model goes, what it takes, and how long its context may be. Pure.

Made from the file's header, so a model that does not fit is refused before any weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from isthmus.config import (
    BLOCK_TOKENS,
    DEFAULT_CONTEXT_TOKENS,
    KV_DISK_QUEUE_BYTES,
    MAX_CONTEXT_TOKENS,
    MAX_DRAFT,
    PROMPT_LOGIT_ROWS,
    RunOptions,
)
from isthmus.errors import NotEnoughMemoryError, UsageError
from isthmus.formats.kv_cache import APPROXIMATE
from isthmus.placement.captured import captured_bytes, decode_bytes
from isthmus.placement.cost import Estimate, estimate
from isthmus.placement.devices import choose_devices, why_no_gpu
from isthmus.placement.layout import GIB, DevicePlan, ExpertTable, Job, Placement
from isthmus.placement.machine import Machine
from isthmus.placement.parts import ModelParts, model_parts, module_path
from isthmus.placement.profile import Profile
from isthmus.placement.sizes import key, vector_bytes, weight_bytes
from isthmus.placement.strategies import STRATEGIES
from isthmus.weights.mtp import mtp_note

if TYPE_CHECKING:
    from isthmus.weights.metadata import Metadata
    from isthmus.weights.source import WeightSource

# The interpreter with torch and the tokenizer's tables: 0.3 to 0.5 GiB resident, whatever the model.
PROCESS_BYTES = GIB // 2


@dataclass(frozen=True)
class Plan:
    """Bytes by purpose and by device, and what they allow. Totals count all devices, `need_bytes` RAM."""

    context_tokens: int  # of one request
    threads: int
    weight_bytes: int
    mapped_bytes: int  # of these, pages of a packed cache, which the kernel takes back when it needs them
    decode_weight_bytes: int  # of these, read for one decoded token
    kv_token_bytes: int
    num_blocks: int  # of the paged cache, BLOCK_TOKENS each
    scratch_bytes: int  # activations of one step, logits, the process itself
    available_bytes: int  # RAM
    strategy: str = "cpu"
    tokens_fit: int = 0  # the longest context that this placement has room for
    modules: dict[str, str] = field(
        default_factory=dict
    )  # module path -> device; routed experts: see `experts`
    experts: dict[int, ExpertTable] = field(default_factory=dict)  # by layer
    devices: tuple[DevicePlan, ...] = ()  # the last is the host
    ring: bool = False  # whether memory for experts that stream is set aside on each device
    notes: tuple[str, ...] = ()
    estimate: Estimate | None = None

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * BLOCK_TOKENS * self.kv_token_bytes

    @property
    def need_bytes(self) -> int:
        """Of RAM."""
        in_ram = [device for device in self.devices if not device.name.startswith("cuda")]
        return sum(device.need_bytes for device in in_ram) - self.mapped_bytes

    def device_of(self, tensor_name: str) -> str:
        """Where the module is that the tensor belongs to."""
        return self.modules[module_path(tensor_name)]

    def to_json(self) -> str:
        import msgspec

        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Raises UsageError for anything but what `to_json` gives."""
        import msgspec

        try:
            made: Plan = msgspec.json.decode(text, type=Plan)
        except (msgspec.DecodeError, ValueError) as error:
            raise UsageError(f"this is no plan: {error}") from None
        return made

    def __str__(self) -> str:
        from isthmus.placement.show import as_text

        return as_text(self)

    def __rich__(self) -> Any:
        from isthmus.placement.show import as_table

        return as_table(self)


def plan(
    machine: Machine,
    source: WeightSource,
    options: RunOptions,
    *,
    mapped: bool = False,
    profile: Profile | None = None,
    parts: ModelParts | None = None,
) -> Plan:
    """The plan for one model.

    mapped: its matrices are read in place from a packed cache; profile: which experts are worth VRAM; parts:
    `model_parts` of the same source and options, where somebody made them already. Raises
    NotEnoughMemoryError; DeviceError for a device or strategy that cannot be had; UsageError for a context
    beyond the model's, another model's profile, or more late experts than a token has; MalformedFileError for
    metadata that cannot be planned with.
    """
    metadata = source.metadata
    trained = context_length(metadata)
    if options.context_tokens is not None and options.context_tokens > trained:
        raise UsageError(
            f"a context of {options.context_tokens} tokens is asked for; this model's limit is {trained}"
        )
    parts = parts or model_parts(source, options)
    _check_deferral(options, parts)
    if options.isa in machine.isa:
        machine = replace(machine, isa=machine.isa[: machine.isa.index(options.isa) + 1], multiply_gops=0.0)
    if profile is not None:
        _check_profile(profile, parts)
    wanted = options.context_tokens or min(trained, DEFAULT_CONTEXT_TOKENS)
    job = Job(
        strategy=options.strategy,
        parts=parts,
        devices=choose_devices(machine, options),
        ram_bytes=machine.available_bytes,
        wanted_tokens=wanted,
        may_shrink=options.context_tokens is None,
        parallel=options.parallel,
        step_bytes=_step_bytes(metadata, options),
        process_bytes=PROCESS_BYTES,
        chunk_tokens=options.chunk_tokens,
        decode_bytes=decode_bytes(metadata),
        captured_bytes=captured_bytes(metadata, options, wanted),
        to_disk=_to_disk(machine, options),
        profile=profile,
        cache_bytes=options.expert_cache or 0,
        overlap=options.overlap,
        defer_experts=options.defer_experts,
    )
    job = replace(job, streams=job.on_gpu or options.stream_rows is not None)
    job = replace(job, below_bytes=_below_bytes(options, on_gpu=job.on_gpu))
    if mapped:
        matrices = weight_bytes(source, exact_batching=options.exact_batching) - vector_bytes(source)
        job = replace(job, mapped_bytes=matrices)
    job, placed, notes = _place(job, options)
    fallback = why_no_gpu(machine, options)
    if options.kv_dtype in APPROXIMATE:
        notes += (f"approximate: keys and values are rounded to {options.kv_dtype} (--kv-dtype)",)
    if options.defer_experts:
        notes += (
            f"approximate: of each sampled token {options.defer_experts} experts join a layer late "
            "(--defer-experts)",
        )
    return Plan(
        context_tokens=min(job.wanted_tokens, (placed.num_blocks - placed.shared_blocks) * BLOCK_TOKENS),
        threads=options.threads or machine.cores,
        weight_bytes=sum(device.weight_bytes + device.expert_bytes for device in placed.devices),
        mapped_bytes=placed.mapped_bytes,
        decode_weight_bytes=round(sum(part.ram_read for part in parts.all)),
        kv_token_bytes=parts.kv_token_bytes,
        num_blocks=placed.num_blocks,
        scratch_bytes=sum(device.scratch_bytes for device in placed.devices),
        available_bytes=machine.available_bytes,
        strategy=job.strategy,
        tokens_fit=placed.tokens_fit,
        modules=placed.modules,
        experts=placed.experts,
        devices=placed.devices,
        ring=placed.ring,
        notes=(
            *((f"on the CPU: {fallback}",) if fallback else ()),
            *notes,
            *placed.notes,
            *_unused(job, options),
            *filter(None, [mtp_note(metadata)]),
            *_not_below_ram(job, options),
        ),
        estimate=estimate(machine, job, placed),
    )


def _place(job: Job, options: RunOptions) -> tuple[Job, Placement, tuple[str, ...]]:
    """(the job with the strategy that was taken, its placement, why it is not a better one)."""
    if job.strategy != "auto":
        return job, STRATEGIES[job.strategy](job), ()
    refusals: list[NotEnoughMemoryError] = []
    if job.devices:
        for strategy in ("gpu", "hybrid"):
            attempt = replace(job, strategy=strategy)
            try:
                return attempt, STRATEGIES[strategy](attempt), ()
            except NotEnoughMemoryError as error:
                if strategy == "hybrid" and options.asks_for_gpu:
                    raise
                refusals.append(error)
    alone = _below_bytes(options, on_gpu=False)
    attempt = replace(job, strategy="cpu", devices=(), below_bytes=alone)
    try:
        return attempt, STRATEGIES["cpu"](attempt), tuple(f"on the CPU: {error}" for error in refusals[-1:])
    except NotEnoughMemoryError as error:
        nearest = min((error, *refusals), key=lambda refusal: refusal.need_bytes - refusal.have_bytes)
        raise nearest from None


def _unused(job: Job, options: RunOptions) -> tuple[str, ...]:
    """What was asked of experts on a device, and is for nothing under the strategy that was taken."""
    names = [
        name for name in ("profile", "expert_cache", "stream_rows") if getattr(options, name) is not None
    ]
    if not names or (job.strategy == "hybrid" and job.parts.experts):
        return ()
    why = f"strategy {job.strategy} shares none with the CPU" if job.parts.experts else "this model has none"
    return (f"{', '.join(names)} is about experts on a device: {why}",)


def _below_bytes(options: RunOptions, *, on_gpu: bool) -> int:
    """Host memory of the tiers below the cache."""
    kept = options.kv_ram or 0 if on_gpu else 0
    return kept + (KV_DISK_QUEUE_BYTES if options.kv_disk is not None else 0)


def _to_disk(machine: Machine, options: RunOptions) -> str:
    """Several nodes copy a packed cache into their memory; one reads it in place."""
    if machine.nodes <= 1:
        return "`isthmus pack`"
    how = "no ISTHMUS_FAKE_NUMA" if options.fake_numa is not None else "numactl --cpunodebind=0"
    return f"`isthmus pack` and one NUMA node ({how})"


def _not_below_ram(job: Job, options: RunOptions) -> tuple[str, ...]:
    if options.kv_ram is None or job.on_gpu:
        return ()
    return ("kv_ram is for what a GPU's cache gives up; this cache is in RAM itself, so it is for nothing",)


def context_length(metadata: Metadata) -> int:
    """Tokens the model was trained for."""
    return metadata.int(key(metadata, "context_length"), min=2, max=MAX_CONTEXT_TOKENS)


def _check_profile(profile: Profile, parts: ModelParts) -> None:
    for layer, counts in profile.counts.items():
        part = parts.experts.get(layer)
        if part is None or len(counts) != part.count:
            have = f"{part.count} experts" if part else "none"
            raise UsageError(
                f"the profile of {profile.model!r} counts {len(counts)} experts in layer {layer}, this model "
                f"has {have} there; make one of this model"
            )


def _check_deferral(options: RunOptions, parts: ModelParts) -> None:
    used = min((part.used for part in parts.experts.values()), default=0)
    if options.defer_experts and parts.experts and options.defer_experts >= used:
        raise UsageError(
            f"defer_experts must be 1 to {used - 1}, fewer than the {used} experts that a token of this "
            f"model takes, got {options.defer_experts}"
        )


def _step_bytes(metadata: Metadata, options: RunOptions) -> int:
    """Activations of a step in fp32, from above: 16 of the hidden width, 3 of the chosen experts' width.

    Logits of a row for each answer, or of as many as a draft may have, of rows of prompts, and three rows of
    what sampling computes on the way.
    """

    layers = metadata.int(key(metadata, "block_count"), min=1)

    def count(name: str, default: int = 0) -> int:
        return max(metadata.int_per_layer(key(metadata, name), layers, default, min=0))

    dense = count("feed_forward_length")
    chosen = count("expert_used_count") + count("expert_shared_count")
    inner = max(dense, chosen * count("expert_feed_forward_length", dense))
    vocab = len(metadata.get("tokenizer.ggml.tokens", ()))
    rows = options.chunk_tokens
    drafts = MAX_DRAFT if options.speculate != "off" else 0
    logit_rows = min(rows, options.parallel * (1 + drafts)) + PROMPT_LOGIT_ROWS
    return 4 * rows * (16 * count("embedding_length") + 3 * inner) + 4 * vocab * (logit_rows + 3)
