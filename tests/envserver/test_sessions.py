"""Sessions without a wire: leases by a clock that the test moves, idempotence, capacity, hung calls."""

import asyncio

import grpc
import pytest

from common.types import Action, Message, Observation, Status
from envserver.sessions import Refused, Sessions, _to_wire
from envserver.workers import Abandoned, Workers
from tests.envserver.fakes import Clock, Script, script_task
from tests.processes import eventually

HANG = script_task(step="hang")


def make(domain=None, capacity=4, threads=2, lease_s=10.0):
    clock = Clock()
    return Sessions(domain or Script(), capacity, threads, lease_s, clock), clock


def text(reply):
    return reply.observation.messages[0].text


async def hang(sessions, name, index=0):
    """A step that hangs in a thread of the pool."""
    step = asyncio.create_task(sessions.step(name, index, Action("work")))
    await asyncio.to_thread(sessions.domain.running.acquire)
    return step


async def refused(code, awaitable):
    with pytest.raises(Refused) as caught:
        await awaitable
    assert caught.value.code == getattr(grpc.StatusCode, code)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("blocking", [True, False])
async def test_077_a_repeated_step_is_the_recorded_answer_and_runs_nothing(blocking):
    domain = Script(blocking)
    sessions, _ = make(domain)
    await sessions.open("a", script_task(), False)
    first = await sessions.step("a", 0, Action("x"))
    second = await sessions.step("a", 1, Action("y"))
    for _ in range(3):
        assert await sessions.step("a", 0, Action("x")) is first
        assert await sessions.step("a", 1, Action("y")) is second
    assert [event for event in domain.events if event[0] == "step"] == [("step", "x"), ("step", "y")]
    assert (text(first), text(second)) == ("x done", "y done")


async def test_077_the_same_index_while_it_still_runs_joins_it():
    domain = Script()
    sessions, _ = make(domain)
    await sessions.open("a", HANG, False)
    first = await hang(sessions, "a")
    again = [asyncio.create_task(sessions.step("a", 0, Action("work"))) for _ in range(3)]
    await asyncio.sleep(0)
    first.cancel()  # the first caller's deadline has passed; its call goes on
    domain.gate.set()
    replies = await asyncio.gather(*again)
    assert [text(reply) for reply in replies] == ["work done"] * 3
    assert domain.count("step") == 1


async def test_steps_come_in_order_with_one_action_per_index_and_end_with_the_episode():
    sessions, _ = make()
    await sessions.open("a", script_task(steps=2), False)
    assert "step 1 is out of order, the next one is 0" in await refused("FAILED_PRECONDITION", sessions.step("a", 1, Action("x")))
    assert "step -1 is out of order" in await refused("FAILED_PRECONDITION", sessions.step("a", -1, Action("x")))
    await sessions.step("a", 0, Action("x"))
    assert "taken with another action" in await refused("INVALID_ARGUMENT", sessions.step("a", 0, Action("y")))
    last = await sessions.step("a", 1, Action("x"))
    assert last.observation.status == Status.TERMINATED
    assert "the episode has ended" in await refused("FAILED_PRECONDITION", sessions.step("a", 2, Action("x")))
    assert await sessions.step("a", 1, Action("x")) is last
    assert "not open here" in await refused("NOT_FOUND", sessions.step("b", 0, Action("x")))


async def test_the_next_index_does_not_overtake_a_running_step():
    sessions, _ = make()
    await sessions.open("a", HANG, False)
    step = await hang(sessions, "a")
    assert "step 0 is still running" in await refused("FAILED_PRECONDITION", sessions.step("a", 1, Action("x")))
    sessions.domain.gate.set()
    await step


async def test_open_is_idempotent_also_while_it_runs_and_echoes_the_task():
    domain = Script()
    sessions, _ = make(domain)
    task = script_task(reset="hang")
    first = asyncio.create_task(sessions.open("a", task, True))
    await asyncio.to_thread(domain.running.acquire)
    second = asyncio.create_task(sessions.open("a", task, True))
    await asyncio.sleep(0)
    assert "still opening" in await refused("FAILED_PRECONDITION", sessions.step("a", 0, Action("x")))
    first.cancel()
    domain.gate.set()
    reply = await second
    assert await sessions.open("a", task, True) is reply
    assert domain.count("reset") == 1
    assert (reply.task_id, reply.lease_seconds, reply.instructions) == (task.id, 10.0, "Follow the script.")
    assert [action.text for action in reply.reference] == ["solve"]
    assert "not for train-9" in await refused("ALREADY_EXISTS", sessions.open("a", script_task("train-9"), False))


