"""Tool calls in the text of an answer, one file for each dialect. A new one is its file and a line here.

`FAMILIES` knows a dialect by texts of the chat template, which writes earlier calls as the model does.
"""

from __future__ import annotations

from isthmus.server.tools.base import Functions, ToolParser
from isthmus.server.tools.deepseek import LIST as _DEEPSEEK_LIST
from isthmus.server.tools.deepseek import DeepseekV3Parser, DeepseekV31Parser
from isthmus.server.tools.glm45 import Glm45Parser
from isthmus.server.tools.harmony import HarmonyParser
from isthmus.server.tools.hermes import HermesParser
from isthmus.server.tools.kimi_k2 import KimiK2Parser
from isthmus.server.tools.llama3_json import Llama3JsonParser
from isthmus.server.tools.minimax_m2 import MinimaxM2Parser
from isthmus.server.tools.mistral import MistralParser
from isthmus.server.tools.qwen3_coder import Qwen3CoderParser

__all__ = ["PARSERS", "Functions", "ToolParser", "detect"]

# Under the names that vLLM gives them, where it has the dialect.
PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "qwen3_coder": Qwen3CoderParser,
    "deepseek_v3": DeepseekV3Parser,
    "deepseek_v31": DeepseekV31Parser,
    "kimi_k2": KimiK2Parser,
    "glm45": Glm45Parser,
    "minimax_m2": MinimaxM2Parser,
    "mistral": MistralParser,
    "llama3_json": Llama3JsonParser,
    "harmony": HarmonyParser,
}

# Parser -> texts that a template of its dialect has all of; the first that fits decides.
FAMILIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek_v3", (_DEEPSEEK_LIST, "```json")),
    ("deepseek_v31", (_DEEPSEEK_LIST,)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("minimax_m2", ("<minimax:tool_call>", "<invoke name=")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters"')),
)


def detect(template: str) -> str | None:
    """The parser for what a chat template's model writes; None where it shows no tool calls."""
    return next((name for name, texts in FAMILIES if all(text in template for text in texts)), None)
