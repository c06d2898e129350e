"""Tools from plain functions: schemas, validation, several calls, mistakes as observations."""

import json
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.convert import observation_to
from common.types import Action, Status, Task, ToolCall
from envserver.env import EnvMisuse
from envserver.toolenv import ToolEnv, ToolError, ToolResult, Tools

TASK = Task("desk", "desk-0", 0, {})


def upper(text: str) -> str:
    """Write in capitals."""
    return text.upper()


class Desk(ToolEnv):
    """A note that can be written, and an end."""

    def begin(self, task):
        self.note = ""
        self.written = 0
        return "A desk."

    def write(self, json: str, times: int = 1, mode: Literal["append", "replace"] = "append") -> ToolResult:
        """Write on the note.

        More about it that the agent need not read.

        Args:
            json: what to write
            times: how often
        """
        if not json:
            raise ToolError("there is nothing to write")
        self.note = (self.note if mode == "append" else "") + json * times
        self.written += 1
        return ToolResult(self.note, reward=0.25)

    def leave(self) -> ToolResult:
        """Leave."""
        return ToolResult("Bye.", reward=1.0, done=True)

    def breaks(self) -> str:
        """Break."""
        raise OSError("disk full")

    tools = Tools(write, leave, upper, breaks)

    def metrics(self):
        return {"written": float(self.written)}

    def state_key(self):
        return self.note.encode()


def started():
    env = Desk()
    env.reset(TASK)
    return env


def call(name, arguments=None, error="", call_id="c"):
    return ToolCall(call_id, name, arguments if arguments is not None else {}, error)


def answer(*calls):
    return started().step(Action("", calls))


def test_schema_comes_from_hints_and_docstring_and_has_no_titles():
    assert Desk.tools.schemas[0] == {
        "type": "function",
        "function": {
            "name": "write",
            "description": "Write on the note.",
            "parameters": {
                "type": "object",
                "properties": {
                    "json": {"type": "string", "description": "what to write"},
                    "times": {"type": "integer", "default": 1, "description": "how often"},
                    "mode": {"type": "string", "enum": ["append", "replace"], "default": "append"},
                },
                "required": ["json"],
            },
        },
    }
    assert Desk.tools.schemas[1]["function"]["parameters"] == {"type": "object", "properties": {}}


def test_an_argument_may_be_called_title():
    def put(title: str) -> str:
        """Put."""
        return title

    tools = Tools(put)
    assert tools.schemas[0]["function"]["parameters"]["properties"] == {"title": {"type": "string"}}
    assert tools.call(started(), call("put", {"title": "x"})).text == "x"


@pytest.mark.parametrize("kind", ["no hint", "star", "no docstring"])
def test_functions_that_cannot_be_tools_are_refused_when_defined(kind):
    def no_hint(x):
        """Doc."""

    def star(*x: int):
        """Doc."""

    def bare(x: int):
        pass

    function, words = {
        "no hint": (no_hint, "x needs a type hint"),
        "star": (star, "by name"),
        "no docstring": (bare, "docstring"),
    }[kind]
    with pytest.raises(TypeError, match=words):
        Tools(function)


def test_several_calls_run_in_order_and_succeed_or_fail_alone():
    observation = answer(
        call("write", {"json": "a", "times": 2}, call_id="0"),
        call("write", {"json": ""}, call_id="1"),
        call("nothing", call_id="2"),
        call("", error="Expecting ',' at column 7", call_id="3"),
        call("upper", {"text": "b"}, call_id="4"),
        call("write", {"json": "c", "mode": "replace"}, call_id="5"),
    )
    assert [(message.role, message.tool_call_id, message.text) for message in observation.messages] == [
        ("tool", "0", "aa"),
        ("tool", "1", "Error: there is nothing to write"),
        ("tool", "2", "Error: there is no tool 'nothing'; tools: write, leave, upper, breaks"),
        ("tool", "3", "Error: Expecting ',' at column 7"),
        ("tool", "4", "B"),
        ("tool", "5", "c"),
    ]
    assert [outcome.ok for outcome in observation.tool_outcomes] == [True, False, False, False, True, True]
    assert observation.tool_outcomes[1].error == "there is nothing to write"
    assert observation.reward == 0.25 + 0.25
    assert observation.status == Status.RUNNING
    assert observation.metrics == {"written": 2.0}
    assert observation.state_key == b"c"


def test_calls_after_the_end_are_answered_but_not_executed():
    env = started()
    observation = env.step(Action("", (call("leave", call_id="0"), call("write", {"json": "a"}, call_id="1"))))
    assert observation.status == Status.TERMINATED
    assert observation.reward == 1.0
    assert [message.text for message in observation.messages] == ["Bye.", "Not executed: the episode is over."]
    assert [outcome.ok for outcome in observation.tool_outcomes] == [True, False]
    assert env.note == ""
    with pytest.raises(EnvMisuse, match="over"):
        env.step(Action(""))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "write needs the argument json"),
        ({"json": "a", "size": 1}, "write has no argument 'size'; arguments: json, times, mode"),
        ({"json": "a", "times": "many"}, "write: times is 'many': "),
        ({"json": "a", "mode": "x" * 500}, "write: mode is '" + "x" * 79 + "...: "),
        ({"json": "a", "times": float("nan")}, "write: times is nan: "),
        ({"json": None}, "write: json is None: "),
        ([1, 2], "the arguments of write must be a JSON object"),
        ("text", "the arguments of write must be a JSON object"),
    ],
)
def test_wrong_arguments_are_short_helpful_observations(arguments, words):
    observation = answer(call("write", arguments))
    assert observation.messages[0].text.startswith(f"Error: {words}")
    assert len(observation.messages[0].text) < 300
    assert not observation.tool_outcomes[0].ok


def test_numbers_are_accepted_as_text_and_digits_as_numbers():
    assert answer(call("write", {"json": 7, "times": "2"})).messages[0].text == "77"


def test_an_action_without_a_call_is_asked_for_one():
    observation = started().step(Action("I think."))
    assert [(message.role, message.text) for message in observation.messages] == [
        ("user", "Call a tool: write, leave, upper, breaks.")
    ]
    assert observation.tool_outcomes == ()
    assert observation.status == Status.RUNNING


def test_083_an_exception_of_a_tool_is_not_an_observation():
    with pytest.raises(OSError, match="disk full"):
        answer(call("breaks"))


def test_a_tool_that_returns_something_else_is_an_error_of_the_domain():
    def number() -> int:
        """Number."""
        return 3

    with pytest.raises(TypeError, match="number returned int"):
        Tools(number).call(started(), call("number"))  # pyright: ignore


def test_half_a_surrogate_pair_from_the_agent_does_not_break_the_wire():
    arguments = json.loads('{"text": "x\\ud800"}')
    observation = answer(call("upper", arguments), call("\ud800"))
    assert observation.messages[0].text == "X?"
    observation_to(observation).SerializeToString()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(categories=["L", "Cs", "Cc"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["write", "leave", "upper", "jump", ""]), JSON, st.text(max_size=5))
def test_no_call_of_an_agent_raises(name, arguments, error):
    observation = started().step(Action("", (ToolCall("c", name, arguments, error),)))
    assert len(observation.messages) == len(observation.tool_outcomes) == 1
    observation_to(observation).SerializeToString()
