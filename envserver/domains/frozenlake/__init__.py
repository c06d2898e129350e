"""frozenlake: walk over a frozen lake by tool calls, on random maps (Gymnasium's FrozenLake, not slippery).

Cells are named like chess squares: a letter for the column, a digit for the row, a1 is top left. The agent starts at a1,
the goal is the opposite corner, and a move names the cell to go to. Several calls in one action are all made, in order,
until the episode ends. Reaching the goal pays 1, a hole or the last of `max_moves` moves 0; all three terminate. The limit
is part of the task, so it is no truncation: a critic that bootstrapped there would learn that standing around is as good
as arriving.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections import deque
from functools import lru_cache

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map
from pydantic import Field

from common.types import Action, Json, Task, ToolCall
from envserver.env import Domain, Options, TaskError
from envserver.tasks import draw, read_tasks
from envserver.toolenv import ECHO_LIMIT, ToolEnv, ToolError, ToolResult, Tools

DELTAS = {0: (0, -1), 1: (1, 0), 2: (0, 1), 3: (-1, 0)}  # Gymnasium's actions left, down, right, up as (rows, columns)

Cell = tuple[int, int]  # row, column, from 0


class LakeOptions(Options):
    size: int = Field(4, ge=2, le=9, description="cells per side")
    hole_probability: float = Field(
        0.14, ge=0, le=0.5, description="of each cell but start and goal, before unsolvable maps are rejected"
    )
    max_moves: int = Field(0, ge=0, description="moves, mistakes included, after which the episode is over; 0: no limit")
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
    holes = [cells[name] for name in names]
    if (0, 0) not in distances(size, holes):
        raise ValueError(f"no way leads around the holes {names!r}")
    return size, holes


def map_key(payload: Json) -> str:
    """One text per map, whatever the order of its holes."""
    parse_lake(payload)
    return f"{payload['size']}:{','.join(sorted(payload['holes']))}"


def neighbours(cell: Cell, size: int) -> dict[Cell, int]:
    """The cells beside `cell`, and Gymnasium's action that leads there."""
    beside = {(cell[0] + down, cell[1] + right): action for action, (down, right) in DELTAS.items()}
    return {(row, column): action for (row, column), action in beside.items() if 0 <= row < size and 0 <= column < size}


def distances(size: int, holes: list[Cell]) -> dict[Cell, int]:
    """Moves from each cell that reaches the goal, around the holes."""
    goal = (size - 1, size - 1)
    out = {goal: 0}
    queue = deque([goal])
    while queue:
        here = queue.popleft()
        for cell in neighbours(here, size):
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
    def __init__(self, max_moves: int = 0) -> None:
        self.max_moves = max_moves

    def begin(self, task: Task) -> str:
        try:
            size, holes = parse_lake(task.payload)
        except ValueError as error:
            raise TaskError(f"task {task.id}: {error}") from error
        self.size = size
        self.moves = 0
        self.reached = False
        self.map_hash = hashlib.blake2b(map_key(task.payload).encode(), digest_size=8).digest()
        self.lake = copy.copy(_lake(size, tuple(holes)))  # an episode changes attributes, never the shared table
        self.state, _ = self.lake.reset(seed=task.seed)
        names = ", ".join(map(cell_name, holes)) or "none"
        limit = f" Moves: {self.max_moves}." if self.max_moves else ""
        return f"Start {self.cell}. Goal {cell_name((size - 1, size - 1))}. Holes: {names}.{limit}"

    @property
    def cell(self) -> str:
        return cell_name(divmod(self.state, self.size))

    def move(self, to: str) -> ToolResult:
        """Go to a cell beside yours."""
        self.moves += 1
        last = self.moves == self.max_moves
        beside = {cell_name(cell): action for cell, action in neighbours(divmod(self.state, self.size), self.size).items()}
        if to not in beside:
            text = f"{to[:ECHO_LIMIT]} is not beside {self.cell}"
            if not last:
                raise ToolError(text)
            return ToolResult(f"{text}. No moves left.", done=True)
        state, reward, ended, _, _ = self.lake.step(beside[to])
        self.state, self.reached = int(state), reward > 0
        if self.reached:
            return ToolResult(f"You reached the goal at {to}.", float(reward), done=True)
        if ended:
            return ToolResult(f"You fell into the hole at {to}.", done=True)
        return ToolResult(f"You are at {to}." + (" No moves left." if last else ""), done=last)

    tools = Tools(move)

    def metrics(self) -> dict[str, float]:
        return {"success": float(self.reached), "moves": float(self.moves)}

    def state_key(self) -> bytes:
        return self.map_hash + self.cell.encode()


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
        return LakeEnv(self.options.max_moves)

    def reference(self, task: Task) -> list[Action]:
        """A shortest path, one move a turn; ties are broken by the task's seed, so that references are diverse."""
        size, holes = parse_lake(task.payload)
        left = distances(size, holes)
        rng = random.Random(task.seed)
        here = (0, 0)
        path: list[Action] = []
        while left[here]:
            closer = [cell for cell in neighbours(here, size) if left.get(cell, size * size) < left[here]]
            here = rng.choice(closer)
            path.append(Action("", (ToolCall(f"call_{len(path)}", "move", {"to": cell_name(here)}),)))
        return path

    def _random_lake(self, seed: int) -> tuple[str, Json]:
        size = self.options.size
        rows = generate_random_map(size, 1 - self.options.hole_probability, seed)
        holes = [cell_name((r, c)) for r in range(size) for c in range(size) if rows[r][c] == "H"]
        payload = {"size": size, "holes": holes}
        return map_key(payload), payload
