"""Credit over time against hand-computed numbers, slow definitions, identities, and what must change nothing."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.temporal import Bounds, bilevel_gae, discounted_returns, gae, step_gae, vtrace

pytestmark = pytest.mark.usefixtures("x64")

finite = st.floats(-3, 3, allow_nan=False, width=32)
SIZE = 12  # of the padded arrays: one compiled program for all examples of a test

# a a e e a a e: the policy's tokens at 0, 1, 4, 5; what stands elsewhere is junk that must not be read
MASK = [1, 1, 0, 0, 1, 1, 0]
VALUES = [0.5, 0.4, 0.9, 0.8, 0.3, 0.2, 0.7]
ALONG = [0, 0, 0, 0, 0, 1.0, 0]  # the outcome, on the last token of the policy's
BEHIND = [0, 0, 0, 0, 0, 0, 1.0]  # and on the environment's behind it


def arrays(*xs):
    return [jnp.asarray(x, bool if x is MASK else float) for x in xs]


def padded(tokens, *, fill=np.nan):
    """Columns of hypothesis' tuples as arrays of SIZE; the mask; junk behind."""
    columns = np.full((len(tokens[0]), SIZE), fill)
    columns[:, : len(tokens)] = np.transpose(tokens)
    return [jnp.asarray(column) for column in columns], jnp.arange(SIZE) < len(tokens)


def number(x):
    return jnp.asarray(float(x))


# ---- golden numbers --------------------------------------------------------------------------------------------------------


def test_gae_golden():
    """γ .9, λ .95. Backwards over .2 .3 .4 .5: 1 - .2 = .8; .9·.2 - .3 + .855·.8 = .564; and so on."""
    rewards, values, mask = arrays(ALONG, VALUES, MASK)
    found, returns = gae(rewards, values, mask, number(0), 0.9, 0.95)
    np.testing.assert_allclose(found, [0.161148, 0.352220, 0, 0, 0.564, 0.8, 0], atol=5e-7)
    np.testing.assert_allclose(returns, [0.661148, 0.752220, 0, 0, 0.864, 1.0, 0], atol=5e-7)
    undiscounted, _ = gae(rewards, values, mask, number(0), 1.0, 1.0)
    np.testing.assert_allclose(undiscounted[np.array(MASK, bool)], [0.5, 0.6, 0.7, 0.8])


def test_gae_is_not_what_other_stacks_compute():
    """The environment's tokens as steps of their own (slime), values of the environment's first token as bootstrap
    (AgentGym-RL), a reward behind the policy's last token lost (verl): all different on the same data."""
    rewards, values, mask = arrays(ALONG, VALUES, MASK)
    own = np.asarray(gae(rewards, values, mask, number(0), 0.9, 0.95)[0])[[0, 1, 4, 5]]
    unmasked, _ = gae(arrays(BEHIND)[0], values, jnp.ones(7, bool), number(0), 0.9, 0.95)
    np.testing.assert_allclose(unmasked, [-0.002758, 0.160518, -0.291792, -0.130751, 0.466958, 0.6865, 0.3], atol=5e-7)
    lost, _ = gae(arrays(BEHIND)[0], values, mask, number(0), 0.9, 0.95)
    np.testing.assert_allclose(lost, [-0.463878, -0.378805, 0, 0, -0.291, -0.2, 0], atol=5e-7)
    agentgym, agentgym_behind = [1.016615, 1.352766, 1.10265, 1.43], [0.391588, 0.621741, 0.24765, 0.43]
    for wrong in (np.asarray(unmasked)[[0, 1, 4, 5]], np.asarray(lost)[[0, 1, 4, 5]], agentgym, agentgym_behind):
        assert (np.abs(own - wrong) > 0.09).all()
    plain, _ = gae(rewards, values, mask, number(0), 1.0, 1.0)  # where even γ = λ = 1 gives AgentGym-RL's away
    assert (np.abs(np.asarray(plain)[[0, 1, 4, 5]] - [1.8, 1.9, 1.4, 1.5]) > 0.6).all()


def test_029_gae_skips_observation_tokens():
    values, rewards = [0.1, 0.2, 0.9, -0.5, 0.4, 0.6], [0, 0, 0, 0, 0, 1.0]
    mask = jnp.asarray([1, 1, 0, 0, 1, 1], bool)
    for gamma, wanted in (
        (0.99, [0.786703, 0.732273, 0, 0, 0.5702, 0.4]),
        (1.0, [0.81345, 0.751, 0, 0, 0.58, 0.4]),
    ):
        found, _ = gae(*arrays(rewards, values), mask, number(0), gamma, 0.95)
        np.testing.assert_allclose(found, wanted, atol=5e-7)
    naive, _ = gae(*arrays(rewards, values), jnp.ones(6, bool), number(0), 0.99, 0.95)
    np.testing.assert_allclose(naive[:2], [0.705474, 0.645906], atol=5e-7)


