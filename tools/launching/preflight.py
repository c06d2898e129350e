"""Everything that is checked and written before the first process starts.

Wrong input is refused here, with one line that names the value and the fix, so that nobody waits for a process to say
it. Then the run folder gets its config.toml, model/ and addresses.json, and the list of programs follows from them.
"""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import socket
import ssl
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common import keys
from common.addresses import MAIN, STALE, Addresses, EngineAddress, RelayAddress
from common.cli import dump_toml
from common.config import ModelConfig, RunConfig, TlsConfig
from common.config_algorithm import AlgorithmConfig
from common.config_domain import DELEGATE
from common.files import replace_file
from common.vocabulary import token_ids
from tools.launching import engines
from tools.launching.runs import Refusal
from tools.launching.supervisor import Program, has_accelerator

# Below every system's range of ephemeral ports, so that no outgoing connection takes a port before its server binds it.
PORTS = range(20_000, 32_000)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
TASKS_FILE = "tasks_file"  # the option of a domain that names a file
# What each extra of pyproject.toml brings that programs of its kind cannot start without.
EXTRAS = {
    "learner": (
        *("aiohttp", "beartype", "flax", "jax", "jaxtyping", "ml_dtypes", "optax", "orbax.checkpoint", "orjson", "pyarrow"),
        *("safetensors", "tensorboard"),
    ),
    "actors": ("aiohttp", "jinja2", "orjson", "tokenizers"),
}
TEMPLATES = "additional_chat_templates"  # a folder, where a model has several
OPTIONAL_TOKENIZER_FILES = (
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
)


def resolve_paths(config: RunConfig, bases: list[Path]) -> RunConfig:
    """The configuration with absolute paths: each is looked up below `bases` in turn, since programs run elsewhere."""

    def absolute(text: str) -> str:
        if not text or Path(text).is_absolute():
            return text
        found = [base / text for base in bases if (base / text).exists()]
        return str((found or [bases[0] / text])[0].resolve())

    def with_reference(algorithm: dict[str, Any]) -> dict[str, Any]:
        kl = algorithm.get("kl", {})
        given = kl.get("reference", "initial") != "initial"
        return algorithm | {"kl": kl | {"reference": absolute(kl["reference"])}} if given else algorithm

    used = "path" if config.model.path else "tokenizer"
    model = config.model.model_copy(update={used: absolute(getattr(config.model, used))})
    engine = config.engine.model_copy(
        update={"python": absolute(config.engine.python), "router_python": absolute(config.engine.router_python)}
    )
    tls = config.tls.model_copy(update={name: absolute(getattr(config.tls, name)) for name in ("cert", "key", "ca")})
    domains = [
        domain.model_copy(
            update={
                "instructions": absolute(domain.instructions),
                "memory_instructions": absolute(domain.memory_instructions),
                "options": {key: absolute(str(value)) if key == TASKS_FILE else value for key, value in domain.options.items()},
                "algorithm": with_reference(domain.algorithm),
            }
        )
        for domain in config.domains
    ]
    algorithm = AlgorithmConfig.model_validate(with_reference(config.algorithm.model_dump()))
    changed = {"model": model, "engine": engine, "tls": tls, "domains": domains, "algorithm": algorithm}
    return config.model_copy(update=changed)


def check(config: RunConfig) -> None:
    """Raise Refusal for the first thing that this machine cannot run."""
    for problem in _problems(config):
        raise Refusal(problem)
    model_config(config.model)


def _problems(config: RunConfig) -> Iterator[str]:
    yield from missing_packages()
    yield from _domain_problems(config)
    yield from _model_problems(config.model)
    if problem := engines.problem(config.engine):
        yield problem
    yield from _tls_problems(config.tls)
    yield from _port_problems(config)


def missing_packages(extras: Mapping[str, Sequence[str]] = EXTRAS) -> Iterator[str]:
    """One line per extra whose packages are not all there; imports none of them."""
    for extra, packages in extras.items():
        missing = [package for package in packages if not _installed(package)]
        if missing:
            yield f'{", ".join(missing)} missing in {sys.executable}: run `make setup`, or pip install -e ".[{extra}]"'


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even its parent package
        return False


def _tls_problems(tls: TlsConfig) -> Iterator[str]:
    for name in ("cert", "key", "ca") if tls.cert else ():
        path = getattr(tls, name)
        if not Path(path).is_file():
            yield f"tls.{name} = {path!r}: no such file"
            return
    if tls.cert:  # gRPC would report a wrong file as a port that cannot be had
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(tls.cert, tls.key)
            context.load_verify_locations(tls.ca)
        except ssl.SSLError as error:
            yield f"tls.cert, tls.key and tls.ca must be PEM files, the key that of the certificate: {error.reason or error}"


