"""A run whose turns are sampled by two pools of engines, one of them with older weights on purpose."""

import json
from collections import Counter
from itertools import pairwise

from learner.metrics import read_metrics
from learner.runfolder import read_trajectories
from learner.weights import read_versions
from tests.e2e.launched import balanced
from tools import check_run, show

REFRESH, MAX_LAG, STALE_MAX_LAG = 3, 1, 4
TABLE = {"engines": 1, "share": 0.5, "refresh": REFRESH, "max_lag": STALE_MAX_LAG}


def tokens(record):
    """Sampled tokens by (pool, version)."""
    counts = Counter()
    for step in record.steps:
        ends = [*(run.start for run in step.versions[1:]), len(step.action_ids)]
        for run, end in zip(step.versions, ends, strict=True):
            counts[run.pool, run.version] += end - run.start
    return counts


def test_two_pools_sample_and_the_loss_takes_the_tokens_of_both(launched, capsys):
    options = [f"--cross_policy.{key}={value}" for key, value in TABLE.items()]
    code, out = launched.launch("local", "--engine.count=2", "--learner.updates=10", "--checkpoint.every=5", *options)
    assert code == 0, out
    pools = {e["name"]: e["pool"] for e in json.loads((launched.run / "addresses.json").read_text())["engines"]}
    assert pools == {"engine-0": "main", "engine-1": "stale"}
    update_of = read_versions(launched.run)
    seen, turns, whole, oldest, last = Counter(), Counter(), Counter(), 0, []
    for number, line in enumerate(read_metrics(launched.run), 1):
        trained = Counter()  # live tokens by pool
        last = [record for _, record in read_trajectories(launched.run / "trajectories" / f"{number}.parquet")]
        for record in last:
            for step in record.steps:
                assert all(run.pool == pools[run.engine] for run in step.versions)
                turns[step.versions[0].pool] += 1
            for (pool, version), count in tokens(record).items():
                seen[pool, version] += count
                lag = number - 1 - update_of[version]
                if lag <= {"main": MAX_LAG, "stale": STALE_MAX_LAG}[pool]:
                    trained[pool] += count
                    oldest = max(oldest, lag)
        whole += trained
        assert line["trained_tokens"] == sum(trained.values())
        assert line["stale_pool/share"] == trained["stale"] / sum(trained.values())
        assert line["lag_max"] <= MAX_LAG
        assert line["stale_pool/lag_max"] <= STALE_MAX_LAG
        assert line["rollout/stale_fallbacks"] >= 0
    assert oldest > MAX_LAG  # only the stale pool's bound lets such a token in
    kept = sorted(version for pool, version in seen if pool == "stale")
    steps = [update_of[b] - update_of[a] for a, b in pairwise(kept)]
    warm = next(e["version"] for e in launched.summary()["evals"] if e["phase"] == "warm")
    assert kept[0] == warm  # not the random weights before it
    assert len(kept) >= 3
    assert all(step >= REFRESH for step in steps)
    assert len({version for pool, version in seen if pool == "main"}) > len(kept)

    summary = launched.summary()
    assert balanced(summary["rollouts"])
    assert (summary["rollouts"]["failed"], summary["recompilations_after_warmup"]) == (0, 0)
    assert 0.3 < turns["stale"] / turns.total() < 0.7  # of more than 100: five standard deviations about 1/2
    assert summary["stale_pool"]["share"] == whole["stale"] / whole.total()  # main's tokens are over age first
    assert summary["lag"]["max"] <= MAX_LAG < summary["stale_pool"]["lag"]["max"] <= STALE_MAX_LAG
    assert summary["lag"]["mean"] < summary["stale_pool"]["lag"]["mean"]
    name, version = next((r.rollout_id, v) for r in last for pool, v in tokens(r) if pool == "stale")
    capsys.readouterr()
    assert show.main([str(launched.run), name]) == 0
    assert f"version {version} (stale)" in " ".join(capsys.readouterr().out.split())
    assert check_run.main([str(launched.run)]) == 0
    assert "lag of the stale pool at most 4: " in capsys.readouterr().out
