"""The report: grouped by configuration, never the best of several, honest about what is few or elsewhere."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from primal_dt.evaluation.plots import plot_report
from primal_dt.evaluation.report import Evaluation, Report
from primal_dt.evaluation.report_files import cells_table, results_table, runs_table, tasks_table, write_report
from primal_dt.evaluation.rollout import Episode
from primal_dt.task import Reference, RunTask

RANDOM, EXPERT = -20.272305, 3234.3


def run(
    seed: int | None = 0,
    *,
    scores: tuple[float, ...] = (50.0,) * 12,
    low_scores: tuple[float, ...] = (),
    dataset: str = "hopper-medium-v2",
    policy: str = "primal-plus",
    **changes: Any,
) -> Evaluation:
    """Episodes with these normalized returns, at the headline and, perhaps, at another target."""

    def episodes(target: float, own: tuple[float, ...]) -> list[Episode]:
        returns = [RANDOM + score / 100 * (EXPERT - RANDOM) for score in own]
        return [Episode(target, 100 + i, total, 10 + i) for i, total in enumerate(returns)]

    evaluation = Evaluation(
        policy=policy,
        configuration=f"c {dataset} {policy}",
        settings={"context": 10, "lr": 0.1},
        task=RunTask("Hopper-v4", "medium", dataset, ("Hopper-v4",), "f", (3600.0, 1800.0), Reference(RANDOM, EXPERT)),
        seed=seed,
        step=1000,
        mode="window",
        checkpoint="runs/a/checkpoints/step-000001000.pt",
        episodes=(*episodes(1800.0, low_scores), *episodes(3600.0, scores)),
        curve=((500, 10.0 * (seed or 0)), (1000, 20.0)),
    )
    for name in ("env_id", "data_env_ids", "reference"):
        if name in changes:
            evaluation = replace(evaluation, task=replace(evaluation.task, **{name: changes.pop(name)}))
    return replace(evaluation, **changes)


def test_a_result_is_the_mean_over_seeds_of_the_means_over_episodes() -> None:
    runs = [run(2, scores=(90.0,) * 10), run(0, scores=(0.0, 60.0) * 5), run(1, scores=(60.0,) * 30)]
    (group,) = Report.of(runs).groups
    assert [each.seed for each in group.runs] == [0, 1, 2]
    result = group.headline
    assert (result.target, result.num_seeds, result.num_episodes) == (3600, 3, 10)
    assert (result.mean, result.iqm) == pytest.approx((60, 60))
    assert result.std == pytest.approx(30)  # of the sample 30, 60, 90
    assert result.interval == pytest.approx((30, 90))
    assert result.return_mean == pytest.approx(RANDOM + 0.6 * (EXPERT - RANDOM))
    assert not result.is_few


def test_the_headline_is_the_tasks_also_if_another_target_does_better() -> None:
    (group,) = Report.of([run(scores=(20.0,) * 10, low_scores=(80.0,) * 10)]).groups
    assert [(result.target, result.is_headline) for result in group.results] == [(3600, True), (1800, False)]
    assert group.headline.mean == pytest.approx(20)
    table = results_table(Report.of([run(scores=(20.0,) * 10, low_scores=(80.0,) * 10)]))
    assert "3600*" in table
    assert "1800 " in table
    with pytest.raises(ValueError, match="no episode at the headline target 3600"):
        Report.of([run(scores=(), low_scores=(80.0,))])


def test_only_what_differs_in_its_seed_alone_is_one_group() -> None:
    base = run()
    others = [
        replace(base, seed=1),
        replace(base, configuration="d"),
        replace(base, mode="streaming"),
        replace(base, policy="softmax"),
        run(env_id="Hopper-v5"),
        run(reference=Reference(RANDOM, 1.0)),
    ]
    assert [len(group.runs) for group in Report.of([base, *others]).groups] == [2, 1, 1, 1, 1, 1]
    # One file under two names is one data set.
    assert len(Report.of([base, replace(base, seed=1, task=replace(base.task, dataset="./same"))]).groups) == 1


def test_one_experiment_does_not_count_twice() -> None:
    with pytest.raises(ValueError, match=r"is there twice with seed 1: runs/a.*, runs/a"):
        Report.of([run(0), run(1), run(1)])


def test_configurations_of_one_name_are_told_apart_by_what_differs() -> None:
    other = run(configuration="d", settings={"context": 20, "lr": 0.1})
    assert [group.label for group in Report.of([run(), other, run(dataset="x")]).groups] == [
        "primal-plus, context 10",
        "primal-plus, context 20",
        "primal-plus",
    ]


def test_a_target_that_only_some_seeds_have_is_no_result_but_its_episodes_are_there() -> None:
    report = Report.of([run(0, low_scores=(1.0,) * 10), run(1)])
    assert [result.target for result in report.groups[0].results] == [3600]
    assert "not all seeds have episodes at the targets 1800" in report.warnings[0]
    assert len(report.as_json()["groups"][0]["runs"][0]["episodes"]) == 22


@pytest.mark.parametrize(
    ("seeds", "episodes", "few"), [(3, 10, False), (2, 10, True), (3, 9, True), (1, 100, True), (5, 100, False)]
)
def test_few_seeds_or_episodes_are_marked(seeds: int, episodes: int, few: bool) -> None:
    report = Report.of([run(seed, scores=(50.0,) * episodes) for seed in range(seeds)])
    assert report.groups[0].headline.is_few == few
    assert all(("†" in table) == few for table in (results_table(report), tasks_table(report), cells_table(report)))
    assert ("†" in runs_table(report)) == (episodes < 10)


def test_a_policy_that_was_not_trained_has_no_seeds_to_be_few() -> None:
    (group,) = Report.of([run(None, scores=(50.0,) * 10)]).groups
    assert (group.headline.num_seeds, group.headline.is_few) == (None, False)


def test_another_version_of_the_environment_and_steps_that_differ_are_warned_of() -> None:
    assert Report.of([run(0), run(1)]).warnings == []
    second = run(1, env_id="Hopper-v5", step=2000, notes=("its training had come to step 2000 of 9000",))
    report = Report.of([run(0, env_id="Hopper-v5"), second], failures=["runs/x: it failed"])
    note, elsewhere, steps, failure = report.warnings
    assert note.endswith("seed 1: its training had come to step 2000 of 9000")
    assert "trained on data of Hopper-v4, evaluated in Hopper-v5" in elsewhere
    assert "seed 0: 1000, seed 1: 2000" in steps
    assert failure == "runs/x: it failed"
    assert all("‡" in table for table in (results_table(report), tasks_table(report), cells_table(report)))


def test_averages_are_over_tasks_of_one_version() -> None:
    tasks = [
        run(dataset="a", scores=(10.0,) * 10),
        run(dataset="b", scores=(30.0,) * 10),
        run(dataset="c", scores=(90.0,) * 10, env_id="Hopper-v5", data_env_ids=("Hopper-v5",)),
        run(dataset="a", scores=(5.0,) * 10, policy="softmax"),
    ]
    (average,) = Report.of(tasks).averages()
    assert (average.policy, average.version, average.datasets) == ("primal-plus", "v4", ("a", "b"))
    assert (average.mean, average.is_few) == (20, True)
    assert "20.0† (of 2)" in tasks_table(Report.of(tasks)).splitlines()[-1]
    # Another pair of reference returns for one environment is another unit.
    assert Report.of([tasks[0], run(dataset="b", reference=Reference(RANDOM, 1.0))]).averages() == []
    assert Report.of(tasks).warnings == []
    unlike = [*tasks, run(dataset="d", policy="softmax")]
    assert "averages in v4 are over different tasks" in Report.of(unlike).warnings[0]


def test_the_average_over_tasks_has_the_interval_of_all_runs() -> None:
    runs = [run(seed, dataset=name, scores=(score,) * 10) for name in "ab" for seed, score in enumerate((10.0, 30.0))]
    (average,) = Report.of(runs).averages()
    assert (average.mean, average.iqm) == pytest.approx((20, 20))
    assert average.interval == pytest.approx((10, 30))


def test_published_numbers_stand_beside_ours() -> None:
    """Where they were published for the same data: other data of the same tier is another thing."""
    published = {
        "walker2d-medium-v2": {"primal-plus": (77.9, 7.8)},
        "hopper-medium-v2": {"primal-plus": (74.5, 0.6), "softmax": (64.2, 1.1)},
    }
    runs = [run(0, dataset="mine"), run(0), run(1), run(2), run(0, policy="linear")]
    report = Report.of(runs, published=published)
    header, _, row, own, _ = tasks_table(report).splitlines()  # and the average
    assert [cell.strip() for cell in header.strip("|").split("|")] == [
        "data set",
        "primal-plus",
        "linear",
        "softmax, published",
    ]
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "hopper-medium-v2",
        "50.0 ± 0.0 (74.5 ± 0.6)",
        "50.0†",
        "(64.2 ± 1.1)",
    ]
    assert [cell.strip() for cell in own.strip("|").split("|")] == ["mine", "50.0†", "", ""]
    report = Report.of(runs[1:], published=published)
    cell = next(line for line in cells_table(report).splitlines() if "primal-plus" in line)
    for word in ("50.0 ± 0.0", "74.5 ± 0.6", "0, 1, 2", "12", "1000", "3600", "Hopper-v4", "-20.2723, 3234.3"):
        assert word in cell


def test_every_run_is_there_with_its_spread() -> None:
    table = runs_table(Report.of([run(4, scores=(0.0, 10.0, 20.0, 90.0))]))
    row = table.splitlines()[-1]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    expected = ["4", "1000", "3600", "30.0 ± 35.4", "15.0", "0.0", "90.0", "12", "4†"]
    assert cells == ["hopper-medium-v2", "primal-plus", "window", *expected]


def test_the_files_have_everything(tmp_path: Path) -> None:
    report = Report.of([run(0, low_scores=(1.0,) * 3), run(1, low_scores=(3.0,) * 3)], provenance={"commit": "abc"})
    page = write_report(report, tmp_path).read_text()
    plots = sorted(tmp_path.glob("*.png"))
    assert {plot.stem for plot in plots} == {"scores", "targets", "profiles", "curves"}
    assert all(plot.read_bytes().startswith(b"\x89PNG") for plot in plots)
    assert results_table(report) in page
    assert "* commit: abc" in page
    assert all(f"({plot.name})" in page for plot in plots)
    rows = list(csv.DictReader((tmp_path / "report.csv").read_text().splitlines()))
    assert [(row["target"], row["headline"]) for row in rows] == [("3600.0", "True"), ("1800.0", "False")]
    assert [float(row["normalized_mean"]) for row in rows] == pytest.approx([50, 2])
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["provenance"] == {"commit": "abc"}
    assert content["groups"][0]["profile"] == {str(t): float(t < 50) for t in range(0, 121, 10)}
    episodes = [episode for each in content["groups"][0]["runs"] for episode in each["episodes"]]
    assert len(episodes) == 30
    returns = [episode["total_reward"] for episode in episodes if episode["target"] == 3600]
    np.testing.assert_allclose(returns, RANDOM + 0.5 * (EXPERT - RANDOM))


def test_a_plot_without_anything_to_show_is_not_made(tmp_path: Path) -> None:
    behavior = run(None, mode=None, step=None, checkpoint=None, curve=(), policy="random")
    assert [plot.name for plot in plot_report(Report.of([behavior]), tmp_path)] == ["scores.png", "profiles.png"]