async def test_open_refuses_what_cannot_be():
    sessions, _ = make(Script(has_reference=False))
    await refused("INVALID_ARGUMENT", sessions.open("", script_task(), False))
    assert "no reference" in await refused("INVALID_ARGUMENT", sessions.open("a", script_task(), True))
    other = script_task()
    object.__setattr__(other, "domain", "chess")
    assert "this server has 'script'" in await refused("INVALID_ARGUMENT", sessions.open("a", other, False))
    sessions.draining = True
    await refused("UNAVAILABLE", sessions.open("a", script_task(), False))
    assert len(sessions) == 0


async def test_capacity_counts_open_sessions_and_close_is_welcome_twice():
    sessions, _ = make(capacity=2)
    await sessions.open("a", script_task(), False)
    await sessions.open("b", script_task(), False)
    await sessions.open("a", script_task(), False)  # known, takes no slot
    assert "all 2 sessions" in await refused("RESOURCE_EXHAUSTED", sessions.open("c", script_task(), False))
    assert [sessions.close("a"), sessions.close("a")] == [True, False]
    await sessions.open("c", script_task(), False)
    await eventually(lambda: sessions.domain.count("close") == 1)


async def test_081_a_lease_ends_without_renewal_and_lives_with_it():
    sessions, clock = make(capacity=3, lease_s=10.0)
    for name in ("silent", "renewed", "stepping"):
        await sessions.open(name, script_task(), False)
    for second in range(1, 11):
        clock.now = 100.0 + second
        assert sessions.renew(["renewed", "unknown"]) == ["unknown"]
        await sessions.step("stepping", second - 1, Action("x"))
        assert len(sessions) == 3
        sessions.expire()
    assert len(sessions) == 2
    assert sessions.renew(["silent", "renewed"]) == ["silent"]
    await sessions.open("fourth", script_task(), False)
    await eventually(lambda: sessions.domain.count("close") == 1)


async def test_081_a_running_step_is_kept_alive_by_renewal_only():
    domain = Script()
    sessions, clock = make(domain)
    for name in ("renewed", "silent"):
        await sessions.open(name, HANG, False)
    steps = {name: await hang(sessions, name) for name in ("renewed", "silent")}
    for clock.now in (105.0, 111.0, 120.0):
        sessions.renew(["renewed"])
        sessions.expire()
    assert "closed during step 0" in await refused("ABORTED", steps["silent"])
    domain.gate.set()
    assert text(await steps["renewed"]) == "work done"
    await eventually(lambda: domain.count("close") == 1)


async def test_a_process_that_stood_still_blames_nobody():
    sessions, clock = make(lease_s=0.1)
    await sessions.open("a", script_task(), False)
    reaper = asyncio.create_task(sessions.expire_forever())
    await asyncio.sleep(0)
    clock.now += 3600.0  # stopped for an hour within one sleep
    await eventually(lambda: sessions._open["a"].deadline > clock.now)
    sessions.expire()
    assert len(sessions) == 1
    reaper.cancel()


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("fault", ["reset", "step"])
async def test_083_an_exception_of_the_environment_is_internal_and_ends_the_session(blocking, fault):
    domain = Script(blocking)
    sessions, _ = make(domain)
    opening = sessions.open("a", script_task(**{fault: "OSError"}), False)
    if fault == "reset":
        message = await refused("INTERNAL", opening)
    else:
        await opening
        message = await refused("INTERNAL", sessions.step("a", 0, Action("x")))
    assert message == f"script {'reset' if fault == 'reset' else 'step 0'}: OSError: disk full"
    assert len(sessions) == 0
    await eventually(lambda: domain.count("close") == 1)
    await refused("NOT_FOUND", sessions.step("a", 1, Action("x")))


async def test_sys_exit_in_environment_code_costs_one_session_not_a_thread():
    sessions, _ = make(threads=1)
    await sessions.open("a", script_task(step="exit"), False)
    assert "SystemExit: 3" in await refused("INTERNAL", sessions.step("a", 0, Action("x")))
    await sessions.open("b", script_task(), False)
    assert text(await sessions.step("b", 0, Action("x"))) == "x done"


@pytest.mark.parametrize("blocking", [True, False])
async def test_a_close_that_fails_hurts_nobody(blocking):
    domain = Script(blocking)
    sessions, _ = make(domain, threads=1)
    await sessions.open("a", script_task(close="OSError"), False)
    assert sessions.close("a")
    await sessions.open("b", script_task(), False)
    assert text(await sessions.step("b", 0, Action("x"))) == "x done"


