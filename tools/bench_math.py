"""Polyturn's mathematics beside that of other implementations: the same random batches through both.

    python tools/bench_math.py [--docs]

rlax, tunix (the wheel google-tunix) and verl run in virtual environments of their own, built once outside of the tree from
tools/math_peers/*.txt. Prints a table, writes runs/bench/math.json, and with --docs the table into docs/algorithms.md. Exits with
1 if something differs without a reason that reproduces the peer's numbers (tools/math_peers/known.py), or if a reason is given
where nothing differs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)] * (str(ROOT) not in sys.path)

import jax  # noqa: E402

from tools import benchmarks  # noqa: E402
from tools.math_peers import batches  # noqa: E402
from tools.math_peers.comparisons import Result, compare, document, measurements, table  # noqa: E402
from tools.math_peers.known import comparisons  # noqa: E402

PEERS = ROOT / "tools" / "math_peers"
PROGRAMS = ("jax", "torch")  # in_NAME.py runs where NAME.txt and, without dependencies, NAME-bare.txt are installed
BEGIN, END = "<!-- tools/bench_math.py --docs writes what follows -->", "<!-- up to here -->"


def cache() -> Path:
    """Where environments are kept."""
    return Path(os.environ.get("POLYTURN_CACHE") or Path.home() / ".cache" / "polyturn")


def folder_name(name: str, requirements: bytes) -> str:
    """Of the environment with these requirements."""
    return f"math-{name}-{zlib.crc32(requirements):08x}"


def environment(name: str) -> Path:
    """The Python of a peer's environment, which is built if its requirements have not been installed yet."""
    files = [PEERS / f"{name}.txt", PEERS / f"{name}-bare.txt"]
    folder = cache() / folder_name(name, b"".join(file.read_bytes() for file in files))
    python, done = folder / "bin" / "python", folder / ".installed"
    if done.exists():
        return python
    print(f"building {folder}: some minutes, once", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-r", files[0]], check=True)
    subprocess.run([*pip, "--no-deps", "-r", files[1]], check=True)
    done.touch()
    return python


def ask(name: str, source: Path) -> dict[str, batches.Answers]:
    """A peer's answers to the batches in `source`."""
    target = source.with_name(f"{name}.npz")
    program = [environment(name), "-m", f"tools.math_peers.in_{name}", source, target]
    subprocess.run(program, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=True)
    return batches.read(target)


def run() -> list[Result]:
    """Every comparison on every batch."""
    given = batches.all_batches()
    answers: dict[str, batches.Answers] = {name: {} for name in given}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "batches.npz"
        batches.save(given, source)
        for name in PROGRAMS:
            for batch, found in ask(name, source).items():
                answers[batch] |= found
    with jax.enable_x64(True):
        return [compare(comparison, given, answers) for comparison in comparisons()]


def filled(page: str, lines: Sequence[str]) -> str:
    """The page with these lines between its marks. Raises ValueError where it has none."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"docs/algorithms.md has no {BEGIN} ... {END}")
    return "\n".join([head + begin, "", *lines, "", end + tail])


def report(results: Sequence[Result]) -> int:
    """Prints the table, and what is wrong; the exit status."""
    print("\n".join(table(results)))
    print("\n" + "  ".join(f"{name}: {value:g}" for name, value in measurements(results).items()))
    for result in results:
        for wrong in result.wrong:
            print(f"{result.comparison.what} / {result.comparison.peer}: {wrong}", file=sys.stderr)
    return int(any(result.wrong for result in results))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help="write the table into docs/algorithms.md")
    arguments = parser.parse_args()
    commit = benchmarks.head()
    jax.config.update("jax_platforms", "cpu")
    results = run()
    status = report(results)
    benchmarks.write("math", measurements(results), commit)
    if arguments.docs:
        page = ROOT / "docs" / "algorithms.md"
        page.write_text(filled(page.read_text(), document(results)))
    return status


if __name__ == "__main__":
    sys.exit(main())
