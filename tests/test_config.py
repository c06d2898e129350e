"""Configuration: typos are refused with the field and the fix, what is written reads back, committed files load."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.cli import ConfigError, dump_toml, help_text, load
from common.config import DomainConfig, RunConfig

REPOSITORY = Path(__file__).parents[1]
MINIMAL = '[[domains]]\nname = "frozenlake"\n'


@pytest.fixture
def minimal(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize("path", sorted(REPOSITORY.glob("configs/*.toml")), ids=lambda path: path.name)
def test_committed_configurations_load_and_read_back(path, tmp_path):
    config = load(path)
    (tmp_path / "config.toml").write_text(dump_toml(config))
    assert load(tmp_path / "config.toml") == config


TYPOS = {
    "a key at the top": ('nmae = "x"\n' + MINIMAL, [], "unknown key nmae; did you mean 'name'?"),
    "a key in a table": (MINIMAL + "[optimizer]\nlrr = 1", [], "unknown key optimizer.lrr; did you mean 'lr'?"),
    "a key in a list of tables": (MINIMAL + "capasity = 3", [], "unknown key domains.0.capasity; did you mean 'capacity'?"),
    "a key like no other": (MINIMAL + "[tls]\nzzz = 1", [], "unknown key tls.zzz; known keys here: ca, cert, key"),
    "a type": (MINIMAL + '[engine]\nslots = "many"', [], "engine.slots = 'many': Input should be a valid integer"),
    "a value out of range": (MINIMAL + "[actors]\ncount = 0", [], "actors.count = 0: Input should be greater than or equal to 1"),
    "a number that is none": (MINIMAL + "[optimizer]\nlr = nan", [], "optimizer.lr = nan: Input should be a finite number"),
    "a choice": (MINIMAL, ["--algorithm.policy_loss=pppo"], "algorithm.policy_loss = 'pppo': Input should be 'ppo', 'gspo'"),
    "an override without =": (MINIMAL, ["--seed"], "override '--seed': write --table.key=value"),
    "an override without dashes": (MINIMAL, ["seed=3"], "override 'seed=3': write --table.key=value"),
    "an index too high": (MINIMAL, ["--domains.1.capacity=8"], "'1' is not an index into a list of 1 entries"),
    "an index that is a name": (MINIMAL, ["--domains.frozenlake.capacity=8"], "'frozenlake' is not an index"),
    "a key below a value": ("seed = 3\n" + MINIMAL, ["--seed.x=8"], "override '--seed.x=8': seed is a value, not a table"),
    "a list's entry": (MINIMAL, ["--domains.0=8"], "name a key of one of the list's entries: --domains.0.KEY=..."),
    "a list without tables": (
        MINIMAL + "[engine]\nwidths = [64, 320]",
        ["--engine.widths.0=64"],
        "write the whole list: --engine.widths=[...]",
    ),
    "no way to evaluate": (MINIMAL, ["--eval.modes=[]"], "eval.modes: List should have at least 1 item"),
    "no domains": ("seed = 3", [], "domains is missing; add it"),
    "TOML": ("name = [", [], "not TOML"),
    "a combination: GRPO with a critic": (MINIMAL, ["--algorithm.critic=shared"], 'grpo has no critic: set critic = "none"'),
    "a combination: GRPO without a bootstrap": (
        MINIMAL,
        ["--algorithm.bootstrap_truncated=false"],
        "is for an advantage with a critic, grpo has none",
    ),
    "a combination: PPO without one": (MINIMAL, ["--algorithm.advantage=gae"], 'set algorithm.critic to "shared" or "separate"'),
    "a combination: a group of one": (MINIMAL, ["--algorithm.group_size=1"], "a group of one has no baseline"),
    "a combination: heads": (MINIMAL, ["--model.num_kv_heads=3"], "model.num_heads 4 is not a multiple of model.num_kv_heads 3"),
    "a combination: widths": (MINIMAL, ["--engine.widths=[320,128]"], "engine.widths [320, 128] must rise"),
    "a combination: length": (MINIMAL, ["--domains.0.limits.max_tokens=321"], "max_tokens 321 exceeds engine.max_length 320"),
    "a combination: a router's Python without a router": (
        MINIMAL,
        ["--engine.router_python=/p"],
        "engine.router_python = '/p' is for router = true",
    ),
    "a combination: two that choose": (
        MINIMAL,
        ["--engine.router=true", "--engine.choice=least_loaded"],
        'engine.choice = "least_loaded" cannot be used with engine.router',
    ),
    "a context: a window without turns": (MINIMAL, ["--domains.0.context.name=window"], "needs context.turns, at least 1"),
    "a context: turns without a window": (MINIMAL, ["--domains.0.context.turns=2"], 'context.turns = 2 is for name = "window"'),
    "a context: no length": (MINIMAL, ["--domains.0.context.name=discard"], 'name = "discard" needs context.tokens'),
    "a context: a length without a cut": (MINIMAL, ["--domains.0.context.tokens=9"], 'for name = "discard" or "summary"'),
    "a context: no size of summaries": (
        MINIMAL,
        ["--domains.0.context.name=summary", "--domains.0.context.tokens=200"],
        "needs context.summary_tokens",
    ),
    "a context: a summary without a cut": (MINIMAL, ["--domains.0.context.summary_tokens=9"], 'is for name = "summary"'),
    "a context: a model without its server": (
        MINIMAL,
        [f"--domains.0.context.{key}" for key in ("name=summary", "tokens=200", "summary_tokens=9", "summary_model=m")],
        "summary_url and summary_model go together",
    ),
    "a context: a server without its protocol": (
        MINIMAL,
        [
            f"--domains.0.context.{key}"
            for key in ("name=summary", "tokens=200", "summary_tokens=9", "summary_url=host:1", "summary_model=m")
        ],
        "context.summary_url 'host:1': write http://host:port",
    ),
    "a context: a cut that comes too late": (
        MINIMAL,
        [f"--domains.0.context.{key}" for key in ("name=summary", "tokens=280", "summary_tokens=9")],
        "context.tokens 280 comes too late: with limits.max_new_tokens and context.summary_tokens it makes 321",
    ),
    "a context: sub-agents whose turns are all calls": (
        MINIMAL,
        ["--domains.0.context.subagent_turns=2", "--chat.tools=answer"],
        'context.subagent_turns = 2 cannot be used with chat.tools = "answer"',
    ),
    "a context: slack of nothing": (MINIMAL, ["--domains.0.context.slack=1"], "context.slack = 1 is for turns, observations or"),
    "a context: calls without sub-agents": (MINIMAL, ["--domains.0.context.subagent_calls=2"], "is for subagent_turns"),
    "a context: sub-agents without calls": (
        MINIMAL,
        ["--domains.0.context.subagent_turns=2", "--domains.0.context.subagent_calls=0"],
        "context.subagent_calls = 0 with subagent_turns",
    ),
    "a context: the domain's, and not": (
        MINIMAL,
        ["--domains.0.context.name=domain", "--domains.0.context.observations=2"],
        "context.observations = 2 is for a named policy",
    ),
    "sampling that cannot be replayed": (
        MINIMAL,
        ["--sampling.top_p=0.9"],
        "sampling.top_p changes the distribution that tokens are drawn from; their recorded logprobs could not be replayed",
    ),
    "sampling that cannot be replayed, in the file": (
        MINIMAL + "[sampling]\nmin_new_tokens = 3",
        [],
        "sampling.min_new_tokens changes",
    ),
    "sampling: a temperature of nothing": (
        MINIMAL,
        ["--sampling.temperature=0"],
        "sampling.temperature = 0: Input should be greater",
    ),
    "a combination: a router and two pools": (
        MINIMAL,
        ["--engine.router=true", "--engine.count=2", "--cross_policy.engines=1"],
        "engine.router and cross_policy.engines cannot be used together",
    ),
    "a combination: a router before engines with a key": (
        MINIMAL,
        ["--engine.router=true", "--weights.transport=relay"],
        "engine.router cannot be used where engines want a key",
    ),
    "a stale pool: none left in main": (MINIMAL, ["--cross_policy.engines=1"], "of engine.count 1 leave none in the main pool"),
    "a stale pool: keys without engines": (
        MINIMAL,
        ["--cross_policy.share=0.5"],
        "cross_policy.share = 0.5 is for engines of at least 1; leave it out",
    ),
    "a stale pool: every turn": (
        MINIMAL,
        ["--engine.count=2", "--cross_policy.engines=1", "--cross_policy.share=1"],
        "cross_policy.share = 1: Input should be less than 1",
    ),
    "a stale pool: refreshed as often as main": (
        MINIMAL,
        ["--engine.count=2", "--cross_policy.engines=1", "--cross_policy.refresh=1"],
        "cross_policy.refresh = 1: Input should be greater than or equal to 2",
    ),
    "a stale pool: a bound that its tokens pass": (
        MINIMAL,
        ["--engine.count=2", "--cross_policy.engines=1", "--learner.max_lag=3"],
        "max_lag 27 is too low: tokens of the stale pool are up to refresh 25 updates old when sampled, and wait for up to "
        "learner.max_lag 3 more; set it to 28 or more",
    ),
    "samples without sampling": (MINIMAL, ["--eval.samples=4"], 'eval.samples = 4 is for modes = ["sampled"]; leave it out'),
    "a temperature without sampling": (MINIMAL, ["--eval.temperature=0.5"], 'eval.temperature = 0.5 is for modes = ["sampled"]'),
    "a combination: evaluation": (MINIMAL, ["--eval.tasks=129"], "eval.tasks 129 exceeds domains.frozenlake.heldout_tasks 128"),
    "a combination: limits of no memory": (
        MINIMAL + "memory_notes = 3",
        [],
        'domains.frozenlake.memory_notes = 3 is for memory = "rollout" or "task"; leave it out',
    ),
    "a combination: memory where one tool can be called": (
        MINIMAL + 'memory = "task"',
        ["--chat.template=raw", "--chat.tools=fenced"],
        'domains.frozenlake.memory = "task" cannot be used with chat.tools = "fenced", which writes no call of write_note',
    ),
    "a combination: memory where a call has one text": (
        MINIMAL + 'memory = "rollout"',
        ["--chat.tools=answer"],
        'domains.frozenlake.memory = "rollout" cannot be used with chat.tools = "answer"',
    ),
    "a memory that is none": (
        MINIMAL + 'memory = "on"',
        [],
        "domains.0.memory = 'on': Input should be 'off', 'rollout' or 'task'",
    ),
    "a combination: a relay that everybody could use": (
        MINIMAL,
        ["--weights.transport=relay", "--host=10.0.0.7"],
        "weights.transport = \"relay\" on host '10.0.0.7', which other machines reach, needs TLS: set tls.cert, tls.k",
    ),
    "a combination: a relay's folder without relays": (
        MINIMAL,
        ["--weights.folder=/x"],
        "weights.folder = '/x' is for transport = \"relay\"; leave it out",
    ),
    "a combination: half of TLS": (MINIMAL, ["--tls.cert=x"], "tls needs cert, key and ca together"),
    "a combination: GRPO with a discount": (
        MINIMAL,
        ["--algorithm.gamma=0.99"],
        "algorithm.gamma = 0.99 is for credit over time, grpo gives none",
    ),
    "a combination: PPO with groups": (
        MINIMAL,
        ["--algorithm.advantage=gae", "--algorithm.critic=shared", "--algorithm.std_ddof=0"],
        "algorithm.std_ddof = 0 is for grpo and erpo",
    ),
    "a combination: decay of a constant": (
        MINIMAL,
        ["--optimizer.decay_steps=9"],
        'optimizer.decay_steps = 9 is for schedule = "cosine"; leave it out',
    ),
    "a combination: arguments of another engine": (
        MINIMAL,
        ['--engine.args=["--tp", "2"]'],
        "engine.args = ['--tp', '2'] is for kind = \"sglang\"",
    ),
    "a combination: SGLang with our sizes": (
        MINIMAL,
        ["--engine.kind=sglang", "--engine.prefill_slots=4"],
        'engine.prefill_slots = 4 is for kind = "embedded"',
    ),
    "a port above all": (MINIMAL, ["--learner.port=70000"], "learner.port = 70000: Input should be less than or equal to 65535"),
    "engines above all ports": (
        MINIMAL,
        ["--engine.port=65535", "--engine.count=2"],
        "engine.port 65535: the last of 2 engines would get port 65536",
    ),
    "one port twice": (
        MINIMAL,
        ["--engine.port=7000", "--engine.count=3", "--learner.port=7002"],
        "learner.port 7002 is an engine's too; engines get 7000 to 7002",
    ),
    "a lease shorter than a heartbeat": (
        MINIMAL,
        ["--domains.0.lease_s=1"],
        "domains.0.lease_s = 1: Input should be greater than or equal to 4",
    ),
    "an index in other digits": (MINIMAL, ["--domains.\u00b2.capacity=8"], "is not an index into a list of 1 entries"),
    "a combination: success without a loss": (MINIMAL, ["--warm.target_success=0.2"], "set warm.target_loss too"),
    "a combination: raw text without a format": (MINIMAL, ["--chat.template=raw"], 'template = "raw" has none: name a format'),
    "a combination: raw text with a template's options": (
        MINIMAL,
        ["--chat.template=raw", "--chat.tools=fenced", "--chat.options={enable_thinking = false}"],
        "chat.options = {'enable_thinking': False} is for template = \"model\"; leave it out",
    ),
    "a combination: a prompt for a chat template": (MINIMAL, ["--chat.prompt=$task"], "chat.prompt = '$task' is for template"),
    "a combination: schedule": (MINIMAL, ["--optimizer.schedule=cosine"], "decay_steps 0 must exceed optimizer.warmup 0"),
    "a name twice": (MINIMAL + MINIMAL, [], "a name stands twice"),
    "a name that is no folder": (MINIMAL, ["--name=../x"], "name = '../x': String should match pattern"),
}


@pytest.mark.parametrize("what", TYPOS)
def test_a_typo_is_refused_with_field_and_fix(what, tmp_path):
    text, overrides, words = TYPOS[what]
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(path, overrides)
    assert words in str(refused.value)


def test_every_mistake_is_named_at_once(minimal):
    with pytest.raises(ConfigError) as refused:
        load(minimal, ["--optimizer.lrr=1", "--engine.slots=0"])
    assert len(str(refused.value).splitlines()) == 2


def test_a_missing_file_and_a_folder_are_one_line(tmp_path):
    with pytest.raises(ConfigError, match="no such file; committed configurations are in configs/"):
        load(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="is a folder; name a TOML file"):
        load(tmp_path)


def test_overrides_reach_every_kind_of_place(minimal):
    overrides = ["--optimizer.lr=1e-3", "--domains.0.options.size=5", "--name=other", "--engine.widths=[64,320]"]
    config = load(minimal, [*overrides, "--eval.init=false", "--domains.0.options.kind=wide", "--seed=9"])
    assert (config.optimizer.lr, config.name, config.seed, config.eval.init) == (1e-3, "other", 9, False)
    assert config.engine.widths == [64, 320]
    assert config.domains[0].options == {"size": 5, "kind": "wide"}


@pytest.mark.parametrize(
    ("overrides", "places"),
    [
        ((), 96),
        (("--actors.count=4",), 24),
        (("--actors.count=5",), 20),
        (("--engine.concurrency=7", "--actors.count=4"), 7),
        (("--engine.concurrency=7", "--engine.count=3", "--engine.router=true"), 21),
    ],
)
def test_actors_share_what_keeps_an_engine_busy(minimal, overrides, places):
    assert load(minimal, list(overrides)).places == places


def test_help_names_every_key():
    text = help_text()
    assert '--algorithm.aggregation=<token_mean|seq_mean_token_mean|seq_mean_token_sum|constant>  (default "token_mean")' in text
    assert "--domains.0.limits.max_turns=<int>  (default 10)" in text
    assert "--domains.0.name=<str>  (required)" in text
    assert "--engine.widths=<list of int>" in text


scalars = st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=8
)


@given(st.dictionaries(st.text(max_size=5), values, max_size=4), st.text(max_size=8))
def test_what_is_written_reads_back(tmp_path_factory, options, instructions):
    domain = DomainConfig(name="frozenlake", options=options, instructions=instructions)
    config = RunConfig(domains=[domain, DomainConfig(name="arithmetic")])
    path = tmp_path_factory.getbasetemp() / "again.toml"
    path.write_text(dump_toml(config))
    assert load(path) == config


def test_infinity_is_no_setting(minimal):
    with pytest.raises(ConfigError, match="finite"):
        load(minimal, ["--optimizer.clip_norm=inf"])


def test_common_imports_no_framework():
    program = (
        "import sys, common.cli, common.validate, common.convert, common.seeds;"
        "print(sorted({'jax', 'transformers', 'tokenizers', 'grpc', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", ["2026-11-30", "12", "1e3", "true"])
def test_a_text_may_look_like_something_else(tmp_path, name):
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    config = load(path, [f"--name={name}", "--seed=3", "--optimizer.lr=1e-3"])
    assert (config.name, config.seed, config.optimizer.lr) == (name, 3, 1e-3)


def test_a_key_is_needed_where_others_can_call(minimal):
    tls = [f"--tls.{name}=x.pem" for name in ("cert", "key", "ca")]
    for host in ("127.0.0.1", "127.1.2.3", "localhost", "::1"):
        assert not load(minimal, [f"--host={host}"]).keyed
        assert load(minimal, [f"--host={host}", "--weights.transport=relay"]).keyed
    for host in ("10.0.0.7", "0.0.0.0", "learner.example"):
        assert load(minimal, [f"--host={host}"]).keyed
        assert load(minimal, [f"--host={host}", "--weights.transport=relay", *tls]).weights.folder == "/dev/shm"