def _domain_problems(config: RunConfig) -> Iterator[str]:
    from envserver.domains import DomainError, check_installed, load_domain
    from envserver.memory import with_memory

    for index, domain in enumerate(config.domains):
        try:
            check_installed(domain.name)
        except DomainError as error:
            yield f"domains.{index}.name: {error}"
            continue
        if domain.instructions and not Path(domain.instructions).is_file():
            yield f"domains.{index}.instructions = {domain.instructions!r}: no such file"
            continue
        try:
            found = load_domain(domain.name, domain.options, domain.instructions)
            with_memory(found, domain, Path(), ())
            if TASKS_FILE in domain.options:
                found.tasks("train", 1)  # reads all of it
        except DomainError as error:
            yield f"domains.{index}: {error}"
            continue
        names = [tool.get("function", tool).get("name") for tool in found.tools]
        if domain.context.subagent_turns and DELEGATE in names:
            yield f"domains.{index}.context.subagent_turns: domain {domain.name!r} has a tool {DELEGATE} of its own; leave it out"
        if config.warm.updates and not found.has_reference:
            yield (
                f"warm.updates = {config.warm.updates}: domain {domain.name!r} has no reference solutions to learn from;"
                " set --warm.updates=0"
            )


def with_contexts(config: RunConfig) -> RunConfig:
    """Every context.name = "domain" becomes what the domain has. Raises Refusal when that does not go with the rest."""
    from envserver.domains import load_domain

    plain = config.model_dump()
    for domain in plain["domains"]:
        if domain["context"]["name"] == "domain":
            domain["context"] = load_domain(domain["name"], domain["options"], domain["instructions"]).context()
    try:
        return RunConfig.model_validate(plain)
    except ValidationError as error:
        why = "; ".join(str(detail["msg"]).removeprefix("Value error, ") for detail in error.errors())
        raise Refusal(f'context.name = "domain": what the domain wants does not go with this configuration: {why}') from error


def _model_problems(model: ModelConfig) -> Iterator[str]:
    folder = Path(tokenizer_folder(model))
    key = "model.path" if model.path else "model.tokenizer"
    if not folder.is_dir():
        yield f"{key} = {str(folder)!r}: no such folder; name a Hugging Face directory"
        return
    for name in TOKENIZER_FILES:
        if not (folder / name).is_file():
            yield f"{key} = {str(folder)!r}: no {name} in it; name a directory with a Hugging Face tokenizer"
    if model.path and not (folder / "config.json").is_file():
        yield f"model.path = {model.path!r}: no config.json in it; name a Hugging Face model directory"
    if model.path and not any(folder.glob("*.safetensors")):
        yield f"model.path = {model.path!r}: a directory without weights (*.safetensors); leave model.path empty for random ones"


def tokenizer_folder(model: ModelConfig) -> str:
    return model.path or model.tokenizer


def _port_problems(config: RunConfig) -> Iterator[str]:
    with ExitStack() as held:
        if not _hold(config.host, 0, held):
            yield f"host = {config.host!r} is not an IPv4 address of this machine; set --host=127.0.0.1"
            return
        for key, port in _fixed_ports(config):
            if not _hold(config.host, port, held):
                fix = f"stop the process that has it, or set --{key}=0 for a free one"
                yield f"{key}: port {port} on {config.host} is busy; {fix}"


def _fixed_ports(config: RunConfig) -> list[tuple[str, int]]:
    """Ports that the configuration names. (It refuses one that two programs would get.)"""
    engines = [("engine.port", config.engine.port + index) for index in range(config.engine.count)] if config.engine.port else []
    return engines + ([("learner.port", config.learner.port)] if config.learner.port else [])


def _hold(host: str, port: int, held: ExitStack) -> bool:
    """Listen on the port until `held` closes; False when it is taken. (Only listening keeps others off it: two sockets
    that reuse addresses can both be bound.)"""
    probe = held.enter_context(socket.socket())
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((host, port))
        probe.listen()
    except OSError:
        return False
    return True


