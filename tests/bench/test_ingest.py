"""The benchmark of ingest: what it sends either way, and a small real run."""

from __future__ import annotations

import multiprocessing

import pytest

from tools.bench_ingest import TURNS, ScoredData, as_lists, measure, turns


def test_as_lists_a_rollout_has_an_entry_for_every_token():
    steps = turns(1600, 0)
    data = ScoredData.model_validate(as_lists("actor-0", steps))
    (ids,), (masks,), (logprobs,) = data.tokens, data.masks, data.inference_logprobs or [[]]
    assert len(ids) == len(masks) == len(logprobs) == 1600
    assert ids[:100] == [*steps[0].context_ids.tolist(), *steps[0].action_ids.tolist()]
    assert masks[50:100] == ids[50:100]
    assert masks[:50] == [-100] * 50
    assert logprobs[49:51] == [1.0, pytest.approx(float(steps[0].action_logprobs[0]))]
    assert len(steps) == TURNS


def test_both_endpoints_take_in_what_actors_send():
    found = measure(tokens=1600, count=2, seconds=0.5)
    assert found["tokens_per_s"] == pytest.approx(1600 * found["trajectories_per_s"])
    assert found["json_tokens_per_s"] == pytest.approx(1600 * found["json_trajectories_per_s"])
    assert found["ratio_json_http"] == pytest.approx(found["tokens_per_s"] / found["json_tokens_per_s"])
    assert min(found.values()) > 0
    assert multiprocessing.active_children() == []
