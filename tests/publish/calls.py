"""What several tests of this folder share: a blocking /generate, background calls, short deadlines, tiny weights."""

from __future__ import annotations

import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import orjson
from safetensors.numpy import load_file, save_file

from learner.engine_api import Deadlines

TIGHT = Deadlines(look_s=1.0, pause_s=1.0, update_s=1.0)  # for calls that hang; others should not meet a deadline
EASY = Deadlines(look_s=20.0, pause_s=20.0, update_s=20.0)


def generate(url, body):
    request = urllib.request.Request(f"{url}/generate", orjson.dumps(body), {"Content-Type": "application/json"})
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
