"""frozenlake: walk over a frozen lake by tool calls, on random maps (Gymnasium's FrozenLake, not slippery).

Cells are named like chess squares: a letter for the column, a digit for the row, a1 is top left. The agent starts at a1,
the goal is the opposite corner. It is told where the holes are once, and after each move where it stands and which ways are
open there; a move off the lake leaves it where it is. Several calls in one action are all made, in order, until the episode
ends. Reaching the goal pays 1, a hole 0; both terminate. There is no limit of moves but the run's limit of turns.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections import deque
from functools import lru_cache
from typing import Literal

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map
from pydantic import Field

from common.types import Action, Json, Task, ToolCall
from envserver.env import Domain, Options, TaskError
from envserver.tasks import draw, read_tasks
from envserver.toolenv import ToolEnv, ToolResult, Tools

DELTAS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}  # rows, columns
ACTIONS = {way: action for action, way in enumerate(DELTAS)}  # the order is Gymnasium's

Cell = tuple[int, int]  # row, column, from 0


class LakeOptions(Options):
    size: int = Field(4, ge=2, le=9, description="cells per side")
    hole_probability: float = Field(
        0.14, ge=0, le=0.5, description="of each cell but start and goal, before unsolvable maps are rejected"
    )
    draw: bool = Field(False, description="each answer draws the whole lake, which makes it long")
    tasks_file: str = Field("", description='JSON lines with payloads {"size": 4, "holes": ["b2"]}, instead of random maps')


def cell_name(cell: Cell) -> str:
    return f"{'abcdefghi'[cell[1]]}{cell[0] + 1}"


def parse_lake(payload: Json) -> tuple[int, list[Cell]]:
    """Size and holes of a payload. Raises ValueError when it is not a solvable lake."""
    if not isinstance(payload, dict) or set(payload) != {"size", "holes"}:
        raise ValueError(f'a lake is {{"size": 4, "holes": ["b2"]}}, not {payload!r}')
    size, names = payload["size"], payload["holes"]
    if not isinstance(size, int) or not 2 <= size <= 9:
        raise ValueError(f"size {size!r} is not 2..9")
    cells = {cell_name((row, column)): (row, column) for row in range(size) for column in range(size)}
    inner = set(cells) - {cell_name((0, 0)), cell_name((size - 1, size - 1))}
    if not isinstance(names, list) or not all(isinstance(name, str) and name in inner for name in names):
        raise ValueError(f"holes {names!r} are not names of cells other than start and goal in a lake of size {size}")
    if len(set(names)) != len(names):  # else one map could stand in both splits
        raise ValueError(f"holes {names!r}: a name stands twice")
    holes = [cells[name] for name in names]
    if (0, 0) not in distances(size, holes):
        raise ValueError(f"no way leads around the holes {names!r}")
    return size, holes


def map_key(payload: Json) -> str:
    """One text per map, whatever the order of its holes."""
    parse_lake(payload)
    return f"{payload['size']}:{','.join(sorted(payload['holes']))}"


def neighbours(cell: Cell, size: int) -> dict[str, Cell]:
    """The cells beside `cell`, by the way that leads there."""
    beside = {way: (cell[0] + down, cell[1] + right) for way, (down, right) in DELTAS.items()}
    return {way: (row, column) for way, (row, column) in beside.items() if 0 <= row < size and 0 <= column < size}


def distances(size: int, holes: list[Cell]) -> dict[Cell, int]:
    """Moves from each cell that reaches the goal, around the holes."""
    goal = (size - 1, size - 1)
    out = {goal: 0}
    queue = deque([goal])
    while queue:
        here = queue.popleft()
        for cell in neighbours(here, size).values():
            if cell not in holes and cell not in out:
                out[cell] = out[here] + 1
                queue.append(cell)
    return out


@lru_cache(maxsize=1024)
def _lake(size: int, holes: tuple[Cell, ...]) -> FrozenLakeEnv:
    """A lake to copy: its table of transitions takes longer to build than an episode to play."""
    letters = [["F"] * size for _ in range(size)]
    for row, column in holes:
        letters[row][column] = "H"
    letters[0][0], letters[-1][-1] = "S", "G"
    return FrozenLakeEnv(desc=["".join(row) for row in letters], is_slippery=False)


class LakeEnv(ToolEnv):
    def __init__(self, draw: bool = False) -> None:
        self.draw = draw

    def begin(self, task: Task) -> str:
        try:
            size, holes = parse_lake(task.payload)
        except ValueError as error:
            raise TaskError(f"task {task.id}: {error}") from error
        self.size, self.holes = size, frozenset(holes)
        self.moves = 0
        self.reached = False
        self.map_hash = hashlib.blake2b(map_key(task.payload).encode(), digest_size=8).digest()
        self.lake = copy.copy(_lake(size, tuple(holes)))  # an episode changes attributes, never the shared table
        self.state, _ = self.lake.reset(seed=task.seed)
        names = ", ".join(map(cell_name, holes)) or "none"
        return f"Start {self.name}. Goal {cell_name((size - 1, size - 1))}. Holes: {names}. {self._view()}"

    @property
    def cell(self) -> Cell:
        row, column = divmod(self.state, self.size)
        return row, column

    @property
    def name(self) -> str:
        return cell_name(self.cell)

    def _view(self) -> str:
        """The ways that lead to ice, always in one order, below the lake where it is drawn."""
        ways = f"Open: {', '.join(way for way, cell in neighbours(self.cell, self.size).items() if cell not in self.holes)}."
        return f"{self._drawing()}\n{ways}" if self.draw else ways

    def _drawing(self) -> str:
        """One line a row: o for ice, x for a hole, G for the goal, @ for the agent."""
        signs = dict.fromkeys(self.holes, "x") | {(self.size - 1, self.size - 1): "G", self.cell: "@"}
        rows = (" ".join(signs.get((row, column), "o") for column in range(self.size)) for row in range(self.size))
        return "\n" + "\n".join(f"{number} {row}" for number, row in enumerate(rows, 1))

    def move(self, to: Literal["left", "down", "right", "up"]) -> ToolResult:
        """Go one cell."""
        self.moves += 1
        state, reward, ended, _, _ = self.lake.step(ACTIONS[to])
        self.state, self.reached = int(state), reward > 0
        if self.reached:
            return ToolResult(f"You reached the goal at {self.name}.", float(reward), done=True)
        if ended:
            return ToolResult(f"You fell into the hole at {self.name}.", done=True)
        return ToolResult(f"You are at {self.name}. {self._view()}")

    tools = Tools(move)

    def metrics(self) -> dict[str, float]:
        return {"success": float(self.reached), "moves": float(self.moves)}

    def state_key(self) -> bytes:
        return self.map_hash + self.name.encode()


class FrozenLake(Domain):
    name = "frozenlake"
    tools = LakeEnv.tools.schemas
    options_model = LakeOptions
    has_reference = True
    blocking = False  # a step is a look-up in a table: about 30 us, a third of a hop to a thread and back

    def tasks(self, split: str, n: int) -> list[Task]:
        if self.options.tasks_file:
            return read_tasks(self.options.tasks_file, self.name, map_key)[split][:n]
        return draw(self.name, split, n, self._random_lake)

    def make_env(self) -> LakeEnv:
        return LakeEnv(self.options.draw)

    def context(self) -> dict[str, Json]:
        """The task and the newest answer say all that there is to know."""
        return {"name": "window", "turns": 1}

    def reference(self, task: Task) -> list[Action]:
        """A shortest path, one move a turn; ties are broken by the task's seed, so that references are diverse."""
        size, holes = parse_lake(task.payload)
        left = distances(size, holes)
        rng = random.Random(task.seed)
        here = (0, 0)
        path: list[Action] = []
        while left[here]:
            beside = neighbours(here, size)
            way = rng.choice([way for way, cell in beside.items() if left.get(cell, size * size) < left[here]])
            here = beside[way]
            path.append(Action("", (ToolCall(f"call_{len(path)}", "move", {"to": way}),)))
        return path

    def _random_lake(self, seed: int) -> tuple[str, Json]:
        size = self.options.size
        rows = generate_random_map(size, 1 - self.options.hole_probability, seed)
        holes = [cell_name((r, c)) for r in range(size) for c in range(size) if rows[r][c] == "H"]
        payload = {"size": size, "holes": holes}
        return map_key(payload), payload
