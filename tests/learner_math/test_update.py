"""Whole updates on a small model: they learn, they repeat, they survive sick gradients."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from common.record import segments
from common.types import Finish, Status
from learner.model import hf
from learner.model.qwen3 import Qwen3
from learner.temporal import gae
from learner.update import Trainer, TrainingStopped
from tests.learner_math.build import SPEC, as_reference, batch, chain, config, random_rollout, rollout, same, turn, with_behaviour


def test_pinned_step(grpo):
    """Numbers of one update. They may change with the initialisation or a library; a change of the algorithm must say so."""
    metrics = grpo.policy_update(batch())
    assert metrics["optimizer_steps"] == 4
    assert metrics["trained_tokens"] == 2 * sum(len(s.action_ids) for g in batch() for t in g for s in t.steps)
    assert metrics["lr"] == pytest.approx(1e-2)
    assert grpo.step == 4
    pinned = {
        "loss": -0.12653,
        "policy_loss": -0.09885,
        "entropy": 2.76752,
        "grad_norm": 1.1189,
        "gap_mean": 0.06837,
        "kl_k3": 0.00782,
    }
    assert {name: metrics[name] for name in pinned} == pytest.approx(pinned, rel=1e-2)


def test_supervised_loss_falls_to_nearly_nothing(grpo):
    """Two dialogues are learnt by heart; context is not trained on."""
    references = [
        as_reference(rollout(chain([([1, 2], [3, 4], 0.0), ([5], [6, 7], 1.0)]), "a")),
        as_reference(rollout([turn([8], [9, 3])], "b")),
    ]
    losses = [grpo.supervised(references, 0.02) for _ in range(30)]
    assert losses[0]["loss"] == pytest.approx(np.log(16), abs=0.5)
    assert losses[-1]["loss"] < 0.1
    assert losses[0]["trained_tokens"] == 6
    assert losses[0]["lr"] == pytest.approx(0.02)
    assert grpo.step == 0  # the schedule of policy updates has not begun


def test_forgetting_the_moments_leaves_the_parameters_and_the_schedule(grpo):
    started = grpo.state_tree()
    grpo.policy_update(batch())
    before = grpo.state_tree()
    grpo.forget_moments()
    after = grpo.state_tree()
    moments = {name for name in after if name.startswith("adam")}
    assert same({n: after[n] for n in moments}, {n: started[n] for n in moments})
    assert not same({n: before[n] for n in moments}, {n: started[n] for n in moments})
    assert same({n: after[n] for n in after.keys() - moments}, {n: before[n] for n in after.keys() - moments})


def test_an_update_repeats_bit_for_bit_also_from_a_restored_state(grpo):
    groups = batch()
    grpo.policy_update(groups)
    saved = grpo.state_tree()
    first = grpo.policy_update(groups)
    after = grpo.state_tree()
    grpo.restore_tree(saved)
    assert same(grpo.state_tree(), saved)
    assert grpo.policy_update(groups) == first
    assert same(grpo.state_tree(), after)
    assert not same(saved, after)


def test_updates_of_any_size_compile_once(grpo):
    for groups, size in ((4, 3), (2, 2), (9, 4)):
        grpo.policy_update(batch(groups, groups, size))
        grpo.restore_tree(grpo.state_tree())
    compiled = (*grpo._policy._accumulate, grpo._policy._nothing, grpo._apply)
    assert [function._cache_size() for function in compiled] == [1, 1, 1]


def test_a_state_of_another_model_is_refused(grpo):
    tree = grpo.state_tree()
    name = next(iter(tree))
    with pytest.raises(ValueError, match="does not fit this configuration"):
        grpo.restore_tree({**tree, name: np.zeros(7)})
    with pytest.raises(ValueError, match="does not fit this configuration"):
        grpo.restore_tree({n: a for n, a in tree.items() if n != name})


def test_063_the_ratio_is_1_before_anything_has_changed(grpo):
    groups = with_behaviour(grpo, batch())
    metrics = grpo.policy_update(groups)
    assert metrics["gap_max"] < 1e-5


def test_tokens_that_are_too_old_leave_the_loss_and_their_reward_stays(grpo):
    """A dead rollout: not a token is trained, whatever it recorded; the group keeps its baseline."""
    groups = batch()
    dead = groups[0][0]
    live = {dead.rollout_id: [np.zeros(len(s.action_ids), bool) for s in dead.steps]}
    start = grpo.state_tree()
    metrics = grpo.policy_update(groups, live)
    after = grpo.state_tree()
    assert metrics["trained_tokens"] == 2 * sum(len(s.action_ids) for g in groups for t in g for s in t.steps if t is not dead)
    strange = replace(dead, steps=tuple(replace(s, action_logprobs=s.action_logprobs * 1e6) for s in dead.steps))
    grpo.restore_tree(start)
    grpo.policy_update([[strange, *groups[0][1:]], *groups[1:]], live)
    assert same(grpo.state_tree(), after)
    poorer = replace(dead, steps=(*dead.steps[:-1], replace(dead.steps[-1], reward=-5.0)))
    grpo.restore_tree(start)
    grpo.policy_update([[poorer, *groups[0][1:]], *groups[1:]], live)
    assert not same(grpo.state_tree(), after)


def test_037_051_an_update_without_a_trained_token_changes_nothing(grpo):
    start = grpo.state_tree()
    metrics = grpo.policy_update([[group[0]] for group in batch()])  # every group has shrunk to one
    assert (metrics["trained_tokens"], metrics["optimizer_steps"], metrics["skipped_empty"]) == (0, 0, 4)
    assert same(grpo.state_tree(), start)
    empty = rollout([turn([1], [])], status=Status.TRUNCATED)
    assert grpo.supervised([empty], 0.02)["optimizer_steps"] == 0
    assert grpo.supervised([], 0.02)["optimizer_steps"] == 0
    assert same(grpo.state_tree(), start)


def test_093_a_sick_update_changes_no_bit_and_a_row_of_them_stops_the_run(grpo):
    grpo.policy_update(batch())
    start = grpo.state_tree()
    sick = [[recorded_as(t, np.nan) for t in group] for group in batch()]
    metrics = grpo.policy_update(sick)
    assert (metrics["skipped_nonfinite"], metrics["optimizer_steps"]) == (4, 0)
    assert same(grpo.state_tree(), start)
    grpo.policy_update(batch())  # a healthy one in between: the count begins anew
    grpo.policy_update(sick)
    with pytest.raises(TrainingStopped, match="2 updates in a row"):
        grpo.policy_update(sick)


def recorded_as(trajectory, value):
    """Logprobs of `value`: the record's rules refuse them, but a bug of ours could make such ratios."""
    steps = tuple(replace(s, action_logprobs=np.full(len(s.action_ids), value, np.float32)) for s in trajectory.steps)
    return replace(trajectory, steps=steps)


