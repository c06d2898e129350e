"""tools/replay.py on the folder of a run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from common.cli import dump_toml
from common.record import segments
from learner.model import hf
from learner.runfolder import RunFolder
from learner.update import Trainer
from tests.control import scripted
from tests.learner_math.build import SPEC, batch, config, domains, of_domain, with_behaviour
from tools import replay


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Update 3 of a GRPO run: two groups, sampled by version 1, whose logprobs are .1 above those of version 5."""
    folder = tmp_path_factory.mktemp("runs") / "kept"
    settings = config(algorithm={"minibatches": 1}, learner={"max_lag": 1})
    trainer = Trainer(settings, SPEC)
    groups = with_behaviour(trainer, batch(groups=2), offset=0.1)
    groups = [[replace(t, group_id=f"g{g}") for t in group] for g, group in enumerate(groups)]
    opened = RunFolder(folder)
    opened.begin(0)
    opened.trajectories(3, [t for group in groups for t in group], [0] * 6)
    opened.close()
    (folder / "config.toml").write_text(dump_toml(settings))
    hf.write(trainer.snapshot(np.arange(4))[0], SPEC, folder / "weights" / "5", None)
    shutil.copytree(folder / "weights" / "5", folder / "model")
    (folder / "weights" / "5" / "DONE").touch()
    lines = [{"version": 1, "update": 2}, {"version": 5, "update": 2}]
    (folder / "versions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder, groups


@pytest.fixture(scope="module")
def mixed(run, tmp_path_factory):
    """The same update of a run whose second group is of another domain, trained by leave-one-out."""
    folder = shutil.copytree(run[0], tmp_path_factory.mktemp("runs") / "mixed")
    settings = config(
        algorithm={"minibatches": 1},
        learner={"max_lag": 1},
        domains=domains(frozenlake={}, arithmetic={"advantage": "rloo", "aggregation": "seq_mean_token_sum"}),
    )
    groups = [run[1][0], *of_domain(run[1][1:], "arithmetic")]
    opened = RunFolder(folder)
    opened.begin(1)
    opened.trajectories(4, [t for group in groups for t in group], [0] * 6)
    opened.close()
    (folder / "config.toml").write_text(dump_toml(settings))
    lines = [{"version": 1, "update": 2}, {"version": 5, "update": 3}]
    (folder / "versions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder, groups


def numbers(line):
    return [float(word) for word in line.split()[1:]]


def test_an_update_under_another_algorithm(run, capsys):
    """Dr. GRPO: R - mean, without GRPO's division; ratios exp(-.1); its constant divisor of 256 tokens per rollout."""
    folder, groups = run
    name = groups[0][0].rollout_id
    assert replay.main([str(folder), "3", "--algorithm", "dr_grpo", "--tokens", name]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "own: grpo, weights of published version 5"
    assert out[1] == "other: dr_grpo, weights of published version 5"
    table = {line.split()[0]: numbers(line) for line in out[3:9]}
    for group in groups:
        rewards = np.array([t.total_reward for t in group])
        for trajectory, centred in zip(group, rewards - rewards.mean(), strict=True):
            reward, tokens, own, other, differs, _, loss, _ = table[trajectory.rollout_id]
            assert reward == trajectory.total_reward
            assert tokens == sum(len(step.action_ids) for step in trajectory.steps)
            assert other == pytest.approx(centred, abs=1e-4)
            assert own == pytest.approx(centred / (rewards.std(ddof=1) + 1e-6) if rewards.std() else 0, abs=1e-4)
            assert differs == pytest.approx(other - own, abs=2e-5)
            assert loss == pytest.approx(-centred * np.exp(-0.1) * tokens / (6 * 256), abs=2e-5)
    assert float(out[9].split()[-2]) == pytest.approx(sum(row[6] for row in table.values()), abs=1e-4)
    shown = [line.split() for line in out[11:]]
    (segment,) = segments(groups[0][0])
    assert [int(words[2]) for words in shown] == segment.ids[segment.mask].tolist()
    for words in shown:
        recorded, present = float(words[3]), float(words[4])
        assert recorded == pytest.approx(present + 0.1, abs=2e-5)


def test_what_cannot_be_replayed_is_said(run, capsys, tmp_path):
    folder, _ = run
    for arguments, told in (
        (["4", "--algorithm", "grpo"], "update 4 is not recorded"),
        (["3", "--algorithm", "grppo"], "algorithm.preset 'grppo' is not known; there are agentrl, "),
        (["3", "--algorithm", "grpo", "--tokens", "nobody"], "--tokens 'nobody' begins 0 rollouts of update 3"),
    ):
        assert replay.main([str(folder), *arguments]) == 2
        assert told in capsys.readouterr().err
    copy = shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(copy / "weights")
    assert replay.main([str(copy), "3", "--algorithm", "grpo"]) == 2
    assert "the weights after update 2 are not kept any more (checkpoints [])" in capsys.readouterr().err


def rewritten(run, tmp_path, **algorithm):
    """The run's folder, with another `[algorithm]`."""
    folder = shutil.copytree(run[0], tmp_path / "other")
    settings = config(algorithm={"minibatches": 1, **algorithm}, learner={"max_lag": 1})
    (folder / "config.toml").write_text(dump_toml(settings))
    return str(folder)


def test_a_preset_of_more_minibatches_than_groups_is_one_step(run, tmp_path):
    assert replay.main([rewritten(run, tmp_path, groups_per_update=1), "3", "--algorithm", "gspo"]) == 0


def test_a_kl_in_the_reward_is_not_taken_from_other_weights_than_the_first(run, tmp_path, capsys):
    """Version 5 is not the policy that RL began with: its KL to itself would be 0."""
    folder = rewritten(run, tmp_path, advantage="reinforce_pp", kl={"where": "reward"})
    assert replay.main([folder, "3", "--algorithm", "grpo"]) == 2
    assert "the policy that RL began with, which is not kept beside these weights" in capsys.readouterr().err


def test_tokens_that_were_too_old_are_left_out(run):
    folder, groups = run
    settings = config(learner={"max_lag": 1})
    lines = [{"version": 1, "update": 0}, {"version": 5, "update": 2}]
    own = folder.parent / "older"
    own.mkdir()
    (own / "versions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    live = replay.live_tokens(settings, own, 3, groups)  # sampled by version 1: two updates old
    assert not any(mask.any() for masks in live.values() for mask in masks)
    assert all(m.all() for masks in replay.live_tokens(settings, folder, 3, groups).values() for m in masks)


@pytest.mark.parametrize(("on_stale", "trained"), [("mask", [2, 2, 0, 3]), ("drop", [0, 2, 0, 3]), ("restart", [0, 2, 0, 3])])
def test_a_replay_trains_on_the_tokens_that_the_run_trained_on(on_stale, trained, tmp_path):
    """Update 3 with max_lag 1, versions 1, 2 and 3 of updates 0, 1 and 2. One rollout of four has an over-age token and two
    young ones, one has over-age tokens alone: what the control plane hands out is what the replay finds in the run's folder,
    also when the run has gone on for 5,000 updates."""
    settings = {"learner": {"on_stale": on_stale, "max_attempts": 1}}
    control, _, _ = scripted.started(tmp_path / "spool", **settings)
    control.ledger.update = 2
    for version, update in ((2, 1), (3, 2)):
        scripted.publish(control, version, update)
    control.set_engines([scripted.engine(3)])
    tokens = ([(0, 1), (1, 2), (2, 3)], [(0, 2)], [(0, 1)], [(0, 2), (1, 3)])
    for asked, runs, ids in zip(scripted.lease(control, 4), tokens, ([3, 4, 5], [3, 4], [3], [3, 4, 5]), strict=True):
        scripted.hand_in(control, scripted.trajectory(asked, steps=(scripted.step(ids, runs, 1.0),)))
    handed_out = control.take(0)
    assert handed_out is not None
    lines = [{"version": version, "update": version - 1} for version in range(1, 5_000)]
    (tmp_path / "versions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = replay.live_tokens(scripted.config(**settings), tmp_path, 3, [list(group) for group in handed_out.groups])
    assert [sum(int(mask.sum()) for mask in masks) for masks in found.values()] == trained
    assert found.keys() == handed_out.live.keys()
    for name, masks in handed_out.live.items():
        assert [mask.tolist() for mask in found[name]] == [mask.tolist() for mask in masks]


def test_a_run_of_several_algorithms_is_replayed_by_domain(mixed, capsys):
    """Each group by its own: GRPO's std, RLOO's 3/2 of R - mean. Losses are halves: 3 of 6 rollouts each, ratios exp(-.1)."""
    folder, groups = mixed
    own, dr_grpo = "frozenlake grpo, arithmetic rloo", "frozenlake grpo, arithmetic dr_grpo"
    for arguments, heads in (
        (["--algorithm", "dr_grpo", "--domain", "arithmetic"], (own, dr_grpo)),
        (["--algorithm", "dr_grpo"], (own, "dr_grpo")),
    ):
        assert replay.main([str(folder), "4", *arguments]) == 0
        out = capsys.readouterr().out.splitlines()
        assert [line.split(", weights")[0] for line in out[:2]] == [f"own: {heads[0]}", f"other: {heads[1]}"]
        table = {line.split()[0]: numbers(line) for line in out[3:9]}
        for group, sums in zip(groups, (False, True), strict=True):
            rewards = np.array([t.total_reward for t in group])
            for trajectory, centred in zip(group, rewards - rewards.mean(), strict=True):
                _, tokens, mine, other, _, loss, replaced, _ = table[trajectory.rollout_id]
                grpo = centred / (rewards.std(ddof=1) + 1e-6) if rewards.std() else 0
                assert mine == pytest.approx(1.5 * centred if sums else grpo, abs=1e-4)
                assert other == pytest.approx(grpo if not sums and "--domain" in arguments else centred, abs=1e-4)
                of_group = sum(len(step.action_ids) for t in group for step in t.steps)
                weight = 1 / 3 if sums else 1 / of_group
                assert loss == pytest.approx(-mine * np.exp(-0.1) * tokens * weight / 2, abs=5e-5)
                if sums:
                    assert replaced == pytest.approx(-centred * np.exp(-0.1) * tokens / 256 / 6, abs=5e-5)
    assert replay.main([str(folder), "4", "--algorithm", "dr_grpo", "--domain", "chess"]) == 2
    assert "--domain 'chess' is none of the run's: frozenlake, arithmetic" in capsys.readouterr().err
