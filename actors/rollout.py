"""One rollout: open an environment, take turns, close it, hand back a trajectory.

Whatever happens inside, the answer is a Trajectory that obeys the rules of the record, except when the rollout itself is
cancelled from outside: then `run_rollout` raises CancelledError and leaves nothing open.

How a rollout ends:
  TERMINATED  the environment said so.
  TRUNCATED   the environment said so, or a limit was reached; a flag names it: "turn_limit", "token_limit" (the next
              prompt, or the turn, would pass limits.max_tokens), "length" (the last turn was cut by the engine; nothing in
              it was executed), "deadline" (the next turn would begin after limits.deadline_s).
  FAILED      infrastructure, a wait that has not ended by twice the deadline included; the flag "reason:..." says what.
              Rewards are zero.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from actors.chat import EMPTY, Context
from actors.conversation import Conversation
from actors.decoding import tokens_to_stop
from actors.engines import Engines, EngineUnavailable, Generation, Request
from actors.envs import Envs, Session
from actors.observations import Room
from actors.toolcalls.arguments import schemas_of
from actors.toolcalls.turns import Turn, TurnParser
from common.seeds import turn_seed
from common.types import (
    Action,
    Assignment,
    Finish,
    Message,
    Observation,
    Source,
    Status,
    Step,
    StepKind,
    Trajectory,
    VersionRun,
    ids_array,
)
from common.validate import RecordError, Vocabulary, check, check_lengths

log = logging.getLogger("actors.rollout")

TURN_TRIES = 8  # requests for one turn, over all engines: the only retry of a generation
LATE = 2  # times limits.deadline_s, then what a rollout waits for counts as lost
FIRST_DELAY_S, LONGEST_DELAY_S = 0.25, 4.0


class RolloutError(Exception):
    """The rollout cannot go on, and nobody's retry would help it."""


@dataclass(eq=False)
class Wait:
    """What a rollout waits for at this moment; heartbeats report it."""

    name: str = "start"
    on: str = ""
    since: float = 0.0  # monotonic
    deadline_s: float = 0.0

    def set(self, name: str, on: str) -> None:
        self.name, self.on, self.since = name, on, time.monotonic()


@dataclass(frozen=True, eq=False)
class Parts:
    """What all rollouts of a process share."""

    chat: Conversation
    parser: TurnParser
    vocabulary: Vocabulary
    engines: Engines
    envs: Envs


@dataclass(eq=False)
class Sampled:
    """A turn as it grows: more than one request when an engine aborted it on the way."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionRun] = field(default_factory=list)
    finish: Finish = Finish.ABORT

    def add(self, piece: Generation) -> None:
        for run in piece.versions:
            run = replace(run, start=run.start + len(self.ids))
            last = self.versions[-1] if self.versions else None
            if last is None or (last.version, last.engine, last.pool) != (run.version, run.engine, run.pool):
                self.versions.append(run)
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        self.finish = piece.finish

    def cut_at(self, stops: Sequence[str], pieces: Sequence[bytes]) -> None:
        """End the turn with the token that completes a stop string, if one does; `pieces` are the tokenizer's."""
        count = tokens_to_stop([pieces[i] for i in self.ids], stops) if stops else None
        if count is not None:
            self.ids, self.logprobs, self.finish = self.ids[:count], self.logprobs[:count], Finish.STOP
            self.versions = [run for run in self.versions if run.start < count]


