"""kill -9 and SIGTERM, of single processes and of everything: the books balance, nothing is trained twice or left behind."""

import os
import random
import re
import signal
import time
from collections import Counter

from learner.metrics import begins, read_metrics
from learner.runfolder import read_events
from tests.e2e.launched import WARM_ROLLOUTS, balanced, ordinal

UPDATES = 40
KILL_UPDATES = 150  # on an idle machine an update takes a tenth of a second
ENV = "env-frozenlake-0"


def test_every_process_but_the_learner_is_killed_once(launched):
    """Each in the middle of its work: what it needs is frozen until rollouts hang on it. The warm start is long enough for
    episodes of several turns. Weights go by a relay."""
    memory = launched.folder / "memory"
    options = ("--warm.updates=60", f"--learner.updates={KILL_UPDATES}", "--learner.lease_s=4", "--eval.init=false")
    options += ("--weights.transport=relay", f"--weights.folder={memory}")
    launched.start("local", *options)
    launched.until(lambda: launched.update() >= 1, "the first update")
    for victim, frozen in (("actor-0", ENV), (ENV, "engine-0"), ("engine-0", "engine-0"), ("relay-0", "relay-0")):
        if victim != "relay-0":  # no rollout hangs on it, but the next version does
            launched.until(lambda frozen=frozen: caught(launched, frozen), f"rollouts that hang on {frozen}")
        os.kill(launched.pids(victim)[-1], signal.SIGKILL)
        if frozen != victim:
            os.kill(launched.pids(frozen)[-1], signal.SIGCONT)
        launched.until(lambda victim=victim: len(launched.pids(victim)) == 2, f"a restart of {victim}")
        wanted = launched.update() + 3  # max_lag + 1 = 2 updates could be made of what was delivered before
        launched.until(lambda wanted=wanted: launched.update() >= wanted, f"update {wanted} after the restart of {victim}")
    code, out = launched.finish()
    assert (code, launched.alive()) == (0, []), out
    (finished,) = launched.launch_events("finished")
    assert finished["restarts"] == {"actor-0": 1, ENV: 1, "engine-0": 1, "relay-0": 1}
    assert list(memory.iterdir()) == []  # the host has its memory back
    for victim in finished["restarts"]:
        assert f"{victim} was killed by SIGKILL; restart 1 of 5" in out
        assert f"{victim} 1" in out.splitlines()[-1]
    assert read_events(launched.run, "leases_expired")  # of the killed actor
    assert {"EnvLost"} <= {event["reason"].partition(":")[0] for event in read_events(launched.run, "rollout_failed")}

    summary, rows, metrics = launched.history(KILL_UPDATES)
    assert summary["lag"]["max"] <= 1
    stale = sum(line["stale"] for line in metrics)  # these count in their groups' statistics only
    assert len(rows) - stale == summary["rollouts"]["trained"] - 60 * 8
    assert max(row["attempt"] for row in rows) >= 2  # work of the killed was done again
    assert begins(launched.run) == {1: 0}  # the learner lived through it all


def caught(launched, program):
    """Freeze `program` with rollouts that need it. Between two batches, or while an engine takes new weights, none does: then
    it goes on, for another try."""
    os.kill(launched.pids(program)[-1], signal.SIGSTOP)
    begun = time.monotonic()
    while (frozen_s := time.monotonic() - begun) < 3:
        if hanging(launched.status(), frozen_s):
            return True
        time.sleep(0.1)
    os.kill(launched.pids(program)[-1], signal.SIGCONT)
    time.sleep(random.uniform(0.1, 0.5))
    return False


def hanging(report, frozen_s):
    """Some rollout waited for more than a second when its actor last spoke; a whole one takes a fraction of that. It spoke
    since the freeze: an earlier word may be that of an actor killed before it, whose successor has not spoken yet."""
    ages = [actor["age_s"] for actor in report.get("actors", [])]
    if max(ages, default=frozen_s) >= frozen_s:
        return False
    waits = [wait for wait in report.get("waits", []) if wait["name"] in ("env.open", "env.step", "engine.generate")]
    return any(wait["seconds"] - max(ages) > 1 for wait in waits)


def test_a_run_has_three_lives(launched):
    """kill -9 of everything, resume, SIGTERM, resume: one unbroken history comes out."""
    options = ("--optimizer.schedule=cosine", f"--optimizer.decay_steps={2 * UPDATES}", f"--learner.updates={UPDATES}")
    launched.start("local", *options)
    launched.until(lambda: max(launched.checkpoints(), default=0) >= 2, "a checkpoint of RL")
    launched.kill_everything()
    assert launched.alive() == []
    assert not (launched.run / "summary.json").exists()
    first = launched.checkpoints()[-1]
    # Of the files: an update may have been killed between its line of metrics and its rollouts.
    written = {int(path.stem) for path in (launched.run / "trajectories").glob("*.parquet")}
    undone = {update for update in written if update > first}

    launched.start("resume")
    launched.until(lambda: launched.update() >= first + 3, "updates after the first resume")
    launched.launchers[-1].send_signal(signal.SIGTERM)
    code, out = launched.finish()
    assert (code, launched.alive()) == (143, []), out
    assert "stopped by SIGTERM" in out
    summary = launched.summary()
    second = summary["updates"]
    assert balanced(summary["rollouts"])
    assert first + 3 <= second < UPDATES
    assert launched.checkpoints()[-1] == second
    assert [e["phase"] for e in summary["evals"]] == ["init", "warm"]

    code, out = launched.launch("resume")
    assert (code, launched.alive()) == (0, []), out
    assert begins(launched.run) == {1: 0, 2: first, 3: second}
    superseded = {int(p.name.partition(".")[0]) for p in (launched.run / "trajectories").glob("*.superseded-2.parquet")}
    assert superseded == undone
    assert launched.summary()["wall_seconds"] > summary["wall_seconds"] > 0
    assert launched.summary()["tokens"]["trained"] > summary["tokens"]["trained"]
    check_history(launched)
    code, out = launched.launch("resume")
    assert code == 2
    assert f"has made all its {UPDATES} updates" in out


