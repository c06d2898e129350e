"""Domains with algorithms of their own in one optimizer step: what each would do alone, weighted by its share of the rollouts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest

from common.config_algorithm import AlgorithmConfig
from learner import objective, reducers
from learner.objective import contribution
from learner.pack import Aggregation, Shape, pack
from learner.parts import Accumulator, Part, loads_of, parts_of
from learner.reducers import results
from learner.report import Report
from learner.update import Trainer
from tests.learner_math.build import SPEC, config, domains, of_domain, rollout, turn
from tests.learner_math.test_objective_terms import CASES, Bigram, examples, params, slow_loss
from tests.learner_math.test_update import batch, same, with_behaviour

GAE = {
    "advantage": "gae",
    "normalize": "batch",
    "aggregation": "seq_mean_token_mean",
    "entropy": 0.01,
    "kl": {"where": "loss", "coefficient": 0.1, "value": "k3"},
}
WHOLE = {"entropy": 0.02, "minibatches": 1}
TABLES = {"optimizer": {"lr": 1e-2}}


# ---- the loss, against its definition --------------------------------------------------------------------------------


class Mixed:
    """Two parts of Bigram examples, rollouts a and c of one, b and d of the other, of algorithms in CASES."""

    def __init__(self, first: str, second: str) -> None:
        self.algorithms = [AlgorithmConfig(**CASES[name][0]) for name in (first, second)]
        self.parts = [Part(algorithm, {i: "xy"[i]}) for i, algorithm in enumerate(self.algorithms)]
        self.examples = [replace(own, domain=int(own.rollout in "bd")) for own in examples(3, 6)]
        self.losses = [objective.policy(Bigram("shared"), part.algorithm, part.domains) for part in self.parts]  # type: ignore[arg-type]
        self.aggregations = [part.aggregation(1.0, 0) for part in self.parts]

    def of(self, part):
        return [own for own in self.examples if own.domain == part]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("first", "second"), [("ppo", "critic"), ("observations", "gspo"), ("double_sided", "dual clip")])
@pytest.mark.parametrize("shape", [Shape(30, 4), Shape(10, 1)])
def test_a_step_is_the_sum_of_parts_by_their_share_of_the_rollouts(first, second, shape):
    """Loss: the loop in NumPy. Gradient and measures: each part's own objective on its own examples. Rollouts with a trained
    token count, d has none."""
    mixed = Mixed(first, second)
    mixed.examples = [replace(e, mask=e.mask & (e.rollout != "d")) for e in mixed.examples]
    loads = loads_of(mixed.examples, mixed.parts, shape, 0)
    total, logprobs = Accumulator(mixed.losses).run(params(), loads)
    shares = (2 / 3, 1 / 3)
    wanted = [share * slow_loss(mixed.of(i), mixed.algorithms[i], mixed.aggregations[i]) for i, share in enumerate(shares)]
    found = results([total.measures])
    assert found["loss"] == pytest.approx(sum(wanted), abs=1e-6)
    assert (found["loss/x"], found["loss/y"]) == pytest.approx(wanted, abs=1e-6)
    gradient = jax.tree.map(np.zeros_like, params())
    for i, share in enumerate(shares):
        run = jax.jit(contribution(mixed.losses[i]))
        own = [run(params(), b)[0] for b in pack(mixed.of(i), Shape(60, 2), mixed.aggregations[i]).microbatches]
        gradient = jax.tree.map(lambda a, b, s=share: a + s * np.asarray(b), gradient, own[0].gradient)
        for name, value in results([own[0].measures]).items():
            if name.endswith(f"/{'xy'[i]}") and "loss" not in name:
                assert found[name] == pytest.approx(value, abs=1e-6), name
    for a, b in zip(jax.tree.leaves(total.gradient), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert [len(own) for own in logprobs] == [len(load.packed.microbatches) for load in loads]
    assert [{int(d) for b in load.packed.microbatches for d in b.domain[b.mask]} for load in loads] == [{0}, {1}]


@pytest.mark.usefixtures("x64")
def test_domains_of_one_part_are_measured_apart_and_add_up():
    """Whatever the packing mixes: a domain's measures are those of its examples alone, its losses add up to the step's."""
    settings, aggregation = CASES["critic"]
    chosen = [replace(own, domain=int(own.rollout in "bd")) for own in examples()]
    names = {0: "x", 1: "y"}
    run = jax.jit(contribution(objective.policy(Bigram("shared"), AlgorithmConfig(**settings), names)))  # type: ignore[arg-type]

    def measured(own):
        (packed,) = pack(own, Shape(60, 2), aggregation).microbatches
        own = run(params(), packed)[0].measures
        return results([reducers.merge(reducers.start(own), own)])

    whole = measured(chosen)
    for number, name in names.items():
        alone = measured([own for own in chosen if own.domain == number])
        others = {n for n in alone if "/" not in n and not n.endswith("loss")}
        assert {"entropy", "ratio_max", "ratio_min", "clipped_high", "kl_k3", "effective_sample", "value_clipped"} <= others
        for measure in others:
            assert whole[f"{measure}/{name}"] == pytest.approx(alone[measure], abs=1e-6), measure
    for loss in ("loss", "policy_loss", "value_loss"):
        assert whole[f"{loss}/x"] + whole[f"{loss}/y"] == pytest.approx(whole[loss], abs=1e-6)


def test_schedules_run_by_part():
    """At step 2 of a warm-up of 3, and of a decay over 4; a part that has neither is as always."""
    observation = {"loss": "cross_entropy", "coefficient": 0.2, "decay_steps": 4}
    warm = AlgorithmConfig(advantage="gae", critic="shared", critic_warmup=3)
    fading = AlgorithmConfig(observation=observation)  # type: ignore[arg-type]
    wanted = (Aggregation(share=0.5, policy=0.0), Aggregation(share=0.5, observations=0.1))
    assert tuple(Part(own, {}).aggregation(0.5, 2) for own in (warm, fading)) == pytest.approx(wanted)


# ---- whole updates ---------------------------------------------------------------------------------------------------


def two(first=None, second=GAE, **whole):
    """A run of two domains; the critic is the run's."""
    algorithm = {**WHOLE, "critic": "shared", **whole}
    return config(algorithm=algorithm, domains=domains(frozenlake=first or {}, arithmetic=second), **TABLES)


