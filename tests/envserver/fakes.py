"""Environments and domains that do what a test tells them."""

import threading
import time
from typing import ClassVar

from common.types import Action, Message, Observation, Status, Task
from envserver.env import Domain, Env, Options


class ScriptEnv(Env):
    """The payload says what happens: {"steps": 3, "reset": "OSError", "step": "hang", "pay": [0, 1], ...}."""

    def __init__(self, domain):
        self.domain = domain
        self.taken = 0

    def reset(self, task):
        self.script = task.payload
        self.domain.events.append(("reset", task.id))
        self._act(self.script.get("reset", ""))
        return Observation((Message("user", f"task {task.id}"),), 0.0, Status.RUNNING)

    def step(self, action):
        self.domain.events.append(("step", action.text))
        self._act(self.script.get("step", ""))
        pay = self.script.get("pay", {}).get(action.text, 0.0)
        self.taken += 1
        over = self.taken >= self.script.get("steps", 1000)
        status = Status.TERMINATED if over else Status.RUNNING
        return Observation((Message("user", f"{action.text} done"),), float(pay), status, {"taken": float(self.taken)})

    def close(self):
        self.domain.events.append(("close", threading.current_thread().name))
        self._act(self.script.get("close", ""))

    def _act(self, what):
        if what == "OSError":
            raise OSError("disk full")
        if what == "exit":
            raise SystemExit(3)
        if what == "hang":
            self.domain.running.release()
            self.domain.gate.wait(60)
        if what == "sleep":
            time.sleep(1.0)


class Script(Domain):
    """Records in `events` what its environments do. A step "hang" waits until `gate` is set; `running` counts them."""

    name = "script"
    tools: ClassVar = []
    template = "Follow the script."
    options_model = Options
    has_reference = True

    def __init__(self, blocking=True, has_reference=True, tasks=()):
        super().__init__()
        self.blocking = blocking
        self.has_reference = has_reference
        self.events = []
        self.gate = threading.Event()
        self.running = threading.Semaphore(0)
        self._tasks = list(tasks)

    def tasks(self, split, n):
        return [task for task in self._tasks if task.id.startswith(split)][:n]

    def make_env(self):
        return ScriptEnv(self)

    def reference(self, task):
        return [Action("solve")]

    def count(self, what):
        return sum(event[0] == what for event in self.events)


def script_task(name="train-0", **payload):
    return Task("script", name, 0, payload)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now
