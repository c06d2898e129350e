"""A tiny model and one engine shape for the serving tests, compiled once per engine in about two seconds."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from learner.model.qwen3 import Qwen3
from learner.model.spec import ModelSpec
from learner.serving.engine import Engine
from learner.serving.programs import EngineShape
from learner.serving.request import Request

SPEC = ModelSpec(64, 16, 32, 2, 4, 2, 8, 10_000.0)
SHAPE = EngineShape(rows=4, cache_slots=6, max_length=48, decode_chunk=4, prefill_rows=2, prefill_chunk=5, widths=(16, 48))


def make_model(seed: int = 0) -> Qwen3:
    """Random weights, ten times larger than a fresh model's: its distributions are far from uniform."""
    model = Qwen3(SPEC, rngs=nnx.Rngs(seed))
    model.embedding[...] = model.embedding[...] * 10
    return model


def make_request(rid: str, prompt: list[int], new: int = 8, temperature: float = 1.0, seed: int = 0, stops=()) -> Request:
    return Request(rid, np.asarray(prompt, np.int32), new, temperature, seed, tuple(stops), True)


def make_scored(rid: str, prompt: list[int], start: int = 0, new: int = 1, temperature: float = 1.0) -> Request:
    """With the logprobs of its prompt behind `start`."""
    return replace(make_request(rid, prompt, new, temperature), prompt_from=start)


@partial(jax.jit, static_argnums=0)
def _all_logits(graph, state, ids):
    """One compilation for all lengths: what stands after the sequence cannot be seen from inside it."""
    model = nnx.merge(graph, state)
    return model.logits(model(ids, jnp.arange(ids.shape[1])[None], jnp.ones_like(ids)))


def model_logprobs(model: Qwen3, request: Request) -> np.ndarray:
    """log p of each output token under the training forward pass, of softmax(z / T) as the engine reports it."""
    return _after(model, request.sequence(), len(request.prompt), request.temperature or 1.0)


def prompt_logprobs(model: Qwen3, request: Request) -> np.ndarray:
    """log p of each prompt token after `prompt_from`, of softmax(z)."""
    return _after(model, request.prompt, request.prompt_from + 1, 1.0)


def _after(model: Qwen3, sequence: np.ndarray, start: int, temperature: float) -> np.ndarray:
    ids = np.zeros((1, SHAPE.max_length), np.int32)
    ids[0, : len(sequence)] = sequence
    logits = np.asarray(_all_logits(nnx.graphdef(model), nnx.state(model), ids), np.float64)[0] / temperature
    logits -= logits.max(-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.asarray([logprobs[at - 1, sequence[at]] for at in range(start, len(sequence))])


class Bench:
    """An engine with a mailbox for finished requests. `then` runs once, when the next ones finish, before more is sampled."""

    def __init__(self, model: Qwen3, shape: EngineShape = SHAPE) -> None:
        self.done: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self.then: list[Callable[[], Future]] = []  # commands for the engine, posted from its own thread: no race
        self.answers: queue.SimpleQueue[Future] = queue.SimpleQueue()
        self.engine = Engine(model, shape, "default", self._deliver)
        self.engine.start()
        assert self.engine.ready.wait(240)

    def _deliver(self, requests) -> None:
        for request in requests:
            self.done.put(request)
        while self.then:
            self.answers.put(self.then.pop(0)())

    def run(self, *requests: Request) -> dict[str, Request]:
        self.engine.submit(requests)
        return self.collect(len(requests))

    def collect(self, count: int) -> dict[str, Request]:
        finished = [self.done.get(timeout=60) for _ in range(count)]
        return {request.rid: request for request in finished}


@pytest.fixture(scope="module")
def model() -> Qwen3:
    return make_model()


@pytest.fixture(scope="module")
def shared_bench(model: Qwen3) -> Iterator[Bench]:
    bench = Bench(model)
    yield bench
    bench.engine.stop()


@pytest.fixture
def bench(shared_bench: Bench) -> Bench:
    """The module's engine with an empty cache: results of one test never feed another."""
    assert shared_bench.engine.flush().result(60)
    return shared_bench