def valued(trainer):
    """With a critic that says something."""
    head = {n: np.full_like(a, 0.1) for n, a in trainer.state_tree().items() if n == "params/value_head/kernel"}
    trainer.restore_tree(trainer.state_tree() | head)
    return trainer


class Trainers:
    """Both algorithms in one run, and each in a run of its own; compiled once."""

    def __init__(self) -> None:
        self.both = valued(Trainer(two(), SPEC))
        self.lake = Trainer(config(algorithm=WHOLE, **TABLES), SPEC)
        self.sums = valued(
            Trainer(config(algorithm=WHOLE | GAE | {"critic": "shared"}, domains=domains(arithmetic={}), **TABLES), SPEC)
        )
        self.starts = [own.state_tree() for own in (self.both, self.lake, self.sums)]
        self.groups = with_behaviour(self.lake, batch(0, groups=3), offset=0.1)
        self.others = of_domain(with_behaviour(self.lake, batch(1, groups=2, size=2), offset=-0.1), "arithmetic")

    def restart(self) -> None:
        for own, start in zip((self.both, self.lake, self.sums), self.starts, strict=True):
            own.restore_tree(start)


@pytest.fixture(scope="module")
def trainers_built():
    return Trainers()


@pytest.fixture
def trainers(trainers_built):
    trainers_built.restart()
    return trainers_built


MIXED = [0, 3, 1, 4, 2]  # the order of groups


