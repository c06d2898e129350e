"""A learner without a device and without engines, for benchmarks: the real control plane, served, and a name that its rollouts
say they were sampled by."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.addresses import MAIN
from common.config import RunConfig
from common.types import EngineInfo, Task
from common.validate import Vocabulary
from learner.control import Control
from learner.service import serve

ENGINE = "engine-0"
DOMAIN = "bench"
VOCABULARY = Vocabulary(rows=151_936, sampleable=151_669)  # of Qwen3
GRACE_S = 2.0  # for calls that are on their way when the server ends


def config(domain: dict[str, Any], **tables: Any) -> RunConfig:
    """Of one domain; nothing but the fields that are given differs from the defaults."""
    return RunConfig.model_validate({"domains": [{"name": DOMAIN, **domain}], **tables})


def control_plane(
    config: RunConfig, folder: Path, clock: Callable[[], float] = time.monotonic, kind: type[Control] = Control
) -> Control:
    """Incarnation 1; its tasks have no content, its events are not kept."""
    tasks = {split: [Task(DOMAIN, f"{split}-{i}", i, {}) for i in range(128)] for split in ("train", "heldout")}
    return kind(config, {DOMAIN: tasks}, folder, 1, VOCABULARY, lambda kind, detail: None, clock)


def publish(control: Control, version: int, update: int) -> None:
    """`version` holds the weights after `update` updates, and is served and proven at once."""
    control.published(version, update)
    control.proofs.passed(ENGINE, version)
    control.set_engines([EngineInfo(ENGINE, "http://127.0.0.1:1", MAIN, version, "ready")])


@contextmanager
def served(control: Control) -> Iterator[str]:
    """Its address. After the block there are no more rollouts, and no server."""
    server, port = serve(control, "127.0.0.1:0")
    try:
        yield f"127.0.0.1:{port}"
    finally:
        control.finish()
        server.stop(GRACE_S).wait()
