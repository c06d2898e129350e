"""What an update leaves in the run's folder: its row of metrics, its alarms, its trajectories.

Numbers of rollouts are of all that the batch holds, stale ones too; with several domains they stand beside the totals once more
for each, as NAME/DOMAIN. What there is none of (calls, groups of more than one) has no number, so that no mean is of nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from common.record import segment_lengths
from common.types import Status, StepKind, Trajectory
from learner.batch import Batch
from learner.canary import BOUNDS
from learner.evaluation import succeeded
from learner.rollouts import Kind
from learner.run import Run

log = logging.getLogger("learner.update_log")

Values = dict[str, float]
Groups = Sequence[Sequence[Trajectory]]


def record(run: Run, batch: Batch, metrics: Values) -> None:
    """Metrics and trajectories of an update that was made; `metrics` are those of its optimizer steps."""
    run.totals.add(batch.lag, batch.stale_lag)
    values = metrics | of_rollouts(batch.groups) | lengths(batch.trajectories) | of_batch(run, batch) | of_run(run)
    domains = [domain.name for domain in run.config.domains]
    values |= failures(run, "")
    for domain in domains if len(domains) > 1 else ():
        own = of_rollouts([group for group in batch.groups if group[0].task.domain == domain]) | failures(run, domain)
        values |= {f"{name}/{domain}": value for name, value in own.items()}
    alarms(run, batch, metrics)
    run.folder.metrics(run.update, values)
    run.folder.trajectories(run.update, batch.trajectories, [batch.lags[r.rollout_id] for r in batch.trajectories])
    log.info(
        "update %d/%d: reward %.3f, lag %.2f, entropy %.3f, gap %s, gradient %.3f, %d tokens",
        run.update, run.config.learner.updates, values.get("reward", 0.0), batch.lag.mean, metrics.get("entropy", 0.0),
        f"{metrics['gap_mean']:.1e}" if "gap_mean" in metrics else "unknown", metrics.get("grad_norm", 0.0), batch.live_tokens,
    )  # fmt: skip


# ---- numbers of rollouts -------------------------------------------------------------------------------------


def of_rollouts(groups: Groups) -> Values:
    """How `groups` of rollouts went. Means over rollouts, but: `group_reward_std` (ddof 0) and `groups_zero_std` over groups of
    more than one, `call_turns` over turns of the policy and its sub-agents, `calls_parsed` over calls, `calls_ok` over calls
    that were answered. `groups` is their number."""
    rollouts = [rollout for group in groups for rollout in group]
    out: Values = {"groups": float(len(groups))}
    if not rollouts:
        return out
    out |= {
        "success": _mean(succeeded(rollout) for rollout in rollouts),
        "reward": _mean(rollout.total_reward for rollout in rollouts),
        "turns": _mean(sum(step.kind == StepKind.ACT for step in rollout.steps) for rollout in rollouts),
        "action_tokens": _mean(sum(len(step.action_ids) for step in rollout.steps) for rollout in rollouts),
        "prompt_tokens": _mean(sum(len(step.context_ids) for step in rollout.steps) for rollout in rollouts),
        "truncated": _mean(rollout.status == Status.TRUNCATED for rollout in rollouts),
    }
    rewards = [[rollout.total_reward for rollout in group] for group in groups if len(group) > 1]
    if rewards:
        out["group_reward_std"] = _mean(float(np.std(own)) for own in rewards)
        out["groups_zero_std"] = _mean(max(own) == min(own) for own in rewards)
    return out | of_calls(rollouts)


def of_calls(rollouts: Sequence[Trajectory]) -> Values:
    """How tools are called, as actors have counted (docs/record.md): see `of_rollouts`. `calls`: of a rollout."""
    total = {
        name: sum(rollout.metrics.get(name, 0.0) for rollout in rollouts)
        for name in ("calls", "calls_unparsed", "calls_ok", "calls_failed", "call_turns", "turns", "subagent_turns")
    }
    out = {"calls": total["calls"] / len(rollouts)}
    if turns := total["turns"] + total["subagent_turns"]:
        out["call_turns"] = total["call_turns"] / turns
    if total["calls"]:
        out["calls_parsed"] = 1 - total["calls_unparsed"] / total["calls"]
    if answered := total["calls_ok"] + total["calls_failed"]:
        out["calls_ok"] = total["calls_ok"] / answered
    return out


def _mean(values) -> float:  # noqa: ANN001 - an iterable of numbers
    found = list(values)
    return float(sum(found) / len(found))


def lengths(rollouts: Sequence[Trajectory]) -> Values:
    """Segments, and means over rollouts of whatever actors and environments count: calls, summaries, notes."""
    rows = [segment_lengths(rollout) for rollout in rollouts]
    out: Values = {
        "segments": sum(map(len, rows)) / max(1, len(rows)),
        "segment_tokens": sum(map(sum, rows)) / max(1, len(rows)),  # of a rollout: what training on it costs
    }
    for name in sorted({name for rollout in rollouts for name in rollout.metrics}):
        out[f"rollout/{name}"] = sum(rollout.metrics.get(name, 0.0) for rollout in rollouts) / len(rows)
    return out


def failures(run: Run, domain: str) -> Values:
    """`failed`: share of the policy's rollouts that have ended since the update before and failed for good, of `domain` or of
    all. Unknown in the first update of a resumed learner, and when none has ended."""
    counts = run.control.counts(Kind.RL, domain=domain)
    now = (counts["dispatched"] - counts["open"], counts["failed"])
    before = run.ended.get(domain, (0, 0) if run.update == 1 else now)
    run.ended[domain] = now
    return {"failed": (now[1] - before[1]) / (now[0] - before[0])} if now[0] > before[0] else {}


# ---- numbers of the batch and the run ------------------------------------------------------------------------


def of_batch(run: Run, batch: Batch) -> Values:
    values: Values = {
        "lag_mean": batch.lag.mean,
        "lag_max": batch.lag.max,
        "stale": batch.stale,
        "identical": len(batch.identical),
    }
    if run.config.cross_policy.engines:
        stale = batch.stale_lag
        values |= {"stale_pool/share": stale.tokens / max(1, batch.live_tokens)}
        values |= {"stale_pool/lag_mean": stale.mean, "stale_pool/lag_max": stale.max}
    return values


def of_run(run: Run) -> Values:
    worst = max(run.publisher.canaries.values(), default=0.0)
    return {"version": run.version, "seconds": run.seconds(), "canary_worst": worst} | run.control.lengths.metrics()


def alarms(run: Run, batch: Batch, metrics: Values) -> None:
    """What people should look at, as events."""
    if identical := batch.identical:
        why = "siblings sampled the same ids, which chance does not explain: does the engine use the request's seed?"
        run.folder.event("identical_siblings", {"alarm": why, "pairs": identical[:10], "count": len(identical)})
    if (gap := metrics.get("gap_mean", 0.0)) > (bound := BOUNDS[run.config.model.dtype]):
        why = f"engines and learner differ by {gap:.2g} in a token's logprob (mean), allowed is {bound:g}"
        run.folder.event("engine_gap", {"alarm": why, **{name: x for name, x in metrics.items() if name.startswith("gap")}})
        log.warning("update %d: %s", run.update, why)
    if why := run.control.lengths.alarm():
        run.folder.event("long_rollouts_starve", {"alarm": why})