@pytest.mark.parametrize(
    "aggregation", [{}, {"aggregation": "seq_mean_token_mean"}, {"aggregation": "constant", "constant_divisor": 8}]
)
def test_047_an_update_does_not_depend_on_its_micro_batches(aggregation):
    """The same rollouts in rows of a micro-batch each, and in one of eight rows."""
    ends, found = [], []
    for rows in (1, 8):
        trainer = Trainer(config(algorithm={"minibatches": 2, **aggregation}, learner={"rows_per_microbatch": rows}), SPEC)
        found.append(trainer.policy_update(batch()))
        ends.append(trainer.state_tree())
    for name in ("loss", "grad_norm", "entropy", "trained_tokens"):
        assert found[0][name] == pytest.approx(found[1][name], abs=1e-5), name
    for name, array in ends[0].items():
        np.testing.assert_allclose(array, ends[1][name], atol=1e-5, err_msg=name)


def test_050_a_rollout_without_a_sampled_token_passes_through_an_update():
    """In a micro-batch of its own: nothing in it is NaN, and the others learn as if it were not there."""
    empty = rollout([turn([1, 2], [], 1.0, finish=Finish.LENGTH)], "empty", Status.TRUNCATED)
    other = rollout(chain([([1], [2], 0.0)]), "other")
    ends = []
    for rows in (1, 4):
        trainer = Trainer(
            config(algorithm={"minibatches": 1, "groups_per_update": 1}, learner={"rows_per_microbatch": rows}), SPEC
        )
        metrics = trainer.policy_update(with_behaviour(trainer, [[empty, other]]))
        assert all(np.isfinite(value) for value in metrics.values()), metrics
        assert (metrics["optimizer_steps"], metrics["trained_tokens"]) == (1, 1)
        ends.append(metrics)
    for name in ("loss", "grad_norm", "entropy"):
        assert ends[0][name] == pytest.approx(ends[1][name], rel=1e-5), name
    metrics = trainer.policy_update([[empty, empty]])
    assert (metrics["optimizer_steps"], metrics["skipped_empty"], metrics["trained_tokens"]) == (0, 1, 0)
    assert all(np.isfinite(value) for value in metrics.values()), metrics