def choose_addresses(config: RunConfig, ports: range = PORTS) -> Addresses:
    """Fixed ports where the configuration says so, free ones elsewhere. Raises Refusal when none are free.

    Here all engines are on one host, so they share one relay.
    """
    with ExitStack() as held:  # all at once, so that no port is chosen twice
        for _, number in _fixed_ports(config):
            _hold(config.host, number, held)

        def port() -> int:
            for candidate in random.SystemRandom().choices(ports, k=200):
                if _hold(config.host, candidate, held):
                    return candidate
            raise Refusal(f"no free port on {config.host} between {ports.start} and {ports.stop}")

        numbers = [config.engine.port + index if config.engine.port else port() for index in range(config.engine.count)]
        stale_from = config.engine.count - config.cross_policy.engines
        engines = [
            EngineAddress(
                name=f"engine-{index}", url=f"http://{config.host}:{number}", pool=MAIN if index < stale_from else STALE
            )
            for index, number in enumerate(numbers)
        ]
        relayed, scheme = config.weights.transport == "relay", "https" if config.tls.cert else "http"
        names = [engine.name for engine in engines]
        return Addresses(
            learner=f"{config.host}:{config.learner.port or port()}",
            engines=engines,
            router=f"http://{config.host}:{port()}" if config.engine.router else "",
            router_metrics=f"{config.host}:{port()}" if config.engine.router else "",
            envs={domain.name: [f"{config.host}:{port()}" for _ in range(domain.replicas)] for domain in config.domains},
            weights=f"{config.host}:{port()}" if relayed else "",
            relays=[RelayAddress(name="relay-0", url=f"{scheme}://{config.host}:{port()}", engines=names)] if relayed else [],
        )


def model_config(model: ModelConfig) -> dict[str, Any]:
    """The config.json of engines and learner: that of `model.path`, or one made of the configuration's sizes.

    Raises Refusal when the model cannot be described.
    """
    from learner.model.spec import ModelError, ModelSpec, read_config, spec_from_config

    folder = Path(tokenizer_folder(model))
    try:
        if model.path:
            config = read_config(folder)
            ModelSpec.from_hf(config)
            return config
        ids = token_ids(_json(folder / "tokenizer.json"))
        if not ids:
            raise Refusal(f"{folder / 'tokenizer.json'}: no vocabulary in it; write it with `Tokenizer.save`")
        end = end_token(_json(folder / "tokenizer_config.json"))
        if end not in ids:
            raise Refusal(f"{folder / 'tokenizer_config.json'}: eos_token {end!r} is not in the vocabulary of tokenizer.json")
        return spec_from_config(model, max(ids.values()) + 1).to_hf(eos_id=ids[end], dtype=model.dtype)
    except ModelError as error:
        raise Refusal(f"{folder}: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Refusal(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise Refusal(f"{path}: a JSON object was expected, not a {type(value).__name__}")
    return value


def end_token(tokenizer_config: dict[str, Any]) -> str:
    """`eos_token`, which Hugging Face writes as a string or as a table."""
    end = tokenizer_config.get("eos_token", "")
    return end.get("content", "") if isinstance(end, dict) else str(end)


def write_folder(config: RunConfig, run: Path) -> Addresses:
    """config.toml (a run's first start; it never changes), model/, addresses.json and, where one is needed, the key.

    model/ is the configuration and the tokenizer, for engines and actors; weights come from the learner. Ports are chosen
    anew each time: those of an earlier start may be taken.
    """
    if not (run / "config.toml").is_file():
        replace_file(run / "config.toml", dump_toml(config).encode())
    source, folder = Path(tokenizer_folder(config.model)), run / "model"
    folder.mkdir(exist_ok=True)
    for name in (*TOKENIZER_FILES, *OPTIONAL_TOKENIZER_FILES):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, folder / TEMPLATES, dirs_exist_ok=True)
    replace_file(folder / "config.json", json.dumps(model_config(config.model), indent=2).encode())
    addresses = choose_addresses(config)
    addresses.write(run)
    if config.keyed:
        keys.make(run)
    return addresses


def programs(config: RunConfig, run: Path, addresses: Addresses, learner_arguments: list[str]) -> list[Program]:
    """Every process of the run, with its command line."""
    python, folder = sys.executable, str(run)
    out = [
        Program(
            f"env-{domain.name}-{index}",
            "env",
            (python, "-m", "envserver", "--run", folder, "--domain", domain.name, "--replica", str(index)),
        )
        for domain in config.domains
        for index in range(domain.replicas)
    ]
    out += [
        Program(engine.name, "engine", engines.command(config, run, engine.url, has_accelerator()))
        for engine in addresses.engines
    ]
    if addresses.router:
        out.append(Program("router", "router", engines.router_command(config.engine, addresses)))
    out += [
        Program(relay.name, "relay", (python, "-m", "actors.relay", "--run", folder, "--index", str(index)))
        for index, relay in enumerate(addresses.relays)
    ]
    learner = (python, "-m", "learner", "--run", folder, *learner_arguments)
    out.append(Program("learner", "learner", learner, resumes=not learner_arguments))
    out += [
        Program(f"actor-{index}", "actor", (python, "-m", "actors", "--run", folder, "--index", str(index)))
        for index in range(config.actors.count)
    ]
    return out
