"""`isthmus inspect FILE`: what is in a model file, also in one that cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli import options

if TYPE_CHECKING:
    from isthmus.weights.inspection import ExpertLayout, Inspection


def inspect(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A .gguf file, any shard of a split one, or demo.")
    ],
    tensors: Annotated[bool, typer.Option("--tensors/--no-tensors", help="List every tensor.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    debug: options.Debug = False,
) -> None:
    """Show metadata, tensors, experts, tokenizer and template of FILE, and what is wrong with it."""
    options.configure_logging(debug)
    from isthmus.errors import UsageError
    from isthmus.resolve import resolve_model
    from isthmus.weights.inspection import inspect_file
    from isthmus.weights.source import is_dummy

    path = resolve_model(file)
    if is_dummy(path):
        raise UsageError(f"{path} has no file to look into; isthmus plan says what such a model is made of")
    found = inspect_file(path)
    problems = [*found.problems, *_unsupported(found)]
    if as_json:
        import msgspec

        data = msgspec.to_builtins(found) | {"problems": problems}
        print(msgspec.json.format(msgspec.json.encode(data), indent=1).decode())
        return
    print("\n".join(_lines(found, problems, tensors)))


def _unsupported(found: Inspection) -> list[str]:
    from isthmus.models.table import MODELS

    if not found.architecture or found.architecture in MODELS:
        return []
    return [f"architecture {found.architecture!r} is not run; this version runs {', '.join(sorted(MODELS))}"]


def _lines(found: Inspection, problems: list[str], tensors: bool) -> Iterator[str]:
    from isthmus.placement.show_report import count, table
    from isthmus.weights.inspection import shown_value

    files = f", {len(found.files)} files" if len(found.files) > 1 else ""
    size = f"{found.nbytes / 1e9:.2f} GB, alignment {found.alignment}"
    yield f"{found.path}: GGUF version {found.version}{files}, {size}"
    parameters = sum(total.parameters for total in found.types.values())
    tensor_count = f"{len(found.tensors)} tensors, {count(parameters)} parameters"
    yield f"architecture {found.architecture or '?'}, {tensor_count}"
    yield from ["", "metadata"]
    width = max((len(key) for key in found.metadata), default=0)
    for key, value in found.metadata.items():
        yield f"  {key:{width}}  {shown_value(value, found.value_types[key])}"
    if tensors:
        yield from ["", "tensors"]
        rows = [
            (t.name, " x ".join(map(str, t.shape)), t.type.upper(), f"{t.nbytes:,}") for t in found.tensors
        ]
        yield from table([("name", "shape", "type", "bytes"), *rows], left=(0, 1, 2))
    yield from ["", "types"]
    totals = [
        (
            t.upper(),
            str(n.tensors),
            count(n.parameters),
            f"{n.nbytes / 1e9:.3f}",
            f"{8 * n.nbytes / n.parameters:.2f}",
        )
        for t, n in found.types.items()
    ]
    yield from table([("type", "tensors", "parameters", "GB", "bits a weight"), *totals], left=(0,))
    yield ""
    if found.experts is not None:
        yield _experts(found.experts)
    if found.mtp is not None:
        layers = ", ".join(map(str, found.mtp.layers))
        yield f"MTP: layer {layers}, {found.mtp.nbytes / 1e9:.2f} GB: for guesses of later tokens, not loaded"
    yield _tokenizer(found.tokenizer)
    yield _template(found.template)
    yield from (f"problem: {' '.join(problem.split())}" for problem in problems)


def _experts(experts: ExpertLayout) -> str:
    roles = "; ".join(
        f"{role} {', '.join(f'{t.upper()} in {n} layers' for t, n in types.items())}"
        for role, types in experts.formats.items()
    )
    each = "a tensor each" if experts.separate else "one tensor a role"
    layers = f"{len(experts.layers)} layers ({experts.layers[0]} to {experts.layers[-1]})"
    sizes = f"{experts.nbytes / 1e9:.2f} GB, {experts.one_nbytes / 1e6:.2f} MB each"
    return f"experts: {experts.count}, {experts.used} used, in {layers}, {each}, {sizes}; {roles}"


def _tokenizer(tokenizer: dict[str, Any]) -> str:
    if not tokenizer:
        return "tokenizer: none"
    special = ", ".join(
        f"{name} {value['id']} {value['text']!r}"
        for name, value in tokenizer.items()
        if isinstance(value, dict)
    )
    merges = f", {tokenizer['merges']:,} merges" if tokenizer["merges"] else ""
    kind = f"{tokenizer['model']}, pre-tokenizer {tokenizer['pre']}"
    return f"tokenizer: {kind}, {tokenizer['tokens']:,} tokens{merges}" + (f"; {special}" if special else "")


def _template(template: dict[str, Any]) -> str:
    if not template:
        return "chat template: none"
    what = [word for word in ("tools", "reasoning") if template[word]]
    others = f"; others: {', '.join(template['others'])}" if template["others"] else ""
    knows = f", knows {' and '.join(what)}" if what else ""
    return f"chat template: {template['characters']:,} characters{knows}{others}"
