"""What tools/bench_math.py calls agreement and what an explanation, with a peer made here; and the page that it writes."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tools import bench_math
from tools.math_peers import batches as b
from tools.math_peers import ours
from tools.math_peers.comparisons import Comparison, Finding, Reason, compare, document, measurements, table
from tools.math_peers.known import comparisons

KINDS = ("one turn", "several turns")
GIVEN = {f"{kind}/{seed}": b.make(kind, seed) for kind in KINDS for seed in (0, 1)}


def own_mean(batch):
    return np.asarray(batch.losses[batch.mask].mean())


def whole_mean(batch):
    return np.asarray(batch.losses[batch.span].mean())


def fake(batch):
    """A peer that takes the environment's tokens for its own, and one that says what it likes."""
    return {
        "fake mean": own_mean(batch) + 1e-12,
        "fake mean, gradient": own_mean(batch),
        "fake mean, row": whole_mean(batch),
        "fake mean, float32": np.float32(own_mean(batch) + 1e-6),
        "fake nan": np.asarray(np.nan),
        "fake flat": np.zeros(3),
    }


ANSWERS = {name: fake(batch) for name, batch in GIVEN.items()}


def result(peer, *reasons, ours=own_mean):
    return compare(Comparison("mean", peer, ours, tuple(Reason(*reason) for reason in reasons)), GIVEN, ANSWERS)


def test_what_is_within_the_coarser_precision_agrees():
    for peer, largest in (("fake mean", 2e-12), ("fake mean, float32", 2e-6)):
        found = result(peer)
        assert found.agrees
        assert not found.explained
        assert not found.wrong
        assert list(found.findings) == list(KINDS)
        assert all(0 < finding.difference < largest and finding.reason is None for finding in found.findings.values())
    tight = {name: {"fake mean": own_mean(batch) + 1e-6} for name, batch in GIVEN.items()}
    assert not compare(Comparison("mean", "fake mean", own_mean, ()), GIVEN, tight).agrees
    assert compare(Comparison("mean", "fake mean", lambda batch: np.float32(own_mean(batch)), ()), GIVEN, tight).agrees


def test_a_reason_counts_if_it_gives_the_numbers_of_the_peer():
    found = result("fake mean, row", ("it takes all", whole_mean))
    assert found.explained
    assert not found.agrees
    assert found.findings["one turn"] == Finding(0.0)  # nothing stands between the tokens of one turn
    several = found.findings["several turns"]
    differences = [float(abs(own_mean(x) - whole_mean(x))) for name, x in GIVEN.items() if name.startswith("several")]
    assert (several.difference, several.reason, several.remaining) == (max(differences), "it takes all", 0.0)


@pytest.mark.parametrize(
    ("peer", "reasons", "wrong"),
    [
        ("fake mean, row", (), r"differs by 0\.\d+ \(several turns\), and nothing that is known explains it"),
        ("fake mean, row", (("it doubles", lambda x: 2 * own_mean(x)),), "nothing that is known explains it"),
        ("fake mean", (("it takes all", whole_mean),), "differs nowhere because it takes all"),
        (
            "fake mean, row",
            (("it takes all", whole_mean), ("it doubles", lambda x: 2 * own_mean(x))),
            "nowhere because it doubles",
        ),
        ("fake nan", (("it is not a number", lambda x: np.asarray(np.nan)),), r"differs by nan \(one turn\)"),
    ],
)
def test_what_nothing_explains_is_wrong(peer, reasons, wrong):
    found = result(peer, *reasons)
    assert re.search(wrong, "; ".join(found.wrong))
    assert not found.agrees
    assert not found.explained
    assert measurements([found])["unexplained"] == 1
    assert re.search(wrong, table([found])[-1])


def test_one_seed_that_differs_is_enough():
    for which in GIVEN:
        answers = {name: {"fake mean": own_mean(x) + (name == which)} for name, x in GIVEN.items()}
        assert len(compare(Comparison("mean", "fake mean", own_mean), GIVEN, answers).wrong) == 1


def test_answers_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"mean: Polyturn's answer has shape \(\), that of fake flat \(3,\)"):
        result("fake flat")
    with pytest.raises(KeyError, match="fake sum"):
        result("fake sum")


def test_a_program_reads_what_was_saved_and_is_read(tmp_path):
    source, target = tmp_path / "in.npz", tmp_path / "out.npz"
    b.save(GIVEN, source)
    b.answer(fake, ["program", str(source), str(target)])
    found = b.read(target)
    assert found.keys() == ANSWERS.keys()
    for name, answers in ANSWERS.items():
        assert found[name].keys() == answers.keys()
        assert all(np.array_equal(found[name][key], x, equal_nan=True) for key, x in answers.items())
    assert found["one turn/0"]["fake mean, float32"].dtype == np.float32


