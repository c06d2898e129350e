"""One rollout: open an environment, play it, close it, hand back a trajectory.

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

from actors.agents import Agents, Parts, RolloutError, env_step, open_history
from actors.envs import Session
from actors.history import Rules
from actors.tape import Sampled, Tape
from common.record import sequence_lengths
from common.types import Assignment, Finish, Source, Status, Trajectory
from common.waits import Wait, session_name

log = logging.getLogger("actors.rollout")

LATE = 2  # times limits.deadline_s, then what a rollout waits for counts as lost


async def run_rollout(assignment: Assignment, parts: Parts, wait: Wait) -> Trajectory:
    """Play `assignment` to its end. Raises only CancelledError, when this task was cancelled."""
    tape = Tape(assignment)
    session: Session | None = None
    try:
        async with asyncio.timeout(LATE * assignment.limits.deadline_s):
            session_id = session_name(assignment.rollout_id, assignment.attempt)
            session = await parts.envs.open(assignment.task, session_id, assignment.source == Source.REFERENCE, wait)
            if assignment.source == Source.REFERENCE:
                await play_reference(tape, parts, session, wait)
            else:
                await Agents(tape, parts, session, wait).play()
    except TimeoutError:  # whoever it waits for has been silent for long: no fault of the policy, so never a reward
        tape.fail(f"deadline: {wait} after {LATE * assignment.limits.deadline_s:g} s")
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        tape.fail(f"cancelled: a call was cancelled during {wait}")  # by a library, not by us
    except Exception as error:  # a bad episode is data: the one place where everything is caught
        log.warning("rollout %s failed in %s: %s: %s", assignment.rollout_id, wait.name, type(error).__name__, error)
        tape.fail(f"{type(error).__name__}: {error}")
    finally:
        if session is not None:
            parts.envs.close_session(session)
    return tape.trajectory(parts.vocabulary)


async def play_reference(tape: Tape, parts: Parts, session: Session, wait: Wait) -> None:
    """The domain's own solution, written as the policy would write it and shown as the policy would see it, but for summaries,
    of which it has none. Only a solution that works is one."""
    limits, sampling = tape.assignment.limits, tape.assignment.sampling
    rules = Rules.of(tape.assignment.context).of_reference()
    sizes, helpers = (limits.max_tokens, sampling.max_new_tokens), rules.subagent_turns > 0
    history = open_history(parts.chat, rules, session, sizes, session.observation.messages, helpers)
    longest = 0
    for number, action in enumerate(session.reference[: limits.max_turns]):
        prompt = history.show(history.next_view()) if number else history.begin()
        ids = parts.parser.encode(action)
        longest = max(longest, len(ids))
        turn = parts.parser.parse(ids, Finish.STOP, number)
        index = tape.append(prompt, Sampled(ids, [], [], Finish.STOP), turn, {})
        history.stored(prompt, ids, index)
        observation = await env_step(tape, parts, session, index, action, wait)
        history.turn(ids, turn.spans, observation.messages)
        if observation.status != Status.RUNNING:
            tape.end(observation.status, tail=history.tail())
            break
    if longest > sampling.max_new_tokens:
        allowed = sampling.max_new_tokens
        raise RolloutError(f"a turn of the reference takes {longest} tokens, limits.max_new_tokens is {allowed}")
    if (tokens := max(sequence_lengths(tuple(tape.steps)), default=0)) > limits.max_tokens:
        raise RolloutError(f"the reference takes {tokens} tokens, limits.max_tokens is {limits.max_tokens}")
    if tape.status != Status.TERMINATED or tape.metrics.get("success", 1.0) < 1.0:
        raise RolloutError(f"the reference of task {tape.assignment.task.id} does not solve it in {limits.max_turns} turns")
