"""The wait-for graph in sentences, with the clock set by hand."""

from __future__ import annotations

import json

from common.waits import Edge
from learner.stalls import WRITER, publisher_of
from tests.control.scripted import engine, hand_in, in_background, lease, publish, started, trajectory
from tests.processes import until


def heartbeat(control, assigned, *edges, actor="actor-0"):
    control.renew(actor, [(a.rollout_id, a.attempt) for a in assigned], list(edges), {})


def stall(control) -> list[str]:
    return control.status()["stall"]


def test_the_learners_wait_is_followed_to_a_silent_env_replica(tmp_path):
    """The sentence of the promise: who, for whom, and for how long nobody has heard of it."""
    control, clock, _ = started(tmp_path)
    assert control.take(0) is None
    assert stall(control) == ["root cause: no actor has called", "learner waits for 2 groups of any domain: no actor has called"]
    assigned = lease(control, 4)
    for a in assigned[2:]:
        hand_in(control, trajectory(a))
    clock.now = 4.0
    assert control.take(0) is None
    said = "learner waits for 1 group of toy: rollout 1-g000000-0 is with actor-0, for 4.0 s"
    assert control.status()["sentence"] == said
    first, second = (a.rollout_id for a in assigned[:2])
    heartbeat(control, assigned[:2], Edge(first, "env.step", "env-toy-17", "", 3.0, 30.0, 2.0, 1))
    said = "rollout 1-g000000-0 on actor-0 waits for env-toy-17 (env.step) for 3.0 s of 30 s"
    assert control.status()["sentence"] == f"learner waits for 1 group of toy: {said}"
    clock.now = 100.0
    both = [Edge(name, "env.step", "env-toy-17", "", 94.0 + n, 300.0, 94.0, n) for n, name in enumerate((second, first))]
    heartbeat(control, assigned[:2], *both)
    assert stall(control) == [
        "root cause: env-toy-17 has been silent for 94 s; 2 rollouts wait for it",
        "learner waits for 1 group of toy: rollout 1-g000000-0 on actor-0 waits for env-toy-17 (env.step), silent for 94 s",
        "2 rollouts on actor-0 wait for env-toy-17 (env.step), silent for 94 s",
    ]
    edges = control.status()["waits"]
    own = {"owner": "learner", "name": "take", "on": first, "why": "", "seconds": 100.0, "deadline": 5.0, "silent": 0.0}
    assert edges[0] | {"number": 0} == own | {"number": 0}
    assert [edge["owner"] for edge in edges[1:]] == [first, second]  # longest first
    clock.now = 102.0  # what an actor said grows older
    assert "silent for 96 s" in control.status()["sentence"]
    lease(control, 0)  # says nothing about waits
    assert "silent for 96 s" in control.status()["sentence"]
    assert json.loads(json.dumps(control.status()))["waits"][1]["silent"] == 96.0


def test_a_session_that_the_server_works_on_is_followed_into_the_server(tmp_path):
    control, clock, _ = started(tmp_path)
    (a,) = lease(control, 1)
    control.take(0)
    clock.now = 90.0
    step = Edge(a.rollout_id, "env.step", "env-toy-0", "", 80.0, 120.0, 1.5, 4)
    inside = Edge(f"env-toy-0/{a.rollout_id}.1", "env.code", "code of toy", "step 3", 79.5, 120.0, 79.5, 9)
    heartbeat(control, [a], step, inside._replace(silent=0.0))
    assert stall(control) == [
        "root cause: env-toy-0/1-g000000-0.1 waits for code of toy (env.code, step 3) for 79.5 s of 120 s",
        "learner waits for 2 groups of toy: rollout 1-g000000-0 on actor-0 waits for env-toy-0 (env.step) for 80.0 s of 120 s; "
        "env-toy-0/1-g000000-0.1 waits for code of toy (env.code, step 3) for 79.5 s of 120 s",
        "rollout 1-g000000-0 on actor-0 waits for env-toy-0 (env.step) for 80.0 s of 120 s",
        "env-toy-0/1-g000000-0.1 waits for code of toy (env.code, step 3) for 79.5 s of 120 s",
    ]
    heartbeat(control, [a], step._replace(silent=6.0), inside)  # an older word of a server that does not answer any more
    assert stall(control)[0] == "root cause: env-toy-0 has been silent for 6 s"


def test_an_actor_that_is_silent_itself_is_the_cause(tmp_path):
    control, clock, _ = started(tmp_path, learner={"lease_s": 60.0})
    (a,) = lease(control, 1)
    heartbeat(control, [a], Edge(a.rollout_id, "env.step", "env-toy-0", "", 0.5, 30.0, 0.1, 1))
    control.take(0)
    clock.now = 15.0
    assert stall(control)[:2] == [
        "root cause: actor-0 has been silent for 15 s",
        "learner waits for 2 groups of toy: rollout 1-g000000-0 is with actor-0, silent for 15 s",
    ]
    clock.now = 61.0
    control.take(0)
    assert stall(control)[0] == "root cause: no actor has called"  # forgotten, and its lease has ended


def test_without_young_weights_the_publishers_are_followed(tmp_path):
    control, clock, _ = started(tmp_path)
    control.set_engines([engine(1, "updating", "to version 2")])
    control.ledger.update = 5
    control.take(0)
    state = "no engine has young enough weights: engine-0 is updating at version 1 (to version 2)"
    assert stall(control) == [f"root cause: {state}", f"learner waits for 2 groups of any domain: {state}"]
    with control.waits.wait(publisher_of("engine-0"), "publish.update", "engine-0", 300.0, "version 2"):
        clock.now = 12.0
        following = "publisher of engine-0 waits for engine-0 (publish.update, version 2), silent for 12 s"
        assert stall(control) == [
            "root cause: engine-0 has been silent for 12 s",
            f"learner waits for 2 groups of any domain: {state}; {following}",
            following,
        ]
        control.waits.hear("engine-0")
        assert stall(control)[0].endswith("(publish.update, version 2) for 12.0 s of 300 s")
    with control.waits.wait(WRITER, "weights.write", "weights/2", 300.0):
        clock.now = 14.0
        assert stall(control)[0] == "root cause: publisher waits for weights/2 (weights.write) for 2.0 s of 300 s"