def test_a_mixed_update_measures_what_its_parts_would_alone(trainers):
    """9 rollouts of GRPO, 4 of PPO: losses are 9/13 and 4/13 of theirs, everything else of a domain is what it would be alone.
    The critic knows the sums only."""
    groups = [[*trainers.groups, *trainers.others][i] for i in MIXED]
    metrics = trainers.both.policy_update(groups)
    alone = {
        "frozenlake": (trainers.lake.policy_update(trainers.groups), 9 / 13),
        "arithmetic": (trainers.sums.policy_update(trainers.others), 4 / 13),
    }
    whole = {"trained_tokens": 0.0, "loss": 0.0, "policy_loss": 0.0, "value_loss": 0.0}
    for domain, (own, share) in alone.items():
        for name in whole:
            whole[name] += own.get(name, 0.0) * (1 if name == "trained_tokens" else share)
        for name, value in own.items():
            if f"{name}/{domain}" in metrics:
                wanted = value * share if name.endswith("loss") else value
                assert metrics[f"{name}/{domain}"] == pytest.approx(wanted, abs=2e-5), name
    assert {name: metrics[name] for name in whole} == pytest.approx(whole, abs=2e-5)
    of_both = {
        "loss",
        "policy_loss",
        "entropy",
        "kl_k1",
        "kl_k2",
        "kl_k3",
        "clipped_low",
        "clipped_high",
        "ratio_min",
        "ratio_max",
    }
    of_both |= {"effective_sample", "advantage_std", "group_reward_std", "correction_mean", "correction_zero"}
    of_sums = {"value_loss", "value_clipped", "reference_kl", "value_mean", "return_mean", "explained_variance"}
    apart = {"frozenlake": set(), "arithmetic": set()}
    for name, _, domain in (key.partition("/") for key in metrics if "/" in key):
        apart[domain].add(name)
    assert apart == {"frozenlake": of_both, "arithmetic": of_both | of_sums}
    assert metrics["advantage_std/arithmetic"] == pytest.approx(1, abs=1e-4)  # whitened over its own tokens
    for name in of_sums - {"value_loss"}:
        assert metrics[name] == metrics[f"{name}/arithmetic"]
    assert metrics["ratio_max"] == max(metrics["ratio_max/frozenlake"], metrics["ratio_max/arithmetic"])
    assert metrics["gap_tokens"] == metrics["trained_tokens"]


def test_an_update_without_rollouts_of_a_part_is_that_of_the_other_alone(trainers):
    metrics = trainers.both.policy_update(trainers.groups)
    wanted = trainers.lake.policy_update(trainers.groups)
    for name in ("loss", "entropy", "grad_norm", "advantage_std/frozenlake", "gap_mean"):
        assert metrics[name] == pytest.approx(wanted[name], abs=1e-6), name
    assert not any(name.endswith("/arithmetic") and value for name, value in metrics.items())
    after, alone = trainers.both.state_tree(), trainers.lake.state_tree()
    for name in (n for n in alone if n.startswith("params/policy")):
        np.testing.assert_allclose(after[name], alone[name], atol=1e-6, err_msg=name)
    dead = {t.rollout_id: [np.zeros(len(s.action_ids), bool) for s in t.steps] for g in trainers.others for t in g}
    trainers.restart()
    assert trainers.both.policy_update([*trainers.groups, *trainers.others], dead)["loss"] == pytest.approx(
        wanted["loss"], abs=1e-6
    )
    assert trainers.both.policy_update(trainers.others, dead)["skipped_empty"] == 1


def test_scores_are_read_where_an_algorithm_asks_for_them(trainers):
    prepared, credits, found = trainers.both.prepare([*trainers.groups, *trainers.others], {}, Report())
    for own in itertools.chain.from_iterable(prepared):
        sums = own.trajectory.task.domain == "arithmetic"
        assert (len(own.values) > 0, len(own.reference) > 0, len(own.logprobs) > 0) == (sums, sums, False)
    assert [{example.domain for example in group} for group in found] == [{0}] * 3 + [{1}] * 2
    assert all(len(parts) == len(group) for parts, group in zip(credits, prepared, strict=True))
    unknown = of_domain(trainers.groups[:1], "chess")
    with pytest.raises(ValueError, match="of domain 'chess'; the run has frozenlake, arithmetic"):
        trainers.both.policy_update(unknown)


def test_a_mixed_update_repeats_bit_for_bit_from_a_restored_state_and_compiles_once(trainers):
    """Two updates of which the second has other groups, the second again from what a checkpoint has: the reference is in it."""
    groups = [*trainers.groups, *trainers.others]
    trainers.both.policy_update([groups[i] for i in MIXED])
    saved = trainers.both.state_tree()
    assert any(name.startswith("reference/") for name in saved)
    first = trainers.both.policy_update(groups[1:])
    after = trainers.both.state_tree()
    trainers.both.restore_tree(saved)
    assert trainers.both.policy_update(groups[1:]) == first
    assert same(trainers.both.state_tree(), after)
    compiled = [*trainers.both._policy._accumulate, trainers.both._policy._nothing, trainers.both._apply]
    assert [function._cache_size() for function in compiled] == [1, 1, 1, 1]


