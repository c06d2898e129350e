"""A domain with tools of its own, with and without notes."""

import dataclasses
from pathlib import Path
from typing import Literal

from common.types import Action, Task, ToolCall
from envserver.env import Domain
from envserver.memory import MemoryEnv, WithMemory
from envserver.notes import NoteFolder, NoteLimits, Notes
from envserver.testing import play
from envserver.toolenv import ToolEnv, ToolResult, Tools

LIMITS = NoteLimits(notes=3, characters=8)
TASK = Task("desk", "desk-0", 0, {})
NAMES = ("write_note", "read_note", "list_notes", "delete_note")


def call(tool, /, error="", **arguments):
    return ToolCall("c", tool, arguments, error)


def act(*calls, text=""):
    """Calls with the ids "0", "1", ..."""
    return Action(text, tuple(dataclasses.replace(each, id=str(at)) for at, each in enumerate(calls)))


def write(name="plan", text="go left"):
    return call("write_note", name=name, text=text)


READ, LIST = call("read_note", name="plan"), call("list_notes")


def texts(observation):
    return [message.text for message in observation.messages]


class Desk(ToolEnv):
    """A pad that pays for each stroke, and a door. Counts its steps and the actions without a call."""

    def begin(self, task):
        self.strokes = self.steps = self.silent = 0
        return "A desk."

    def step(self, action):
        observation = super().step(action)
        self.steps += 1
        return observation

    def no_call(self, text):
        self.silent += 1
        return ToolResult("Do something.", reward=-0.5)

    def draw(self, to: Literal["left", "right"] = "left") -> ToolResult:
        """Draw a line."""
        self.strokes += 1
        return ToolResult(f"Line {self.strokes} goes {to}.", reward=0.25)

    def leave(self) -> ToolResult:
        """Leave."""
        return ToolResult("Bye.", reward=1.0, done=True)

    def breaks(self) -> str:
        """Break."""
        raise OSError("disk full")

    tools = Tools(draw, leave, breaks)

    def metrics(self):
        return {"strokes": float(self.strokes)}

    def state_key(self):
        return b"%d" % self.strokes


class Flat(Desk):
    """Slow definition of a desk with notes: one environment that has all the tools itself."""

    def begin(self, task):
        self.notes = Notes(LIMITS, {})
        return super().begin(task)

    def write_note(self, name: str, text: str) -> str:
        """Write."""
        return self.notes.write_note(name, text)

    def read_note(self, name: str) -> str:
        """Read."""
        return self.notes.read_note(name)

    def list_notes(self) -> str:
        """List."""
        return self.notes.list_notes()

    def delete_note(self, name: str) -> str:
        """Delete."""
        return self.notes.delete_note(name)

    tools = Tools(Desk.draw, Desk.leave, Desk.breaks, write_note, read_note, list_notes, delete_note)

    def metrics(self):
        counts = {"memory_writes": float(self.notes.writes), "memory_reads": float(self.notes.reads)}
        return super().metrics() | counts


class DeskDomain(Domain):
    name, tools, template, blocking = "desk", Desk.tools.schemas, "Sit down.", False

    def __init__(self, make=Desk, tools=Desk.tools.schemas):
        super().__init__()
        self.make, self.tools = make, tools

    def tasks(self, split, n):
        return [Task("desk", f"{split}-{at}", at, {}) for at in range(n)]

    def make_env(self):
        return self.make()


def remembering(folder, tasks=(TASK.id,), inner=None, limits=LIMITS):
    return WithMemory(inner or DeskDomain(), NoteFolder(folder, limits, tasks))


def started(domain=None, task=TASK):
    env = (domain or WithMemory(DeskDomain(), NoteFolder(Path(), LIMITS))).make_env()
    assert isinstance(env, MemoryEnv)
    env.reset(task)
    return env


def episode(domain, *actions, task=TASK):
    """Play to the end, by the door; the observations."""
    return play(domain, task, [*actions, act(call("leave"))])