def test_a_warm_start_that_ended_early_is_not_repeated(launched):
    early = ("--warm.updates=60", "--warm.target_loss=100", "--eval.every=1")
    endless = ("--learner.updates=100000", "--checkpoint.every=100000")
    launched.start("local", *early, *endless)
    launched.until(lambda: launched.checkpoints() == [0], "the checkpoint after the warm start")
    launched.until(lambda: launched.update() >= 1, "an update that no checkpoint holds")
    launched.kill_everything()
    launched.start("resume")
    launched.until(lambda: launched.update() >= 2, "updates after the resume")
    launched.launchers[-1].send_signal(signal.SIGTERM)
    code, out = launched.finish()
    assert (code, launched.alive()) == (143, []), out
    assert [event["updates"] for event in read_events(launched.run, "warm_target")] == [8]  # the loss of 8 updates is looked at
    log = (launched.run / "logs" / "learner.log").read_text()
    made = re.findall(r"warm start (\d+)/(\d+): loss", log)
    assert made == [(str(n), "60") for n in range(1, 9)]
    phases = [e["phase"] for e in launched.summary()["evals"]]
    assert phases[:3] == ["init", "warm", "rl"]
    assert set(phases[3:]) <= {"rl"}


def check_history(launched):
    """What stands in the run's folder is what one uninterrupted life would have left."""
    summary, rows, metrics = launched.history(UPDATES)
    assert [e["phase"] for e in summary["evals"]] == ["init", "warm", "rl"]
    assert [row["update"] for row in rows] == sorted(row["update"] for row in rows)
    assert len(rows) - sum(line["stale"] for line in metrics) == summary["rollouts"]["trained"] - WARM_ROLLOUTS
    # The optimizer: the learning rate is a function of its steps, two per update; a cosine falls everywhere.
    assert {line["optimizer_steps"] for line in metrics} == {2}
    rates = [line["lr"] for line in metrics]
    assert rates == sorted(set(rates), reverse=True)
    # The sampler: 32 tasks, each once per epoch; the warm start drew the first 24.
    task_of = {ordinal(row["group_id"]): row["task_id"] for row in rows}
    epochs = Counter(((WARM_ROLLOUTS + number) // 32, task) for number, task in task_of.items())
    assert len({row["group_id"] for row in rows}) == len(task_of)
    assert set(epochs.values()) == {1}


def test_sigterm_in_a_run_that_cannot_learn(launched):
    """No gradient at all, so no new weights: such a run goes on all the same, until it is stopped."""
    no_gradient = ("--algorithm.entropy=0", "--algorithm.zero_advantages=true")
    launched.start("local", "--learner.updates=100000", "--warm.updates=0", "--eval.init=false", *no_gradient)
    launched.until(lambda: launched.update() >= 5, "more updates than max_lag + 1")
    os.kill(launched.pids("learner")[-1], signal.SIGTERM)  # not by the launcher: it is started again, where it stopped
    launched.until(lambda: len(launched.pids("learner")) == 2, "a restart of the learner")
    launched.until(lambda: launched.update() >= 10, "updates after it")
    launched.launchers[-1].send_signal(signal.SIGTERM)
    code, out = launched.finish()
    assert (code, launched.alive()) == (143, []), out
    summary = launched.summary()
    assert balanced(summary["rollouts"])
    assert (summary["updates"] >= 10, summary["lag"]["max"]) == (True, 0)  # one policy, however many updates
    metrics = read_metrics(launched.run)
    assert {line["version"] for line in metrics} == {1, 2}  # a learner publishes what it starts with
    assert [line["update"] for line in metrics] == list(range(1, summary["updates"] + 1))
    restarted = begins(launched.run)
    assert list(restarted) == [1, 2]
    assert restarted[2] >= 5  # SIGTERM saves


def test_a_run_that_is_stopped_in_its_last_evaluation_is_not_finished(launched):
    tasks = ("--domains.0.heldout_tasks=600", "--eval.tasks=600", "--actors.rollouts=4")  # a second or more
    launched.start("local", "--warm.updates=0", "--eval.init=false", "--learner.updates=2", *tasks)
    launched.until(lambda: launched.update() >= 2, "the last update")
    launched.launchers[-1].send_signal(signal.SIGTERM)
    code, out = launched.finish()
    assert (code, launched.alive()) == (143, []), out
    assert not (launched.run / "summary.json").exists()
    code, out = launched.launch("resume")
    assert code == 0, out
    summary = launched.summary()
    assert [(e["phase"], e["n"]) for e in summary["evals"]] == [("rl", 600)]
    assert (summary["updates"], balanced(summary["rollouts"])) == (2, True)
