"""Fields that clients know, this server does not act on yet, and that would change the answer.

Ignoring one would give a wrong answer with a 200, so it is a 400 that names it, unless its value asks for
nothing (null, or one of the values listed). Fields that cannot change the text (user, metadata, store,
service_tier, ...) and fields nobody knows are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from isthmus.server.errors import ApiError

# What makes a prompt another one, also where only that is asked for.
IN_PROMPTS: dict[str, tuple[Any, ...]] = {
    "documents": ([],),
    "chat_template": (),
    "truncate_prompt_tokens": (),
}

# llama.cpp's, which Ollama has among its options.
OLD_SAMPLERS: dict[str, tuple[Any, ...]] = {
    "typical_p": (1, 1.0),
    "tfs_z": (1, 1.0),
    "mirostat": (0,),
}

# Field -> values that ask for nothing. Whoever builds a feature takes its line out.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # several answers
    "best_of": (1,),
    "use_beam_search": (False,),
    # tools
    "functions": ([],),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    # structured output
    "json_schema": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "structural_tag": (),
    "regex": (),
    "ebnf": (),
    # log-probabilities
    "prompt_logprobs": (0,),
    # other media
    "audio": (),
    "modalities": (["text"],),
    # the prompt
    "prediction": (),
    "suffix": ("",),
    **IN_PROMPTS,
    # samplers of other servers
    "n_predict": (-1,),
    "min_tokens": (0,),
    "allowed_token_ids": ([],),
    "length_penalty": (1, 1.0),
    "no_repeat_ngram_size": (0,),
    "repeat_last_n": (-1,),
    "bad_words": ([],),
    "logits_processors": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "thinking_token_budget": (-1,),
    "thinking_budget": (-1,),
    "reasoning_budget": (-1,),
    "top_n_sigma": (-1, -1.0),
    **OLD_SAMPLERS,
    "dry_multiplier": (0, 0.0),
    "xtc_probability": (0, 0.0),
    "dynatemp_range": (0, 0.0),
}

# Fields that change nothing while all of these have a value listed: llama.cpp sends the window of
# its penalties (64) with every request.
_ONLY_WITH: dict[str, dict[str, tuple[Any, ...]]] = {
    "repeat_last_n": {
        "repetition_penalty": (1, 1.0),
        "repeat_penalty": (1, 1.0),
        "presence_penalty": (0, 0.0),
        "frequency_penalty": (0, 0.0),
    },
}

# Of a chat alone: a completion has fields of these names.
IN_CHATS: dict[str, tuple[Any, ...]] = UNSUPPORTED | {
    "echo": (False,),
    "add_special_tokens": (False,),
}


def refuse_unsupported(
    fields: dict[str, Any], unsupported: Mapping[str, tuple[Any, ...]] = UNSUPPORTED
) -> None:
    """ApiError 400 for the first of these fields whose value asks for something."""
    for name, neutral in unsupported.items():
        if _asks(fields, name, neutral) and (
            name not in _ONLY_WITH or any(_asks(fields, *other) for other in _ONLY_WITH[name].items())
        ):
            wanted = ", ".join(
                ["leave it out", *(f"or send {json.dumps(allowed)}" for allowed in neutral[:1])]
            )
            raise ApiError(
                400,
                f"{name} is not supported by this server yet: {wanted}",
                param=name,
                code="unsupported_parameter",
            )


def _asks(fields: dict[str, Any], name: str, neutral: tuple[Any, ...]) -> bool:
    value = fields.get(name)
    return value is not None and not any(_same(value, allowed) for allowed in neutral)


def _same(value: Any, allowed: Any) -> bool:
    """Equal also in type: in Python True == 1 == 1.0."""
    return type(value) is type(allowed) and bool(value == allowed)
