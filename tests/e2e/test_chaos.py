"""kill -9 of any process at any moment, again and again in one run: it goes on, its books balance, it learns all the same."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from learner.metrics import begins
from tests.e2e.launched import REPOSITORY, Launched

VICTIMS = ("actor-0", "env-frozenlake-0", "engine-0", "learner")


def chaos(run: Launched, kills: int, updates: int, seed: int) -> list[str]:
    """Kill `kills` processes, each of the victims equally often, spread over `updates`; returns their names. The moment within
    an update is left to chance."""
    chance = random.Random(seed)
    victims = list(VICTIMS) * (kills // len(VICTIMS))
    chance.shuffle(victims)
    for number, victim in enumerate(victims):
        due = 1 + number * (updates - 4) // len(victims)
        run.until(lambda due=due: run.update() >= due, f"update {due}, where {victim} is killed")
        time.sleep(chance.uniform(0, 0.5))
        starts = len(run.pids(victim))
        os.kill(run.pids(victim)[-1], signal.SIGKILL)
        run.until(lambda victim=victim, starts=starts: len(run.pids(victim)) > starts, f"a restart of {victim}")
    return victims


def check(run: Launched, updates: int, victims: list[str]) -> None:
    code, out = run.finish()
    assert (code, run.alive()) == (0, []), out
    (finished,) = run.launch_events("finished")
    assert finished["restarts"] == {victim: victims.count(victim) for victim in VICTIMS}
    run.history(updates)  # of the timeline that survived
    assert len(begins(run.run)) == 1 + victims.count("learner")


def test_eight_kills(launched: Launched) -> None:
    launched.start("local", "--learner.updates=60", "--learner.lease_s=4", "--eval.init=false", "--checkpoint.every=3")
    victims = chaos(launched, 8, 60, seed=1)
    check(launched, 60, victims)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_twenty_kills_and_it_learns(launched: Launched) -> None:
    """The smoke run reaches what it reaches without them."""
    launched.config = REPOSITORY / "configs" / "smoke.toml"
    launched.start("local", "--checkpoint.every=5")
    victims = chaos(launched, 20, 50, seed=2)
    check(launched, 50, victims)
    warm, final = (max(e["success"] for e in launched.summary()["evals"] if e["phase"] == phase) for phase in ("warm", "rl"))
    assert warm <= 0.6
    assert final >= 0.85