class Tape:
    """Writes a rollout's record. `append` is the only way in for tokens."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.begun = time.monotonic()
        self.ids = ids_array([])  # the full sequence so far; arrays, since lists of long dialogues are slow to copy
        self.steps: list[Step] = []
        self.tail = EMPTY
        self.status = Status.RUNNING
        self.flags: list[str] = []
        self.metrics: dict[str, float] = {}
        self.counts = {"turns": 0.0, "calls_ok": 0.0, "calls_failed": 0.0, "format_errors": 0.0, "engine_retries": 0.0}

    @property
    def room(self) -> int:
        """Tokens until limits.max_tokens."""
        return max(0, self.assignment.limits.max_tokens - len(self.ids))

    def append(self, context: Context, sampled: Sampled, turn: Turn, timings: dict[str, float]) -> None:
        """Store one turn: all its arrays, or none. Raises RecordError when their lengths differ."""
        ids, logprobs = ids_array(sampled.ids), np.asarray(sampled.logprobs, np.float32)
        if self.assignment.source == Source.POLICY:
            check_lengths(ids, logprobs, len(self.steps), self.assignment.rollout_id)
        step = Step(
            parent=len(self.steps) - 1,
            prefix_len=len(self.ids),
            context_ids=context.ids,
            context_spans=context.spans,
            action_ids=ids,
            action_logprobs=logprobs,
            action_spans=turn.spans,
            versions=tuple(sampled.versions),
            kind=StepKind.ACT,
            reward=0.0,
            finish=sampled.finish,
            timings=timings,
        )
        self.ids = np.concatenate([self.ids, context.ids, ids])
        self.steps.append(step)
        self.counts["turns"] += 1
        self.counts["format_errors"] += turn.problems

    def observe(self, observation: Observation, seconds: float) -> None:
        """What the environment answered to the last turn."""
        step = self.steps[-1]
        self.steps[-1] = replace(
            step,
            reward=float(observation.reward),
            tool_outcomes=observation.tool_outcomes,
            timings={**step.timings, "env": seconds},
            state_key=observation.state_key,
        )
        for outcome in observation.tool_outcomes:
            self.counts["calls_ok" if outcome.ok else "calls_failed"] += 1
        self.metrics.update(observation.metrics)

    def end(self, status: Status, *flags: str, tail: Context = EMPTY) -> None:
        """A tail that passes limits.max_tokens even with its texts shortened is left out: no row of the learner is longer."""
        if len(tail) > self.room:
            tail, flags = EMPTY, (*flags, "tail_cut")
        self.status, self.tail = status, tail
        self.flags += flags

    def fail(self, reason: str) -> None:
        self.status, self.tail = Status.FAILED, EMPTY
        self.flags = [f"reason:{reason}"]
        self.steps = [replace(step, reward=0.0) for step in self.steps]
        self.metrics = {}

    def trajectory(self, vocabulary: Vocabulary) -> Trajectory:
        """The record, checked. One that breaks a rule becomes FAILED, without its steps."""
        record = self._record()
        try:
            check(record, vocabulary)
        except RecordError as error:
            log.error("%s", error)
            self.fail(f"record:{error.rule}: {error.detail}")
            self.steps = []
            record = self._record()
        return record

    def _record(self) -> Trajectory:
        a = self.assignment
        return Trajectory(
            rollout_id=a.rollout_id,
            attempt=a.attempt,
            group_id=a.group_id,
            task=a.task,
            source=a.source,
            steps=tuple(self.steps),
            tail_ids=self.tail.ids,
            tail_spans=self.tail.spans,
            status=self.status,
            flags=tuple(self.flags),
            metrics={**self.metrics, **self.counts},
            sampling=a.sampling,
        )


async def run_rollout(assignment: Assignment, parts: Parts, wait: Wait) -> Trajectory:
    """Play `assignment` to its end. Raises only CancelledError, when this task was cancelled."""
    tape = Tape(assignment)
    wait.deadline_s = LATE * assignment.limits.deadline_s
    session: Session | None = None
    try:
        async with asyncio.timeout(LATE * assignment.limits.deadline_s):
            if assignment.context.name != "append":
                raise RolloutError(f"context policy {assignment.context.name!r} is unknown; this actor knows 'append'")
            wait.set("env.open", assignment.task.domain)
            session_id = f"{assignment.rollout_id}.{assignment.attempt}"
            session = await parts.envs.open(assignment.task, session_id, assignment.source == Source.REFERENCE)
            play = play_reference if assignment.source == Source.REFERENCE else play_policy
            await play(tape, parts, session, wait)
    except TimeoutError:  # whoever it waits for has been silent for long: no fault of the policy, so never a reward
        tape.fail(f"deadline: {wait.name} {wait.on} after {LATE * assignment.limits.deadline_s:g} s")
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        tape.fail(f"cancelled: a call was cancelled during {wait.name} {wait.on}")  # by a library, not by us
    except Exception as error:  # a bad episode is data: the one place where everything is caught
        log.warning("rollout %s failed in %s: %s: %s", assignment.rollout_id, wait.name, type(error).__name__, error)
        tape.fail(f"{type(error).__name__}: {error}")
    finally:
        if session is not None:
            parts.envs.close_session(session)
    return tape.trajectory(parts.vocabulary)


async def play_policy(tape: Tape, parts: Parts, session: Session, wait: Wait) -> None:
    limits, sampling = tape.assignment.limits, tape.assignment.sampling
    context = _opening(parts, session)
    seen: tuple[bool, tuple[Message, ...]] = (True, ())  # whether the last turn ended itself, and the answer to it
    engine, ends = "", tape.begun + limits.deadline_s
    for index in range(limits.max_turns):
        if tape.steps and time.monotonic() > ends:  # between two turns, where the state that it would go on from is known
            tape.end(Status.TRUNCATED, "deadline", tail=_tail(tape, parts, *seen))
            return
        room = tape.room - len(context)
        if room < 1:
            if not tape.steps:
                raise RolloutError(f"the first prompt has {len(context)} tokens, limits.max_tokens is {limits.max_tokens}")
            tape.end(Status.TRUNCATED, "token_limit", tail=_tail(tape, parts, *seen))
            return
        begun = time.monotonic()
        prompt = np.concatenate([tape.ids, context.ids])
        sampled = await _sample(tape, parts, prompt, min(sampling.max_new_tokens, room), engine, wait)
        engine = sampled.versions[-1].engine if sampled.versions else engine
        generated = time.monotonic()
        turn = parts.parser.parse(sampled.ids, sampled.finish, index, schemas_of(session.tools_json))
        tape.append(context, sampled, turn, {"generate": generated - begun, "parse": time.monotonic() - generated})
        if sampled.finish == Finish.LENGTH:
            tape.end(Status.TRUNCATED, "length", *(["token_limit"] if room < sampling.max_new_tokens else []))
            return
        observation = await _step(tape, parts, session, turn.action, wait)
        seen = (parts.chat.ended(sampled.ids), observation.messages)
        if observation.status != Status.RUNNING:
            tape.end(observation.status, tail=_tail(tape, parts, *seen))
            return
        context = parts.chat.bridge(*seen, Room(tape.room - 1, _each(tape)))
    tape.end(Status.TRUNCATED, "turn_limit", tail=_tail(tape, parts, *seen))


async def play_reference(tape: Tape, parts: Parts, session: Session, wait: Wait) -> None:
    """The domain's own solution, written as the policy would write it. Only a solution that works is one."""
    limits = tape.assignment.limits
    context = _opening(parts, session)
    actions: Sequence[Action] = session.reference
    longest = 0
    for index, action in enumerate(actions[: limits.max_turns]):
        ids = parts.parser.encode(action)
        longest = max(longest, len(ids))
        turn = parts.parser.parse(ids, Finish.STOP, index)
        tape.append(context, Sampled(ids, [], [], Finish.STOP), turn, {})
        observation = await _step(tape, parts, session, action, wait)
        if observation.status != Status.RUNNING:
            tape.end(observation.status, tail=_tail(tape, parts, True, observation.messages))
            break
        context = parts.chat.bridge(True, observation.messages, Room(each=_each(tape)))
    if longest > tape.assignment.sampling.max_new_tokens:
        allowed = tape.assignment.sampling.max_new_tokens
        raise RolloutError(f"a turn of the reference takes {longest} tokens, limits.max_new_tokens is {allowed}")
    if len(tape.ids) > limits.max_tokens:
        raise RolloutError(f"the reference takes {len(tape.ids)} tokens, limits.max_tokens is {limits.max_tokens}")
    if tape.status != Status.TERMINATED or tape.metrics.get("success", 1.0) < 1.0:
        raise RolloutError(f"the reference of task {tape.assignment.task.id} does not solve it in {limits.max_turns} turns")


