"""Messages into the text of a prompt by the model's own Jinja template, with user text kept unparsed.

The template runs in a helper process under limits (`template_process`); a hostile one costs an error, not the
server. The result is a list of segments: special tokens are looked for in the template's text alone.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from isthmus.errors import TemplateError, UsageError
from isthmus.tokenizer.barrier import Barrier, SpecialTexts
from isthmus.tokenizer.default_templates import default_template
from isthmus.tokenizer.messages import Message, check_continued, check_messages, check_tools
from isthmus.tokenizer.segment import Segment
from isthmus.tokenizer.template_process import Limits, TemplateProcess
from isthmus.tokenizer.tokenizer import Tokenizer
from isthmus.tokenizer.vocabulary import TokenizerWarning

_OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})

# A template that prints or joins a call's arguments and never takes them apart or dumps them needs a text.
_PRINTS_ARGUMENTS = re.compile(r"arguments['\"]?\]?\s*(?:\+|~|-?\}\})")
_READS_ARGUMENTS = re.compile(r"arguments['\"]?\]?\s*(?:\|\s*(?:tojson|items|dictsort)|\.items|is\s)")
_TESTS_FOR_NONE = re.compile(r"content['\"]?\]?\s+is\s+(?:not\s+)?none")


class ChatTemplate:
    """Thread-safe. Renderings wait for each other: they share a helper process, started by the first."""

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str],
        *,
        special_literals: Collection[str] = (),
        limits: Limits | None = None,
    ) -> None:
        """`tokens`: bos_token, eos_token, ... as the template sees them.

        `special_literals`: texts of the vocabulary's special tokens, which user text must not become.
        """
        self.source = source
        self._tokens = dict(tokens)
        self._special = SpecialTexts({*special_literals, *filter(None, tokens.values())})
        self._process = TemplateProcess(limits or Limits())

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer, *, limits: Limits | None = None) -> ChatTemplate:
        """The file's template; where it has none, its family's (see `default_templates`) with a warning."""
        source = tokenizer.chat_template
        if source is None:
            name, source = default_template(tokenizer.special_literals)
            warnings.warn(
                f"tokenizer.chat_template is missing: prompts are written in the {name} format, which may "
                "not be what the model was trained with",
                TokenizerWarning,
                stacklevel=2,
            )
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        tokens = {name: "" if token is None else tokenizer.token_text(token) for name, token in ids.items()}
        return cls(source, tokens, special_literals=tokenizer.special_literals, limits=limits)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[Segment]:
        """The prompt. `variables` are the template's own options (`enable_thinking=False`).

        It ends with the head of an answer, or, with `continue_final_message`, inside the last message, which
        is the assistant's: as transformers' apply_chat_template has it, where the two exclude each other.

        Raises UsageError for messages or options that cannot be meant, TemplateError for whatever is the
        template's.
        """
        if continue_final_message and add_generation_prompt:
            raise UsageError("continue_final_message and add_generation_prompt exclude each other")
        forbidden = sorted(set(variables) & (_OWN_VARIABLES | set(self._tokens)))
        if forbidden:
            raise UsageError(f"template option {forbidden[0]!r} is set by Isthmus and cannot be given")
        checked = check_messages(messages)
        if continue_final_message:
            check_continued(checked[-1])
        given = {
            **variables,
            "messages": [self._adapted(message) for message in checked],
            "tools": check_tools(tools),
        }
        try:
            texts = list(_texts(given))
            barrier = Barrier(self._special, [self.source, *texts])
            protected = barrier.protect(given)
        except RecursionError:
            raise UsageError("messages, tools or template options are nested too deeply") from None
        except TypeError as error:
            raise UsageError(f"messages, tools and template options must be JSON values: {error}") from None
        begins = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        final = _mark_end(protected["messages"][-1], barrier.mark) if continue_final_message else None
        request = {
            "source": self.source,
            "barrier": barrier.replacements,
            "variables": {**self._tokens, **protected, "add_generation_prompt": begins},
        }
        rendered = self._ask(request, barrier)
        return barrier.segments(rendered if final is None else _up_to_mark(rendered, final, barrier))

    def close(self) -> None:
        """Ends the helper process; a later rendering starts another."""
        self._process.close()

    def _ask(self, request: Mapping[str, Any], barrier: Barrier) -> str:
        reply = self._process.ask(request)
        if "text" in reply:
            return str(reply["text"])
        message = barrier.restore(reply["error"]["message"])
        what = {
            "syntax": "is not valid Jinja",
            "raised": "refuses these messages",
            "limit": "went beyond its limits",
            "runtime": "failed",
        }[reply["error"]["kind"]]
        raise TemplateError(f"the chat template {what}: {message}")

    def _adapted(self, message: Message) -> Message:
        """The message in the dialect that this template's source shows it speaks."""
        adapted = dict(message)
        if adapted["role"] == "developer" and "developer" not in self.source:
            adapted["role"] = "system"
        if adapted["content"] is None and not _TESTS_FOR_NONE.search(self.source):
            adapted["content"] = ""
        as_text = _PRINTS_ARGUMENTS.search(self.source) and not _READS_ARGUMENTS.search(self.source)
        if "tool_calls" in adapted and as_text:
            adapted["tool_calls"] = [_with_text_arguments(call) for call in adapted["tool_calls"]]
        return adapted


def _mark_end(message: Message, mark: str) -> str:
    """Puts `mark` and a blank behind the message's text, or the last of its texts, and returns that."""
    content = message["content"]
    place, key = (message, "content") if isinstance(content, str) else (content[-1], "text")
    text = str(place[key])
    place[key] = f"{text}{mark} "
    return text


def _up_to_mark(rendered: str, text: str, barrier: Barrier) -> str:
    """The prompt up to the last mark. Where a template trims the blank behind that, it trims `text` too."""
    mark = barrier.mark
    end = rendered.rfind(mark)
    if end < 0 or barrier.restore(text).strip() not in barrier.restore(rendered):
        raise UsageError("the chat template does not show the whole last message: it cannot be continued")
    before = rendered[:end].replace(f"{mark} ", "").replace(mark, "")
    return before if rendered.startswith(f"{mark} ", end) else before.rstrip()


def _with_text_arguments(call: Message) -> Message:
    function = call["function"]
    return {
        **call,
        "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)},
    }


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
