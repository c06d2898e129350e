"""Which tasks are listed."""

import pytest

from envserver.admission import admit, build_catalog, judge
from envserver.env import DomainError
from tests.envserver.fakes import Script, script_task

GOOD = script_task("train-good", pay={"solve": 1.0})
ALWAYS_ONE = script_task("train-always", pay={"": 1.0, "solve": 1.0})
ALWAYS_ZERO = script_task("train-never")
GIVE_UP_PAYS = script_task("train-quitter", pay={"I give up.": 1.0, "solve": 1.0})
NEGATIVE = script_task("train-negative", pay={"": -0.5, "solve": 1.0})
HALF = script_task("train-half", pay={"solve": 0.5})
CRASH = script_task("train-crash", step="OSError")


def test_046_only_the_good_task_is_admitted_and_the_others_have_a_reason():
    tasks = [GOOD, ALWAYS_ONE, ALWAYS_ZERO, GIVE_UP_PAYS, NEGATIVE, HALF, CRASH]
    admitted, quarantined = admit(Script(), tasks, -1)
    assert admitted == [GOOD]
    assert {task_id: verdict.kind for task_id, verdict in quarantined.items()} == {
        "train-always": "pays_for_nothing",
        "train-never": "cannot_pay",
        "train-quitter": "pays_for_nothing",
        "train-negative": "pays_for_nothing",
        "train-half": "cannot_pay",
        "train-crash": "error",
    }
    assert quarantined["train-always"].reason == "an agent that does nothing scores 2, it must score 0"
    assert quarantined["train-half"].reason == "the reference solution scores 0.5, it must score 1"
    assert quarantined["train-crash"].reason == "OSError: disk full"


def test_a_domain_without_references_is_judged_by_the_null_agent_alone():
    domain = Script(has_reference=False)
    assert [judge(domain, task).kind for task in (GOOD, ALWAYS_ZERO, ALWAYS_ONE)] == ["admitted", "admitted", "pays_for_nothing"]


def test_environments_are_closed_also_after_a_crash():
    domain = Script()
    judge(domain, CRASH)
    judge(domain, GOOD)
    assert domain.count("close") == domain.count("reset") == 3


@pytest.mark.parametrize(("checks", "listed"), [(0, 3), (1, 3), (2, 2), (-1, 1)])
def test_the_first_tasks_of_a_split_are_checked(checks, listed):
    admitted, _ = admit(Script(), [GOOD, ALWAYS_ONE, CRASH], checks)
    assert len(admitted) == listed


def test_the_catalog_counts_and_fingerprints_what_is_listed():
    heldout = script_task("heldout-0", pay={"solve": 1.0})
    sizes = {"train": 5, "heldout": 5}
    catalog = build_catalog(Script(tasks=[GOOD, ALWAYS_ONE, heldout]), sizes, -1)
    assert [task.id for task in catalog.tasks["train"]] == ["train-good"]
    assert list(catalog.quarantined["train"]) == ["train-always"]
    assert catalog.quarantined["heldout"] == {}
    assert catalog.fingerprints == build_catalog(Script(tasks=[GOOD, heldout]), sizes, 0).fingerprints


def test_a_split_that_is_left_empty_is_one_clear_line():
    tasks = [GOOD, script_task("heldout-0", step="OSError")]
    with pytest.raises(DomainError, match=r"no heldout task passes admission \(heldout-0: OSError: disk full\)"):
        build_catalog(Script(tasks=tasks), {"train": 5, "heldout": 5}, -1)