def test_030_the_value_behind_the_end_is_not_read():
    found, _ = gae(*arrays([0, 1.0, 0], [0.3, 0.5, 40]), jnp.asarray([1, 1, 0], bool), number(0), 1.0, 0.95)
    np.testing.assert_allclose(found, [0.675, 0.5, 0])


def test_031_returns_run_through_observations():
    """verl until August 2026 reset them at each: 0 0 0 .81 .9 1 0 on the first row (0, 0 at the first turn)."""
    rewards, behind, mask = arrays(ALONG, BEHIND, MASK)
    np.testing.assert_allclose(discounted_returns(rewards, mask, 0.9), [0.729, 0.81, 0, 0, 0.9, 1, 0])
    assert (discounted_returns(behind, mask, 0.9) == 0).all()
    mask = jnp.asarray([1, 1, 0, 0, 1], bool)
    for reward, wanted in ((0, [0.25, 0.5, 0, 0, 1.0]), (0.2, [0.35, 0.7, 0, 0, 1.0])):
        np.testing.assert_allclose(discounted_returns(*arrays([0, reward, 0, 0, 1.0]), mask, 0.5), wanted)


def test_032_an_outcome_on_the_last_token_of_the_policy():
    mask, xs = jnp.asarray([1, 1, 0, 0], bool), arrays([0, 1.0, 0, 0], [0.2, 0.3, 9, 9])
    np.testing.assert_allclose(gae(*xs, mask, number(0), 0.0, 0.95)[0], [-0.2, 0.7, 0, 0])
    np.testing.assert_allclose(gae(*xs, mask, number(0), 0.9, 0.9)[0], [0.637, 0.7, 0, 0])


@pytest.mark.parametrize("width", [5, 16])
def test_034_truncated_and_finished_rollouts(width):
    def run(rewards, values, bootstrap):
        padding = width - len(values)
        mask = jnp.asarray([1] * len(values) + [0] * padding, bool)
        xs = (jnp.asarray([*x, *[7.0] * padding]) for x in (rewards, values))
        return np.asarray(gae(*xs, mask, number(bootstrap), 1.0, 1.0)[0])[: len(values)]

    cut, ended = ([0, 0, 0], [0.2, 0.3, 0.4]), ([0, 0, 0, 0, 1.0], [0.1, 0.2, 0.3, 0.4, 0.5])
    np.testing.assert_allclose(run(*cut, 0.7), [0.5, 0.4, 0.3])
    np.testing.assert_allclose(run(*ended, 0), [0.9, 0.8, 0.7, 0.6, 0.5])
    np.testing.assert_allclose(run(*cut, 0), [-0.2, -0.3, -0.4])  # with the flags swapped
    np.testing.assert_allclose(run(*ended, 0.6), [1.5, 1.4, 1.3, 1.2, 1.1])


def test_bilevel_gae_golden():
    """Turn ends 1 and 5, rewards .2 and 1, γ_turn .95. High: 1 - .2 = .8; .2 + .95·.2 - .4 + .9025·.8 = .712; targets 1.112
    and 1. Low: .9·.4 - .5 + .855·.712 = .46876; .9·.2 - .3 + .855·.8 = .564."""
    rewards, values, mask = arrays([0, 0.2, 0, 0, 0, 1.0, 0], VALUES, MASK)
    ends = jnp.asarray([0, 1, 0, 0, 0, 1, 0], bool)
    found, returns = bilevel_gae(rewards, values, ends, mask, number(0), (0.9, 0.95), 0.95)
    np.testing.assert_allclose(found, [0.46876, 0.712, 0, 0, 0.564, 0.8, 0], atol=5e-7)
    np.testing.assert_allclose(returns, [0.96876, 1.112, 0, 0, 0.864, 1, 0], atol=5e-7)
    # a turn that is paid nothing is a turn; taking ends to be rewards, as RAGEN does, would drop it
    unpaid, _ = bilevel_gae(arrays(ALONG)[0], values, ends, mask, number(0), (0.9, 0.95), 0.95)
    vanished, _ = bilevel_gae(arrays(ALONG)[0], values, arrays(ALONG)[0] != 0, mask, number(0), (0.9, 0.95), 0.95)
    np.testing.assert_allclose(unpaid[1], 0.512, atol=5e-7)  # 0 + .95·.2 - .4 + .722
    assert abs(float(vanished[1]) - 0.512) > 0.1


