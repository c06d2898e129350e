"""Agents: the loop of turns of the policy, of the sub-agents that it calls, and the summaries of what they no longer see.

All agents of a rollout share its environment, one after another. A sub-agent is a branch: its first prompt continues the turn
that called it with nothing but what both openings have in common, and its last words come back as the answer to the call.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from actors.chat import EMPTY, Context
from actors.codec import END_THINK
from actors.conversation import Conversation
from actors.engines import Engines, EngineUnavailable, Request
from actors.envs import Envs, Session
from actors.history import ASK, Beginning, History, Prompt, Rules
from actors.observations import Part, Room, assemble
from actors.summaries import Summaries
from actors.tape import Sampled, Tape
from actors.toolcalls.arguments import schemas_of
from actors.toolcalls.turns import Turn, TurnParser
from common.addresses import EVAL, MAIN, STALE
from common.config_domain import DELEGATE
from common.seeds import turn_seed, turn_uses_stale_pool
from common.types import (
    Action,
    ContextKind,
    Finish,
    Message,
    Observation,
    Status,
    StepKind,
    ToolCall,
    ToolOutcome,
    ids_array,
)
from common.validate import Vocabulary
from common.waits import Wait, Waits

log = logging.getLogger("actors.agents")

TURN_TRIES = 8  # requests for one turn, over all engines: the only retry of a generation
DELEGATE_TOOL = {
    "type": "function",
    "function": {
        "name": DELEGATE,
        "description": "Have a helper do a part of the task. It has the other tools, sees only your words, answers with a text.",
        "parameters": {
            "type": "object",
            "properties": {"task": {"type": "string", "description": "all that the helper needs to know"}},
            "required": ["task"],
        },
    },
}


class RolloutError(Exception):
    """The rollout cannot go on, and nobody's retry would help it."""


@dataclass(frozen=True, eq=False)
class Parts:
    """What all rollouts of a process share."""

    chat: Conversation
    parser: TurnParser
    vocabulary: Vocabulary
    engines: Engines
    envs: Envs
    summaries: Summaries
    waits: Waits  # of the process; heartbeats report them


@dataclass(frozen=True)
class Stopped:
    """Why an agent takes no more turns: "over" (the environment ended), "answer" (a sub-agent's `text`), or a limit's name."""

    why: str
    text: str = ""
    flags: tuple[str, ...] = ()


