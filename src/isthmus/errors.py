"""The exception tree. A user's mistake is one of these; an `assert` is ours.

IsthmusError                  exit code 1
├── UsageError                exit code 2: an option, a model name or an argument that cannot be meant
├── ModelFileError            anything wrong with a file
│   ├── MalformedFileError    the bytes are not what the format's specification allows
│   └── UnsupportedError      a valid file that asks for an architecture, tensor type or tokenizer we lack
├── HubError                  a repository that cannot be found, reached or read
├── NotEnoughMemoryError      the plan does not fit, said before any weight is read
├── DeviceError               a device or strategy that was asked for and cannot be had on this machine
├── ContextLengthError        a prompt longer than the context
├── TemplateError             a chat template that is broken, hostile or too slow
└── EngineError               the engine could not finish a step, or has died

Every message says what came, what was needed, and what to do.
"""

from __future__ import annotations


class IsthmusError(Exception):
    """Base of all errors that a user can cause or repair."""

    exit_code = 1


class UsageError(IsthmusError):
    exit_code = 2


class ModelFileError(IsthmusError):
    pass


class MalformedFileError(ModelFileError):
    pass


class UnsupportedError(ModelFileError):
    pass


class HubError(IsthmusError):
    pass


class NotEnoughMemoryError(IsthmusError):
    """`need_bytes` and `have_bytes` are the numbers of the message."""

    def __init__(self, message: str, need_bytes: int = 0, have_bytes: int = 0) -> None:
        super().__init__(message)
        self.need_bytes = need_bytes
        self.have_bytes = have_bytes


class DeviceError(IsthmusError):
    pass


class ContextLengthError(IsthmusError):
    """`num_prompt_tokens` came, `context_tokens` fit."""

    def __init__(self, message: str, num_prompt_tokens: int = 0, context_tokens: int = 0) -> None:
        super().__init__(message)
        self.num_prompt_tokens = num_prompt_tokens
        self.context_tokens = context_tokens


class TemplateError(IsthmusError):
    pass


class EngineError(IsthmusError):
    pass


class HandoffError(EngineError):
    pass