def test_minibatches_have_the_parts_that_come_and_a_critic_warms_up_while_domains_without_one_train():
    """Five steps of a group each, in all of which the critic warms up."""
    trainer = valued(Trainer(two(second=GAE | {"kl": {}, "entropy": 0.0}, minibatches=5, critic_warmup=5), SPEC))
    groups = with_behaviour(trainer, [*batch(0, groups=3), *of_domain(batch(1, groups=2), "arithmetic")], offset=0.1)
    metrics = trainer.policy_update(groups)
    assert (metrics["optimizer_steps"], metrics["skipped_empty"]) == (5, 0)
    assert metrics["loss"] == pytest.approx(metrics["loss/frozenlake"] + metrics["loss/arithmetic"], abs=1e-6)
    assert metrics["trained_tokens"] == sum(len(s.action_ids) for g in groups for t in g for s in t.steps)
    assert metrics["policy_loss"] == metrics["policy_loss/frozenlake"] != 0
    assert metrics["policy_loss/arithmetic"] == 0
    assert metrics["value_loss/arithmetic"] == metrics["value_loss"] > 0


def test_domains_of_equal_algorithms_are_as_one():
    """One part, and an update that is the same to the last bit, with everything that looks at several rollouts at once."""
    more = {"advantage": "gae", "critic": "shared", "normalize": "batch", "old_policy": "proximal", "correction": "truncated"}
    settings = config(algorithm=WHOLE | more, domains=domains(frozenlake={}, arithmetic={"entropy": 0.02}), **TABLES)
    (part,) = parts_of(settings)
    assert part.domains == {0: "frozenlake", 1: "arithmetic"}
    one, many = Trainer(config(algorithm=WHOLE | more, **TABLES), SPEC), Trainer(settings, SPEC)
    groups = with_behaviour(one, batch(), offset=0.1)
    mixed = [*groups[:2], *of_domain(groups[2:], "arithmetic")]
    metrics, found = one.policy_update(groups), many.policy_update(mixed)
    assert same(many.state_tree(), one.state_tree())
    assert {n: v for n, v in found.items() if "/" not in n} == {n: v for n, v in metrics.items() if "/" not in n}
    assert found["entropy/frozenlake"] != found["entropy/arithmetic"]


def test_algorithms_are_equal_whatever_they_are_called():
    """DAPO is GRPO with the defaults; a domain between two others has an algorithm of its own."""
    own = domains(a={"preset": "dapo"}, b={"clip_low": 0.1}, c={})
    assert [part.domains for part in parts_of(config(domains=own))] == [{0: "a", 2: "c"}, {1: "b"}]


# ---- learning --------------------------------------------------------------------------------------------------------

PROMPTS = {"frozenlake": [1, 2], "arithmetic": [3, 2]}  # the only states of two bandits
PAYS = {"frozenlake": 0, "arithmetic": 1}  # even arms of one, odd arms of the other


def arms(trainer, domain):
    """Logprobs of a bandit's 16 actions."""
    pulls = [rollout([turn(PROMPTS[domain], [arm])], f"arm{arm}") for arm in range(16)]
    return np.array([rows[0][2] for rows in trainer.logprobs(pulls)])


def success(trainer, domain):
    return np.exp(arms(trainer, domain))[PAYS[domain] :: 2].sum()


def play(trainer, rng, domain):
    """Eight groups of eight pulls."""
    logprobs = arms(trainer, domain)
    chances = np.exp(logprobs) / np.exp(logprobs).sum()

    def one(name):
        arm = int(rng.choice(16, p=chances))
        paid = float(arm % 2 == PAYS[domain])
        return rollout([turn(PROMPTS[domain], [arm], paid, logprob=float(logprobs[arm]))], name)

    return of_domain([[one(f"{g}-{i}") for i in range(8)] for g in range(8)], domain)


def test_two_bandits_are_learnt_by_two_algorithms_in_the_same_steps(trainers):
    """GRPO and PPO with a critic, of which one policy learns that even arms pay here and odd ones there."""
    trainer, rng = trainers.both, np.random.default_rng(0)
    assert max(success(trainer, domain) for domain in PROMPTS) < 0.75
    for _ in range(20):
        metrics = trainer.policy_update([group for domain in PROMPTS for group in play(trainer, rng, domain)])
    assert min(success(trainer, domain) for domain in PROMPTS) > 0.9
    assert metrics["value_mean/arithmetic"] > 0.5
