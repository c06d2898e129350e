"""Every advantage and correction on records: what a rollout's segments, its group, its domain and its flags have to do with
it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from common.config_algorithm import COMPARING, CRITICAL, AlgorithmConfig
from common.record import segments
from common.types import StepKind, Task
from learner.credit import of_batch
from learner.examples import group_of, of_rollout
from learner.rows import Credit, Rollout
from tests.learner_math.build import chain, rollout, turn

CORRECTIONS = ("importance", "truncated", "truncated_sequence", "masked", "rejected", "rejected_sequence")


def scored(trajectory, seed=0, **scores):
    """With values, and logprobs near those that were recorded."""
    rng = np.random.default_rng(seed)
    parts = segments(trajectory)
    values = [rng.normal(size=len(s.ids)).astype(np.float32) for s in parts]
    logprobs = [np.where(s.mask, s.logprobs + rng.normal(size=len(s.ids)) * 0.3, 0).astype(np.float32) for s in parts]
    given = {"values": values, "after": 0.5, "logprobs": logprobs, "reference": logprobs} | scores
    return Rollout(trajectory, parts, [s.mask for s in parts], **given)


def gains(credits):
    """Per rollout: advantages of its sampled tokens, in the order of segments."""
    return [np.concatenate([part.advantages for part in parts]) for group in credits for parts in group]


def configured(advantage, **more):
    critic = {"critic": "shared"} if advantage in CRITICAL else {}
    old = {"old_policy": "proximal"} if advantage == "vtrace" else {}
    return AlgorithmConfig(advantage=advantage, **critic, **old, **more)


def of(trajectory, domain):
    return replace(trajectory, task=Task(domain, "t", 0, {}))


def answer(reward, name="r", tokens=1):
    return rollout(chain([([1], [2] * tokens, reward)]), name)


@pytest.mark.parametrize("advantage", [*COMPARING, *CRITICAL, "reinforce_pp"])
def test_batch_mates_padding_and_masked_values_change_no_bit(advantage):
    """Alone with its group, or beside a group of another size with longer rollouts; with NaN where nothing was sampled."""
    turns = [([1], [2, 3], 0.25), ([4], [5], 0.5)]
    group = [scored(rollout(chain(turns), "a"), 1), scored(answer(0.0, "b"), 2)]
    others = [scored(answer(float(i % 2), f"c{i}", 20 + i), i) for i in range(17)]
    algorithm = configured(advantage)
    if advantage == "erpo":  # whose std is of the environment, hence of the batch
        others = [replace(o, trajectory=of(o.trajectory, "other")) for o in others]
    alone = of_batch([group], algorithm)
    beside = of_batch([others, group], algorithm)
    sick = [
        replace(
            r,
            **{
                n: [np.where(s.mask, x, np.nan) for s, x in zip(r.segments, getattr(r, n), strict=True)]
                for n in ("values", "logprobs")
            },
        )
        for r in group
    ]
    for other in (beside[1:], of_batch([sick], algorithm)):
        for own, wanted in zip(other[0], alone[0], strict=True):
            for part, want in zip(own, wanted, strict=True):
                for name in ("advantages", "returns", "old_values", "weights"):
                    assert getattr(part, name).tobytes() == getattr(want, name).tobytes(), name
    assert any(np.abs(x).max() > 0.1 for x in gains(alone))


def test_reinforce_pp_is_the_return_from_each_token():
    """γ .5 over 2 | 1 tokens around an answer, rewards .2 and 1: .35 .7 1."""
    trajectory = rollout(chain([([1], [2, 3], 0.2), ([4, 5], [6], 1.0)]))
    ((credit,),) = of_batch([[scored(trajectory)]], configured("reinforce_pp", gamma=0.5))[0]
    np.testing.assert_allclose(credit.advantages, [0, 0.35, 0.7, 0, 0, 1.0], rtol=1e-6)


def test_bilevel_and_step_level_know_turns_from_the_record():
    """Values .5 .4 | .3 .2, rewards .2 and 1: the numbers of the pure functions."""
    trajectory = rollout(chain([([1], [2, 3], 0.2), ([4, 5], [6, 7], 1.0)]))
    (segment,) = segments(trajectory)
    values = np.full(len(segment.ids), np.nan, np.float32)
    values[segment.mask] = [0.5, 0.4, 0.3, 0.2]
    one = scored(trajectory, values=[values])
    ((credit,),) = of_batch([[one]], configured("bilevel_gae", gamma=0.9, gamma_turn=0.95))[0]
    np.testing.assert_allclose(credit.advantages[segment.mask], [0.46876, 0.712, 0.564, 0.8], atol=1e-6)
    ((credit,),) = of_batch([[one]], configured("step_gae", gamma=0.9))[0]
    np.testing.assert_allclose(credit.advantages[segment.mask], [0.5685, 0.5685, 0.7, 0.7], atol=1e-6)


def test_vtrace_takes_the_ratio_to_what_sampled_the_token():
    """Ratios .5 1.5 .8 as in the golden numbers, over two segments."""
    trajectory = rollout([turn([1], [2, 3]), turn([4], [5], 1.0, 0, 1)])
    parts = segments(trajectory)
    assert len(parts) == 2

    def spread(compact):
        out = [np.zeros(len(s.ids), np.float32) for s in parts]
        for array, s, own in zip(out, parts, np.split(np.asarray(compact), [2]), strict=True):
            array[s.mask] = own
        return out

    one = scored(trajectory, values=spread([0.5, 0.4, 0.3]), logprobs=spread(np.log([0.5, 1.5, 0.8]) - 1))
    (credits,) = of_batch([[one]], configured("vtrace", gamma=0.9, gae_lambda=1.0))[0]
    np.testing.assert_allclose(gains([[credits]])[0], [0, 0.0983, 0.374, 0, 0, 0.56], atol=1e-5)
    targets = np.concatenate([part.returns for part in credits])
    np.testing.assert_allclose(targets, [0, 0.5983, 0.774, 0, 0, 0.86], atol=1e-5)


@pytest.mark.parametrize("advantage", [*CRITICAL, "reinforce_pp"])
def test_concurrent_branches_are_refused(advantage):
    """Two sub-agents whose steps alternate: 1, 3 and 2, 4. One that its caller waits for (2 within 1 … 3) is not concurrent."""
    steps = [
        turn([1], [2]),
        turn([3], [4], 0.0, 0, 1),
        turn([3], [5], 0.0, 0, 1),
        turn([6], [7], 0.0, 1, 3),
        turn([6], [7], 1.0, 2, 3),
    ]
    assert [s.steps for s in segments(rollout(steps))] == [(0,), (1, 3), (2, 4)]
    algorithm = configured(advantage)
    with pytest.raises(
        ValueError, match=rf'rollout r has branches that ran at the same time \(steps 1 to 3 and 2 to 4\).*"{advantage}"'
    ):
        of_batch([[scored(rollout(steps))]], algorithm)
    of_batch([[scored(rollout([*steps[:3], turn([6], [7], 1.0, 1, 3)]))]], algorithm)
    of_batch([[scored(rollout(steps))] * 2], configured("grpo"))


def test_erpo_leaves_user_errors_out_of_everything():
    """1, 1, 0 and a flagged 1; another question 0, 0, 1, 0 of the same environment, one 5, 0 of another."""
    rewards = ([1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0], [5.0, 0.0])
    groups = [[answer(r, f"{g}-{i}") for i, r in enumerate(own)] for g, own in enumerate(rewards)]
    groups[0][3] = replace(groups[0][3], flags=("USER_ERROR",))
    groups[2] = [of(t, "elsewhere") for t in groups[2]]
    algorithm = configured("erpo")
    batch = [group_of(group, {}, algorithm) for group in groups]
    assert [[bool(r.masks[0].any()) for r in group] for group in batch] == [[True] * 3 + [False], [True] * 4, [True] * 2]
    found = [own[-1] for own in gains(of_batch(batch, algorithm))]
    std, wide = np.std([1, 1, 0, 0, 0, 1, 0], ddof=1), np.std([5, 0], ddof=1)
    wanted = [1 / 3 / std, 1 / 3 / std, -2 / 3 / std, 0, *(np.array([-0.25, -0.25, 0.75, -0.25]) / std), 2.5 / wide, -2.5 / wide]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    trained = [group_of(group[2:], {}, algorithm) for group in groups[:1]]  # 0 and the flagged one: nothing to compare with
    assert not any(r.masks[0].any() for r in trained[0])


@pytest.mark.parametrize("advantage", COMPARING)
def test_039_groups_of_equal_prompts_are_compared_apart(advantage):
    """One batch, the same opening in both groups: 0, 0 and 1, 1 give no rollout an advantage (merged, they would be ∓1 or ∓2/3);
    2, 0 beside 1, 1 does, in its group alone."""
    groups = [[scored(answer(r, f"{g}-{i}")) for i, r in enumerate(own)] for g, own in enumerate(([0.0, 0.0], [1.0, 1.0]))]
    assert not np.concatenate(gains(of_batch(groups, configured(advantage)))).any()
    other = [[scored(answer(r, f"{i}")) for i, r in enumerate((2.0, 0.0))], groups[1]]
    high, low, *rest = (own[-1] for own in gains(of_batch(other, configured(advantage))))
    assert high > 0.5
    assert low == pytest.approx(-high)
    assert rest == [0, 0]


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reinforce_pp"])
def test_the_rewards_of_all_turns_count(advantage):
    """.5 and .5 over two turns is as good as 1 at the end, and better than .5 alone: no reward replaces an earlier one."""
    turns = ((0.5, 0.5), (0.0, 1.0), (0.0, 0.5))
    group = [scored(rollout(chain([([1], [2], a), ([3], [4], b)]), f"{i}")) for i, (a, b) in enumerate(turns)]
    first, second, third = (own[own != 0][0] if own.any() else 0.0 for own in gains(of_batch([group], configured(advantage))))
    assert first == pytest.approx(second)
    assert third < second - 0.2


def test_what_erpo_and_gigpo_divide_by_is_as_configured():
    """ddof 0 against 1 over four rewards 1 0 0 1: a factor √(4/3). GiGPO with std divides both comparisons."""
    group = [scored(answer(r, f"{i}")) for i, r in enumerate((1.0, 0.0, 0.0, 1.0))]
    one, zero = (gains(of_batch([group], configured("erpo", std_ddof=ddof)))[0][-1] for ddof in (1, 0))
    assert zero / one == pytest.approx(np.sqrt(4 / 3), rel=1e-5)
    with_std, without = (gains(of_batch([group], configured("gigpo", step_std=std)))[0][-1] for std in (True, False))
    assert without == pytest.approx(0.5 + 0.5)
    assert with_std == pytest.approx(2 * 0.866024, abs=1e-5)


def test_vtraces_bounds_are_those_of_the_configuration():
    """One token with a ratio of 4, reward 1, value 0: its advantage is held by the policy's bound, its target by that of rho; and
    a second one before it moves by c and λ."""
    trajectory = rollout(chain([([1], [2, 3], 1.0)]))
    (segment,) = segments(trajectory)
    logs = np.where(segment.mask, np.log(4.0) - 1, 0).astype(np.float32)
    bounds = {"vtrace_rho": 2.0, "vtrace_c": 1.5, "vtrace_policy": 3.0, "gae_lambda": 0.5, "gamma": 0.9}
    one = scored(trajectory, values=[np.zeros(len(segment.ids), np.float32)], logprobs=[logs])
    ((credit,),) = of_batch([[one]], configured("vtrace", **bounds))[0]
    np.testing.assert_allclose(credit.returns[segment.mask], [0.9 * 0.5 * 1.5 * 2, 2], rtol=1e-5)
    np.testing.assert_allclose(credit.advantages[segment.mask], [3 * 0.9 * 2, 3], rtol=1e-5)


def test_gigpo_compares_steps_that_began_in_the_same_state():
    """Rollout a: begin → s → u, b: begin → s → u, c: begin → t. γ .5, rewards at the end 1, 0, 0: returns at begin .25, 0, 0 (a
    and
    b have three steps, c two), at s .5, 0; the third steps began in u: 1, 0; c's second in t, alone."""

    def walk(name, keys, reward):
        steps = chain([([1], [2], 0.0)] * (len(keys) - 1) + [([1], [2], reward)])
        return rollout([replace(step, state_key=key) for step, key in zip(steps, keys, strict=True)], name)

    group = [walk("a", [b"s", b"u", b"end"], 1.0), walk("b", [b"s", b"u", b""], 0.0), walk("c", [b"t", b""], 0.0)]
    algorithm = configured("gigpo", gamma=0.5, step_weight=2.0)
    a, b, c = (own[own != 0] for own in gains(of_batch([[scored(t) for t in group]], algorithm)))
    episode = np.array([2 / 3, -1 / 3, -1 / 3])
    np.testing.assert_allclose(a, episode[0] + 2 * np.array([0.25 * 2 / 3, 0.25, 0.5]), atol=1e-6)
    np.testing.assert_allclose(b, episode[1] + 2 * np.array([-0.25 / 3, -0.25, -0.5]), atol=1e-6)
    np.testing.assert_allclose(c, episode[2] + 2 * np.array([-0.25 / 3, 0]), atol=1e-6)
    # steps of a summary, after a state that was not said, and of another group, are like no other
    summed = [replace(t, steps=(*t.steps[:1], replace(t.steps[1], kind=StepKind.SUMMARY), *t.steps[2:])) for t in group[:2]]
    a, b = (own[own != 0] for own in gains(of_batch([[scored(t) for t in summed]], algorithm)))
    np.testing.assert_allclose(a, [0.5 + 2 * 0.125, 0.5, 0.5 + 2 * 0.5], atol=1e-6)
    mute = [walk("a", [b"", b"end"], 1.0), walk("b", [b"", b"end"], 0.0)]
    a, b = (own[own != 0] for own in gains(of_batch([[scored(t) for t in mute]], algorithm)))
    np.testing.assert_allclose([a, b], [[1.0, 0.5], [-1.0, -0.5]], atol=1e-6)
    apart = of_batch([[scored(group[0])], [scored(group[1])]], algorithm)
    assert not np.concatenate(gains(apart)).any()


