"""Recomputes score, credit and loss of a recorded update under another algorithm, offline.

    python tools/replay.py RUN UPDATE --algorithm PRESET [--domain NAME] [--tokens ROLLOUT] [--runs DIR]

RUN is a run's folder, or its name below --runs. Nothing is trained and nothing is written. A line per rollout has its return,
and under the run's own algorithm and under the other one: the mean advantage of its tokens, its share of the policy's loss (all
groups of the update as one optimizer step), and what differs. --tokens ROLLOUT adds a line per sampled token of that rollout.

PRESET takes the place of the algorithms of all domains, or with --domain of one domain's; the others then keep their own.

It needs the weights that the update began with: the checkpoint after the update before, else its published weights, where they
are still kept (`checkpoint.every`, `checkpoint.keep`). A critic is in checkpoints only, and only if the run's algorithm has the
same one.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

if __package__ in (None, ""):  # run as a file: the packages are in the repository root
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.cli import ConfigError, load
from common.config import RunConfig
from common.config_algorithm import AlgorithmConfig, for_domain, read_preset
from common.record import segments
from common.types import Trajectory
from learner import batch
from learner.assignments import origins_of
from learner.checkpoints import Checkpoints, committed_steps
from learner.examples import Live
from learner.ledger import Ledger
from learner.model import hf
from learner.model.spec import ModelSpec, read_config
from learner.pack import PackError
from learner.report import Report
from learner.rollouts import Rules
from learner.runfolder import TRAJECTORIES, read_trajectories
from learner.update import Trainer
from learner.weights import read_versions
from tools.launching.runs import Refusal, find


@dataclass(frozen=True, eq=False)
class Replayed:
    """One algorithm on the update's rollouts: arrays per segment, in the order of the rollouts."""

    advantages: list[list[np.ndarray]]  # [T], times the weights of a correction
    losses: list[list[np.ndarray]]  # [T]: of the policy, weighted
    logprobs: list[list[np.ndarray]]  # [T]: of the weights that the update began with
    masks: list[list[np.ndarray]]  # [T] bool: trained on


def groups_of(run: Path, update: int) -> list[list[Trajectory]]:
    """Raises Refusal."""
    path = run / TRAJECTORIES / f"{update}.parquet"
    if not path.is_file():
        known = sorted(int(file.stem) for file in path.parent.glob("*.parquet") if file.stem.isdigit())
        have = f"{known[0]} to {known[-1]}" if known else "none"
        raise Refusal(f"update {update} is not recorded in {path.parent}; there are {have}")
    groups: dict[str, list[Trajectory]] = {}
    for _, rollout in read_trajectories(path):
        groups.setdefault(rollout.group_id, []).append(rollout)
    return list(groups.values())


def live_tokens(config: RunConfig, run: Path, update: int, groups: list[list[Trajectory]]) -> Live:
    """Which tokens the update trained on: none of a rollout that `learner.on_stale` took out of it, else the young enough."""
    ledger = Ledger(Rules.of(config), 0)
    ledger.update = update - 1
    for version, made in read_versions(run).items():
        if made < update:
            ledger.published(version, made)
    rollouts = [rollout for group in groups for rollout in group]
    return {
        rollout.rollout_id: [
            batch.live_tokens(step, ledger, Counter()) & ledger.young(origins_of(rollout)) for step in rollout.steps
        ]
        for rollout in rollouts
    }


