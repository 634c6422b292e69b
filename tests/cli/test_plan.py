"""`isthmus plan` as a user has it: the figures, a repository, a picture, and one line for what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cli.conftest import Here
from cli.terminal import environment, isthmus
from hub_server import Recorded, hub_server
from isthmus.formats.spec import by_name
from isthmus.models.table import MODELS
from isthmus.weights import hub as isthmus_hub
from models import tiny

SERVER = ["--gpu", "rtx4090", "--ram-bandwidth", "300GB/s", "--cores", "32", "--isa", "amx"]


def test_the_plan_of_deepseek_v3_needs_no_torch() -> None:
    program = (
        "import sys\n"
        "from isthmus.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as done: code = done.code\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'matplotlib', 'huggingface_hub'} & set(sys.modules)\n"
        "print('code', code, 'heavy', sorted(heavy))\n"
    )
    command = [sys.executable, "-c", program, "plan", "deepseek-v3", "--quant", "q4_k_m", "--ram", "512GB"]
    done = subprocess.run([*command, *SERVER], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout.splitlines()[-1] == "code 0 heavy []"
    assert "671 B parameters (37 B active)" in done.stdout
    assert "68.6 KiB a token" in done.stdout


def test_a_machine_too_small_is_an_answer_and_not_an_error(here: Here) -> None:
    done = here("plan", "deepseek-v3", "--ram", "192GB", *SERVER, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["best"] is None
    assert data["instead"]["quant"] == "iq2_xxs"


def test_a_repository_is_planned_from_its_header(
    alphabet_model: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"alphabet-Q8_0.gguf": alphabet_model.read_bytes()}
    machine = ["--ram", "8GB", *SERVER, "--json"]
    with hub_server(Recorded({"owner/alphabet": files})) as hub:
        done = isthmus("plan", "owner/alphabet:Q8_0", *machine, HF_ENDPOINT=hub.url)
        monkeypatch.setattr(isthmus_hub, "Hub", partial(isthmus_hub.Hub, hub.url))
        typo = here("plan", "owner/alphabte", *machine)
    assert done.returncode == 0, done.stderr
    remote = json.loads(done.stdout)
    there = json.loads(here("plan", alphabet_model, *machine).stdout)
    assert remote["model"] | {"name": ""} == there["model"] | {"name": ""}
    assert remote["strategies"] == there["strategies"]
    assert typo.returncode == 1
    assert "did you mean owner/alphabet?" in typo.stderr


def test_quantisations_are_compared_and_drawn(tmp_path: Path, here: Here) -> None:
    picture = tmp_path / "plan.svg"
    arguments = ["--compare", "q8_0,IQ2_XXS", "--chart", picture, "--ram", "64GB", *SERVER]
    done = here("plan", "gpt-oss-20b", *arguments)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["quant", "Q8_0", "IQ2_XXS"]
    assert "not run yet" not in done.stdout
    assert "<svg" in picture.read_text()


def test_an_architecture_that_cannot_be_run_is_planned_and_said(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(MODELS, "gpt-oss")
    done = here("plan", "gpt-oss-20b", "--ram", "64GB", *SERVER)
    assert done.returncode == 0, done.stderr
    assert "'gpt-oss' can be planned but not run yet" in done.stdout


def test_tensors_of_a_type_that_cannot_run_are_planned_and_said(tmp_path: Path, here: Here) -> None:
    case = tiny.WIDE_CASES["qwen3moe"]
    model, name = tiny.build(case), "blk.1.ffn_down_exps.weight"
    stored = {
        key: tiny.Stored(by_name("f32"), values.shape, values)
        for key, values in tiny.tensors_of(case, model).items()
    }
    nbytes = stored[name].data.size // 256 * 292
    stored[name] = tiny.Stored(by_name("q8_k"), stored[name].shape, np.zeros(nbytes, np.uint8))
    path = tiny.write_stored(tmp_path / "tiny.gguf", case.arch, tiny.keys_of(case, model.config), stored)
    done = here("plan", path, "--ram", "64GB", *SERVER)
    assert done.returncode == 0, done.stderr
    assert f"note: tensor {name} cannot run: q8_k holds activations inside an engine" in done.stdout


def test_a_dummy_of_fewer_layers_is_planned_over_two_cards(here: Here) -> None:
    machine = ["--gpu", "2xrtx3060", "--ram", "32GB", *SERVER[2:]]
    done = here("plan", "dummy:qwen3-30b-a3b?layers=2", *machine)
    assert done.returncode == 0, done.stderr
    gpu = next(line for line in done.stdout.splitlines() if line.startswith("gpu: "))
    assert "layer 0, token_embd, 128 experts; cuda:1 " in gpu
    assert "layer 1, output_norm, output, 128 experts" in gpu


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["deepsek-v3", "--ram", "1TB", *SERVER],
            "no model and no built-in shape is called 'deepsek-v3'; did you mean deepseek-v3",
        ),
        (
            ["deepseek-v3", "--quant", "q4km", "--ram", "1TB", *SERVER],
            "no quant is called 'q4km' (did you mean q4_k_m",
        ),
        (["deepseek-v3", "--compare", "q9"], "--compare: no quant is called 'q9'"),
        (["deepseek-v3", "--chart", "plan.bmp"], "--chart must name a .png or .svg file"),
        (["deepseek-v3", "--ctx", "9999999", "--ram", "1TB", *SERVER], "this model's limit is 163840"),
        (["owner/repo:Q4_K_M", "--quant", "q8_0", "--ram", "1TB", *SERVER], "leave one of them out"),
    ],
)
def test_what_cannot_be_meant_is_one_line(arguments: list[str], said: str, here: Here) -> None:
    done = here("plan", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_machine_file_with_a_slip_is_refused_by_its_key(tmp_path: Path, here: Here) -> None:
    machine = tmp_path / "machine.json"
    machine.write_text('{"cores": 8, "ram": "64GB"}')
    done = here("plan", "mixtral-8x7b", "--machine", machine)
    assert done.returncode == 2
    assert "unknown key 'ram'" in done.stderr
