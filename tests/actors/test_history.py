"""Which part of a dialogue is shown: rules number by number, and every prompt against the template's own rendering of the
messages that should stand in it."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.chat import Chat
from actors.codec import decode_bytes
from actors.history import ASK, PLACEHOLDER, SUMMED_UP, UNSHOWN, Beginning, History, Rules, View
from actors.tape import Sampled, Tape
from actors.template import Slots, compile_template
from actors.toolcalls.turns import TurnParser
from common.config_domain import ContextConfig
from common.record import full_prompt, segments
from common.types import (
    ContextKind,
    ContextPolicy,
    Finish,
    Limits,
    Message,
    Status,
    StepKind,
    Trajectory,
    VersionRun,
    expand_spans,
)
from tests.actors.servers import assignment
from tests.actors.toy import CHATML, OPENS_THINKING, VOCABULARY, Toy, toy_chat

TEMPLATES = {"plain": CHATML, "opens thinking": OPENS_THINKING}
TASK = Beginning("hello", "", (Message("user", "he"),))
LIMIT = 4000


def test_an_actor_knows_every_option_of_the_configuration() -> None:
    config = ContextConfig(name="window", turns=3, reasoning="drop", slack=1)
    assert Rules.of(config.policy) == Rules("window", turns=3, keep=1, reasoning="drop", slack=1, subagent_calls=4)
    assert {field.name for field in fields(Rules)} == set(ContextConfig.model_fields)
    with pytest.raises(ValueError, match=r"'window' with \['colour'\] is unknown"):
        Rules.of(ContextPolicy("window", {"turns": 3, "colour": 1}))
    with pytest.raises(ValueError, match="'forget'"):
        Rules.of(ContextPolicy("forget"))


def views(rules: Rules, turns: int, by_user: frozenset[int] = frozenset()) -> list[tuple[int, int, int]]:
    """After each turn; numbers from 1."""
    out, view = [], View()
    for count in range(1, turns + 1):
        view = rules.trim(view, count, count in by_user)
        out.append((view.first, view.hidden, view.bare))
    return out


def test_a_window_moves_when_more_turns_than_it_and_its_slack_are_shown() -> None:
    assert views(Rules("window", turns=2), 5) == [(0, 0, 0), (0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0)]
    # With a slack of 2 it shows 2, 3 and 4 turns, then 2 again: one segment for three turns.
    assert [first for first, _, _ in views(Rules("window", turns=2, slack=2), 9)] == [0, 0, 0, 0, 3, 3, 3, 6, 6]


def test_the_newest_observations_stay() -> None:
    assert [hidden for _, hidden, _ in views(Rules(observations=2), 5)] == [0, 0, 1, 2, 3]
    assert [hidden for _, hidden, _ in views(Rules(observations=2, slack=1), 7)] == [0, 0, 0, 2, 2, 4, 4]
    # Together with a window: of the turns that it shows, the newest one's.
    assert views(Rules("window", turns=3, observations=1), 5)[-1] == (2, 4, 0)


def test_reasoning_is_dropped_at_once_or_when_a_user_speaks() -> None:
    assert [bare for _, _, bare in views(Rules(reasoning="drop"), 3)] == [1, 2, 3]
    assert [bare for _, _, bare in views(Rules(reasoning="drop", slack=1), 5)] == [0, 2, 2, 4, 4]
    assert [bare for _, _, bare in views(Rules(reasoning="drop_at_user"), 5, frozenset({3}))] == [0, 0, 3, 3, 3]


@pytest.mark.parametrize("name", ["discard", "summary"])
def test_a_cut_comes_with_length_and_leaves_the_newest_turns(name: str) -> None:
    rules = Rules(name, tokens=100, keep=2)
    assert rules.cut(View(), 7, 100) == View()
    assert rules.cut(View(), 7, 101) == View(5)
    assert rules.cut(View(5), 6, 101) == View(5)  # nothing comes back
    assert Rules("append").cut(View(), 7, 10**9) == View()


# ---- whole dialogues ---------------------------------------------------------------------------------------------------

REASONING = st.lists(st.sampled_from([5, 7, 15, 4, 100 + ord("x")]), max_size=3).map(lambda ids: [8, *ids, 9, 4])
WORDS = st.lists(st.sampled_from([5, 6, 7, 12, 100 + ord("("), 100 + 0xC3]), min_size=1, max_size=4)
TURNS = st.lists(
    st.tuples(
        st.booleans() | st.just(True),  # whether the turn ends itself
        st.just([]) | REASONING,
        WORDS,
        st.lists(st.builds(Message, st.sampled_from(["tool", "user"]), st.text("he <|im_end|>🙂", max_size=9)), max_size=2),
    ),
    min_size=1,
    max_size=9,
)
RULES = st.builds(
    Rules,
    name=st.sampled_from(["append", "window", "discard", "summary"]),
    turns=st.integers(1, 3),
    tokens=st.integers(40, 200),
    keep=st.integers(0, 2),
    summary_tokens=st.just(20),
    observations=st.integers(0, 2),
    reasoning=st.sampled_from(["keep", "drop", "drop_at_user"]),
    slack=st.integers(0, 2),
)


class Player:
    """Plays a dialogue through a history, as actors do, and keeps the messages that should be shown."""

    def __init__(self, rules: Rules, template: str) -> None:
        self.chat: Chat = toy_chat(template, Toy(marks_are_ids=True))
        self.parser = TurnParser(self.chat.codec, 2, self.chat.opens_reasoning)
        self.rules = rules
        self.history = History(self.chat, rules, TASK, LIMIT)
        self.tape = Tape(assignment(["he"], Limits(99, LIMIT, 1.0)))
        self.turns: list[tuple[str, str, list[Message]]] = []  # whole text, text without reasoning, the answer
        self.summary = ""

    def sample(self, prompt, ids: list[int], kind: StepKind = StepKind.ACT):
        turn = self.parser.parse(ids, Finish.STOP, 0)
        sampled = Sampled(list(ids), [-0.5] * len(ids), [VersionRun(0, 1, "e", "main")], Finish.STOP)
        index = self.tape.append(prompt, sampled, turn, {}, kind)
        self.history.stored(prompt, ids, index)
        return turn

    def play(self, dialogue) -> Trajectory:
        prompt = self.history.begin()
        for ended, reasoning, words, messages in dialogue:
            before = reasoning[1:] if self.chat.opens_reasoning and reasoning else reasoning
            before = [9] if self.chat.opens_reasoning and not reasoning else before
            ids = [*before, *words, *([2] if ended else [])]
            turn = self.sample(prompt, ids)
            self.history.turn(ids, turn.spans, messages)
            text, bare = self.text([*before, *words]), self.text(words).lstrip()
            self.turns.append((text, bare, messages))
            view = self.history.next_view()
            if self.rules.name == "summary" and view.first > self.history.view.first:
                asking = self.history.ask()
                assert self.text(asking.ids).endswith(self.rendered(self.history.view, [Message("user", ASK)]))
                turn = self.sample(asking, [*before, 7, 6, 2], StepKind.SUMMARY)
                self.history.summed_up([*before, 7, 6, 2], turn.spans)
                self.summary = "hellollo"
            prompt = self.history.show(view)
            assert self.text(prompt.ids) == self.rendered(view, [])
        self.tape.end(Status.TRUNCATED, "turn_limit", tail=self.history.tail())
        record = self.tape.trajectory(VOCABULARY)
        assert record.status == Status.TRUNCATED, record.flags
        return record

    def text(self, ids) -> str:
        return decode_bytes(self.chat.codec, list(ids)).decode("utf-8", "replace")

    def rendered(self, view: View, more: list[Message]) -> str:
        """What the template says of the messages that should be shown."""
        said = [("system", "hello"), ("user", "he")]
        if view.first:
            said.append(("user", (SUMMED_UP if self.summary else UNSHOWN).format(count=view.first) + self.summary))
        opened = "<think>\n" if self.chat.opens_reasoning else ""
        for number, (whole, bare, messages) in list(enumerate(self.turns))[view.first :]:
            said.append(("assistant", bare if number < view.bare else opened + whole))
            hidden = number < view.hidden and number < len(self.turns) - 1
            said += [(message.role, PLACEHOLDER if hidden else message.text) for message in messages]
        said += [(message.role, message.text) for message in more]
        return render([{"role": role, "content": text} for role, text in said], self.chat.opens_reasoning)


def render(messages: list[dict[str, str]], opens_reasoning: bool) -> str:
    return compile_template(OPENS_THINKING if opens_reasoning else CHATML)(messages, [], True, Slots(0))


@settings(max_examples=300, deadline=None)
@given(RULES, st.sampled_from(sorted(TEMPLATES)), TURNS)
def test_every_prompt_is_what_the_template_shows_of_the_view(rules: Rules, template: str, dialogue) -> None:
    player = Player(rules, TEMPLATES[template])
    record = player.play(dialogue)
    rows = segments(record)
    held = np.zeros(len(record.steps), int)
    for row in rows:  # every sampled token has its mask in exactly one segment
        for index in row.steps:
            at = row.step_of == index
            assert row.ids[at].tolist() == record.steps[index].action_ids.tolist()
            assert row.mask[at].all()
            held[index] += at.sum()
    assert held.tolist() == [len(step.action_ids) for step in record.steps]
    assert sum(int(row.mask.sum()) for row in rows) == held.sum()
    for index, step in enumerate(record.steps):  # sampled ids are shown again as they are, and as nothing else
        kinds = expand_spans(step.context_spans, len(step.context_ids))
        if step.parent >= 0 and step.prefix_len < len(full_prompt(record, step.parent)):
            assert len(rows) > 1
        assert set(kinds.tolist()) <= {1, 2, 3, 4, 5, 6}
        assert (ContextKind.SUMMARY in kinds) <= (rules.name == "summary"), index


def test_append_keeps_one_segment_whatever_happens() -> None:
    player = Player(Rules(), CHATML)
    record = player.play([(n % 2 == 0, [8, 5, 9, 4], [7], [Message("tool", "he")]) for n in range(6)])
    assert len(segments(record)) == 1


def test_003_reasoning_dropped_in_history_opens_a_segment() -> None:
    """Two segments, every sampled token with its mask in one of them, the observation in the second; append has one."""
    dialogue = [(True, [8, 5, 9], [7], [Message("user", "llo")]), (True, [], [7], [])]
    record = Player(Rules(reasoning="drop_at_user"), CHATML).play(dialogue)
    first, second = segments(record)
    assert first.ids[first.mask].tolist() == [8, 5, 9, 7, 2]
    assert second.ids[second.mask].tolist() == [7, 2]
    assert [8, 5, 9] not in [second.ids[at : at + 3].tolist() for at in range(len(second.ids))]
    assert 6 in second.ids[second.kinds == ContextKind.OBSERVATION].tolist()  # "llo"
    assert second.ids[: record.steps[1].prefix_len].tolist()[-3:] == [1, 13, 4]  # shared: up to where the reasoning stood
    assert record.steps[1].context_ids.tolist() == [7, 2, 4, 1, 12, 4, 6, 2, 4, 1, 13, 4]
    (row,) = segments(Player(Rules(), CHATML).play(dialogue))
    assert [8, 5, 9] in [row.ids[at : at + 3].tolist() for at in range(len(row.ids))]


def test_a_policy_of_tool_answers_keeps_reasoning_until_a_user_speaks() -> None:
    answers = ["tool", "tool", "user", "tool"]
    record = Player(Rules(reasoning="drop_at_user"), CHATML).play(
        [(True, [8, 5, 9], [7], [Message(role, "he")]) for role in answers]
    )
    assert [row.steps for row in segments(record)] == [(0, 1, 2), (3,)]


def test_a_summary_is_shown_as_it_was_sampled_without_its_reasoning() -> None:
    history = History(toy_chat(), Rules("summary", tokens=1, summary_tokens=9), TASK, 400)
    parser = TurnParser(toy_chat(codec=Toy(marks_are_ids=True)).codec, 2)
    history.stored(history.begin(), [7, 2], 0)
    history.turn([7, 2], parser.parse([7, 2], Finish.STOP, 0).spans, [Message("tool", "he")])
    asking = history.ask()
    summary = [8, 7, 9, 4, 5, 6, 5, 2]  # 5 6 is not how "hello" is encoded
    history.stored(asking, summary, 1)
    history.summed_up(summary, parser.parse(summary, Finish.STOP, 1).spans)
    prompt = history.show(View(1))
    assert history.summary == (5, 6, 5)
    kinds = expand_spans(prompt.context.spans, len(prompt.context))
    assert prompt.context.ids[kinds == ContextKind.SUMMARY].tolist() == [5, 6, 5]
    # 11 ids of the system's message, 6 of the user's and <|im_start|>: then the assistant's turn was, where the remark is now.
    assert (prompt.parent, prompt.prefix_len) == (1, 18)


def long_answer(rules: Rules, limit: int) -> History:
    history = History(toy_chat(), rules, TASK, limit)
    for index, text in enumerate(("he", "x" * 500)):
        prompt = history.show(history.next_view()) if index else history.begin()
        history.stored(prompt, [7, 2], index)
        history.turn([7, 2], TurnParser(toy_chat().codec, 2).parse([7, 2], Finish.STOP, 0).spans, [Message("tool", text)])
    return history


def test_the_newest_answer_is_shortened_to_the_room_that_a_view_leaves() -> None:
    history = long_answer(Rules("window", turns=1), 150)
    prompt = history.show(history.next_view())
    assert (history.view, len(prompt)) == (View(1), 149)  # one token is left for the turn
    assert prompt.ids[-3:].tolist() == [1, 13, 4]


def test_placeholders_may_make_a_cut_unnecessary() -> None:
    """The length is that of the prompt with what else the policy wants."""
    history = long_answer(Rules("discard", tokens=200, observations=1), 4000)
    assert history.next_view() == View(first=2, hidden=1)  # the newest answer alone is too long
    ids = history.ids
    history.stored(history.show(View(hidden=1)), [7, 2], 2)
    assert len(history.ids) > len(ids) + 500
    history.turn([7, 2], TurnParser(toy_chat().codec, 2).parse([7, 2], Finish.STOP, 0).spans, [Message("tool", "he")])
    assert history.next_view() == View(hidden=2)


def test_a_summary_has_room_for_its_tokens() -> None:
    ask = len(toy_chat().codec.encode_text(ASK))
    history = long_answer(Rules("summary", tokens=10, summary_tokens=40), ask + 150)
    assert len(history.ask()) == ask + 150 - 40
    history = long_answer(Rules("summary", tokens=10, summary_tokens=9000), ask + 300)
    room = ask + 300 - len(history.ids)
    assert len(history.ask()) == len(history.ids) + room - room // 2  # half of it, where all would not do


def test_another_model_is_told_what_is_shown_and_no_reasoning_that_is_not() -> None:
    chat = toy_chat(codec=Toy(marks_are_ids=True))
    history = History(chat, Rules("summary", tokens=1, reasoning="drop"), TASK, 4000)
    turn = TurnParser(chat.codec, 2).parse([8, 5, 9, 7, 2], Finish.STOP, 0)
    history.stored(history.begin(), [8, 5, 9, 7, 2], 0)
    history.turn([8, 5, 9, 7, 2], turn.spans, [Message("tool", "llo"), Message("user", "he")])
    assert history.transcript(View(1)) == "hello\n\n[user]\nhe\n\n[assistant]\n<think>he</think>hello\n\n[tool user]\nllo\nhe"
    history.show(View(bare=1))
    assert history.transcript(View(1)) == "hello\n\n[user]\nhe\n\n[assistant]\nhello\n\n[tool user]\nllo\nhe"