def test_rewards_less_the_kl_penalty_and_the_price_of_length():
    """β .1, log-ratios to the reference .5 and 1: -.05 and -.1 at their tokens; four tokens of a limit of five with a cache of
    2: -.5."""
    trajectory = rollout(chain([([1], [2, 3], 1.0)]))
    (segment,) = segments(trajectory)
    reference = np.zeros(3, np.float32)
    reference[segment.mask] = np.array([-1.5, -2.0])  # recorded: -1 each
    kl = {"where": "reward", "coefficient": 0.1}
    one = scored(trajectory, reference=[reference])
    ((credit,),) = of_batch([[one]], configured("reinforce_pp", kl=kl))[0]
    np.testing.assert_allclose(credit.advantages, [0, 0.85, 0.9], atol=1e-6)
    proximal = scored(trajectory, reference=[reference], logprobs=[reference])
    ((credit,),) = of_batch([[proximal]], configured("reinforce_pp", kl=kl, old_policy="proximal"))[0]
    np.testing.assert_allclose(credit.advantages, [0, 1, 1], atol=1e-6)
    group = [one, scored(answer(0.85, "b"), reference=[np.array([0, -1.0], np.float32)])]
    equal = of_batch([group], configured("dr_grpo", kl=kl))
    np.testing.assert_allclose(np.concatenate(gains(equal)), 0, atol=1e-6)  # 1 - .15 and .85
    long = [scored(answer(1.0, "a", 4)), scored(answer(1.0, "b", 3))]
    found = of_batch([long], configured("dr_grpo", overlong_limit=5, overlong_cache=2))
    np.testing.assert_allclose([own[-1] for own in gains(found)], [-0.25, 0.25])


