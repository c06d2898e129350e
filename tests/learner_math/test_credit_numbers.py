"""Credit on records, by hand: what each comparison gives, what length costs and where, what a KL in the loss leaves alone."""

from __future__ import annotations

import numpy as np
import pytest

from common.record import segments
from learner.credit import of_batch
from tests.learner_math.build import chain, rollout, turn
from tests.learner_math.test_credit_methods import answer, configured, gains, scored


@pytest.mark.parametrize(
    ("advantage", "one"),
    [("grpo", 0.866024), ("dr_grpo", 0.5), ("reinforce_pp_baseline", 0.5), ("rloo", 2 / 3), ("erpo", 0.866024)],
)
def test_each_comparison_of_one_group(advantage, one):
    """Rewards 1 0 0 1."""
    group = [scored(answer(r, f"{i}")) for i, r in enumerate((1.0, 0.0, 0.0, 1.0))]
    found = [own[-1] for own in gains(of_batch([group], configured(advantage)))]
    np.testing.assert_allclose(found, [one, -one, -one, one], atol=2e-6)


def test_the_price_of_length_is_paid_at_the_end_and_for_all_segments():
    """Two segments of two tokens and one, of a limit of 4 with a cache of 2: three tokens cost a half, on the last one: with γ
    .5 the first two have a quarter and a half of the rest."""
    trajectory = rollout([turn([1], [2, 3]), turn([4], [5], 1.0, 0, 1)])
    assert len(segments(trajectory)) == 2
    algorithm = configured("reinforce_pp", gamma=0.5, overlong_limit=4, overlong_cache=2)
    (found,) = gains(of_batch([[scored(trajectory)]], algorithm))
    np.testing.assert_allclose(found[found != 0], [0.125, 0.25, 0.5])


def test_a_kl_in_the_loss_leaves_the_rewards_alone():
    trajectory = rollout(chain([([1], [2, 3], 1.0)]))
    (segment,) = segments(trajectory)
    one = scored(trajectory, reference=[np.where(segment.mask, -9.0, 0).astype(np.float32)])
    for where, wanted in (("loss", [1, 1]), ("reward", [1 - 1.6, 1 - 0.8])):
        algorithm = configured("reinforce_pp", kl={"where": where, "coefficient": 0.1})
        (found,) = gains(of_batch([[one]], algorithm))
        np.testing.assert_allclose(found[segment.mask], wanted, rtol=1e-5)
