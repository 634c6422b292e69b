"""The real process for long texts over the fakes of harness.py: `python fake_text_worker.py LOG FD`.

LOG gets a line for each start. What a text begins with may make trouble: "hang" while it has only idle cores,
"stuck" always, "die" at once.
"""

import os
import socket
import sys
import time
from pathlib import Path

from harness import ByteTokenizer, PlainTemplate

from isthmus.server import text_worker
from isthmus.server.text_process import Begin


def main() -> None:
    log = Path(sys.argv[1])

    class Troubled(ByteTokenizer):
        def encode(self, text: str, **options: bool) -> list[int]:
            if text.startswith("die"):
                os._exit(3)
            if text.startswith("stuck") or (text.startswith("hang") and self.only_idle):
                time.sleep(60)
            return super().encode(text, **options)

    def load(begin: Begin) -> tuple[ByteTokenizer, PlainTemplate]:
        with log.open("a") as lines:
            lines.write("idle\n" if begin.only_idle else "low\n")
        tokenizer = Troubled()
        tokenizer.only_idle = begin.only_idle
        return tokenizer, PlainTemplate()

    text_worker.run(socket.socket(fileno=int(sys.argv[2])), load)


if __name__ == "__main__":
    main()
