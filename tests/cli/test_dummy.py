"""Commands on models without a file."""

import json

import pytest

from cli.conftest import Here


@pytest.mark.usefixtures("briefly_measured")
def test_bench_of_a_dummy_reads_the_bytes_its_shape_says(here: Here) -> None:
    done = here("bench", "dummy:qwen3-30b-a3b?layers=1&quant=q4_0", "-p", "8", "-n", "1", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["model"] == "dummy:qwen3-30b-a3b?layers=1&quant=q4_0"
    # Of 128 experts 8, three matrices of 768 x 2048 each; q, k, v, o; the router in fp32; the head. 18 bytes
    # per 32 weights in Q4_0, the head in Q6_K: 210 per 256. The rest are norms, a row of the embedding, and
    # 2 KB of cache for each token before: the quicker the machine, the more there are in the same time.
    experts = 8 * 3 * 768 * 2048 * 18 // 32
    attention = 2048 * (4096 + 512 + 512 + 4096) * 18 // 32
    head = 151936 * 2048 * 210 // 256
    weights = experts + attention + 4 * 128 * 2048 + head
    assert weights + 9 * 2048 < result["bytes_per_token"] < weights + 30_000 + 1000 * 2048


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "dummy:deepseek", "hi"], "no built-in shape is called 'deepseek'"),
        (["bench", "dummy:kimi-k2?layers=x"], "layers must be a whole number from 1 to 1024, got 'x'"),
        (["pack", "dummy:qwen3-30b-a3b?layers=1"], "has no file of which a packed cache could be kept"),
        (
            ["bench", "dummy:qwen3-30b-a3b?layers=1", "--packed-cache"],
            "has no file of which a packed cache could be kept",
        ),
    ],
)
def test_what_a_dummy_cannot_be(here: Here, arguments: list[str], said: str) -> None:
    done = here(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
