"""A scripted engine in the real worker loop: `python fake_engine.py LOG GATE FLAGS FD`.

The prompt's last {...} is its script: {"say": text, "prefill": steps before it, "end": "stop" | "error" |
"crash" | "fall" | "reject"}. Tokens are bytes; "tokens" gives others. LOG gets a line for each call. GATE, if
not "-", is a FIFO from which each step (and the load, with the flag "slow") takes a byte first: the test is
the clock.
"""

import json
import os
import signal
import socket
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from isthmus import errors
from isthmus.config import RunOptions
from isthmus.engine import worker
from isthmus.engine.request import EngineStats, ModelInfo, Output, Request, SlotStats, TokenLogprob

CONTEXT_TOKENS = 2048
VOCAB_SIZE = 512


def logprob_of(token: int, num_top: int) -> TokenLogprob:
    """Minus an eighth of the id; the next ids are less probable."""
    return TokenLogprob(token, -token / 8, tuple((token + i, -(token + i) / 8) for i in range(num_top)))


def script_in(text: str) -> dict:
    """The last {...} of a prompt; a text without one asks for nothing in particular."""
    start = text.rfind('{"say"')  # what is said may have braces of its own
    try:
        script = json.loads(text[start if start >= 0 else text.rindex("{") : text.rindex("}") + 1])
    except ValueError:
        return {}
    return script if isinstance(script.get("say", ""), str) else {}


@dataclass
class Job:
    request: Request
    script: dict
    text: deque[int]
    num_output: int = 0
    prefill_left: int = field(default=0)
    num_prefills: int = 0  # a step of prefill counts as one token


class FakeEngine:
    def __init__(self, log: Path, gate: str, flags: list[str]) -> None:
        self._log = log
        self._gate = None if gate == "-" else os.open(gate, os.O_RDONLY)
        self._jobs: list[Job] = []
        if "slow" in flags:
            self._wait()
        if "fail" in flags:
            raise errors.NotEnoughMemoryError("need 9 GiB, have 4", need_bytes=9 << 30, have_bytes=4 << 30)
        if "crash" in flags:
            os.kill(os.getpid(), signal.SIGKILL)
        self.info = ModelInfo("fake", "fake", VOCAB_SIZE, CONTEXT_TOKENS, "scalar", 1, 1 << 30, 1 << 20, 0.1)
        self.log("loaded")

    def log(self, line: str) -> None:
        with self._log.open("a") as file:
            file.write(line + "\n")

    def _wait(self) -> None:
        if self._gate is not None and not os.read(self._gate, 1):
            sys.exit("the test has closed the gate")

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    def add(self, request: Request) -> None:
        script = script_in(bytes(token for token in request.prompt if token < 256).decode(errors="replace"))
        if script.get("end") == "reject":
            raise errors.UsageError("the engine does not take this")
        say = deque(script.get("tokens") or script.get("say", "ok").encode())
        self._jobs.append(Job(request, script, say, prefill_left=script.get("prefill", 1)))
        self.log(f"add {request.id}")

    def cancel(self, request_id: str) -> None:
        self.log(f"cancel {request_id}")
        self._jobs = [job for job in self._jobs if job.request.id != request_id]

    def step(self) -> list[Output]:
        self._wait()
        job = self._jobs[0]
        self.log(f"step {job.request.id}")
        if job.prefill_left > 0:
            job.prefill_left -= 1
            job.num_prefills += 1
            return []
        output = self._next(job)
        if output.finish_reason is not None:
            self._jobs.pop(0)
        return [output]

    def stats(self) -> EngineStats:
        slots = tuple(
            SlotStats(job.request.id, index > 0, len(job.request.prompt), 0, job.num_prefills, job.num_output)
            for index, job in enumerate(self._jobs)
        )
        waiting = max(0, len(self._jobs) - 1)
        return EngineStats(num_running=min(1, len(self._jobs)), num_waiting=waiting, slots=slots)

    def _next(self, job: Job) -> Output:
        token, reason, error = None, None, None
        if job.text and job.text[0] in job.request.stop_ids:
            reason = "stop"
        elif job.text:
            token = job.text.popleft()
            job.num_output += 1
            if job.num_output == job.request.params.max_tokens:
                reason = "length"
        else:
            reason = job.script.get("end", "stop")
            if reason == "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            if reason == "fall":
                raise errors.EngineError("the fake engine fell")
            error = "the logits are not finite" if reason == "error" else None
        params, prompt = job.request.params, job.request.prompt
        logprobs = params.logprobs is not None and token is not None
        of_prompt = None
        if params.prompt_logprobs is not None and job.num_output <= 1:
            of_prompt = (None, *(logprob_of(each, params.prompt_logprobs) for each in prompt[1:]))
        return Output(
            job.request.id, token, reason, error, len(prompt), job.num_output,
            logprob=logprob_of(token, params.logprobs) if logprobs else None, prompt_logprobs=of_prompt,
        )  # fmt: skip

    def close(self) -> None:
        self.log("closed")


def main() -> int:
    log, gate, flags, fd = sys.argv[1:]

    def make(model: Path, options: RunOptions, progress: worker.Report) -> FakeEngine:
        progress(1, 2)
        engine = FakeEngine(Path(log), gate, flags.split(","))
        progress(2, 2)
        return engine

    return worker.run(socket.socket(fileno=int(fd)), make)


if __name__ == "__main__":
    sys.exit(main())