def test_normalisation_is_over_what_is_trained_on():
    """Returns 1 2 3 over the batch; or in their domains: 1 3 and 2 4 6."""
    group = [scored(answer(r, str(r))) for r in (1.0, 2.0, 3.0, 99.0)]
    group[3] = replace(group[3], masks=[np.zeros_like(mask) for mask in group[3].masks])
    root = np.sqrt(1.5)
    found = gains(of_batch([group], configured("reinforce_pp", normalize="batch")))
    np.testing.assert_allclose([own[-1] for own in found], [-root, 0, root, 0], atol=1e-6)
    group = [scored(of(answer(r, str(r)), d)) for d, r in (("a", 1.0), ("b", 2.0), ("a", 3.0), ("b", 4.0), ("b", 6.0))]
    found = gains(of_batch([group], configured("reinforce_pp", normalize="task")))
    np.testing.assert_allclose([own[-1] for own in found], [-(0.5**0.5), -1, 0.5**0.5, 0, 1], atol=1e-5)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_correction_is_of_the_whole_rollout(correction):
    """Two segments of two tokens and one, ratios 2 .5 3 (product 3, geometric mean 1.442); the recorded logprobs are -1."""
    trajectory = rollout([turn([1], [2, 3]), turn([4], [5], 1.0, 0, 1)])
    logprobs = [np.array([9, np.log(2) - 1, np.log(0.5) - 1]), np.array([9, 9, np.log(3) - 1])]
    one = scored(trajectory, logprobs=[x.astype(np.float32) for x in logprobs])
    bounds = {} if correction == "importance" else {"correction_low": 0.6, "correction_high": 2.5}
    algorithm = configured("reinforce_pp", old_policy="proximal", correction=correction, **bounds)
    (credits,) = of_batch([[one]], algorithm)[0]
    wanted = {
        "importance": [2, 0.5, 3],
        "truncated": [2, 0.6, 2.5],
        "truncated_sequence": [2.5] * 3,
        "masked": [2, 0, 0],
        "rejected": [1, 0, 0],
        "rejected_sequence": [1] * 3,
    }[correction]
    np.testing.assert_allclose(credits[0].weights, [0, *wanted[:2]], rtol=1e-5)
    np.testing.assert_allclose(credits[1].weights, [0, 0, wanted[2]], rtol=1e-5)


def test_a_rollout_that_left_the_loss_teaches_none_of_its_observations():
    """Two observations of two tokens, the first of which nothing predicts. Left out, trained, its second turn too old."""
    trajectory = rollout(chain([([1, 2], [3], 0.0), ([4, 5], [6], 1.0)]))
    (segment,) = segments(trajectory)
    zeros = np.zeros(len(segment.ids), np.float32)
    credit, algorithm = Credit(zeros, zeros, zeros, zeros), AlgorithmConfig(observation={"loss": "cross_entropy"})
    for mask, observed in ((np.zeros_like(segment.mask), 0), (segment.mask, 3), (segment.step_of == 0, 3)):
        (found,) = of_rollout(Rollout(trajectory, [segment], [mask]), [credit], algorithm)
        assert (int(found.observed.sum()), found.answers) == (observed, observed)
