"""context.name = "domain": what the domain wants is checked and written down before anything starts."""

from common.cli import load
from common.config_domain import ContextConfig
from envserver.domains import DOMAINS, Row
from tests.launch.stage import REPOSITORY
from tests.launch.test_refusals import refused
from tools.launching import preflight

LAKE = DOMAINS["frozenlake"].load({}, "").__class__


def test_a_context_policy_of_the_domain_that_does_not_fit(stage, monkeypatch):
    class Late(LAKE):
        template = "Go."

        def context(self):
            return {"name": "discard", "tokens": 1000}

    monkeypatch.setitem(DOMAINS, "frozenlake", Row(Late))
    refused(
        stage, stage.call_local("--domains.0.context.name=domain"), "what the domain wants does not go with this configuration"
    )


def test_a_domain_with_a_tool_of_our_own(stage, monkeypatch):
    class Delegating(LAKE):
        tools, template = [{"type": "function", "function": {"name": "delegate"}}], "Go."

    monkeypatch.setitem(DOMAINS, "frozenlake", Row(Delegating))
    refused(stage, stage.call_local("--domains.0.context.subagent_turns=2"), "'frozenlake' has a tool delegate of its own")


def test_a_context_policy_of_the_domain_stands_in_the_runs_configuration(monkeypatch):
    class Short(LAKE):
        template = "Go."

        def context(self):
            return {"name": "window", "turns": 2}

    monkeypatch.setitem(DOMAINS, "frozenlake", Row(Short))
    config = load(REPOSITORY / "configs" / "tiny.toml", ["--domains.0.context.name=domain"])
    found = preflight.with_contexts(config)
    assert found.domains[0].context == ContextConfig(name="window", turns=2)
    assert found.model_copy(update={"domains": config.domains}) == config
    plain = load(REPOSITORY / "configs" / "tiny.toml")
    assert preflight.with_contexts(plain) == plain