def _tail(tape: Tape, parts: Parts, ended: bool, messages: Sequence[Message]) -> Context:
    return parts.chat.tail(ended, messages, Room(tape.room, _each(tape)))


def _each(tape: Tape) -> int | None:
    """Tokens that one observation's text may have; as long as it is when the context policy does not say."""
    return int(tape.assignment.context.options.get("observation_tokens", 0)) or None


def _opening(parts: Parts, session: Session) -> Context:
    if session.observation.status != Status.RUNNING:
        raise RolloutError("the environment ended at its reset")
    return parts.chat.opening(session.instructions, session.tools_json, session.observation.messages)


async def _step(tape: Tape, parts: Parts, session: Session, action: Action, wait: Wait) -> Observation:
    begun = time.monotonic()
    wait.set("env.step", session.replica.address)
    observation = await parts.envs.step(session, len(tape.steps) - 1, action)
    tape.observe(observation, time.monotonic() - begun)
    return observation


async def _sample(tape: Tape, parts: Parts, prompt: np.ndarray, budget: int, engine: str, wait: Wait) -> Sampled:
    """Sample one turn, from another engine if one dies. Raises EngineUnavailable when TURN_TRIES are used up.

    A turn that an engine aborts (for new weights) goes on after the tokens it has: each keeps its own logprob and version.
    Every try of a turn has the same seed: it is a function of the rollout and the turn alone. An engine that keys its draws by
    position then goes on as if nothing had happened.
    """
    assignment, index = tape.assignment, len(tape.steps)
    s = assignment.sampling
    ends = tuple(dict.fromkeys((parts.chat.end_id, *sorted(parts.chat.end_ids), *s.stop_token_ids)))
    stops = (*s.stop, *parts.chat.format.stops)  # looked for here: engines that get ids have no text
    sampled, why, delay = Sampled(), "", FIRST_DELAY_S
    for attempt in range(TURN_TRIES):
        if not parts.engines.ready():
            wait.set("engine.ready", parts.engines.states())
        chosen = await parts.engines.pick(engine)
        wait.set("engine.generate", chosen.name)
        rid = f"{assignment.rollout_id}.{assignment.attempt}.{index}.{attempt}"
        left = budget - len(sampled.ids)
        ids = np.concatenate([prompt, ids_array(sampled.ids)])
        request = Request(rid, ids, left, s.temperature, ends, turn_seed(s.seed, index))
        try:
            sampled.add(await parts.engines.generate(chosen, request))
            sampled.cut_at(stops, parts.chat.codec.pieces)
        except EngineUnavailable as error:
            why = str(error)
            log.info("rollout %s turn %d: %s", assignment.rollout_id, index, error)
            tape.counts["engine_retries"] += 1
            wait.set("engine.ready", why)
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY_S)
            continue
        if sampled.finish != Finish.ABORT:
            return sampled
        why = f"{chosen.name} aborted the request"
        tape.counts["engine_retries"] += 1
        if len(sampled.ids) >= budget:
            sampled.finish = Finish.LENGTH
            return sampled
    raise EngineUnavailable(f"{TURN_TRIES} tries of one turn; the last: {why}")
