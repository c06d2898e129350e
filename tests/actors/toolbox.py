"""Any model's chat in whole rollouts: its turns are ids that an engine samples one after another, and the environment writes
down which calls it ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from actors.chat import Chat, Context
from actors.codec import ModelFiles, decode
from actors.conversation import Conversation
from actors.history import Prompt
from actors.rollout import run_rollout
from actors.tape import Sampled, Tape
from actors.toolcalls.formats import Llama3
from actors.toolcalls.turns import TurnParser
from common.record import Segment, segments
from common.types import Finish, Limits, Status, Task, Trajectory, VersionRun
from common.validate import Vocabulary
from common.waits import Wait
from envserver.env import Domain, Env
from envserver.toolenv import ToolEnv, ToolResult, Tools
from tests.actors.servers import assignment, env_server, parts_of, ready
from tests.fakes import FakeEngine

LIMITS = Limits(8, 20_000, 30.0)


class Toolbox(ToolEnv):
    """Every call that runs is written down; `stop` ends the episode, and so does a turn without a call."""

    def __init__(self, domain: ToolboxDomain) -> None:
        self.ran, self.answers = domain.ran, domain.answers

    def begin(self, task: Task) -> str:
        return task.payload["task"]

    def no_call(self, text: str) -> ToolResult:
        self.ran.append(("", {"text": text}))
        return ToolResult("No call.", done=True)

    def f(self, x: int = 0) -> str:
        """Say x."""
        self.ran.append(("f", {"x": x}))
        return f"x is {x}"

    def now(self) -> str:
        """Say the time."""
        self.ran.append(("now", {}))
        return "noon"

    def get(self, id: str) -> str:
        """Get a thing."""
        self.ran.append(("get", {"id": id}))
        return self.answers.get(id, id)

    def delete(self, path: str) -> str:
        """Delete a file."""
        self.ran.append(("delete", {"path": path}))
        return "deleted"

    tools = Tools(f, now, get, delete)


class ToolboxDomain(Domain):
    name = "scripted"
    tools = Toolbox.tools.schemas
    template = "Use the tools."
    blocking = False

    def __init__(self, **answers: str) -> None:
        """`answers` of `get`, by id."""
        super().__init__()
        self.ran: list[tuple[str, dict]] = []
        self.answers = answers

    def tasks(self, split: str, n: int) -> list[Task]:
        return []

    def make_env(self) -> Env:
        return Toolbox(self)


@dataclass(frozen=True, eq=False)
class Model:
    """A tokenizer and a chat format."""

    name: str
    files: ModelFiles
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "chat", Chat(self.files, options=self.options))

    chat: Chat = field(init=False)

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.files.rows, len(self.files.codec.pieces))

    @property
    def bare_calls(self) -> bool:
        """Calls are objects without marks around them."""
        return isinstance(self.chat.format, Llama3)

    def parser(self, chat: Conversation | None = None) -> TurnParser:
        chat = chat or self.chat
        return TurnParser(chat.codec, chat.end_id, chat.opens_reasoning, chat.format, chat.end_ids)

    def turn(self, text: str) -> list[int]:
        """The ids of a turn that says `text`, marks as the tokenizer has them, and its end."""
        return [*self.chat.codec.encode_template(text), self.chat.end_id]

    def calls(self, *calls: tuple[str, str]) -> str:
        """Calls as the model writes them; arguments are JSON, or what should be."""
        if self.bare_calls:
            return "; ".join(f'{{"name": "{name}", "parameters": {body}}}' for name, body in calls)
        return "".join(f'<tool_call>{{"name": "{name}", "arguments": {body}}}</tool_call>' for name, body in calls)

    def text(self, ids: Any) -> str:
        return decode(self.files.codec, list(map(int, ids)))


def row(record: Trajectory) -> Segment:
    """The one row of an append-only rollout."""
    (only,) = segments(record)
    return only


def recorded(
    contexts: Sequence[Context], turns: Sequence[Sequence[int]], model: Model, tail: Context | None = None
) -> Trajectory:
    """The record of `turns` behind `contexts`, without an engine and an environment."""
    tape, length = Tape(assignment([], LIMITS)), 0
    for index, (context, ids) in enumerate(zip(contexts, turns, strict=True)):
        turn = model.parser().parse(ids, Finish.STOP, index)
        prompt = Prompt(context.ids, index - 1, length, context)
        tape.append(prompt, Sampled(list(ids), [-0.5] * len(ids), [VersionRun(0, 1, "e", "main")], Finish.STOP), turn, {})
        length += len(context) + len(ids)
    tape.end(Status.TERMINATED, **({"tail": tail} if tail else {}))
    record = tape.trajectory(model.vocabulary)
    assert record.status == Status.TERMINATED, record.flags
    return record


async def sampled(
    model: Model, turns: Sequence[Sequence[int]], domain: ToolboxDomain, chat: Conversation | None = None, **more: Any
) -> tuple[Trajectory, list[list[int]]]:
    """A rollout in which the policy samples `turns`, and its prompts. `more`: limits, stop, max_new_tokens, task."""
    left = [list(turn) for turn in turns]
    asked = assignment([], more.get("limits", LIMITS), task=more.get("task", "Go."))
    sampling = replace(asked.sampling, max_new_tokens=more.get("max_new_tokens", 999), stop=more.get("stop", ()))
    with FakeEngine(reply=lambda prompt, sampling: left.pop(0)) as engine:
        async with env_server(domain) as server:
            addresses = {"scripted": [f"127.0.0.1:{server.port}"]}
            async with parts_of(chat or model.chat, model.vocabulary, addresses, ready(engine)) as parts:
                record = await run_rollout(replace(asked, sampling=sampling), parts, Wait())
        return record, [body["input_ids"] for path, body in engine.calls if path == "/generate"]