def test_an_engine_that_answers_the_learner_is_not_silent(tmp_path):
    control, clock, _ = started(tmp_path)
    (a,) = lease(control, 1)
    control.take(0)
    clock.now = 50.0
    heartbeat(control, [a], Edge(a.rollout_id, "engine.generate", "engine-0", "", 40.0, 60.0, 40.0, 1))
    assert stall(control)[0] == "root cause: engine-0 has been silent for 40 s"
    control.waits.hear("engine-0")
    clock.now = 51.0
    said = "rollout 1-g000000-0 on actor-0 waits for engine-0 (engine.generate) for 41.0 s of 60 s"
    assert stall(control)[0] == f"root cause: {said}"


def test_what_the_main_thread_waits_for_besides_rollouts(tmp_path):
    control, clock, _ = started(tmp_path)
    assert control.status()["sentence"] == "learner is in phase rl"
    with control.waits.wait("learner", "checkpoint", "the checkpoint before", 300.0):
        clock.now = 3.0
        said = "learner waits for the checkpoint before (checkpoint) for 3.0 s of 300 s"
        assert stall(control) == [f"root cause: {said}", said]
    assert control.take(0) is None
    for a in lease(control, 4):
        hand_in(control, trajectory(a))
    batch = control.take(0)
    assert stall(control) == ["learner trains update 1 on 2 groups"]
    control.commit(batch)
    assert stall(control) == ["learner is in phase rl"]  # it publishes, writes down: the wait for rollouts is over
    assert control.status()["rollouts"]["trained"] == 4


def test_an_evaluation_is_waited_for_by_name(tmp_path):
    control, _, _ = started(tmp_path)
    result = in_background(control.evaluate, "rl", 1)
    until(lambda: control.evaluation.open, "the evaluation to begin")
    (held,) = lease(control, 1)
    until(lambda: control.waiting, "the wait")
    heartbeat(control, [held], Edge(held.rollout_id, "env.step", "env-toy-0", "", 9.0, 30.0, 9.0, 1))
    assert stall(control)[1] == (
        "learner waits for 3 of 3 held-out rollouts (greedy, version 1): "
        f"rollout {held.rollout_id} on actor-0 waits for env-toy-0 (env.step), silent for 9 s"
    )
    control.finish()
    result()


def test_a_wait_past_its_deadline_becomes_one_event_with_the_graph(tmp_path):
    """Of the learner (5 s) and of an actor's rollout (30 s); the next wait of the same rollout is another one."""
    control, clock, events = started(tmp_path, learner={"lease_s": 500.0})
    assigned = lease(control, 4)
    control.take(0)
    clock.now = 4.9
    control.take(0)
    assert events.of("wait_past_deadline") == []
    clock.now = 6.5
    for _ in range(3):
        clock.now += 1
        control.take(0)
    (event,) = events.of("wait_past_deadline")
    assert (event["count"], event["late"][0]["owner"], event["late"][0]["name"]) == (1, "learner", "take")
    assert event["stall"][1] == "learner waits for 2 groups of toy: rollout 1-g000000-0 is with actor-0, silent for 8 s"
    assert event["waits"][0]["owner"] == "learner"
    waits = [Edge(a.rollout_id, "env.step", "env-toy-0", "", 29.0, 30.0, 29.0, n) for n, a in enumerate(assigned)]
    heartbeat(control, assigned, *waits)
    assert len(events.of("wait_past_deadline")) == 1
    clock.now += 1.5  # the actor has said nothing since: the waits go on all the same
    control.status()
    control.status()
    (_, event) = events.of("wait_past_deadline")
    assert (event["count"], {edge["owner"] for edge in event["late"]}) == (4, {a.rollout_id for a in assigned})
    assert event["stall"][0] == "root cause: env-toy-0 has been silent for 30 s; 4 rollouts wait for it"
    heartbeat(control, assigned, *[edge._replace(seconds=31.0, number=edge.number + 100) for edge in waits])
    clock.now += 1
    control.status()
    assert [event["count"] for event in events.of("wait_past_deadline")] == [1, 4, 4]


def test_the_event_of_another_actors_wait_with_the_same_number_is_told_too(tmp_path):
    control, clock, events = started(tmp_path)
    for actor in ("actor-0", "actor-1"):
        (a,) = lease(control, 1, actor)
        heartbeat(control, [a], Edge(actor, "lease", "learner", "", 30.0, 20.0, 30.0, 1), actor=actor)
        clock.now += 1
        control.status()
    assert [event["late"][0]["owner"] for event in events.of("wait_past_deadline")] == ["actor-0", "actor-1"]


def test_an_actors_outcomes_are_in_the_report(tmp_path):
    control, clock, _ = started(tmp_path)
    control.renew("actor-0", [], [], {"outcome/STORED": 7.0, "outcome/LOST": 1.0})
    clock.now = 0.5
    assert control.status()["actors"] == [
        {"id": "actor-0", "running": 0, "age_s": 0.5, "outcome/STORED": 7.0, "outcome/LOST": 1.0}
    ]
    publish(control, 2, 1)
    assert control.status()["engines"][0]["version"] == 1
