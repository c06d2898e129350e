"""An evaluation with several rollouts a task that is killed on its way."""

import json
from collections import Counter

from learner.runfolder import read_events

TASKS, SAMPLES = 64, 8
ALL = TASKS * SAMPLES


def scored(launched, phase):
    """Tasks and samples, as often as they were scored, by the weights."""
    path = launched.run / "evaluations.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return [(row["weights"], row["task"], row["sample"]) for row in rows if row["weights"].startswith(phase)]


def test_a_killed_evaluation_goes_on_with_the_rest(launched):
    sizes = (f"--domains.0.heldout_tasks={TASKS}", f"--eval.tasks={TASKS}", f"--eval.samples={SAMPLES}")
    options = ('--eval.modes=["sampled"]', "--eval.temperature=0.7", "--eval.init=false", "--learner.updates=2")
    launched.start("local", *sizes, *options)
    launched.until(lambda: len(scored(launched, "warm")) >= 50, "a part of the evaluation")
    launched.kill_everything()
    before = len(scored(launched, "warm"))
    assert before < ALL
    code, out = launched.launch("resume")
    assert (code, launched.alive()) == (0, []), out
    assert [event["kept"] for event in read_events(launched.run, "evaluation")] == [before, 0]
    for phase in ("warm", "rl"):
        counts = Counter(scored(launched, phase))
        assert (len(counts), set(counts.values())) == (ALL, {1})
        assert len({weights for weights, *_ in counts}) == 1
    evals = launched.summary()["evals"]
    assert [(e["phase"], e["mode"], e["n"], e["tasks"]) for e in evals] == [
        ("warm", "sampled", ALL, TASKS),
        ("rl", "sampled", ALL, TASKS),
    ]
    for entry in evals:
        rows = entry["pass_k"]
        assert [row["k"] for row in rows] == [1, 2, 4, 8]
        assert rows[0]["pass_at"] == rows[0]["pass_all"] == entry["success"]
        assert [row["pass_at"] for row in rows] == sorted(row["pass_at"] for row in rows)
        assert [row["pass_all"] for row in rows] == sorted((row["pass_all"] for row in rows), reverse=True)
