"""`make bench`: every bench in turn, one JSON line per case, in a few minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    for script in ("gemv.py", "experts.py"):
        subprocess.run([sys.executable, HERE / script], check=True)
    isthmus = Path(sys.executable).with_name("isthmus")
    subprocess.run([isthmus, "bench", "demo", "--json"], check=True)


if __name__ == "__main__":
    main()
