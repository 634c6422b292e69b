"""Everything a command line can get wrong: one clear line, the right exit code, no traceback."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from alphabet import byte_characters, write_alphabet_model
from cli.conftest import Here
from cli.terminal import COMMAND, environment, isthmus
from isthmus.placement.nvidia import detect_gpus
from isthmus.weights.downloads import Downloads


def error_line(done) -> str:  # type: ignore[no-untyped-def]
    """The one line on stderr that says what is wrong; nothing on stdout."""
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["run", "MODEL", "hi", "--temperature", "-1"],
            "temperature must be a number from 0 up to 10, got -1",
        ),
        (["run", "MODEL", "hi", "--top-p", "0"], "top_p must be a number above 0 up to 1, got 0.0"),
        (["run", "MODEL", "hi", "--max-tokens", "0"], "max_tokens must be a whole number from 1"),
        (["run", "MODEL", "hi", "--seed", "-3"], "seed must be a whole number from 0"),
        (["run", "MODEL", "hi", "--ctx", "1"], "context_tokens must be a whole number from 2"),
        (["run", "MODEL", "hi", "--threads", "0"], "threads must be a whole number from 1 to 1024, got 0"),
        (["run", "MODEL", "hi", "--threads", "-1"], "threads must be a whole number from 1 to 1024, got -1"),
        (["run", "MODEL", "hi", "--threads", "100000"], "threads must be a whole number from 1 to 1024"),
        (["run", "MODEL", "hi", "--threads", "two"], "--threads"),
        (["run", "MODEL", "hi", "--isa", "neon"], "isa must be one of scalar, avx2, avx2vnni, avx512, amx"),
        (["run", "MODEL", "hi", "--kv-dtype", "fp8"], "kv_dtype must be one of bf16, f32, q8_0, got 'fp8'"),
        (["run", "MODEL", "hi", "--temperature", "warm"], "--temperature"),
        (["run", "MODEL", "hi", "--strategy", "fast"], "strategy must be one of auto, cpu, stream, hybrid"),
        (["bench", "MODEL", "--device", "gpu"], "device must be cpu, cuda, cuda:0 or cuda:0,1, got 'gpu'"),
        (["run", "MODEL", "hi", "--strategy", "cpu", "--device", "cuda"], "strategy cpu uses no GPU"),
        (["run", "MODEL", "hi", "--gpu-memory", "all"], "gpu_memory must be a size such as 20GiB"),
        (["run", "MODEL", "hi", "--stop", ""], "a stop string has 1 to 1024 characters"),
        (["run", "MODEL", "   "], "the prompt from PROMPT is empty"),
        (["run", "MODEL", "-"], "the prompt from standard input is empty"),
        (["run", "MODEL", "hi", "--raw", "--system", "x"], "--raw uses no chat template"),
        (["run", "MODEL", "hi", "--no-such-option"], "--no-such-option"),
        (["run"], "MODEL"),
        (["run", "MODEL", "-", "-"], "standard input can be read once"),
        (["serve"], "Missing argument 'MODEL'; isthmus serve --help shows what there is"),
        (["srve"], "Did you mean 'serve'?"),
        (["bench", "MODEL", "-p", "0"], "-p must be a whole number from 1"),
        (["bench", "MODEL", "-n", "x"], "-n"),
        (["fly"], "No such command 'fly'; isthmus --help shows what there is"),
        (["run", "MODEL", "hi", "--ctx", "100000"], "100000 tokens is asked for; this model's limit is 4096"),
    ],
)
def test_a_mistake_in_a_command_is_exit_code_2(
    alphabet_model: Path, here: Here, arguments: list[str], said: str
) -> None:
    done = here(*[str(alphabet_model) if word == "MODEL" else word for word in arguments])
    assert said in error_line(done)
    assert done.returncode == 2


@pytest.mark.parametrize(("name", "most"), [("ISTHMUS_THREADS", 1024), ("ISTHMUS_FAKE_NUMA", 64)])
def test_a_malformed_environment_variable_is_a_usage_error(
    alphabet_model: Path, name: str, most: int
) -> None:
    done = isthmus("run", alphabet_model, "hi", **{name: "many"})
    assert f"{name} must be a whole number from 1 to {most}, got 'many'" in error_line(done)
    assert done.returncode == 2


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    done = isthmus("run", tmp_path / "no.gguf", "hi")
    assert "no.gguf" in error_line(done)
    assert done.returncode == 2


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "page.gguf"
    path.write_text("<!DOCTYPE html><html><body>404</body></html>" * 10)
    done = isthmus("run", path, "hi")
    assert "page.gguf" in error_line(done)
    assert done.returncode == 1


def write_vocabulary(path: Path, architecture: str, *tensors: str) -> Path:
    """A header with a tokenizer of bytes, and tensors of its size."""
    w = gguf.GGUFWriter(path, architecture)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list([*byte_characters(), "Ġt"])
    w.add_token_types([gguf.TokenType.NORMAL] * 257)
    w.add_token_merges(["Ġ t"])
    w.add_eos_token_id(0)
    for name in tensors:
        w.add_tensor(name, np.zeros((257, 32), np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def test_an_architecture_we_lack_is_named_with_those_we_have(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "mamba.gguf", "mamba", "token_embd.weight")
    done = isthmus("run", path, "hi")
    assert "mamba" in error_line(done)
    assert "llama" in error_line(done)
    assert done.returncode == 1


def test_a_model_larger_than_memory_is_refused_before_it_is_read(huge_model: Path) -> None:
    """2 TiB by its header; the file is sparse, so reading it would only give zeros, for hours."""
    done = isthmus("run", huge_model, "hi")
    line = error_line(done)
    assert "not enough memory: the model needs 20" in line
    assert "GiB (weights 20" in line
    assert "GiB are available" in line
    assert done.returncode == 1


@pytest.fixture
def huge_model(alphabet_model: Path, tmp_path: Path) -> Path:
    """The alphabet model with one more tensor, 2 TiB of hole at the end of the file."""
    return write_alphabet_model(tmp_path / "huge.gguf", hole=2 << 40)


def test_a_prompt_longer_than_the_context_has_the_numbers(alphabet_model: Path) -> None:
    done = isthmus("run", alphabet_model, "x" * 300, "--raw", "--ctx", "128")
    assert "the prompt has 300 tokens; a context of 128 takes 127" in done.stderr.splitlines()[-1]
    assert done.stdout == ""
    assert done.returncode == 1


def test_bytes_that_are_not_utf8(alphabet_model: Path) -> None:
    done = isthmus("run", alphabet_model, "-", stdin=b"caf\xe9")
    assert "standard input is not valid UTF-8 (at byte 3)" in error_line(done)
    assert done.returncode == 2


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = isthmus("run", tmp_path / "no.gguf", "hi", "--debug")
    assert "Traceback" in done.stderr
    assert done.returncode == 1


@pytest.mark.skipif(bool(detect_gpus()[0]), reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["run", "MODEL", "hi"], {"ISTHMUS_DEVICE": "cuda:0"}),
        (["serve", "MODEL", "--port", "0", "--gpu-memory", "8GiB"], {}),
    ],
)
def test_a_gpu_that_is_not_there_is_said_with_the_reason(
    alphabet_model: Path, arguments: list[str], environment: dict[str, str]
) -> None:
    done = isthmus(*[str(alphabet_model) if word == "MODEL" else word for word in arguments], **environment)
    assert "needs a GPU, and there is none: " in error_line(done)
    assert done.returncode == 1


def test_a_full_disk_and_a_folder_that_may_not_be_read_are_not_our_faults(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, said in [
        (OSError(errno.ENOSPC, "No space left on device"), "error: No space left on device; --debug"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/hub"), "error: /x/hub: Permission denied; "),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "the Python package torch is missing"),
        (ValueError("odd"), "error: ValueError: odd (a fault of Isthmus); --debug shows where"),
    ]:
        monkeypatch.setattr(Downloads, "repos", _raising(error))
        done = here("list")
        assert said in error_line(done)
        assert done.returncode == 1


def _raising(error: Exception):  # type: ignore[no-untyped-def]
    def repos(self: Downloads) -> list[str]:
        raise error

    return repos


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="Linux's device that is always full")
def test_output_that_cannot_be_written_is_said_once() -> None:
    with FULL.open("w") as full:
        done = subprocess.run(
            [*COMMAND, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.stderr.splitlines() == ["error: No space left on device; --debug shows where"]
    assert done.returncode == 1


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_standard_file_is_the_null_device(alphabet_model: Path, closed: int) -> None:
    done = subprocess.run(
        [*COMMAND, "inspect", str(alphabet_model)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.close(closed),
        check=True,
    )
    assert ("architecture llama" in done.stdout) == (closed != 1)
    assert done.stderr == ""


def test_letters_that_the_terminal_has_not_are_written_as_escapes(alphabet_model: Path) -> None:
    command = [*COMMAND, "inspect", str(alphabet_model)]
    changed = environment(PYTHONIOENCODING="ascii")
    done = subprocess.run(command, capture_output=True, text=True, env=changed, check=True)
    assert "\\u0120t" in done.stdout or "\\u0100" in done.stdout


def test_a_header_without_tensors_is_no_model(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "vocab.gguf", "llama")
    done = isthmus("run", path, "hi")
    assert "vocab.gguf: has no tensor, perhaps a vocabulary alone" in error_line(done)


def test_an_extension_that_cannot_be_loaded_says_what_to_do() -> None:
    program = (
        "import sys; sys.modules['isthmus.native._native'] = None\n"
        "sys.argv = ['isthmus', 'plan', 'deepseek-v3']\n"
        "from isthmus.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    line = error_line(done)
    assert "the native extension cannot be loaded (" in line
    assert "_native" in line
    assert f"this is Python {sys.version_info.major}.{sys.version_info.minor}; install Isthmus again" in line
    assert done.returncode == 1
