"""Tool calls: how models write them, how they are read, what their arguments are."""

from __future__ import annotations

from actors.toolcalls.formats import Hermes, Llama3, ToolFormat
from actors.toolcalls.prose import Answer, React
from actors.toolcalls.tagged import Coder, Fenced

FORMATS: dict[str, type[ToolFormat]] = {
    "hermes": Hermes,
    "llama3": Llama3,
    "qwen3_coder": Coder,
    "fenced": Fenced,
    "answer": Answer,
    "react": React,
}


def format_of(template: str) -> str:
    """The name of the format that a chat template teaches; Hermes when it shows no tools."""
    if "<function=" in template:
        return "qwen3_coder"
    if "<tool_call>" not in template and "parameters" in template and ("ipython" in template or "<|python_tag|>" in template):
        return "llama3"
    return "hermes"