def restored(config: RunConfig, run: Path, update: int) -> tuple[Trainer, str]:
    """A trainer with the weights that the update began with, and where they are from. Raises Refusal."""
    spec = ModelSpec.from_hf(read_config(run / "model"))
    step = config.warm.updates + update - 1
    versions = [version for version, made in read_versions(run).items() if made == update - 1]
    folders = [run / "weights" / str(version) for version in versions[::-1]]
    folder = next((folder for folder in folders if (folder / "DONE").exists()), None)
    if step in committed_steps(run / "checkpoints"):
        checkpoints = Checkpoints(run / "checkpoints", keep=10**6)
        try:
            _, tree, _ = checkpoints.restore(step)
        finally:
            checkpoints.close()
        check_reference(config, tree)
        trainer = Trainer(config, spec)
        own = trainer.state_tree()
        fits = {name: tree[name] if name in tree and tree[name].shape == own[name].shape else own[name] for name in own}
        trainer.restore_tree(fits)
        missing = sum(name.startswith("params/") and name not in tree for name in own)
        return trainer, f"checkpoint {step}" + (f"; {missing} arrays of the critic are untrained" if missing else "")
    if folder is None:
        raise Refusal(
            f"the weights after update {update - 1} are not kept any more (checkpoints {committed_steps(run / 'checkpoints')});"
            f" replay an update that follows one of them"
        )
    check_reference(config, {})
    trainer = Trainer(config, spec, hf.load(folder)[1])
    untrained = "; the critic is untrained" if config.algorithm.critic != "none" else ""
    return trainer, f"published version {folder.name}{untrained}"


def check_reference(config: RunConfig, tree: Mapping[str, Any]) -> None:
    """Raises Refusal for a KL in the reward whose reference, the policy that RL began with, is not in `tree`."""
    compares = any((own.kl.where, own.kl.reference) == ("reward", "initial") for own in config.algorithms.values())
    if compares and not any(name.startswith("reference/") for name in tree):
        raise Refusal(
            'algorithm.kl.where = "reward" compares with the policy that RL began with, which is not kept beside these weights:'
            " replay an update that follows a checkpoint of a run with such a KL, or an algorithm without one"
        )


def replay(trainer: Trainer, groups: list[list[Trajectory]], live: Live) -> Replayed:
    prepared, _, examples = trainer.prepare(groups, live, Report())
    flat = [own for group in examples for own in group]
    found = iter(zip(flat, trainer.token_losses(flat), strict=True))
    out = Replayed([], [], [], [])
    for rollout in (rollout for group in prepared for rollout in group):
        own = [next(found) for _ in rollout.segments]
        out.advantages.append([example.advantages for example, _ in own])
        out.losses.append([losses for _, (losses, _) in own])
        out.logprobs.append([logprobs for _, (_, logprobs) in own])
        out.masks.append([example.mask for example, _ in own])
    return out


def lines(groups: list[list[Trajectory]], a: Replayed, b: Replayed) -> Iterator[str]:
    """Of each rollout, and the sums."""
    head = ("return", "tokens", "advantage", "other", "differs", "loss", "other", "differs")
    yield f"{'rollout':<20} " + " ".join(f"{name:>10}" for name in head)
    totals = np.zeros(2)
    for index, rollout in enumerate(rollout for group in groups for rollout in group):
        means = [_mean(own.advantages[index], own.masks[index]) for own in (a, b)]
        losses = np.array([sum(float(part.sum(dtype=np.float64)) for part in own.losses[index]) for own in (a, b)])
        totals += losses
        tokens = sum(int(mask.sum()) for mask in b.masks[index])
        numbers = (*means, means[1] - means[0], *losses, losses[1] - losses[0])
        yield f"{rollout.rollout_id:<20} {rollout.total_reward:>10.4g} {tokens:>10} " + " ".join(f"{x:>+10.5f}" for x in numbers)
    yield f"{'all':<20} {'':>10} {'':>10} {'':>10} {'':>10} {'':>10} " + " ".join(
        f"{x:>+10.5f}" for x in (*totals, totals[1] - totals[0])
    )


def _mean(parts: list[np.ndarray], masks: list[np.ndarray]) -> float:
    own = np.concatenate([part[mask] for part, mask in zip(parts, masks, strict=True)])
    return float(own.mean(dtype=np.float64)) if len(own) else 0.0