def test_094_restored_arrays_are_donated_like_any(grpo):
    """If they could not be, the first update after a resume would hold everything twice."""
    grpo.restore_tree(grpo.state_tree())
    restored = [leaf for leaf in jax.tree.leaves(grpo._state.params) if leaf.size > 1]
    grpo.policy_update(batch())
    assert restored
    assert all(leaf.is_deleted() for leaf in restored)


def test_only_what_the_policy_sampled_and_the_task_scored_is_trained_on(grpo):
    good = batch()[0]
    with pytest.raises(ValueError, match="rollout g0-0 is REFERENCE"):
        grpo.policy_update([[as_reference(good[0]), *good[1:]]])
    with pytest.raises(ValueError, match="rollout g0-1 is FAILED"):
        grpo.policy_update([[good[0], replace(good[1], status=Status.FAILED)]])
    with pytest.raises(ValueError, match="rollout g0-0 was sampled at temperature 0"):
        grpo.policy_update([[replace(good[0], sampling=replace(good[0].sampling, temperature=0.0)), good[1]]])


def test_094_snapshots_survive_the_steps_after_them(grpo):
    """50 steps with donation, a snapshot after each: every one is still what it was when it was taken."""
    reference = [as_reference(random_rollout(np.random.default_rng(0), "a"))]
    taken = []
    for _ in range(50):
        grpo.supervised(reference, 0.02)
        tree = grpo.state_tree()
        policy = list(grpo.snapshot(np.arange(4))[0].values())
        taken.append((tree, {n: a.tobytes() for n, a in tree.items()}, policy, [x.tobytes() for x in policy]))
    for tree, own, policy, bits in taken:
        assert {n: a.tobytes() for n, a in tree.items()} == own
        assert [x.tobytes() for x in policy] == bits
    assert len({tuple(bits) for *_, bits in taken}) == 50


def arms(trainer):
    """Logprobs of the 16 actions of a bandit's only state."""
    pulls = [rollout([turn([1, 2], [arm])], f"arm{arm}") for arm in range(16)]
    return np.array([rows[0][2] for rows in trainer.logprobs(pulls)])


def play(trainer, rng, groups, size):
    """Rollouts of the bandit: even arms pay 1."""
    logprobs = arms(trainer)
    chances = np.exp(logprobs) / np.exp(logprobs).sum()

    def one(name):
        arm = int(rng.choice(16, p=chances))
        return rollout([turn([1, 2], [arm], float(arm % 2 == 0), logprob=float(logprobs[arm]))], name)

    return [[one(f"{g}-{i}") for i in range(size)] for g in range(groups)]


@pytest.mark.parametrize("name", ["grpo_fresh", "ppo_fresh"])
def test_a_bandit_is_learnt(name, request):
    trainer = request.getfixturevalue(name)()
    rng = np.random.default_rng(0)
    before = np.exp(arms(trainer))[::2].sum()
    assert before < 0.75
    for _ in range(12):
        metrics = trainer.policy_update(play(trainer, rng, 8, 8))
    assert np.exp(arms(trainer))[::2].sum() > 0.95
    if name == "ppo_fresh":
        assert metrics["value_mean"] > 0.5  # the critic has learnt that it pays


