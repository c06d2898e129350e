"""`python -m learner --run RUN [--resume | --eval [--tasks N] [--mode greedy|sampled]]`"""

from __future__ import annotations

import argparse
import errno
import logging
import signal
import sys
import threading
import time
from pathlib import Path

from common.addresses import AddressesError
from common.cli import ConfigError, load
from common.wire import PortBusy

STARTED = time.monotonic()
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="learner", description="Polyturn's learner: ingests rollouts, trains, publishes weights."
    )
    parser.add_argument("--run", type=Path, required=True, help="the run's folder, with config.toml and addresses.json")
    parser.add_argument("--resume", action="store_true", help="go on from the newest committed checkpoint")
    parser.add_argument("--eval", action="store_true", help="only evaluate the newest checkpoint on held-out tasks")
    parser.add_argument("--tasks", type=int, default=0, help="held-out tasks of --eval; 0: as configured")
    parser.add_argument("--mode", choices=("greedy", "sampled"), default="", help="of --eval; as configured when missing")
    parser.add_argument("--samples", type=int, default=0, help="rollouts per task of --eval in mode sampled; 0: as configured")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("absl").setLevel(logging.WARNING)
    asked = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: asked.set())
    try:
        config = load(args.run / "config.toml")
        from learner import main as learner  # JAX is imported here, after the arguments and the configuration are checked
        from learner.assignments import EveryRolloutFails
        from learner.checkpoints import CheckpointError
        from learner.dispatch import NothingToLearn
        from learner.model.spec import ModelError
        from learner.pack import PackError
        from learner.publisher import PublishError
        from learner.tasks import TasksError
        from learner.update import TrainingStopped
    except ConfigError as error:
        return refuse(error)
    try:
        options = learner.Options(args.run.resolve(), args.resume, args.eval, STARTED, args.tasks, args.mode, args.samples)
        return learner.main(options, config, asked.is_set)
    except (AddressesError, ConfigError, EveryRolloutFails, ModelError, PackError, PublishError) as error:
        return refuse(error)
    except (CheckpointError, NothingToLearn, learner.Silence, PortBusy, TasksError, TrainingStopped) as error:
        return refuse(error)
    except OSError as error:
        if not is_disk(error):
            raise
        return refuse(error, "the run's folder needs room and permission to write; then resume the run")


def is_disk(error: OSError) -> bool:
    """A file cannot be written, and no restart will change that. (Arrow raises OSErrors without a number.)"""
    return error.errno in DISK or "No space left" in str(error)


def refuse(error: Exception, fix: str = "") -> int:
    line = " ".join(str(error).splitlines())
    print(f"polyturn: error: {line}{f'; {fix}' if fix else ''}", file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
