"""The picture of docs/architecture.md, held: which package may import which, and what stays free of torch."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import isthmus

PACKAGE = Path(__file__).parent.parent / "src" / "isthmus"
CSRC = PACKAGE.parent.parent / "csrc"

# Package -> packages it may import, beside itself and the shared leaves. Arrows point one way.
ALLOWED = {
    "cli": {
        "server",
        "engine",
        "models",
        "native",
        "doctor",
        "placement",
        "tokenizer",
        "weights",
        "formats",
        "resolve",
    },
    "server": {"engine", "tokenizer", "resolve"},
    "engine": {"models", "modules", "native", "placement", "tokenizer", "weights", "formats", "resolve"},
    "models": {"modules", "weights", "formats", "engine"},  # engine: only batch and state, see below
    "modules": {"native", "gpu", "formats", "weights", "engine"},
    "placement": {"weights", "formats", "native"},
    "doctor": {"placement"},
    "native": {"formats"},
    "gpu": {"formats"},
    "weights": {"formats"},
    "tokenizer": {"weights"},
    "formats": set(),
    "resolve": {"weights", "formats"},
}
LEAVES = {"errors", "config", "priority"}
TORCH_FREE = ["errors", "config", "formats/spec", "weights", "resolve", "placement", "tokenizer", "server"]
TORCH_FREE += [f"engine/{name}" for name in ("request", "blocks", "prefix", "fairness", "scheduler")]
TORCH_FREE += ["engine/speculate", "engine/process", "cli/main", "doctor", "priority"]


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports_of(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Dotted names that a file imports; with `top_level_only` those that run when it is imported."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_imports_point_one_way() -> None:
    wrong = []
    for path in modules():
        own = package_of(path)
        if own not in ALLOWED:
            continue
        for name in imports_of(path):
            if not name.startswith("isthmus.") or len(name.split(".")) < 2:
                continue
            other = name.split(".")[1]
            if other != own and other not in ALLOWED[own] | LEAVES and (PACKAGE / other).exists():
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not wrong


def test_models_and_modules_see_only_batch_and_state_of_the_engine() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in modules()
        if package_of(path) in {"models", "modules"}
        for name in imports_of(path)
        if name.startswith("isthmus.engine.") and name.split(".")[2] not in {"batch", "state"}
    ]
    assert not wrong


@pytest.mark.parametrize("part", TORCH_FREE)
def test_part_is_free_of_torch(part: str) -> None:
    target = PACKAGE / part
    files = sorted(target.rglob("*.py")) if target.is_dir() else [target.with_suffix(".py")]
    assert files
    for path in files:
        assert not {n for n in imports_of(path, top_level_only=True) if n.split(".")[0] == "torch"}, path


def test_kernels_are_imported_when_they_are_used() -> None:
    """triton comes with CUDA builds of torch: without a GPU there is none, references do without it."""
    with_triton = {p for p in modules() if any(n.split(".")[0] == "triton" for n in imports_of(p))}
    assert {package_of(p) for p in with_triton} == {"gpu"}
    gpu = set((PACKAGE / "gpu").glob("*.py"))
    plain = {
        p for p in gpu if p.stem.startswith("reference") or p.stem in {"__init__", "tiles", "plain", "fp8"}
    }
    kernels = {f"isthmus.gpu.{p.stem}" for p in gpu - plain}
    wrong = [
        f"{p.relative_to(PACKAGE)} imports {name}"
        for p in modules()
        if p not in gpu - plain
        for name in imports_of(p, top_level_only=True) & kernels
    ]
    assert not wrong


def test_environment_is_read_in_one_file() -> None:
    readers = [
        str(p.relative_to(PACKAGE))
        for p in modules()
        if re.search(r"os\.environ|from os import environ|getenv", p.read_text())
    ]
    assert readers == ["config.py"]


def test_core_knows_no_python_torch_or_cuda() -> None:
    forbidden = ("Python.h", "nanobind", "torch/", "ATen", "cuda")
    wrong = [
        f"{path.relative_to(CSRC)}: {line.strip()}"
        for path in [*CSRC.rglob("*.h"), *CSRC.rglob("*.cpp")]
        if path.relative_to(CSRC).parts[0] != "bindings"
        for line in path.read_text().splitlines()
        if line.startswith("#include") and any(word in line for word in forbidden)
    ]
    assert not wrong


def test_no_pickle_and_no_remote_code() -> None:
    words = ("import pickle", "torch.load(", "trust_remote_code")
    wrong = [f"{p.relative_to(PACKAGE)}: {w}" for p in modules() for w in words if w in p.read_text()]
    assert not wrong


def test_public_names_resolve_and_importing_the_package_is_light() -> None:
    code = (
        "import sys, isthmus\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "assert sorted(isthmus.__all__) == sorted(dir(isthmus))\n"
        "[getattr(isthmus, name) for name in isthmus.__all__]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_type_checker_sees_the_public_names_where_they_are_imported_from() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    typed = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == isthmus._PUBLIC
    assert (PACKAGE / "py.typed").is_file()
