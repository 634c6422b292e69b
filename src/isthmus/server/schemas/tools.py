"""Tools that a chat may call, the calls in its history, and the format that its answer must have."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from isthmus.engine.request import MAX_GRAMMAR_CHARACTERS
from isthmus.server.schemas.base import MAX_NAME_CHARACTERS, Body

MAX_TOOLS = 1024
MAX_CALLS = 1024

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,128}$")]  # OpenAI's letters, and dots


class Function(Body):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema of the arguments; None: there are none
    strict: bool | None = None  # a call's arguments must satisfy it

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return self.parameters or {"type": "object", "properties": {}}


class Tool(Body):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """As chat templates print it: the keys that models have been trained with, in their order."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        return {
            "type": "function",
            "function": function | {"parameters": self.function.schema_of_arguments},
        }


class NamedFunction(Body):
    name: FunctionName


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(Body):
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Body):
    """A call of an earlier turn."""

    id: Annotated[str | None, Field(max_length=MAX_NAME_CHARACTERS)] = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        call = {"type": "function", "function": self.function.model_dump()}
        return call if self.id is None else {"id": self.id} | call


class JsonSchemaFormat(Body):
    name: Annotated[str | None, Field(max_length=MAX_NAME_CHARACTERS)] = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None  # the schema is held either way


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise PydanticCustomError("missing", "of type 'json_schema' needs json_schema.schema")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """What the answer must be; None: any text."""
        if self.type == "json_object":
            return {"type": "object"}
        return self.json_schema.schema_ if self.type == "json_schema" and self.json_schema else None


class GrammarFormat(Body):
    """An extension, in the words of OpenAI's custom tools: the answer is a text of this grammar."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


class ToolFields(Body):
    """What a chat says of tools and formats."""

    tools: Annotated[list[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    grammar: GrammarFormat | None = None

    @field_validator("tools")
    @classmethod
    def _names_differ(cls, value: list[Tool] | None) -> list[Tool] | None:
        names = [tool.function.name for tool in value or ()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise PydanticCustomError("duplicate", "two functions have the name {name}", {"name": twice})
        return value

    @field_validator("response_format", mode="before")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(json.dumps(value)) > MAX_GRAMMAR_CHARACTERS:
            message = "is longer than {limit} characters as JSON"
            raise PydanticCustomError("too_long", message, {"limit": MAX_GRAMMAR_CHARACTERS})
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> ToolFields:
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise PydanticCustomError("dependent", "needs tools to choose from", {"param": "tool_choice"})
        if named is not None and named not in {tool.function.name for tool in self.tools or ()}:
            raise PydanticCustomError("dependent", "names no function of tools", {"param": "tool_choice"})
        formatted = self.response_format is not None and self.response_format.type != "text"
        if self.grammar is not None and (formatted or self.callable_tools):
            raise PydanticCustomError(
                "dependent", "cannot be held together with tools or a response_format", {"param": "grammar"}
            )
        return self

    @property
    def callable_tools(self) -> list[Tool]:
        """The functions that the answer may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forced_tools(self) -> list[Tool]:
        """Those of which one must be called, if one must."""
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return [tool for tool in self.callable_tools if tool.function.name == name]
        return self.callable_tools if self.tool_choice == "required" else []

    @property
    def held(self) -> str | None:
        """The field that free text would not satisfy, if there is one."""
        if self.grammar is not None:
            return "grammar"
        if self.forced_tools:
            return "tool_choice"
        if self.response_format is not None and self.response_format.schema_of_answer is not None:
            return "response_format"
        if any(tool.function.strict for tool in self.callable_tools):
            return "tools"
        return "parallel_tool_calls" if self.callable_tools and self.parallel_tool_calls is False else None