class Agents:
    """Of one rollout by the policy."""

    def __init__(self, tape: Tape, parts: Parts, session: Session, wait: Wait) -> None:
        """Raises ValueError for a context policy that this actor does not know."""
        self._tape, self._parts, self._session, self._wait = tape, parts, session, wait
        self._rules = Rules.of(tape.assignment.context)
        self._limits = tape.assignment.limits
        self._engines: dict[str, str] = {}  # pool -> the engine there that sampled last: it holds the prefix
        self._newest: History | None = None  # whose step was the last one
        self._helpers = self._rules.subagent_calls if self._rules.subagent_turns else 0  # that may still be called

    async def play(self) -> None:
        """The rollout, from the opened environment to the record's status."""
        history = self._history(self._session.observation.messages, helpers=self._helpers > 0)
        stopped = await self._turns(history, StepKind.ACT, self._limits.max_turns)
        if stopped.why != "over":
            self._tape.end(Status.TRUNCATED, *stopped.flags, tail=self._tail())

    def _history(self, messages: Sequence[Message], helpers: bool) -> History:
        sizes = self._limits.max_tokens, self._tape.assignment.sampling.max_new_tokens
        return open_history(self._parts.chat, self._rules, self._session, sizes, messages, helpers)

    async def _turns(self, history: History, kind: StepKind, most: int) -> Stopped:
        limit, sampling = self._limits.max_tokens, self._tape.assignment.sampling
        for number in range(most):
            # The deadline is looked at between two turns, where the state that the rollout would go on from is known.
            if self._tape.steps and time.monotonic() > self._tape.begun + self._limits.deadline_s:
                return Stopped("deadline", flags=("deadline",))
            prompt = await self._next(history) if number else history.begin()
            room = limit - len(prompt)
            if not self._tape.steps:
                check_opening(len(prompt), limit, self._rules)
            if room < 1:
                return Stopped("token_limit", flags=("token_limit",))
            turn, finish = await self._turn(history, prompt, kind, min(sampling.max_new_tokens, room))
            if finish == Finish.LENGTH:
                return Stopped("length", flags=("length", "token_limit") if room < sampling.max_new_tokens else ("length",))
            if kind == StepKind.SUBAGENT and not turn.action.tool_calls:
                return Stopped("answer", turn.action.text)
            index = history.last
            observation = await self._act(history, turn.action, kind)
            history.turn(self._tape.steps[index].action_ids.tolist(), turn.spans, observation.messages)
            if observation.status != Status.RUNNING and self._tape.status == Status.RUNNING:
                self._tape.end(observation.status, tail=self._tail())
            if self._tape.status != Status.RUNNING:
                return Stopped("over")
        return Stopped("turn_limit", flags=("turn_limit",))

    async def _turn(self, history: History, prompt: Prompt, kind: StepKind, most: int) -> tuple[Turn, Finish]:
        """Sample at most `most` tokens and store them."""
        begun, index = time.monotonic(), len(self._tape.steps)
        asked = self._tape.assignment
        stale = turn_uses_stale_pool(asked.sampling.seed, index, asked.stale_share)
        held_out = asked.purpose == "eval" and self._parts.engines.places.has(EVAL)
        sampled = await self._sample(prompt.ids, most, EVAL if held_out else STALE if stale else MAIN)
        self._tape.counts["stale_fallbacks"] += stale and any(run.pool != STALE for run in sampled.versions)
        self._engines |= {run.pool: run.engine for run in sampled.versions}
        generated = time.monotonic()
        turn = self._parts.parser.parse(sampled.ids, sampled.finish, index, schemas_of(history.tools_json))
        timings = {"generate": generated - begun, "parse": time.monotonic() - generated}
        self._tape.append(prompt, sampled, turn, timings, kind)
        history.stored(prompt, sampled.ids, index)
        self._newest = history
        return turn, sampled.finish

    def _tail(self) -> Context:
        """The answer to the newest turn, whoever took it; a turn that was cut has none, nor has a helper's last word."""
        return self._newest.tail() if self._newest and self._newest.answered else EMPTY

    # ---- what is shown --------------------------------------------------------------------------------------

    async def _next(self, history: History) -> Prompt:
        """The prompt after the newest turn; longer than limits.max_tokens when there is no room left."""
        view = history.next_view()
        if self._rules.name == "summary" and view.first > history.view.first:
            if self._rules.summary_url:
                history.summary = await self._foreign_summary(history.transcript(view)) or history.summary
            else:
                asking = history.ask()
                room = self._limits.max_tokens - len(asking)
                if room < 1:
                    return asking
                turn, _ = await self._turn(history, asking, StepKind.SUMMARY, min(self._rules.summary_tokens, room))
                history.summed_up(self._tape.steps[-1].action_ids.tolist(), turn.spans)
        return history.show(view)

    async def _foreign_summary(self, transcript: str) -> tuple[int, ...]:
        """Of another model: text, so it is encoded, and nobody is trained on it."""
        rules = self._rules
        self._wait.set("summary", rules.summary_url, rules.summary_model)
        text = await self._parts.summaries.write(
            rules.summary_url, rules.summary_model, f"{transcript}\n\n{ASK}", rules.summary_tokens
        )
        text = text.rpartition(END_THINK)[2]
        part = Part(self._parts.chat.codec.encode_text(text.strip()), ContextKind.SUMMARY, text=True)
        return tuple(assemble([part], self._parts.chat.codec, Room(each=rules.summary_tokens))[0])

    # ---- what is done ---------------------------------------------------------------------------------------

    async def _act(self, history: History, action: Action, kind: StepKind) -> Observation:
        """Calls of the environment's tools first, in one step of it, then those of helpers; messages in the order of calls."""
        index = history.last
        helps = [call for call in action.tool_calls if kind == StepKind.ACT and self._rules.subagent_turns and _delegates(call)]
        others = tuple(call for call in action.tool_calls if call not in helps)
        observation = Observation((), 0.0, Status.RUNNING)
        if others or not helps:
            observation = await env_step(
                self._tape, self._parts, self._session, index, replace(action, tool_calls=others), self._wait
            )
        if not helps:
            return observation
        answers = []
        for call in helps:
            begun = time.monotonic()
            text, error = "", "Not executed: the episode is over."
            if observation.status == self._tape.status == Status.RUNNING:
                text, error = await self._delegate(history, call)
            self._tape.called(index, [ToolOutcome(DELEGATE, not error, error, time.monotonic() - begun)])
            answers.append(Message("tool", f"Error: {error}" if error else text, call.id))
        order = {call.id: n for n, call in enumerate(action.tool_calls)}
        messages = sorted((*observation.messages, *answers), key=lambda message: order.get(message.tool_call_id, len(order)))
        return replace(observation, messages=tuple(messages))

    async def _delegate(self, history: History, call: ToolCall) -> tuple[str, str]:
        """The helper's answer, or what went wrong."""
        task = call.arguments.get("task") if isinstance(call.arguments, dict) else None
        if not isinstance(task, str) or not task.strip():
            return "", f"{DELEGATE} needs the argument task, a text"
        if not self._helpers:
            return "", f"no more helpers: {self._rules.subagent_calls} are allowed"
        self._helpers -= 1
        helper = self._history((Message("user", task),), helpers=False)
        helper.branch(history)
        stopped = await self._turns(helper, StepKind.SUBAGENT, self._rules.subagent_turns)
        if stopped.why == "answer":
            return stopped.text.strip(), "" if stopped.text.strip() else "the helper said nothing"
        return "", f"the helper came to no answer ({stopped.why})"

    async def _sample(self, prompt: np.ndarray, budget: int, wanted: str) -> Sampled:
        """Sample one turn, from another engine if one dies. Raises EngineUnavailable when TURN_TRIES are used up.

        A turn that an engine aborts (for new weights) goes on after the tokens it has: each keeps its own logprob and version.
        Every try of a turn has the same seed: it is a function of the rollout and the turn alone. An engine that keys its draws
        by position then goes on as if nothing had happened. The pool is `wanted` at every try, too; main, when that is the
        stale one and no engine of it is ready.
        """
        tape, parts, wait = self._tape, self._parts, self._wait
        assignment, index = tape.assignment, len(tape.steps)
        s = assignment.sampling
        ends = tuple(dict.fromkeys((parts.chat.end_id, *sorted(parts.chat.end_ids), *s.stop_token_ids)))
        stops = (*s.stop, *parts.chat.format.stops)  # looked for here: engines that get ids have no text
        sampled, why = Sampled(), ""
        for attempt in range(TURN_TRIES):
            otherwise = MAIN if wanted == STALE else ""
            async with parts.engines.places.take(self._engines.values(), wanted, wait.set, otherwise) as chosen:
                wait.set("engine.generate", chosen.name, deadline_s=parts.engines.timeout_s)
                rid = f"{assignment.rollout_id}.{assignment.attempt}.{index}.{attempt}"
                left = budget - len(sampled.ids)
                ids = np.concatenate([prompt, ids_array(sampled.ids)])
                request = Request(rid, ids, left, s.temperature, ends, turn_seed(s.seed, index))
                try:
                    sampled.add(await parts.engines.generate(chosen, request))
                    why = f"{chosen.name} aborted the request"
                except EngineUnavailable as error:
                    why = str(error)
                    log.info("rollout %s turn %d: %s", assignment.rollout_id, index, error)
                    tape.counts["engine_retries"] += 1
                    continue
            sampled.cut_at(stops, parts.chat.codec.pieces)
            if sampled.finish != Finish.ABORT:
                return sampled
            tape.counts["engine_retries"] += 1
            if len(sampled.ids) >= budget:
                sampled.finish = Finish.LENGTH
                return sampled
        raise EngineUnavailable(f"{TURN_TRIES} tries of one turn; the last: {why}")