async def test_084_a_pool_full_of_stuck_calls_still_closes_and_serves_others():
    domain = Script()
    sessions, _ = make(domain, capacity=8, threads=4)
    steps = []
    for name in "abc":
        await sessions.open(name, HANG, False)
        steps.append(await hang(sessions, name))
    await sessions.open("free", script_task(), False)
    await sessions.open("d", HANG, False)
    steps.append(await hang(sessions, "d"))  # all four threads hang now
    for name in "abc":
        assert sessions.close(name)
    assert sessions.workers.stuck == 3
    for step in steps[:3]:
        assert "closed during step 0" in await refused("ABORTED", step)
    assert text(await sessions.step("free", 0, Action("x"))) == "x done"  # on a replacement thread
    assert domain.count("close") == 0  # never while its call runs
    domain.gate.set()
    assert text(await steps[3]) == "work done"
    await eventually(lambda: sessions.workers.stuck == 0)
    assert domain.count("close") == 3


async def test_084_when_too_many_calls_hang_for_good_new_sessions_go_elsewhere():
    domain = Script()
    sessions, _ = make(domain, threads=1)
    await sessions.open("a", HANG, False)
    step = await hang(sessions, "a")
    sessions.close("a")
    await refused("ABORTED", step)
    assert "the environment code hangs" in await refused("RESOURCE_EXHAUSTED", sessions.open("b", script_task(), False))
    domain.gate.set()
    await eventually(lambda: sessions.workers.stuck == 0)
    await sessions.open("b", script_task(), False)


async def test_a_session_closed_before_its_first_turn_makes_no_environment():
    domain = Script()
    sessions, _ = make(domain)
    opening = asyncio.create_task(sessions.open("a", script_task(), False))
    await asyncio.sleep(0)  # the request has arrived, the environment is not yet asked for
    sessions.close("a")
    assert "closed before reset" in await refused("ABORTED", opening)
    assert domain.events == []
    assert sessions.idle.is_set()


async def test_workers_abandon_jobs_in_every_state():
    domain = Script()
    workers = Workers(1)
    cleaned = []
    running = workers.submit(lambda: (domain.running.release(), domain.gate.wait(60)))
    await asyncio.to_thread(domain.running.acquire)
    queued = workers.submit(lambda: cleaned.append("must not run"))
    workers.abandon(queued, lambda: cleaned.append("queued"))
    workers.abandon(running, lambda: cleaned.append("running"))
    for job in (queued, running):
        with pytest.raises(Abandoned):
            await job.future
    await eventually(lambda: cleaned == ["queued"])
    domain.gate.set()
    await eventually(lambda: cleaned == ["queued", "running"])
    done = workers.submit(lambda: 7)
    assert await done.future == 7
    workers.abandon(done, lambda: cleaned.append("done"))
    await eventually(lambda: cleaned[2:] == ["done"])
    assert workers.stuck == 0


@pytest.mark.parametrize(
    "observation",
    [
        Observation((), float("nan"), Status.RUNNING),
        Observation((), float("inf"), Status.RUNNING),
        Observation((), 0.0, Status.FAILED),
        Observation((), 0.0, Status.RUNNING, {"success": float("nan")}),
        Observation((Message("user", "\ud800"),), 0.0, Status.RUNNING),
    ],
)
def test_an_observation_that_no_record_may_hold_is_an_error_of_the_environment(observation):
    with pytest.raises(ValueError):  # noqa: PT011 - of several makers
        _to_wire(observation)


async def test_a_session_waits_for_a_thread_and_then_for_its_code():
    """One thread: the first step hangs on it, the second waits for it. When the first returns, the second is in its code."""
    sessions, clock = make(threads=1)
    await sessions.open("a", HANG, False)
    await sessions.open("b", HANG, False)
    first = await hang(sessions, "a")
    second = asyncio.create_task(sessions.step("b", 0, Action("work")))
    await eventually(lambda: sessions.edges({"b"}))
    clock.now += 3.0
    (a, b) = [sessions.edges({name})[0] for name in ("a", "b")]
    assert (a.owner, a.name, a.on, a.why, a.seconds) == ("a", "env.code", "code of script", "step 0", 3.0)
    assert (b.owner, b.name, b.on, b.why, b.seconds) == ("b", "env.thread", "one of 1 threads", "step 0", 3.0)
    assert len(sessions.edges({"a", "b", "c"})) == 2
    sessions.domain.gate.set()
    await first
    await second
    assert sessions.edges({"a", "b"}) == []


async def test_a_call_of_environment_code_is_late_after_what_a_rollout_may_take():
    clock = Clock()
    sessions = Sessions(Script(), 4, 2, 60.0, clock, late_s=20.0)
    await sessions.open("a", HANG, False)
    step = await hang(sessions, "a")
    clock.now += 20.5
    assert (sessions.edges({"a"})[0].deadline, sessions.edges({"a"})[0].late) == (20.0, True)
    sessions.close("a")
    with pytest.raises(Refused):
        await step
    assert sessions.edges({"a"}) == []  # given up, whatever the thread still does
    sessions.domain.gate.set()
