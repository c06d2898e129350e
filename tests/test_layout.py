"""The shape of the repository: who may import what, how long things may be, what stands at the top level."""

import ast
import importlib.util
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import common

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("common", "learner", "actors", "envserver", "tools")
GENERATED = ("rl_pb2.py", "rl_pb2_grpc.py")

TOP_LEVEL = {"WORKSPACE.md", "README.md", "learner", "actors", "envserver", "common", "configs", "tests", "tools", "docs"}
PROJECT_FILES = {"pyproject.toml", "Makefile", "requirements.lock", "LICENSE", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md"}

# What may be imported where: package or import -> folders (or folder prefixes) that may.
ARROWS = {
    "learner": ("learner", "tools", "tests"),
    "actors": ("actors", "tools", "tests"),
    "envserver": ("envserver", "tools", "tests"),
    "tools": ("tools", "tests"),
    "tests": ("tests",),
    **dict.fromkeys(("jax", "jaxlib", "flax", "optax", "orbax", "chex"), ("learner", "tools", "tests")),
    **dict.fromkeys(("tokenizers", "transformers"), ("actors", "tools", "tests")),
    "kubernetes": ("envserver/sandboxes", "tools", "tests"),
    "torch": ("tools/sglang_cpu", "tools/math_peers"),  # which run in environments of their own
    "sglang": ("tools/sglang_cpu",),
    **dict.fromkeys(("rlax", "tunix", "verl"), ("tools/math_peers",)),
    "unittest": (),  # fakes are real classes
}
FUNCTION_LINES, MAIN_LINES, MODULE_LINES, PARAMETERS = 60, 150, 400, 7


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (REPOSITORY / folder).rglob("*.py") if path.name not in GENERATED)


def place(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def imports(tree: ast.AST) -> set[str]:
    """First names of everything imported, at any depth of the code."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "write imports from the repository's root, not relative ones"
            found.add((node.module or "").partition(".")[0])
    return found


def wrong_imports(path: str, source: str) -> list[str]:
    return [
        name
        for name in sorted(imports(ast.parse(source)))
        if name in ARROWS and not any(path.startswith(f"{p}/") for p in ARROWS[name])
    ]


def test_imports_follow_the_arrows():
    stray = "tests/launch/fakes/"  # programs that stand in for ours, under our names
    files = [path for path in python_files(*PACKAGES, "tests") if not place(path).startswith(stray)]
    wrong = {place(path): wrong_imports(place(path), path.read_text()) for path in files}
    assert {path: names for path, names in wrong.items() if names} == {}


@pytest.mark.parametrize(
    ("path", "source", "names"),
    [
        ("actors/x.py", "def f():\n    from learner.ledger import Ledger", ["learner"]),
        ("learner/x.py", "import transformers.utils", ["transformers"]),
        ("common/x.py", "import jax.numpy as jnp", ["jax"]),
        ("envserver/x.py", "import kubernetes", ["kubernetes"]),
        ("envserver/sandboxes/x.py", "import kubernetes", []),
        ("learner/x.py", "import tools.launch", ["tools"]),
        ("tests/x.py", "from unittest import mock", ["unittest"]),
        ("learner/x.py", "import jax, optax\nfrom common.wire import bind", []),
    ],
)
def test_the_arrow_check_sees(path, source, names):
    assert wrong_imports(path, source) == names


def too_big(path: str, source: str) -> list[str]:
    """What breaks a budget in one module."""
    out = []
    lines = len(source.splitlines())
    if lines >= MODULE_LINES:
        out.append(f"{path}: {lines} lines")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length >= (MAIN_LINES if node.name == "main" else FUNCTION_LINES):
            out.append(f"{path}:{node.lineno} {node.name}: {length} lines")
        arguments = node.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if a.arg not in ("self", "cls")]
        if len(names) > PARAMETERS:
            out.append(f"{path}:{node.lineno} {node.name}: {len(names)} parameters")
    return out


def test_budgets_of_lines_and_parameters():
    assert list(itertools.chain.from_iterable(too_big(place(path), path.read_text()) for path in python_files(*PACKAGES))) == []


def test_the_budget_check_sees():
    body = "    x = 1\n"
    assert too_big("m.py", "def f():\n" + body * 58) == []
    assert too_big("m.py", "def f():\n" + body * 59) == ["m.py:1 f: 60 lines"]
    assert too_big("m.py", "def main():\n" + body * 148) == []
    assert too_big("m.py", "def main():\n" + body * 149) == ["m.py:1 main: 150 lines"]
    assert too_big("m.py", "x = 1\n" * 400) == ["m.py: 400 lines"]
    assert too_big("m.py", "def f(self, a, b, c, d, e, *, f, g): pass") == []
    assert too_big("m.py", "def f(a, b, c, d, e, *, f, g, h): pass") == ["m.py:1 f: 8 parameters"]


def test_names_say_what_things_are():
    vague = re.compile(r"(Manager|Handler|Orchestrator)$|^Base[A-Z]")
    for path in python_files(*PACKAGES):
        assert path.stem not in ("utils", "helpers", "misc"), place(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                assert not vague.search(node.name), f"{place(path)}: class {node.name}"


def test_tests_use_real_classes():
    for path in python_files("tests"):
        for node in ast.walk(ast.parse(path.read_text())):
            patched = isinstance(node, ast.Attribute) and node.attr == "setattr" and ast.unparse(node.value) == "monkeypatch"
            assert not patched, f"{place(path)}:{node.lineno} patches; write a fake class"


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [REPOSITORY / name for name in listed.stdout.split("\0") if name and (REPOSITORY / name).is_file()]


def test_the_top_level_is_fixed():
    names = {path.relative_to(REPOSITORY).parts[0] for path in tracked()}
    visible = {name for name in names if not name.startswith(".")}
    assert TOP_LEVEL - visible == set()
    assert visible - TOP_LEVEL - PROJECT_FILES == set()


def test_files_name_no_machine_and_no_registry():
    """Somebody else's checkout has other folders and another package index."""
    forbidden = re.compile(
        "|".join(
            [
                re.escape(f"{REPOSITORY}/"),
                re.escape(f"{sys.prefix}/"),
                r"/(home|Users)/\w",
                r"--(extra-)?index-url|--find-links[ =]http",
            ]
        )
    )
    for path in tracked():
        if path == Path(__file__) or path.suffix in (".png", ".svg", ".ico"):
            continue
        found = forbidden.search(path.read_text(errors="replace"))
        assert not found, f"{place(path)} names {found[0]!r}"
    assert "://" not in (REPOSITORY / "requirements.lock").read_text()


def test_the_packages_are_those_of_this_checkout():
    assert Path(common.__file__).is_relative_to(REPOSITORY)


@pytest.mark.skipif(not importlib.util.find_spec("grpc_tools"), reason="grpcio-tools is not installed")
def test_generated_files_are_current(tmp_path):
    out = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *out, "common/proto/rl.proto"]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    for made in sorted((tmp_path / "common" / "proto").iterdir()):
        committed = REPOSITORY / "common" / "proto" / made.name
        assert without_versions(made.read_text()) == without_versions(committed.read_text()), (
            f"{made.name} is old: run `make proto`"
        )


def without_versions(source: str) -> str:
    """Generated code without the lines that only name the generator's version."""
    source = re.sub(r"ValidateProtobufRuntimeVersion\(.*?\)", "", source, flags=re.DOTALL)
    kept = [line for line in source.splitlines() if not line.startswith("#") and "GRPC_GENERATED_VERSION =" not in line]
    return "\n".join(kept)
