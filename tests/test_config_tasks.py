"""`[tasks]`, `[curriculum]` and `domains.unlock`: what is refused, and what published numbers become."""

from __future__ import annotations

import pytest

from common.cli import ConfigError, load
from common.config import RunConfig
from common.config_tasks import PRESETS, TasksConfig

ONE = '[[domains]]\nname = "a"\n'


def chain(**needs: str) -> str:
    """Domains, each with its `unlock`."""
    return "".join(f'[[domains]]\nname = "{name}"\nunlock = {unlock}\n' for name, unlock in needs.items())


REFUSED = {
    "decay of no estimate": (ONE, ["--tasks.decay=0.5"], 'tasks.decay = 0.5 is for sampler = "variance"; leave it out'),
    "a floor of nothing": (ONE, ["--tasks.floor=0.5"], 'tasks.floor = 0.5 is for sampler = "variance" or "limr"'),
    "a floor of zero": (ONE, ["--tasks.sampler=variance", "--tasks.floor=0"], "tasks.floor = 0: Input should be greater than 0"),
    "a threshold without limr": (ONE, ["--tasks.threshold=0.2"], 'tasks.threshold = 0.2 is for sampler = "limr"'),
    "one visit": (ONE, ["--tasks.sampler=limr", "--tasks.visits=1"], "visits = 1: Input should be greater than or equal to 2"),
    "a share of all": (ONE, ["--tasks.share=0.5"], 'tasks.share = 0.5 is for select = "top_std" or "mass"'),
    "a form of all": (ONE, ["--tasks.form=linear"], "tasks.form = 'linear' is for select = \"mass\""),
    "zeros in the paper's form": (
        ONE,
        ["--tasks.select=mass", "--tasks.include_zero=true"],
        'tasks.include_zero = True is for select = "mass" with form = "linear" or "softmax"',
    ),
    "refills of all": (ONE, ["--tasks.max_refills=2"], 'tasks.max_refills = 2 is for select = "signal" or "mass"'),
    "a group of one": (
        ONE,
        ["--tasks.select=signal", "--algorithm.advantage=gae", "--algorithm.critic=shared", "--algorithm.group_size=1"],
        'tasks.select = "signal" compares the rewards of a group; algorithm.group_size is 1: set select = "all"',
    ),
    "draining a choice": (
        ONE,
        ["--tasks.select=mass", "--learner.take=drain"],
        'tasks.select = "mass" chooses among a fixed number of groups; set learner.take = "fixed"',
    ),
    "a share of half a group": (
        ONE,
        ["--tasks.select=top_std", "--tasks.share=0.3"],
        "tasks.share 0.3 of how many groups is algorithm.groups_per_update 32? It would be 106.667",
    ),
    "stages of nothing": (ONE, ["--curriculum.every=5"], 'curriculum.every = 5 is for kind = "stages"'),
    "turns of nothing": (ONE, ["--curriculum.turns=[2,4]"], 'curriculum.turns = [2, 4] is for kind = "stages" or "success"'),
    "turns that fall": (
        ONE,
        ["--curriculum.kind=success", "--curriculum.turns=[4,2]"],
        "curriculum.turns [4, 2] must rise from stage to stage",
    ),
    "a stage twice": (ONE, ["--curriculum.kind=success", "--curriculum.turns=[2,2,4]"], "curriculum.turns [2, 2, 4] must rise"),
    "one stage": (ONE, ["--curriculum.kind=success", "--curriculum.turns=[4]"], "curriculum.turns [4] must rise"),
    "stages without a length": (
        ONE,
        ["--curriculum.kind=stages", "--curriculum.turns=[2,4]"],
        'curriculum.kind = "stages" needs curriculum.every',
    ),
    "a preset and turns": (
        ONE,
        ["--curriculum.kind=stages", "--curriculum.preset=webarena", "--curriculum.turns=[2,4]"],
        'curriculum.turns = [2, 4] is for stages without preset = "webarena"',
    ),
    "more turns than any domain has": (
        ONE,
        ["--curriculum.kind=stages", "--curriculum.preset=webarena"],
        "curriculum.turns end at 15, the most that a domain has is limits.max_turns 10: raise that",
    ),
    "a domain that nobody knows": (chain(a="{ b = 0.5 }"), [], "domains.a.unlock names 'b'; name another of []"),
    "a domain that waits for itself": (chain(a="{ a = 0.5 }", b="{}"), [], "domains.a.unlock names 'a'; name another of ['b']"),
    "a circle": (
        chain(a="{}", b="{ a = 0.5, d = 0.1 }", c="{ b = 0.5 }", d="{ c = 0.5 }"),
        [],
        "domains.unlock of b and c and d wait for one another; at least one must be free",
    ),
    "a success above all": (chain(a="{}", b="{ a = 1.5 }"), [], "domains.1.unlock.a = 1.5: Input should be less than or equal"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_combination_is_refused_with_field_and_fix(what, tmp_path):
    text, overrides, words = REFUSED[what]
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(path, overrides)
    assert words in str(refused.value)


def test_shares_are_those_of_the_papers_unless_said_otherwise():
    assert [TasksConfig(select=name).kept_share for name in ("all", "signal", "top_std", "mass")] == [1.0, 1.0, 0.25, 0.9]
    assert TasksConfig(select="mass", share=0.5).kept_share == 0.5


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_stages(preset):
    domain = {"name": "a", "limits": {"max_turns": 30}}
    config = RunConfig.model_validate({"domains": [domain], "curriculum": {"kind": "stages", "preset": preset}})
    assert config.curriculum.stages == PRESETS[preset]


def test_domains_that_open_one_after_another_are_accepted(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(chain(a="{}", b="{ a = 0.6 }", c="{ a = 0.8, b = 0.5 }"))
    assert [domain.unlock for domain in load(path).domains] == [{}, {"a": 0.6}, {"a": 0.8, "b": 0.5}]
