"""A tensor whose values come when somebody looks at it.

Routed experts give one where two halves of a step alternate: the result of a half's layer is waited for when
that half's next layer begins, and until then the other half has the device. A model that looks earlier (a
norm after the experts, say) waits earlier, and is right all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class Promise(Tensor):
    """Any torch function over it, its shape and address included, makes the values come first."""

    _finish: Callable[[], Tensor] | None
    _result: Tensor

    @staticmethod
    def like(other: Tensor, finish: Callable[[], Tensor]) -> Tensor:
        """What `finish` returns, of the shape and dtype of `other`; it is called once."""
        promise: Promise = Tensor._make_subclass(Promise, other)
        promise._finish = finish
        return promise

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kept = {name: _kept(value) for name, value in (kwargs or {}).items()}
        return func(*(_kept(value) for value in args), **kept)


def kept(x: Tensor) -> Tensor:
    """x, or what it promised. Raises what `finish` raises."""
    if not isinstance(x, Promise):
        return x
    if x._finish is not None:
        finish, x._finish = x._finish, None
        x._result = finish()
    return x._result


def _kept(value: Any) -> Any:
    """The same for an argument, or those in a list."""
    if isinstance(value, list | tuple):
        return type(value)(map(_kept, value))
    return kept(value) if isinstance(value, Tensor) else value
