"""A dialogue as an actor plays it: an actor's history makes its prompts, an actor's tape its record."""

from __future__ import annotations

from collections.abc import Sequence

from actors.conversation import Conversation
from actors.history import Beginning, History, Rules
from actors.tape import Sampled, Tape
from actors.toolcalls.turns import TurnParser
from common.record import chains, full_prompt
from common.types import Assignment, ContextPolicy, Finish, Limits, Message, Sampling, Source, Status, Task
from common.validate import Vocabulary

LIMITS = Limits(max_turns=10**6, max_tokens=10**9, deadline_s=1e9)
# A record of what was said, with no logprobs in it: an engine's are looked at in rows of their own.
ASSIGNMENT = Assignment(
    "certificate", 0, "certificate", Task("certificate", "t", 0, {}), Source.REFERENCE, "train", LIMITS, Sampling(1.0, 10**6),
    ContextPolicy(),
)  # fmt: skip

Written = list[tuple[list[int], list[int]]]  # of each turn: its prompt, what was sampled there; the last has a prompt alone


def parser_of(chat: Conversation) -> TurnParser:
    return TurnParser(chat.codec, chat.end_id, chat.opens_reasoning, chat.format, chat.end_ids)


class Played:
    """One dialogue, turn by turn. `history`: what makes the prompts; actors have History."""

    def __init__(self, chat: Conversation, beginning: Beginning, history: type[History] = History) -> None:
        self._chat, self._parser = chat, parser_of(chat)
        self._history, self._tape = history(chat, Rules(), beginning, LIMITS.max_tokens), Tape(ASSIGNMENT)
        self._prompt = self._history.begin()
        self._turns: Written = []

    @property
    def prompt(self) -> list[int]:
        """The next one."""
        return self._prompt.ids.tolist()

    @property
    def written(self) -> Written:
        return [*self._turns, (self.prompt, [])]

    def turn(self, ids: Sequence[int], answers: Sequence[Message]) -> None:
        """`ids` were sampled behind the prompt, and answered."""
        self._turns.append((self.prompt, list(ids)))
        finish = Finish.STOP if self._chat.ended(ids) else Finish.LENGTH
        turn = self._parser.parse(ids, finish, len(self._turns) - 1)
        index = self._tape.append(self._prompt, Sampled(list(ids), [], [], finish), turn, {})
        self._history.stored(self._prompt, ids, index)
        self._history.turn(ids, turn.spans, answers)
        self._prompt = self._history.show(self._history.next_view())

    def problems(self) -> list[str]:
        """Prompts that do not begin with what was there, and a record that does not give them back."""
        written, found = self.written, []
        for n, (prompt, ids) in enumerate(self._turns):
            before = [*prompt, *ids]
            if written[n + 1][0][: len(before)] != before:
                found.append(f"prompt {n + 2} does not begin with prompt {n + 1} and its sample")
        self._tape.end(Status.TRUNCATED)
        known = len(self._chat.codec.pieces)
        record = self._tape.trajectory(Vocabulary(known, known))
        if record.status == Status.FAILED:
            return [*found, f"the record breaks a rule: {', '.join(record.flags)}"]
        if len(chains(record.steps)) > 1:
            found.append(
                f"the record falls into {len(chains(record.steps))} segments: prompts do not grow out of what was sampled"
            )
        for n, (prompt, _) in enumerate(self._turns):
            if full_prompt(record, n).tolist() != prompt:
                found.append(f"the record gives back another prompt {n + 1} than the one that was sampled behind")
        return found