def test_step_gae_golden():
    """Two turns with values .5 and .3 at their starts and rewards .2 and 1: 1 - .3 = .7; .2 + .9·.3 - .5 + .855·.7 = .5685."""
    rewards, values, mask = arrays([0.1, 0.1, 0, 0, 0, 1.0, 0], VALUES, MASK)
    starts = jnp.asarray([1, 0, 0, 0, 1, 0, 0], bool)
    found, returns = step_gae(rewards, values, starts, mask, number(0), 0.9, 0.95)
    np.testing.assert_allclose(found, [0.5685, 0.5685, 0, 0, 0.7, 0.7, 0])
    np.testing.assert_allclose(returns, [1.0685, 1.0685, 0, 0, 1, 1, 0])


def test_vtrace_golden():
    """Ratios .5 1.5 .8. Backwards: .8·(1 - .3) = .56; .9·.86 - .4 = .374; .5·(.9·.774 - .5) = .0983."""
    xs = arrays([0, 0, 1.0], [0.5, 0.4, 0.3], np.log([0.5, 1.5, 0.8]))
    found, targets = vtrace(*xs, jnp.ones(3, bool), number(0), 0.9)
    np.testing.assert_allclose(targets, [0.5983, 0.774, 0.86], atol=5e-7)
    np.testing.assert_allclose(found, [0.0983, 0.374, 0.56], atol=5e-7)
    spread = [jnp.zeros(6).at[jnp.array([0, 1, 5])].set(x).at[2:5].set(9.0) for x in xs]  # the same around an answer
    mask = jnp.asarray([1, 1, 0, 0, 0, 1], bool)
    around, _ = vtrace(*spread, mask, number(0), 0.9)
    np.testing.assert_allclose(around, [0.0983, 0.374, 0, 0, 0, 0.56], atol=5e-7)


# ---- slow definitions ------------------------------------------------------------------------------------------------------

compiled_gae = jax.jit(gae, static_argnames=("gamma", "lam"))
LOOSE = Bounds(rho=1.2, c=0.9, policy=1.5, lam=0.8)
compiled_vtrace = jax.jit(vtrace, static_argnames=("gamma", "bounds"))
compiled_step_gae = jax.jit(partial(step_gae, gamma=0.9, lam=0.7))
compiled_bilevel_gae = jax.jit(partial(bilevel_gae, gammas=(0.9, 0.8), lam=0.7))
compiled_returns = jax.jit(partial(discounted_returns, gamma=0.9))


def slow_gae(rewards, values, bootstrap, gamma, lam):
    """O(T²): Â_t = Σ_k (γλ)^k δ_{t+k}."""
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, [*values[1:], bootstrap], values, strict=True)]
    return np.array([sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))])


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=SIZE), finite)
@settings(deadline=None, max_examples=50)
def test_gae_is_its_definition(tokens, bootstrap):
    (rewards, values), mask = padded(tokens)
    found, returns = compiled_gae(rewards, values, mask, number(bootstrap), gamma=0.9, lam=0.7)
    wanted = slow_gae(*map(list, zip(*tokens, strict=True)), bootstrap, 0.9, 0.7)
    np.testing.assert_allclose(found[mask], wanted, atol=1e-12)
    np.testing.assert_allclose(returns[mask], wanted + np.array(values)[mask], atol=1e-12)


def slow_vtrace(rewards, values, ratios, bootstrap, gamma, bounds):
    """O(T²), eq. 1: target_s = v_s + Σ_t γ^(t-s) · Π_{s≤i<t} c_i · ρ_t·δ_t."""
    following, size = [*values[1:], bootstrap], len(values)
    deltas = [min(bounds.rho, ratios[t]) * (rewards[t] + gamma * following[t] - values[t]) for t in range(size)]
    cuts = [bounds.lam * min(bounds.c, ratio) for ratio in ratios]
    targets = [values[s] + sum(gamma ** (t - s) * np.prod(cuts[s:t]) * deltas[t] for t in range(s, size)) for s in range(size)]
    after = [*targets[1:], bootstrap]
    return [min(bounds.policy, ratios[t]) * (rewards[t] + gamma * after[t] - values[t]) for t in range(size)], targets