@pytest.mark.parametrize("kind", b.KINDS)
def test_batches_have_what_their_kind_says(kind):
    several, cut, rewritten = b.KINDS[kind]
    batch = b.make(kind, 0)
    lengths = batch.mask.sum(1)
    assert len(set(lengths)) > 3
    assert lengths.min() >= 1
    assert not batch.mask[:, 0].any()  # nothing would predict it
    assert not batch.mask[:, -1].any()  # padding
    assert (batch.span != batch.mask).any() == several
    assert (batch.bootstrap != 0).any() == cut
    assert (batch.bootstrap == 0).any()
    assert (batch.segments.max(1) > 0).any() == rewritten
    assert not batch.rewards[~batch.mask].any()
    assert len(set(batch.scores[: b.MEMBERS])) == 1 < len(set(batch.scores))
    assert np.all(batch.values[~batch.mask] != 0)  # whoever reads them is seen
    table = np.exp(batch.logits[0, 4].astype(float))  # what stands before token 5
    assert batch.logprobs[0, 5] == pytest.approx(np.log(table[batch.ids[0, 5]] / table.sum()))


def test_the_loss_of_an_update_is_taken_of_a_batch():
    """REINFORCE: minus the mean of A·log π over sampled tokens, in float32."""
    batch = GIVEN["several turns/0"]
    value, gradient = ours.update_loss(batch, per_token=True, policy_loss="reinforce", minibatches=1)
    wanted = -(batch.advantages * b.chosen(batch.logits, batch.ids))[batch.mask].mean()
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    assert gradient.shape == batch.logits.shape
    assert np.isfinite(gradient).all()


def test_aligned_moves_to_the_right():
    x = np.arange(b.ROWS * b.LENGTH).reshape(b.ROWS, b.LENGTH)
    where = np.zeros(x.shape, bool)
    where[0, [2, 5]] = True
    found = b.aligned(x, where)
    assert found[0, -3:].tolist() == [0, 2, 5]
    assert not found[1:].any()


def test_a_table_and_a_page():
    found = [
        result("fake mean"),
        result("fake mean, row", ("it takes all", whole_mean)),
        result("fake mean, gradient", ours=lambda batch: 1e-10 + own_mean(batch)),
    ]
    differs = found[1].findings["several turns"].difference
    head, _, agreeing, differing, _ = table(found)
    assert head == "| what | peer | one turn | several turns | why |"
    assert re.fullmatch(r"\| mean \| fake `mean` \| \de-1\d \| \de-1\d \|  \|", agreeing)
    assert differing == f"| mean | fake `mean, row` | 0e+00 | {differs:.2g} → 0e+00 | it takes all |"
    lines = document(found)
    assert lines[0] == "Of 3 comparisons 2 agree, 1 differ for a reason that was shown, 0 without one."
    assert lines[4:6] == [differing, ""]
    assert lines[-1] == "| mean | fake `mean` | 1e-10 |"  # the gradient's, which is larger
    page = bench_math.filled(f"a\n{bench_math.BEGIN}\nold\n{bench_math.END}\nb\n", lines)
    assert page == f"a\n{bench_math.BEGIN}\n\n" + "\n".join(lines) + f"\n\n{bench_math.END}\nb\n"
    assert bench_math.filled(page, lines) == page
    with pytest.raises(ValueError, match="has no <!--"):
        bench_math.filled("a page", lines)


def test_a_difference_without_a_reason_ends_in_failure(capsys):
    assert bench_math.report([result("fake mean"), result("fake mean, row", ("it takes all", whole_mean))]) == 0
    shown = capsys.readouterr()
    assert "comparisons: 2  agreeing: 1  explained: 1  unexplained: 0" in shown.out
    assert shown.err == ""
    assert bench_math.report([result("fake mean"), result("fake mean, row")]) == 1
    assert "mean / fake mean, row: differs by" in capsys.readouterr().err


def test_the_documentation_has_every_comparison_and_its_reasons():
    page = (bench_math.ROOT / "docs" / "algorithms.md").read_text()
    shown = page.partition(bench_math.BEGIN)[2].partition(bench_math.END)[0]
    known = comparisons()
    assert len({(x.what, x.peer) for x in known}) == len(known) > 80
    assert f"Of {len(known)} comparisons" in shown
    assert " 0 without one." in shown
    for comparison in known:
        peer, _, function = comparison.peer.partition(" ")
        name = f"| {comparison.what} | {peer} `{function}` |"
        row = next((line for line in shown.splitlines() if line.startswith(name)), "")
        assert row or (not comparison.reasons and name.replace(", gradient", "") in shown), name
        for reason in comparison.reasons:
            assert all(part in row for part in reason.text.split("; ")), name


def test_an_environment_is_that_of_its_requirements(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYTURN_CACHE", str(tmp_path))
    folders = {}
    for name in bench_math.PROGRAMS:
        text = b"".join((bench_math.PEERS / f"{name}{kind}.txt").read_bytes() for kind in ("", "-bare"))
        assert b"://" not in text
        assert all(re.fullmatch(rb"#.*|[\w.-]+==[\w.]+|", line) for line in text.split(b"\n"))
        folders[name] = tmp_path / bench_math.folder_name(name, text)
        folders[name].mkdir()
        (folders[name] / ".installed").touch()
        assert bench_math.environment(name) == folders[name] / "bin" / "python"
    assert len(set(folders.values())) == 2
    assert bench_math.folder_name("jax", b"a") != bench_math.folder_name("jax", b"b")
