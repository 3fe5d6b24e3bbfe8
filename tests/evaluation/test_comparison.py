"""Two policies compared: differences, their intervals, and what they are compared on."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from primal_dt.evaluation.comparison import compare, comparison_table
from primal_dt.evaluation.report import Evaluation, Report
from primal_dt.evaluation.report_files import write_report
from primal_dt.evaluation.statistics import difference_of_means, probability_of_improvement
from tests.evaluation.test_report import run

Arrays = list[NDArray[np.float64]]


def made_up(seed: int = 0, gap: float = 5.0) -> tuple[Arrays, Arrays]:
    """Scores of two policies on three tasks, with different numbers of runs."""
    random = np.random.default_rng(seed)
    sizes = ((5, 4), (3, 5), (4, 4))
    levels = (20.0, 60.0, 100.0)
    own = [random.normal(level + gap, 3, number) for level, (number, _) in zip(levels, sizes, strict=True)]
    others = [random.normal(level, 3, number) for level, (_, number) in zip(levels, sizes, strict=True)]
    return own, others


def test_the_interval_is_that_of_scipy() -> None:
    """An independent stratified bootstrap: scipy resamples each sample of a statistic on its own."""
    own, others = made_up()
    found = difference_of_means(own, others, random=np.random.default_rng(0), num_resamples=20_000)

    def statistic(*samples: NDArray[np.float64], axis: int = -1) -> Any:
        means = [sample.mean(axis) for sample in samples]
        return np.mean([one - other for one, other in zip(means[:3], means[3:], strict=True)], axis=0)

    interval = stats.bootstrap(
        (*own, *others), statistic, method="percentile", n_resamples=20_000, random_state=np.random.default_rng(1)
    ).confidence_interval
    assert found.mean == pytest.approx(statistic(*own, *others))
    assert found.interval == pytest.approx((interval.low, interval.high), abs=0.1)


def test_the_probability_is_the_mann_whitney_statistic() -> None:
    own, others = made_up()
    others[0][:2] = own[0][:2]  # ties
    found, interval = probability_of_improvement(own, others, random=np.random.default_rng(0))
    expected = [
        stats.mannwhitneyu(one, other).statistic / (len(one) * len(other))
        for one, other in zip(own, others, strict=True)
    ]
    assert found == pytest.approx(np.mean(expected))
    assert interval is not None
    assert interval.low < found < interval.high
    assert probability_of_improvement(others, own, random=np.random.default_rng(0))[0] == pytest.approx(1 - found)


def test_the_smallest_difference_is_found_in_four_of_five_experiments() -> None:
    """By a z-test with the true spread, over many experiments with that true difference."""
    spread, sizes = 3.0, (5, 5)
    random = np.random.default_rng(0)
    smallest = []
    for _ in range(300):
        own, others = (list(random.normal(0, spread, (9, size))) for size in sizes)
        found = difference_of_means(own, others, random=random, num_resamples=1)
        assert found.smallest is not None
        smallest.append(found.smallest)
    true = float(np.mean(smallest))
    means = random.normal(true, spread * (2 / 5 / 9) ** 0.5, 20_000)  # of the difference in an experiment
    limit = stats.norm.ppf(0.975) * spread * (2 / 5 / 9) ** 0.5
    assert (means > limit).mean() == pytest.approx(0.8, abs=0.03)


def test_intervals_cover_the_true_difference() -> None:
    """With ten seeds on three tasks, about 95 % of them."""
    random, covered = np.random.default_rng(0), 0
    for _ in range(300):
        own, others = (list(random.normal(level, 3, (3, 10))) for level in (2.0, 0.0))
        found = difference_of_means(own, others, random=random, num_resamples=400)
        assert found.interval is not None
        covered += found.interval.low <= 2.0 <= found.interval.high
    assert covered / 300 > 0.9


def test_single_runs_have_no_interval() -> None:
    found = difference_of_means([np.array([3.0])], [np.array([1.0])], random=np.random.default_rng(0))
    assert (found.mean, found.interval, found.smallest, found.is_found) == (2.0, None, None, False)
    assert probability_of_improvement([np.array([3.0])], [np.array([1.0])], random=np.random.default_rng(0)) == (
        1.0,
        None,
    )


def evaluations(scores: dict[tuple[str, str], tuple[float, ...]]) -> list[Evaluation]:
    """Runs of policies on data sets, one for each score."""
    return [
        run(seed, score, policy=policy, dataset=dataset)
        for (policy, dataset), own in scores.items()
        for seed, score in enumerate(own)
    ]


SCORES = {
    ("primal-plus", "a"): (50.0, 60.0),
    ("softmax", "a"): (40.0, 44.0),
    ("primal-plus", "b"): (10.0, 12.0),
    ("softmax", "b"): (20.0, 20.0, 23.0),
}


def test_policies_are_paired_by_task() -> None:
    found = compare(Report.of(evaluations(SCORES)), "primal-plus", "softmax")
    assert [task.dataset for task in found.tasks] == ["a", "b"]
    assert [task.difference.mean for task in found.tasks] == pytest.approx([13.0, -10.0])
    assert found.difference.mean == pytest.approx(1.5)
    assert [task.probability for task in found.tasks] == [1.0, 0.0]
    other = compare(Report.of(evaluations(SCORES)), "softmax", "primal-plus")
    assert other.difference.mean == pytest.approx(-1.5)
    assert found.warnings == ()
    assert "the interval shows no difference" in found.sentence
    assert found.sentence.startswith("primal-plus scores +1.5 [")


def test_the_table_has_tasks_and_their_mean() -> None:
    table = comparison_table(compare(Report.of(evaluations(SCORES)), "primal-plus", "softmax"))
    rows = [" ".join(line.replace("|", " ").split()) for line in table.splitlines()]
    assert rows[2].startswith("a 55.0 42.0 +13.0 [")
    assert rows[3].startswith("b 11.0 21.0 -10.0 [")
    assert rows[4].startswith("mean 33.0 31.5 +1.5 [")
    assert rows[2].endswith("1.00 2, 2")
    assert rows[3].endswith("0.00 2, 3")


def test_tasks_of_one_policy_are_left_out_with_a_warning() -> None:
    scores = SCORES | {("softmax", "c"): (1.0,)}
    found = compare(Report.of(evaluations(scores)), "primal-plus", "softmax")
    assert [task.dataset for task in found.tasks] == ["a", "b"]
    assert found.warnings == ("only one of primal-plus and softmax has results on c: left out",)


def test_unequal_conditions_are_warnings() -> None:
    runs = evaluations({("primal-plus", "a"): (50.0, 60.0), ("softmax", "a"): (40.0, 44.0)})
    changed = [
        replace(each, step=10, task=replace(each.task, fingerprint="g"), episodes=each.episodes[:5])
        if each.policy == "softmax"
        else each
        for each in runs
    ]
    found = compare(Report.of(changed), "primal-plus", "softmax").warnings
    assert [warning.removeprefix("a: ") for warning in found] == [
        "primal-plus and softmax were trained on data sets of this name with other contents",
        "the checkpoints of primal-plus and softmax are from different steps",
        "primal-plus and softmax have different numbers of episodes",
    ]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("primal", "softmax", "'primal' is not a policy with scores in this report: they are 'primal-plus', 'softmax'"),
        ("softmax", "softmax", "the policies to compare must be two, not 'softmax' twice"),
        ("softmax", "linear", "'softmax' and 'linear' have no task in common"),
    ],
)
def test_what_cannot_be_compared_is_refused(first: str, second: str, message: str) -> None:
    scores = dict(SCORES) | ({("linear", "z"): (1.0,)} if second == "linear" else {})
    with pytest.raises(ValueError, match=message):
        compare(Report.of(evaluations(scores)), first, second)


def test_the_report_has_the_comparison(tmp_path: Path) -> None:
    report = Report.of(evaluations(SCORES))
    comparison = compare(report, "primal-plus", "softmax")
    text = write_report(report, tmp_path, comparison).read_text()
    assert "## primal-plus and softmax" in text
    assert comparison_table(comparison) in text
    assert comparison.sentence in text
    assert (tmp_path / "comparison.png").stat().st_size > 1000
    content = json.loads((tmp_path / "report.json").read_text())["comparison"]
    assert content["mean"] == pytest.approx(1.5)
    assert content["tasks"][0]["scores"] == pytest.approx([50.0, 60.0])
    assert "comparison" not in json.loads((write_report(report, tmp_path).parent / "report.json").read_text())
