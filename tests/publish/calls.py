"""What several tests of this folder share: a publisher with a log, a blocking /generate, background calls, deadlines, weights."""

from __future__ import annotations

import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import numpy as np
import orjson
from safetensors.numpy import load_file, save_file

from common import keys
from common.addresses import Addresses, EngineAddress, RelayAddress
from common.types import EngineInfo
from learner.canary import Canary
from learner.engine_api import Deadlines
from learner.publisher import Publisher, PublisherOptions
from learner.transport import DiskTransport, RelayTransport
from tests.fakes import LOGPROB
from tests.relays import RelayThread

TIGHT = Deadlines(look_s=1.0, pause_s=1.0, update_s=1.0, canary_s=1.0)  # for calls that hang; others should not meet a deadline
KEY = "secret"  # of engines behind a relay
EASY = Deadlines(look_s=20.0, pause_s=20.0, update_s=20.0, canary_s=20.0)


def generate(url, body):
    request = urllib.request.Request(
        f"{url}/generate", orjson.dumps(body), {"Content-Type": "application/json", **keys.bearer(KEY)}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return orjson.loads(answer.read())


@contextmanager
def in_background(function, *args):
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(function, *args)


def weights(value):
    return {"model.norm.weight": np.full(4, value, np.float32), "lm_head.weight": np.full((2, 3), value, np.float32)}


def save(params, directory):
    save_file(dict(params), str(directory / "model.safetensors"))


def load(directory):
    return load_file(str(directory / "model.safetensors"))


def canary(ids=(1, 2, 3)):
    """What a healthy FakeEngine answers: the same logprob for every token, and then the next number."""
    logits = np.full(100, np.log((1 - np.exp(LOGPROB)) / 99), np.float32)
    logits[ids[-1] + 1] = LOGPROB
    return Canary(np.asarray(ids, np.int32), np.asarray([0.0, *[LOGPROB] * (len(ids) - 1)], np.float32), logits)


class Log:
    """Collects events and engine tables."""

    def __init__(self):
        self.events = []
        self.tables = []

    def event(self, kind, fields):
        self.events.append((kind, fields))

    def states(self, name):
        return [(f["state"], f["version"]) for kind, f in self.events if kind == "engine" and f["name"] == name]


@contextmanager
def transport(run, engines):
    """Weights by disk, or, as soon as the first engine says so, by a relay that has them all."""
    if not getattr(engines[0], "relayed", False):
        yield DiskTransport()
        return
    names = {f"engine-{i}": engine.url for i, engine in enumerate(engines)}
    (run / "weights").mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        relay = stack.enter_context(RelayThread(run / "host", names, key=KEY))
        rows = [EngineAddress(name=name, url=url, pool="main") for name, url in names.items()]
        relays = [RelayAddress(name="relay-0", url=relay.url, engines=list(names))]
        addresses = Addresses(learner="", engines=rows, envs={}, weights="127.0.0.1:0", relays=relays)
        yield RelayTransport(run / "weights", addresses, KEY)


@contextmanager
def publishing(
    run,
    engines,
    *,
    incarnation=1,
    save=save,
    log=None,
    deadlines=EASY,
    backoff_s=0.02,
    rolling=False,
    rolling_wait_s=60.0,
    pools=(),
    refresh=0,
    hold_one=True,
):
    log = log or Log()
    names = pools or ["main"] * len(engines)
    rows = [EngineInfo(f"engine-{i}", engine.url, names[i], 0, "starting") for i, engine in enumerate(engines)]
    with transport(run, engines) as way:
        wait = {"poll_s": 0.02, "backoff_s": backoff_s, "backoff_max_s": max(backoff_s, 0.1)}
        wait["rolling_wait_s"] = rolling_wait_s
        options = PublisherOptions(
            run, incarnation, deadlines, **wait, rolling=rolling, refresh=refresh, transport=way, hold_one=hold_one
        )
        publisher = Publisher(options, rows, save, log.event, log.tables.append)
        try:
            yield publisher
        finally:
            publisher.close()


def state(publisher, index=0):
    return publisher.engines()[index].state