def test_ppo_values_returns_and_bootstrap_are_those_of_the_model(ppo, tmp_path):
    """Old values and returns of the update against a plain forward pass of every rollout alone."""
    tree = ppo.state_tree()
    kernel = np.random.default_rng(1).normal(size=SPEC.hidden_size).astype(np.float32)
    ppo.restore_tree({n: kernel if n.endswith("kernel") and n.startswith("params/value_head") else a for n, a in tree.items()})
    model = Qwen3(SPEC, rngs=nnx.Rngs(0))
    hf.write(ppo.snapshot(np.arange(4))[0], SPEC, tmp_path, None)
    nnx.update(model, jax.tree.map(jnp.asarray, hf.load(tmp_path)[1]))
    forward = jax.jit(lambda ids: model(ids, jnp.arange(32)[None], jnp.ones((1, 32), int)))
    cut = [
        rollout(chain([([1, 2], [3, 4], 0.5), ([5], [6], 0.0)]), f"cut{i}", Status.TRUNCATED, tail=[7, 8][:i]) for i in range(3)
    ]
    rewritten = rollout([turn([1, 2, 3], [4, 5], 0.25), turn([6], [7], 1.0, 0, 2)], "rewritten", Status.TRUNCATED, tail=[9])
    values, returns = [], []
    for trajectory in (*cut, rewritten):
        own = {}
        for segment in segments(trajectory):
            ids = np.zeros((1, 32), np.int32)
            ids[0, : len(segment.ids)] = segment.ids
            after = np.asarray(forward(ids))[0] @ kernel
            own |= {segment.steps: after[np.flatnonzero(segment.mask) - 1]}
            end = after[len(segment.ids) - 1]
        compact = np.concatenate(list(own.values()))
        rewards = {"rewritten": [0, 0.25, 1.0]}.get(trajectory.rollout_id, [0, 0.5, 0])
        values.append(compact)
        xs = (jnp.asarray(x, jnp.float32) for x in (rewards, compact))
        returns.append(np.asarray(gae(*xs, jnp.ones(len(compact), bool), jnp.asarray(end), 1.0, 0.95)[1]))
    metrics = ppo.policy_update([[trajectory] for trajectory in (*cut, rewritten)])
    assert metrics["value_mean"] == pytest.approx(np.concatenate(values).mean(), abs=1e-5)
    assert metrics["return_mean"] == pytest.approx(np.concatenate(returns).mean(), abs=1e-5)
    left, whole = np.var(np.concatenate(returns) - np.concatenate(values)), np.var(np.concatenate(returns))
    assert metrics["explained_variance"] == pytest.approx(1 - left / whole, abs=1e-4)


def test_043_advantages_are_whitened_over_trained_tokens_alone(ppo):
    """At ratio 1 the policy loss is minus the mean advantage of the trained tokens: 0 once they are white."""
    groups = with_behaviour(ppo, batch())
    rich = replace(groups[0][0], steps=tuple(replace(step, reward=50.0) for step in groups[0][0].steps))
    live = {rich.rollout_id: [np.zeros(len(s.action_ids), bool) for s in rich.steps]}
    metrics = ppo.policy_update([[rich, *groups[0][1:]], *groups[1:]], live)
    assert metrics["policy_loss"] == pytest.approx(0, abs=1e-5)
    assert metrics["return_mean"] < 1  # the rich rollout's old tokens count nowhere


def test_a_control_run_and_bfloat16_with_a_separate_critic():
    """Zero advantages: the policy stays, bit for bit. At lr 1e-6 every master of a bfloat16 critic moves."""
    tables = {"model": {"dtype": "bfloat16", "remat": True}, "optimizer": {"lr": 1e-6}}
    trainer = Trainer(
        config(algorithm={"advantage": "gae", "critic": "separate", "minibatches": 1, "zero_advantages": True}, **tables), SPEC
    )
    head = {n: np.full_like(a, 0.1) for n, a in trainer.state_tree().items() if n.startswith("params/value_head")}
    trainer.restore_tree(trainer.state_tree() | head)
    start = trainer.state_tree()
    metrics = trainer.policy_update(batch())
    after = trainer.state_tree()
    assert metrics["optimizer_steps"] == 1
    for name, array in start.items():
        if name.startswith("params/"):
            assert array.dtype == np.float32
            changed = array.tobytes() != after[name].tobytes()
            assert changed == (not name.startswith("params/policy")), name


def test_a_separate_critic_starts_from_the_trunk_that_the_warm_start_made():
    trainer = Trainer(config(algorithm={"advantage": "gae", "critic": "separate", "minibatches": 1}), SPEC)
    trainer.supervised([as_reference(rollout([turn([8], [9, 3])], "b"))], 0.02)

    def trunks():
        tree = trainer.state_tree()
        policy = {n.removeprefix("params/policy/"): a for n, a in tree.items() if n.startswith("params/policy/")}
        return policy, {n: tree[f"params/critic/{n}"] for n in policy}

    assert not same(*trunks())
    trainer.forget_moments()
    assert same(*trunks())
