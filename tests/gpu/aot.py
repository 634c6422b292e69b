"""Compiling kernels for a card that is not there: triton needs no GPU for it, and says what a kernel will
take.

A wrapper is called with meta tensors inside `launch.recorded`; what it would have launched is compiled for
a compute capability, with the alignments the runtime would have seen. So what is compiled is what wrappers
ask for, not a second list of kernels and constants.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from isthmus.gpu.launch import recorded

_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Launch:
    """A kernel as one call of a wrapper would start it."""

    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, int]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)


@dataclass(frozen=True)
class Compiled:
    name: str
    capability: int
    shared_bytes: int  # of one program
    warps: int
    registers: int  # of one thread
    stack_bytes: int  # of one thread: what registers did not hold


def launches_of(call: Callable[[], object]) -> list[Launch]:
    """What `call`, a call of a wrapper with meta tensors, would launch."""
    found: list[Launch] = []
    with recorded(lambda *launch: found.append(Launch(*launch))):
        call()
    return found


def compile_for(launch: Launch, capability: int) -> Compiled:
    """Compiles for a compute capability (90: 9.0). Raises triton's errors."""
    signature: dict[str, str] = {}
    constants = dict(launch.constants)
    attributes: dict[tuple[int], Any] = {}
    for parameter, arg in zip(launch.kernel.params, launch.args, strict=False):
        name, special = parameter.name, not parameter.do_not_specialize
        if arg is None or (special and isinstance(arg, int) and arg == 1):  # triton makes both constants
            signature[name], constants[name] = "constexpr", arg
            continue
        signature[name] = _type_of(arg)
        if isinstance(arg, Tensor) or (special and isinstance(arg, int) and arg % 16 == 0):
            attributes[(parameter.num,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(launch.constants, "constexpr")
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = launch.options | {"enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack_bytes = _usage(compiled.asm["cubin"])
    return Compiled(
        launch.name, capability, compiled.metadata.shared, launch.options["num_warps"], registers, stack_bytes
    )


def _usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) of a thread, by the tool that comes with triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2]) + int(found[3])


def _type_of(arg: Any) -> str:
    if isinstance(arg, Tensor):
        return _TYPES[arg.dtype]
    if isinstance(arg, float):
        return "fp32"
    return "i32" if -(2**31) <= arg < 2**31 else "i64"