def token_lines(rollout: Trajectory, index: int, a: Replayed, b: Replayed) -> Iterator[str]:
    """Of each token that one of the two trains on."""
    head = ("recorded", "own", "advantage", "other", "loss", "other")
    yield f"{'segment':>7} {'position':>8} {'id':>7} " + " ".join(f"{name:>10}" for name in head)
    for which, segment in enumerate(segments(rollout)):
        for at in np.flatnonzero(a.masks[index][which] | b.masks[index][which]):
            numbers = (
                segment.logprobs[at],
                a.logprobs[index][which][at],
                *(own.advantages[index][which][at] for own in (a, b)),
                *(own.losses[index][which][at] for own in (a, b)),
            )
            yield f"{which:>7} {at:>8} {segment.ids[at]:>7} " + " ".join(f"{x:>+10.5f}" for x in numbers)


def changed(config: RunConfig, preset: str, domain: str) -> RunConfig:
    """With the preset in all domains, or in one. Raises Refusal, and ValueError for what does not go together."""
    keys = read_preset(preset)  # whose refusal is plainer than that of a whole table
    if not domain:
        sizes = {name: getattr(config.algorithm, name) for name in ("group_size", "groups_per_update")}
        sizes |= {"minibatches": 1, "epochs": 1, "critic_warmup": 0}  # one step of all groups, and the policy has a loss in it
        domains = [own.model_copy(update={"algorithm": {}}) for own in config.domains]
        return config.model_copy(update={"algorithm": AlgorithmConfig(preset=preset, **sizes), "domains": domains})
    names = [own.name for own in config.domains]
    if domain not in names:
        raise Refusal(f"--domain {domain!r} is none of the run's: {', '.join(names)}")
    critic = keys.get("critic", "none") if config.algorithm.critic == "none" else config.algorithm.critic
    wide = config.algorithm.model_copy(update={"minibatches": 1, "epochs": 1, "critic": critic})  # all groups are one step here
    for_domain(wide, {"preset": preset})
    domains = [own.model_copy(update={"algorithm": {"preset": preset}}) if own.name == domain else own for own in config.domains]
    return config.model_copy(update={"algorithm": wide, "domains": domains})


def named(config: RunConfig) -> str:
    """Its algorithms, with their domains where they differ."""
    names = {domain: own.preset or own.advantage for domain, own in config.algorithms.items()}
    if len(set(names.values())) == 1:
        return next(iter(names.values()))
    return ", ".join(f"{domain} {name}" for domain, name in names.items())


def compare(run: Path, update: int, preset: str, domain: str, tokens: str) -> Iterator[str]:
    """Raises Refusal, ConfigError, ValueError and PackError."""
    config = load(run / "config.toml")
    other = changed(config, preset, domain)
    groups = groups_of(run, update)
    flat = [rollout for group in groups for rollout in group]
    wanted = [index for index, rollout in enumerate(flat) if tokens and rollout.rollout_id.startswith(tokens)]
    if tokens and len(wanted) != 1:
        raise Refusal(f"--tokens {tokens!r} begins {len(wanted)} rollouts of update {update}; name one")
    live = live_tokens(config, run, update, groups)
    found = []
    for each in (config, other):
        trainer, source = restored(each, run, update)
        found.append(replay(trainer, groups, live))
        yield f"{'own' if each is config else 'other'}: {named(each)}, weights of {source}"
    yield from lines(groups, *found)
    for index in wanted:
        yield from token_lines(flat[index], index, *found)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("update", type=int)
    parser.add_argument("--algorithm", required=True, metavar="PRESET")
    parser.add_argument("--domain", default="", metavar="NAME")
    parser.add_argument("--tokens", default="", metavar="ROLLOUT")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    args = parser.parse_args(argv)
    try:
        for line in compare(find(args.run, args.runs), args.update, args.algorithm, args.domain, args.tokens):
            print(line)
    except (Refusal, ConfigError, PackError, ValueError) as error:
        print(f"polyturn: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
