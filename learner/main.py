"""The learner's loop: take → pack → score → credit → update → publish → checkpoint → log.

Everything before it is set-up, everything after it an evaluation and a summary. The loop runs on the main thread; gRPC
handlers, the publisher and checkpoints have threads of their own and meet it in `Control`, `Publisher` and `Checkpoints`.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.addresses import MAIN, Addresses
from common.config import RunConfig
from common.files import replace_file
from common.seeds import derive_seed
from common.types import EngineInfo
from common.validate import Vocabulary
from common.vocabulary import sampleable
from common.waits import LEARNER, engines_of
from common.wire import Tls
from learner import tasks
from learner.batch import Batch
from learner.canary import canary_ids
from learner.checkpoints import Checkpoints
from learner.control import Control
from learner.engine_api import Deadlines
from learner.model import hf
from learner.model.spec import ModelSpec, eos_ids, read_config
from learner.publisher import NotReady, Publisher, PublisherOptions
from learner.router import NAME, Router
from learner.run import Run
from learner.runfolder import SUMMARY, RunFolder
from learner.service import serve
from learner.transport import transport_of
from learner.update import Trainer
from learner.update_log import record

log = logging.getLogger(__name__)

ASKED_TO_END = 128 + signal.SIGTERM  # exit status
START_S = 300.0  # for env servers to list their tasks and for engines to serve the first version
LOSS_WINDOW = 8  # warm updates whose mean loss is compared with warm.target_loss
SUCCESS_EVERY = 2  # warm updates between two looks at warm.target_success
EVALUATION_TRIES = 2
TAKE_S = 1.0  # the main thread looks up so often while it waits for rollouts


class Stopped(Exception):
    """The process was asked to end."""


class Silence(RuntimeError):
    """Nothing has come for so long that nobody can be expected to come back; the message says what is waited for."""


# ---- the algorithm -------------------------------------------------------------------------------------------


def train(run: Run) -> None:
    """From wherever `run` stands to its last update and the final evaluation. Raises Stopped."""
    publish(run)
    wait_served(run)
    if not run.update:
        begin(run)
    run.control.start_rl()
    while run.update < run.config.learner.updates:
        if run.config.eval.every and run.update and run.update % run.config.eval.every == 0:
            evaluate_once(run, "rl")  # here, so that a resumed run makes it too
        batch = take(run)
        metrics = run.trainer.policy_update(batch.groups, batch.live, run.version)
        if not metrics["optimizer_steps"] and (metrics["skipped_nonfinite"] or not metrics["trained_tokens"]):
            run.control.abandon(batch, "nonfinite_gradient" if metrics["skipped_nonfinite"] else "no_live_token")
            continue
        run.control.commit(batch)
        run.update, run.totals.made_by = run.update + 1, run.control.incarnation
        if metrics["optimizer_steps"]:
            publish(run)
        else:
            run.control.published(run.version, run.update)  # every gradient was zero: the same policy, no update older
        record(run, batch, metrics)
        if run.update % run.config.checkpoint.every == 0 or run.update == run.config.learner.updates:
            run.save()
    evaluate_once(run, "rl")


def begin(run: Run) -> None:
    """What comes before the first policy update; a resumed run does what it had not done yet."""
    if run.config.eval.init:
        evaluate_once(run, "init")
    if run.config.warm.updates:
        if run.control.ledger.warm_update < run.last_warm_update:
            warm_start(run)
            publish(run)
            run.save()  # a crash in the evaluation or in the first updates does not repeat the warm start
        evaluate_once(run, "warm")
    run.trainer.forget_moments()


def warm_start(run: Run) -> None:
    """Supervised updates on reference rollouts, until there were enough or the policy is good enough.

    The loss alone tells little of some tasks: where a turn of many tokens must be right as a whole, success jumps within a
    few updates, at a loss that differs from seed to seed. Then success itself is looked at.
    """
    warm, totals = run.config.warm, run.totals
    run.control.start_warm()
    while (done := run.control.ledger.warm_update) < run.last_warm_update:
        losses = totals.warm_losses = [*totals.warm_losses, supervise(run).get("loss", math.nan)][-LOSS_WINDOW:]
        done += 1
        log.info("warm start %d/%d: loss %.4f", done, warm.updates, losses[-1])
        mean = sum(losses) / LOSS_WINDOW
        below = totals.warm_below = totals.warm_below + (
            totals.warm_below > 0 or (len(losses) == LOSS_WINDOW and mean < warm.target_loss)
        )
        look = below % SUCCESS_EVERY == 1 or done == warm.updates  # at the last one too: it is what comes out
        if below and (not warm.target_success or (look and reached(run, warm.target_success))):
            run.totals.warm_end = done
            run.folder.event("warm_target", {"updates": done, "loss": mean})
        elif done % run.config.checkpoint.every == 0:
            run.save()


def reached(run: Run, target: float) -> bool:
    """Whether the present parameters have `target` success on held-out tasks, in every domain and mode."""
    publish(run)
    results = evaluate(run, "warm")
    expected = len(run.config.domains) * len(run.config.eval.modes)  # less: there is a domain of which nothing is known
    return len(results) == expected and min(result["success"] for result in results) >= target


def supervise(run: Run) -> dict[str, float]:
    """One supervised update that was made."""
    while True:
        batch = take(run)
        metrics = run.trainer.supervised(batch.trajectories, run.config.warm.lr)
        if not metrics["skipped_nonfinite"]:
            run.control.commit(batch)
            run.totals.made_by = run.control.incarnation
            return metrics
        run.control.abandon(batch, "nonfinite_gradient")


def take(run: Run) -> Batch:
    """The next batch. Raises Stopped, PublishError when weights cannot be written any more, and Silence."""
    heard, since = -1, time.monotonic()
    while True:
        if run.stop():
            raise Stopped
        run.publisher.check()
        batch = run.control.take(TAKE_S)
        if batch is not None:
            return batch
        if (deliveries := sum(run.control.deliveries.values())) != heard:
            heard, since = deliveries, time.monotonic()
        elif time.monotonic() - since > run.config.learner.give_up_s:
            raise Silence(f"no rollout came for {run.config.learner.give_up_s:g} s: {run.control.status()['sentence']}")


def publish(run: Run) -> None:
    """Hand the present parameters to the publisher, which writes them and brings them to the engines."""
    tensors, canary = run.trainer.snapshot(run.canary_ids)
    run.version = run.publisher.publish(run.update, tensors, canary, lambda version: run.control.published(version, run.update))
    run.trainer.published(run.version)


def wait_served(run: Run) -> None:
    """Return when an engine serves the newest version. Raises Stopped, NotReady and PublishError."""
    deadline = time.monotonic() + START_S
    with run.control.waits.wait(LEARNER, "served", engines_of(MAIN), START_S, f"version {run.version}"):
        while True:
            if run.stop():
                raise Stopped
            try:
                run.publisher.wait_ready(run.version, min(TAKE_S, max(0.0, deadline - time.monotonic())))
                return
            except NotReady:
                if time.monotonic() >= deadline:
                    raise


def evaluate_once(run: Run, phase: str) -> None:
    """Once per phase and update, also across a resume."""
    results = [e for e in run.control.evaluation.results if e["phase"] == phase]
    if phase == "warm":
        done = bool(results) and run.totals.warm_evaluated == run.control.ledger.warm_update
    else:
        done = run.update in {run.publisher.update_of(e["version"]) for e in results}
    if not done:
        evaluate(run, phase)


def evaluate(run: Run, phase: str, anew: bool = False) -> list[dict[str, Any]]:
    """Held-out success of the newest version; none when it was not done by its deadline, twice. What of it was scored before a
    kill, or in the first try, stays, unless it is to be made `anew`. Raises Stopped."""
    results: list[dict[str, Any]] = []
    for _ in range(EVALUATION_TRIES):
        wait_served(run)  # a version that is still being written cannot be held
        with run.publisher.hold(run.config.eval.deadline_s + TAKE_S, run.version) as version:
            weights = "" if anew else f"{phase} {run.weights}"
            results = run.control.evaluate(phase, version, stop=run.stop, weights=weights)
        if run.stop():
            raise Stopped
        if results:
            run.totals.warm_evaluated = run.control.ledger.warm_update
            break
        log.warning("eval %s was not done in %g s and is not recorded", phase, run.config.eval.deadline_s)
    for result in results:
        low, high = result["ci95"]
        log.info(
            "eval %s: %s %s success %.3f [%.3f, %.3f] of %d, version %d",
            phase, result["domain"], result["mode"], result["success"], low, high, result["n"], version,
        )  # fmt: skip
    return results


# ---- set-up ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    run: Path
    resume: bool = False
    evaluate: bool = False  # only evaluate the run's newest weights
    started: float = field(default_factory=time.monotonic)  # the process: time.monotonic()
    tasks: int = 0  # held-out tasks of `evaluate`; 0: as configured
    mode: str = ""
    samples: int = 0  # rollouts per held-out task of `evaluate` in mode "sampled"; 0: as configured


def start(options: Options, config: RunConfig, stop: Callable[[], bool]) -> Run:
    """Everything but the loop. Raises AddressesError, ModelError, TasksError, PortBusy, OSError."""
    addresses = Addresses.read(options.run)
    tls = Tls(**config.tls.model_dump())
    if options.evaluate:
        asked = {"tasks": options.tasks, "modes": [options.mode] if options.mode else [], "samples": options.samples}
        chosen = {name: value for name, value in asked.items() if value}
        config = config.model_copy(update={"eval": config.eval.model_copy(update=chosen)})
    hf_config = read_config(options.run / "model")
    spec = ModelSpec.from_hf(hf_config)
    weights = None
    if config.model.path:
        spec, weights = hf.load(config.model.path)
    folder = RunFolder(options.run)
    found = tasks.fetch(addresses.envs, tls, START_S, stop)
    vocabulary = Vocabulary(rows=spec.vocab_size, sampleable=sampleable(options.run / "model"))
    control = Control(config, found, options.run, folder.incarnation, vocabulary, folder.event)
    server, _ = serve(control, addresses.learner, tls)
    trainer = Trainer(config, spec, weights)
    eos = list(eos_ids(hf_config))
    router = Router(addresses.router, control.set_engines, folder.event) if addresses.router else None
    publisher = Publisher(
        PublisherOptions(
            options.run,
            folder.incarnation,
            Deadlines(fetch_s=config.weights.fetch_s, canary_s=max(Deadlines.canary_s, 2 * config.engine.timeout_s)),
            transport=transport_of(config, addresses, options.run),
            refresh=config.cross_policy.refresh,
            rolling=config.engine.update == "rolling",
            dtype=config.model.dtype,
            temperature=config.sampling.temperature,
            hold_one=router is None,
        ),
        [EngineInfo(e.name, e.url, e.pool, 0, "starting") for e in addresses.engines],
        lambda tensors, directory: hf.write(tensors, spec, directory, eos),
        folder.event,
        router.hear if router else control.set_engines,
        control.proofs,
        control.waits,
    )
    if router:
        control.proofs.stands_for(NAME, [engine.name for engine in addresses.engines])
    checkpoints = Checkpoints(options.run / "checkpoints", config.checkpoint.keep)
    run = Run(
        config, options.run, folder, control, trainer, publisher, checkpoints, server, stop, router, started=options.started
    )
    run.canary_ids = canary_ids(vocabulary.sampleable, config.engine.max_length - 2, derive_seed(config.seed, "canary"))
    return run


def main(options: Options, config: RunConfig, stop: Callable[[], bool]) -> int:
    """Returns the exit status: 143 when it was asked to end before all was done."""
    run = start(options, config, stop)
    try:
        return work(run, options)
    finally:
        close(run)


def work(run: Run, options: Options) -> int:
    try:
        if options.resume or options.evaluate:
            run.restore()
        if options.evaluate:
            publish(run)
            evaluate_and_tell(run, options.run / "eval.json")
            run.control.finish()
        else:
            run.folder.begin(run.update)
            (options.run / SUMMARY).unlink(missing_ok=True)
            train(run)
            run.summarize()
        run.committed()
    except Stopped:
        log.info("asked to end after update %d", run.update)
        run.folder.event("stopped", {"update": run.update})
        if not options.evaluate:
            if run.update or run.control.ledger.warm_update:
                run.save()
            if run.update < run.config.learner.updates:  # else a resume has the last evaluation to make, and sums up
                run.summarize()
        run.committed()
        return ASKED_TO_END
    return 0


def evaluate_and_tell(run: Run, path: Path) -> None:
    found = {"updates": run.update, "evals": evaluate(run, "rl", anew=True)}
    if not found["evals"]:
        raise Silence(f"the evaluation was not done in {run.config.eval.deadline_s:g} s, twice; see why in events.jsonl")
    replace_file(path, json.dumps(found, indent=1).encode() + b"\n")


def close(run: Run) -> None:
    """End all threads, whatever fails on the way: a server that stays would keep the process alive. What failed is logged; a
    checkpoint that cannot be written has been told before, by `wait`."""
    steps: list[Callable[[], Any]] = [
        run.checkpoints.close,
        run.publisher.close,
        lambda: run.router and run.router.close(),
        lambda: time.sleep(0.5),  # actors hear "no more" at their next call
        lambda: run.server.stop(2.0).wait(),
        run.folder.close,
    ]
    for step in steps:
        try:
            step()
        except Exception as error:
            log.error("at the end: %s: %s", type(error).__name__, error)
