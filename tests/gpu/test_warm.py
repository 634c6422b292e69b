"""After a model's warm-up no step makes triton compile: while it does the device stands still, and within a
captured graph it must not happen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHES = Path(__file__).parents[2] / "benches"


def test_no_step_compiles_anything_new() -> None:
    """Of two models, over caches of both types and under exact_batching; see warm.py."""
    environment = os.environ | {"PYTHONPATH": f"{BENCHES}:{BENCHES.parent / 'src'}"}
    environment.pop("TRITON_INTERPRET")
    command = [sys.executable, str(Path(__file__).with_name("warm.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(cases) == 6
    for model, options, warm, of_q8_0, new in cases:
        assert warm >= 15, (model, options)
        assert bool(of_q8_0) == (options.get("kv_dtype") == "q8_0"), (model, options)
        assert not new, (model, options)