@given(st.lists(st.tuples(finite, finite, st.floats(-1, 1, width=32)), min_size=1, max_size=SIZE), finite)
@settings(deadline=None, max_examples=50)
def test_vtrace_is_its_definition(tokens, bootstrap):
    (rewards, values, logs), mask = padded(tokens)
    found = compiled_vtrace(rewards, values, logs, mask, number(bootstrap), gamma=0.9, bounds=LOOSE)
    columns = list(map(list, zip(*tokens, strict=True)))
    wanted = slow_vtrace(columns[0], columns[1], np.exp(columns[2]), bootstrap, 0.9, LOOSE)
    for own, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(own[mask], want, atol=1e-12)


def slow_turns(tokens, turns):
    """Token indices of each turn."""
    out, at = [], 0
    for size in turns:
        out.append(list(range(at, min(at + size, len(tokens)))))
        at += size
    return [turn for turn in out if turn]


@given(
    st.lists(st.tuples(finite, finite), min_size=1, max_size=SIZE), st.lists(st.integers(1, 4), min_size=12, max_size=12), finite
)
@settings(deadline=None, max_examples=50)
def test_gae_over_turns_is_its_definition(tokens, sizes, bootstrap):
    turns, (xs, mask) = slow_turns(tokens, sizes), padded(tokens)
    rewards, values = map(list, zip(*tokens, strict=True))
    starts, ends = (jnp.zeros(SIZE, bool).at[jnp.array([turn[i] for turn in turns])].set(True) for i in (0, -1))
    own, _ = compiled_step_gae(*xs, starts, mask, number(bootstrap))
    earned, begun = [sum(rewards[t] for t in turn) for turn in turns], [values[turn[0]] for turn in turns]
    wanted = slow_gae(earned, begun, bootstrap, 0.9, 0.7)
    np.testing.assert_allclose(own[mask], np.repeat(wanted, [len(turn) for turn in turns]), atol=1e-12)

    own, _ = compiled_bilevel_gae(*xs, ends, mask, number(bootstrap))
    high = slow_gae(earned, [values[t[-1]] for t in turns], bootstrap, 0.8, 0.7)
    for turn, advantage in zip(turns, high, strict=True):
        inside = [values[t] for t in turn]
        target = [0.0] * (len(turn) - 1) + [advantage + inside[-1]]
        np.testing.assert_allclose(np.asarray(own)[turn], slow_gae(target, inside, 0.0, 0.9, 0.7), atol=1e-12)


def test_bilevel_gae_takes_what_every_token_is_paid():
    """A KL of 5 before each turn's end, β 1, outcome 1: what GAE says in the first token of a turn, all of it. After the last end
    a token has its own reward: -2, then the bootstrap of 3."""
    rewards, zeros = jnp.asarray([-5.0, 0, -5, 1, -2, 0]), jnp.zeros(6)
    ends, whole = jnp.asarray([0, 1, 0, 1, 0, 0], bool), jnp.asarray([1, 1, 1, 1, 0, 0], bool)
    found, _ = bilevel_gae(rewards, zeros, ends, whole, number(0), (1.0, 1.0), 1.0)
    assert found.tolist() == [-9, -9, -4, -4, 0, 0]
    open_turn, _ = bilevel_gae(rewards, zeros, ends, jnp.ones(6, bool), number(3), (1.0, 1.0), 1.0)
    assert open_turn[4:].tolist() == [1, 3]


# ---- identities ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(finite, finite), min_size=1, max_size=SIZE), finite)
@settings(deadline=None, max_examples=50)
def test_with_lambda_1_gae_and_vtrace_are_return_minus_value(tokens, bootstrap):
    """V-trace's ratios are 1: its targets are the n-step returns."""
    (rewards, values), mask = padded(tokens)
    rewards_, values_ = map(list, zip(*tokens, strict=True))
    discounted = np.array([sum(0.9**k * r for k, r in enumerate([*rewards_[t:], bootstrap])) for t in range(len(tokens))])
    found, returns = compiled_gae(rewards, values, mask, number(bootstrap), gamma=0.9, lam=1.0)
    advantages, targets = compiled_vtrace(rewards, values, jnp.zeros(SIZE), mask, number(bootstrap), gamma=0.9, bounds=Bounds())
    for own in (returns, targets):
        np.testing.assert_allclose(own[mask], discounted, atol=1e-12)
    for own in (found, advantages):
        np.testing.assert_allclose(own[mask], discounted - np.array(values_), atol=1e-12)
    if bootstrap == 0:
        np.testing.assert_allclose(compiled_returns(rewards, mask)[mask], discounted, atol=1e-12)