def open_history(
    chat: Conversation, rules: Rules, session: Session, sizes: tuple[int, int], messages: Sequence[Message], helpers: bool
) -> History:
    """`sizes`: tokens of a sequence, and of one turn. Raises RolloutError when there is nothing to do, or when a tool of the
    environment has the name of ours."""
    if session.observation.status != Status.RUNNING:
        raise RolloutError("the environment ended at its reset")
    tools_json = session.tools_json
    if helpers:
        tools = json.loads(tools_json) if tools_json else []
        if DELEGATE in [tool.get("function", tool).get("name") for tool in tools]:
            raise RolloutError(f"the environment has a tool {DELEGATE!r} of its own; set context.subagent_turns = 0")
        tools_json = json.dumps([*tools, DELEGATE_TOOL])
    return History(chat, rules, Beginning(session.instructions, tools_json, tuple(messages)), *sizes)


def check_opening(tokens: int, limit: int, rules: Rules) -> None:
    """Raises RolloutError when nothing could follow the first prompt, or when every turn would be cut away at once."""
    if tokens >= limit:
        raise RolloutError(f"the first prompt has {tokens} tokens, limits.max_tokens is {limit}")
    if 0 < rules.tokens <= tokens:
        raise RolloutError(
            f"the first prompt has {tokens} tokens, context.tokens is {rules.tokens}: every turn would be cut away"
        )


async def env_step(tape: Tape, parts: Parts, session: Session, index: int, action: Action, wait: Wait) -> Observation:
    """The environment's answer to step `index`, recorded."""
    begun = time.monotonic()
    wait.set("env.step", session.replica.name)
    observation = await parts.envs.step(session, tape.env_steps, action)
    tape.observe(index, observation, time.monotonic() - begun)
    return observation


def _delegates(call: ToolCall) -> bool:
    return call.name == DELEGATE and not call.error
