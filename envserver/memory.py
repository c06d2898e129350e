"""Memory: any domain with notes as further tools of its environments.

Context policies drop old messages from the prompt; what the agent has written into a note it can read again. Notes live as
long as the rollout (`memory = "rollout"`), or are kept for later rollouts of the same training task (`"task"`):

- A session sees the notes as they were when it opened; what it changed is merged when its episode ends.
- A session that fails, or is closed before its episode ends (the actor's limits of turns, tokens and time among them), leaves
  nothing: its rollout may be tried again, and the next try must begin as this one did. (Where only the answer to the last
  step was lost, the notes are there already.)
- Held-out tasks, and all that are not listed for training, begin without notes and leave none: an evaluation measures the
  policy, not what earlier evaluations wrote down.
- Admission plays the domain without its memory, and references never call its tools: neither leaves notes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from common.config import DomainConfig
from common.types import Action, Json, Message, Observation, Status, Task, ToolCall, ToolOutcome
from envserver.env import Domain, DomainError, Env, EnvMisuse, fill, read_text
from envserver.notes import NOTE_TOOLS, NoteFolder, NoteLimits, Notes
from envserver.toolenv import OVER, Tools, not_executed

WITHIN_ROLLOUT = (
    "You can keep notes with write_note, read_note, list_notes and delete_note: up to $notes notes of $characters characters."
    " Notes stay when older messages are no longer shown."
)
ACROSS_ROLLOUTS = f"{WITHIN_ROLLOUT} Later attempts at the same task find them: call list_notes first."


def with_memory(domain: Domain, config: DomainConfig, run: Path, train: Collection[str]) -> Domain:
    """`domain` with the memory that `config` asks for. `train` holds the ids of the tasks whose notes may be kept, in files
    below `run`. Raises DomainError."""
    if config.memory == "off":
        return domain
    limits = NoteLimits(config.memory_notes, config.memory_characters)
    folder = NoteFolder(run / "memory" / domain.name, limits, train if config.memory == "task" else ())
    template = ACROSS_ROLLOUTS if config.memory == "task" else WITHIN_ROLLOUT
    if config.memory_instructions:
        template = read_text(config.memory_instructions, f"domains.{domain.name}.memory_instructions")
    return WithMemory(domain, folder, template)


class WithMemory(Domain):
    """A domain whose environments have notes. Everything else of it stays as it is."""

    def __init__(self, inner: Domain, folder: NoteFolder, template: str = WITHIN_ROLLOUT) -> None:
        """`template` says what notes are for; it stands below the domain's own instructions. Raises DomainError."""
        self.inner, self.name, self.options = inner, inner.name, inner.options
        self.has_reference = inner.has_reference
        self.blocking = inner.blocking or bool(folder.tasks)  # which are files
        self._names = [tool["function"]["name"] for tool in inner.tools]
        self._folder = folder
        self._own = Tools(*NOTE_TOOLS, beside=self._names)
        if not self._names:
            raise DomainError(f"domain {self.name!r} has no tools, so its agent makes no calls and cannot have a memory")
        if both := [name for name in self._names if name in self._own]:
            raise DomainError(f"domain {self.name!r} has a tool {both[0]!r} of its own, and so has the memory: leave memory off")
        self.tools = [*inner.tools, *self._own.schemas]
        values = {"notes": folder.limits.notes, "characters": folder.limits.characters}
        paragraph = fill(template, f"domains.{self.name}.memory_instructions", values)
        self.instructions = f"{inner.instructions}\n\n{paragraph}".strip()

    def tasks(self, split: str, n: int) -> list[Task]:
        return self.inner.tasks(split, n)

    def make_env(self) -> Env:
        return MemoryEnv(self.inner.make_env(), self._own, frozenset(self._names), self._folder)

    def context(self) -> dict[str, Json]:
        return self.inner.context()

    def reference(self, task: Task) -> list[Action]:
        return self.inner.reference(task)


class MemoryEnv(Env):
    """An environment and the notes beside it.

    An action is at most one step of the inner environment: it gets the calls of its own tools together, and none when there
    are only calls of notes. Notes do not enter its `state_key`: they are the agent's, as its context is, and what they say
    differs from rollout to rollout where the environment is in the same state.
    """

    def __init__(self, inner: Env, own: Tools, theirs: frozenset[str], folder: NoteFolder) -> None:
        """`own` are the tools of `Notes`, `theirs` the names of the inner environment's."""
        self.inner = inner
        self._own, self._theirs, self._folder = own, theirs, folder
        self._phase = "new"  # then "running", then "over"

    def reset(self, task: Task) -> Observation:
        if self._phase != "new":
            raise EnvMisuse("reset was called before on this environment; make a new one for each episode")
        self._last = self.inner.reset(task)  # what the inner environment said most recently
        self._notes: Notes = self._folder.open(task.id)
        self._task_id = task.id
        return self._observe(self._last.messages, self._last.tool_outcomes)

    def step(self, action: Action) -> Observation:
        if self._phase != "running":
            raise EnvMisuse(f"step on an environment whose episode is {self._phase}")
        calls, own = action.tool_calls, [self._is_own(call) for call in action.tool_calls]
        if calls and all(own):
            self._last = replace(self._last, messages=(), reward=0.0, tool_outcomes=())
        else:
            theirs = tuple(call for call, mine in zip(calls, own, strict=True) if not mine)
            self._last = self.inner.step(replace(action, tool_calls=theirs))
        observation = self._weave(calls, own)
        if self._phase == "over":
            self._folder.merge(self._task_id, self._notes)
        return observation

    def close(self) -> None:
        self.inner.close()

    def _is_own(self, call: ToolCall) -> bool:
        """Also a call of a tool that nobody has, since only we know all tools. One that could not be read is the domain's."""
        return call.name in self._own or not (call.error or call.name in self._theirs)

    def _weave(self, calls: Sequence[ToolCall], own: Sequence[bool]) -> Observation:
        """Run our calls and put each answer where its call stands."""
        messages: list[Message] = []
        outcomes: list[ToolOutcome] = []
        their_messages, their_outcomes = deque(self._last.messages), deque(self._last.tool_outcomes)
        end = self._end(own)
        for at, (call, mine) in enumerate(zip(calls, own, strict=True)):
            if mine:
                answer = self._own.answer(self._notes, call) if at < end else not_executed(call)
                messages.append(answer.message)
                outcomes.append(answer.outcome)
                continue
            if their_messages:
                messages.append(their_messages.popleft())
            if their_outcomes:
                outcomes.append(their_outcomes.popleft())
        return self._observe((*messages, *their_messages), (*outcomes, *their_outcomes))

    def _end(self, own: Sequence[bool]) -> int:
        """Index of the call that ended the episode, the last of the inner environment's that it executed."""
        if self._last.status == Status.RUNNING:
            return len(own)
        theirs = [at for at, mine in enumerate(own) if not mine]
        skipped = sum(outcome.error == OVER for outcome in self._last.tool_outcomes)
        return theirs[: max(1, len(theirs) - skipped)][-1] if theirs else 0

    def _observe(self, messages: tuple[Message, ...], outcomes: tuple[ToolOutcome, ...]) -> Observation:
        self._phase = "running" if self._last.status == Status.RUNNING else "over"
        counts = {"memory_writes": float(self._notes.writes), "memory_reads": float(self._notes.reads)}
        metrics = {**self._last.metrics, **counts}
        return replace(self._last, messages=messages, tool_outcomes=outcomes, metrics=metrics)
