"""Context policies in whole rollouts: over a real env server and a scripted engine, to the record and its segments."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.chat import Remark
from actors.history import ASK, PLACEHOLDER, UNSHOWN, Rules, check_room
from actors.rollout import run_rollout
from common.record import chains, full_prompt, segments
from common.types import ContextKind, ContextPolicy, Finish, Limits, Message, Source, Status, StepKind
from common.validate import check
from common.waits import Wait
from tests.actors.contexts import CALL, CODEC, LIMITS, numbered, sane, shown, spell, under
from tests.actors.servers import ScriptedDomain, assignment, env_server, play, ready, toy_parts
from tests.actors.toy import CHATML, VOCABULARY, Toy, toy_chat
from tests.fakes import FakeEngine


async def test_window() -> None:
    work = under("window", ["a", "b", "c", "d"], turns=2)
    with FakeEngine(reply=numbered()) as engine:
        record = await play(work, engine)
        sane(record, engine, work)
    assert (record.status, len(record.steps), record.total_reward) == (Status.TERMINATED, 4, 1.0)
    opening = "<|im_start|>system\nhello<|im_end|>\n<|im_start|>user\nhe<|im_end|>\n"
    turn = "<|im_start|>assistant\n{}<|im_end|>\n<|im_start|>tool\n{}<|im_end|>\n"
    notice = f"<|im_start|>user\n{UNSHOWN.format(count=1)}<|im_end|>\n"
    last = turn.format("hello" * 2, "b") + turn.format("hello" * 3, "c") + "<|im_start|>assistant\n"
    assert shown(record, 3) == opening + notice + last
    assert chains(record.steps) == [[0, 1, 2], [3]]
    assert record.metrics["turns"] == 4


async def test_older_observations_have_a_placeholder() -> None:
    work = under("append", ["aaa", "bbb", "ccc", "ddd"], observations=1)
    with FakeEngine(reply=numbered()) as engine:
        record = await play(work, engine)
        sane(record, engine, work)
    assert shown(record, 3).count(PLACEHOLDER) == 2
    assert "aaa" not in shown(record, 3)
    assert "bbb" in shown(record, 2)
    assert "ccc" in shown(record, 3)
    # The first prompt that hides one shares all up to its text, and shows the turn after it again.
    assert chains(record.steps) == [[0, 1], [2], [3]]
    (_, second, _) = segments(record)
    assert second.kinds.tolist().count(ContextKind.NOTICE) == len(spell(PLACEHOLDER))


async def test_discard_all_above_a_length() -> None:
    work = under("discard", ["a" * 30, "b" * 40, "c" * 30, "d"], tokens=110)
    with FakeEngine(reply=numbered()) as engine:
        record = await play(work, engine)
        sane(record, engine, work)
    assert [len(full_prompt(record, n)) for n in range(3)] == [20, 20 + 2 + 39, 20 + len(spell(UNSHOWN.format(count=2))) + 5]
    assert "bbb" not in shown(record, 2)
    assert UNSHOWN.format(count=2) in shown(record, 2)
    assert chains(record.steps) == [[0, 1], [2, 3]]


async def test_the_policy_sums_up_and_is_trained_on_it() -> None:
    summary = [5, 6, 15, 7, 2]  # "he" "llo": not how the tokenizer spells it

    def reply(prompt: list[int], sampling: dict) -> list[int]:
        text = b"".join(CODEC.pieces[i] for i in prompt).decode()
        return summary if "Sum up" in text.rsplit("<|im_start|>", 2)[1] else [7, 2]

    work = under("summary", ["a" * 30, "b" * 30, "c" * 30, "d"], tokens=90, keep=1, summary_tokens=40)
    with FakeEngine(reply=reply) as engine:
        record = await play(work, engine)
        sane(record, engine, work)
        budgets = [body["sampling_params"]["max_new_tokens"] for path, body in engine.calls if path == "/generate"]
    kinds = [step.kind for step in record.steps]
    assert kinds == [StepKind.ACT, StepKind.ACT, StepKind.SUMMARY, StepKind.ACT, StepKind.SUMMARY, StepKind.ACT]
    assert budgets == [200, 200, 40, 200, 40, 200]
    assert [step.reward for step in record.steps] == [0, 0, 0, 0, 0, 1.0]
    assert (record.metrics["turns"], record.metrics["summaries"]) == (4, 2)
    assert chains(record.steps) == [[0, 1, 2], [3, 4], [5]]
    second = segments(record)[1]
    assert second.ids[second.kinds == ContextKind.SUMMARY].tolist() == summary[:-1]
    assert "b" * 30 in shown(record, 2)  # what is summed up has the newest answer, which stays in the next prompt
    assert "b" * 30 in shown(record, 3)
    assert "a" * 30 not in shown(record, 3)
    assert len(record.steps[2].action_logprobs) == 5


async def test_a_summary_that_is_cut_serves_as_it_is_and_calls_nothing() -> None:
    def reply(prompt: list[int], sampling: dict) -> list[int]:
        return [*CALL[:-1], *[7] * 90] if sampling["max_new_tokens"] == 40 else [7, 2]

    domain = ScriptedDomain()
    work = under("summary", ["a" * 60, "b"], tokens=60, summary_tokens=40)
    with FakeEngine(reply=reply) as engine:
        record = await play(work, engine, domain=domain)
        sane(record, engine, work)
    assert record.status == Status.TERMINATED
    assert record.steps[1].finish == Finish.LENGTH
    assert [action.tool_calls for action in domain.actions] == [(), ()]
    last = segments(record)[1]
    assert last.ids[last.kinds == ContextKind.SUMMARY].tolist() == [7] * (40 - len(CALL) + 1)


async def test_no_summary_is_made_after_the_last_turn() -> None:
    work = under("summary", ["a" * 60] * 3, Limits(1, 400, 20.0), tokens=60, summary_tokens=40)
    with FakeEngine(reply=numbered()) as engine:
        record = await play(work, engine)
        sane(record, engine, work)
    assert ([step.kind for step in record.steps], record.flags) == ([StepKind.ACT], ("turn_limit",))
    assert len(record.tail_ids) > 60


async def test_no_room_for_a_summary_ends_the_rollout() -> None:
    work = under("summary", ["a" * 60] * 3, Limits(8, 40, 20.0), tokens=30, summary_tokens=10)
    with FakeEngine(reply=lambda prompt, sampling: [7, 2]) as engine:
        record = await play(work, engine)
        sane(record, engine, work)
    assert ([step.kind for step in record.steps], record.flags) == ([StepKind.ACT], ("token_limit",))


async def test_a_summary_that_says_nothing_leaves_the_last_one() -> None:
    said = iter([[5, 6, 1, 5, 2], [2], [8, 7, 9, 2]])  # a control id in the middle is not shown again; empty; reasoning alone

    def reply(prompt: list[int], sampling: dict) -> list[int]:
        return next(said) if sampling["max_new_tokens"] == 40 else [7, 2]

    work = under("summary", ["a" * 60, "b" * 60, "c" * 60, "d"], tokens=60, summary_tokens=40)
    chat = toy_chat(codec=Toy(marks_are_ids=True))
    with FakeEngine(reply=reply) as engine:
        record = await play(work, engine, chat)
        sane(record, engine, work)
    kinds = [step.kind for step in record.steps]
    assert kinds == [StepKind.ACT, StepKind.SUMMARY] * 3 + [StepKind.ACT]
    for row in segments(record)[1:]:
        assert row.ids[row.kinds == ContextKind.SUMMARY].tolist() == [5, 6, 5]


async def test_a_huge_answer_leaves_room_for_a_turn() -> None:
    for policy, options in (("append", {}), ("window", {"turns": 1}), ("discard", {"tokens": 100, "keep": 1})):
        work = under(policy, ["aaa", "x" * 5000, "d"], Limits(8, 500, 20.0), **options)
        work = replace(work, sampling=replace(work.sampling, max_new_tokens=50))
        with FakeEngine(reply=numbered()) as engine:
            record = await play(work, engine)
            sane(record, engine, work)
        assert record.status == Status.TERMINATED, (policy, record.flags)
        assert len(full_prompt(record, 2)) == 450


async def test_a_huge_answer_stays_as_short_as_it_was_shown_first() -> None:
    work = under("window", ["aaa", "x" * 5000, "c", "d"], Limits(8, 700, 20.0), turns=2)
    work = replace(work, sampling=replace(work.sampling, max_new_tokens=50))
    with FakeEngine(reply=numbered()) as engine:
        record = await play(work, engine)
        sane(record, engine, work)
    assert record.status == Status.TERMINATED, record.flags
    cut = shown(record, 2).rpartition("<|im_start|>tool\n")[2].partition("<|im_end|>")[0]
    assert "tokens left out" in cut
    assert f"<|im_start|>tool\n{cut}<|im_end|>\n" in shown(record, 3)


@pytest.mark.parametrize("policy", ["discard", "summary"])
async def test_an_opening_that_is_longer_than_the_cut_is_refused(policy: str) -> None:
    with FakeEngine(reply=numbered()) as engine:
        record = await play(under(policy, ["a"], tokens=20, summary_tokens=9), engine)
    assert record.flags == (
        "reason:RolloutError: the first prompt has 20 tokens, context.tokens is 20: every turn would be cut away",
    )


def test_a_summary_that_has_no_room_is_refused_before_anything_starts() -> None:
    chat = toy_chat()
    question = len(chat.bridge(True, [Message("tool", ""), Remark("user", ASK)]))
    rules = Rules("summary", tokens=100, summary_tokens=30)
    check_room(chat, rules, 100 + 20 + question + 30, 20)
    with pytest.raises(ValueError, match=rf"the question \({question}\) and context.summary_tokens 30"):
        check_room(chat, rules, 100 + 20 + question + 29, 20)
    check_room(chat, replace(rules, summary_url="http://x"), 150, 20)  # another model is asked elsewhere


async def test_a_template_that_wants_roles_to_alternate() -> None:
    """A remark then shares the task's message, and answers of tools that are shown as the user's share one."""
    strict = (
        "{% for m in messages %}{% if not loop.first and m.role == messages[loop.index0 - 1].role %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    )
    chat = toy_chat(strict + CHATML)
    work = under("window", ["a", "b", "c"], turns=1)
    with FakeEngine(reply=numbered()) as engine:
        record = await play(work, engine, chat)
        sane(record, engine, work)
    notice = UNSHOWN.format(count=1)
    assert shown(record, 2).startswith(
        f"<|im_start|>system\nhello<|im_end|>\n<|im_start|>user\nhe\n\n{notice}<|im_end|>\n<|im_start|>a"
    )
    two = chat.bridge(True, [Message("tool", "a"), Message("tool", "b")])
    assert b"".join(CODEC.pieces[i] for i in two.ids).decode() == "\n<|im_start|>tool\na\n\nb<|im_end|>\n<|im_start|>assistant\n"


# ---- references and unknown policies -------------------------------------------------------------------------------------


async def test_a_reference_is_shown_as_the_policy_would_see_it() -> None:
    async with env_server(ScriptedDomain()) as server:
        with FakeEngine() as engine:
            async with toy_parts([f"127.0.0.1:{server.port}"], ready(engine)) as parts:
                for policy, rows in (("window", [[0, 1], [2], [3]]), ("summary", [[0, 1, 2, 3]])):
                    work = assignment(["a", "b", "c", "d"], LIMITS, Source.REFERENCE, f"r-{policy}", reference=4)
                    options = {"turns": 1} if policy == "window" else {"tokens": 10, "summary_tokens": 9}
                    work = replace(work, context=ContextPolicy(policy, options))
                    record = await run_rollout(work, parts, Wait())
                    assert record.status == Status.TERMINATED, record.flags
                    assert chains(record.steps) == rows
                    check(record, VOCABULARY)


async def test_an_unknown_policy_fails_its_rollout() -> None:
    with FakeEngine() as engine:
        record = await play(under("forget", ["a"]), engine)
    assert record.status == Status.FAILED
    assert "context policy 'forget'" in record.flags[0]
