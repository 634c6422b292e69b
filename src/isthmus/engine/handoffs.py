"""The hand-offs of a run, one for each device that has one, seen as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from isthmus.native.handoff import Counters, Event, Handoff


class Handoffs:
    def __init__(self, each: Sequence[Handoff]) -> None:
        self.each = list(each)

    def __bool__(self) -> bool:
        return bool(self.each)

    @property
    def mechanism(self) -> str:
        """`threaded`; of several that differ, each once: `stream_memops, host_func`. Empty without any."""
        return ", ".join(dict.fromkeys(handoff.mechanism for handoff in self.each))

    def counters(self) -> Counters:
        """Sums over all."""
        counted = [handoff.counters() for handoff in self.each]
        names = [field.name for field in fields(Counters)]
        return Counters(**{name: sum(getattr(one, name) for one in counted) for name in names})

    def take_events(self) -> list[Event]:
        """Of all, in the order of their beginnings."""
        events = [event for handoff in self.each for event in handoff.take_events()]
        return sorted(events, key=lambda event: event.begin_ns)

    def close(self) -> None:
        for handoff in self.each:
            handoff.close()