def test_turns_of_one_token_are_tokens():
    """Step-level GAE, and the high level of the bi-level one, are GAE then; with one turn the low level is."""
    rng = np.random.default_rng(0)
    rewards, values = (jnp.asarray(rng.normal(size=6)) for _ in range(2))
    every, mask = jnp.ones(6, bool), jnp.ones(6, bool)
    wanted = gae(rewards, values, mask, number(0.3), 0.9, 0.8)
    for found in (
        step_gae(rewards, values, every, mask, number(0.3), 0.9, 0.8),
        bilevel_gae(rewards, values, every, mask, number(0.3), (0.5, 0.9), 0.8),
    ):
        for own, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(own, want, atol=1e-12)


def test_of_nothing_comes_nothing():
    nothing, mask = jnp.zeros(0), jnp.zeros(0, bool)
    assert gae(nothing, nothing, mask, number(0.7), 1.0, 0.95)[0].shape == (0,)
    full = jnp.full(4, jnp.nan)
    for found in gae(full, full, jnp.zeros(4, bool), number(0.7), 1.0, 0.95):
        assert found.tolist() == [0] * 4


# ---- what must change nothing ----------------------------------------------------------------------------------------------

METHODS = {
    "returns": lambda r, v, w, s, e, m, b: discounted_returns(r, m, 0.9),
    "gae": lambda r, v, w, s, e, m, b: gae(r, v, m, b, 0.9, 0.8),
    "bilevel_gae": lambda r, v, w, s, e, m, b: bilevel_gae(r, v, e, m, b, (0.9, 0.8), 0.7),
    "step_gae": lambda r, v, w, s, e, m, b: step_gae(r, v, s, m, b, 0.9, 0.8),
    "vtrace": lambda r, v, w, s, e, m, b: vtrace(r, v, w, m, b, 0.9),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("method", METHODS)
def test_043_what_stands_outside_of_the_mask_changes_no_bit(method, dtype):
    """Junk and NaN in place of it, the policy's tokens alone, and padding behind: the same bits; and under vmap."""
    rng, size = np.random.default_rng(1), 10
    mask = np.array([0, 1, 1, 0, 0, 1, 0, 1, 1, 0], bool)
    floats = [np.asarray(rng.normal(size=size), dtype) for _ in range(3)]
    starts, ends = np.array([1, 1, 0, 0, 1, 1, 0, 1, 0, 0], bool), np.array([0, 0, 1, 1, 0, 1, 0, 0, 1, 0], bool)
    run = jax.jit(lambda *xs: jax.tree.leaves(METHODS[method](*xs)))

    def bits(floats, flags, mask):
        found = run(*map(jnp.asarray, (*floats, *flags, mask)), jnp.asarray(0.4, dtype))
        assert all((np.asarray(x)[~mask] == 0).all() and x.dtype == dtype for x in found)
        return [np.asarray(x)[mask].tobytes() for x in found]

    wanted = bits(floats, (starts, ends), mask)
    for poison in (1e6, np.nan):
        assert bits([np.where(mask, x, poison).astype(dtype) for x in floats], (starts | ~mask, ends ^ ~mask), mask) == wanted
    assert bits([x[mask] for x in floats], (starts[mask], ends[mask]), mask[mask]) == wanted
    longer = [np.append(x, np.full(13, np.nan, dtype)) for x in floats]
    flags = [np.append(x, np.ones(13, bool)) for x in (starts, ends)]
    assert bits(longer, flags, np.append(mask, np.zeros(13, bool))) == wanted
    rows = [jnp.stack([jnp.asarray(x)] * 3) for x in (*floats, starts, ends, mask)]
    found = jax.vmap(lambda *xs: jax.tree.leaves(METHODS[method](*xs)))(*rows, jnp.full(3, 0.4, dtype))
    for own, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(own)[2][mask], np.frombuffer(want, dtype), rtol=1e-6)


def test_float32_is_near_to_float64():
    """10,000 tokens: what accumulates stays below 1e-5 of the return."""
    rng = np.random.default_rng(2)
    rewards, values = (rng.normal(size=10_000) * 0.1 for _ in range(2))
    mask = jnp.ones(10_000, bool)
    exact, _ = compiled_gae(jnp.asarray(rewards), jnp.asarray(values), mask, number(0.5), gamma=1.0, lam=0.95)
    single = (jnp.asarray(x, jnp.float32) for x in (rewards, values))
    found, _ = compiled_gae(*single, mask, jnp.float32(0.5), gamma=1.0, lam=0.95)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, exact, atol=1e-5)


def test_a_wrong_shape_fails():
    with pytest.raises(Exception, match="values"):
        gae(jnp.zeros(3), jnp.zeros(4), jnp.ones(3, bool), number(0), 1.0, 1.0)
