"""When the tokens of one request came: for its log line, the metrics, and the `timings` of an answer."""

from __future__ import annotations

import time
from typing import Any


class Timing:
    """Times are of the monotonic clock, in seconds."""

    def __init__(self) -> None:
        self.added_at = time.monotonic()
        self.first_at: float | None = None  # of the first token, or of the end of an answer without one
        self.last_at = self.added_at
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0

    def came(self) -> float | None:
        """Something came now; the seconds since the event before it, None if it was the first."""
        before, self.last_at = self.last_at, time.monotonic()
        if self.first_at is None:
            self.first_at = self.last_at
            return None
        return self.last_at - before

    @property
    def first_token_s(self) -> float:
        return (self.first_at if self.first_at is not None else self.last_at) - self.added_at

    @property
    def decode_s(self) -> float:
        """From the first token to the last."""
        return self.last_at - self.first_at if self.first_at is not None else 0.0

    @property
    def tok_s(self) -> float:
        """The first token belongs to the prefill; 0 for an answer of one token."""
        return _rate(self.num_output_tokens - 1, self.decode_s)

    def line(self) -> str:
        """For the log: prompt, cached, time to first token, tokens a second."""
        text = f"{self.num_prompt_tokens} prompt tokens ({self.num_cached_tokens} cached), "
        if self.first_at is None:
            return text + f"no token in {time.monotonic() - self.added_at:.2f} s"
        text += f"first token after {self.first_token_s:.2f} s, {self.num_output_tokens} in all"
        return text + (f" at {self.tok_s:.1f} tok/s" if self.tok_s else "")

    def as_timings(self) -> dict[str, Any]:
        """llama-server's `timings` object, which its clients and benches read."""
        num_computed = self.num_prompt_tokens - self.num_cached_tokens
        return {
            "cache_n": self.num_cached_tokens,
            "prompt_n": num_computed,
            "prompt_ms": round(self.first_token_s * 1e3, 3),
            "prompt_per_second": round(_rate(num_computed, self.first_token_s), 3),
            "predicted_n": self.num_output_tokens,
            "predicted_ms": round(self.decode_s * 1e3, 3),
            "predicted_per_second": round(self.tok_s, 3),
        }


def _rate(count: int, seconds: float) -> float:
    return count / seconds if count > 0 and seconds > 0 else 0.0
