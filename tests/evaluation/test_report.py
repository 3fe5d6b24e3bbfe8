"""Reports: grouping by configuration, statistics over seeds, marks, averages, tables and files."""

import csv
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from primal_dt.evaluation import report_files
from primal_dt.evaluation.plots import _bars, _curves, _profiles, plot_report
from primal_dt.evaluation.report import Evaluation, Report
from primal_dt.evaluation.report_files import cells_table, results_table, runs_table, tasks_table, write_report
from primal_dt.evaluation.rollout import Episode
from primal_dt.task import Reference, RunTask, Specification

RANDOM, EXPERT = -20.272305, 3234.3
REFERENCE, OTHER_REFERENCE = Reference(RANDOM, EXPERT), Reference(RANDOM, 1.0)
TASK = RunTask("Hopper-v4", "medium", "hopper-medium-v2", ("Hopper-v4",), "f", (3600.0, 1800.0), REFERENCE)
PUBLISHED = {
    "walker2d-medium-v2": {"primal-plus": (77.9, 7.8)},
    "hopper-medium-v2": {"primal-plus": (74.5, 0.6), "softmax": (64.2, 1.1)},
}


def episodes(target: float, scores: float | tuple[float, ...]) -> tuple[Episode, ...]:
    """Episodes with these normalized returns. A single number stands for 12 episodes."""
    scores = scores if isinstance(scores, tuple) else (scores,) * 12
    returns = [RANDOM + score / 100 * (EXPERT - RANDOM) for score in scores]
    return tuple(Episode(target, 100 + i, total, 10 + i) for i, total in enumerate(returns))


def run(
    seed: int | None = 0,
    scores: float | tuple[float, ...] = 50.0,
    *,
    low_scores: float | tuple[float, ...] = (),
    policy: str = "primal-plus",
    **changes: Any,
) -> Evaluation:
    """A run with scores at the headline target and at a lower one; ``changes`` are fields of the task or the run."""
    names = {field.name for field in fields(TASK)} - {"notes"}
    task = replace(TASK, **{name: changes.pop(name) for name in names & changes.keys()})
    evaluation = Evaluation(
        policy=policy,
        configuration=f"c {task.dataset} {policy}",
        settings={"context": 10, "lr": 0.1},
        task=task,
        seed=seed,
        step=1000,
        mode="window",
        checkpoint="runs/a/checkpoints/step-000001000.pt",
        episodes=episodes(1800.0, low_scores) + episodes(3600.0, scores),
        curve=((500, 10.0 * (seed or 0)), (1000, 20.0)),
    )
    return replace(evaluation, **changes)


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports are written without plots, which take a second."""
    monkeypatch.setattr(report_files, "plot_report", lambda *_: [])


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_results_are_means_over_seeds_of_episode_means() -> None:
    (group,) = Report.of([run(2, (90.0,) * 10), run(0, (0.0, 60.0) * 5), run(1, (60.0,) * 30)]).groups
    assert [each.seed for each in group.runs] == [0, 1, 2]
    result = group.headline
    assert (result.target, result.num_seeds, result.num_episodes) == (3600, 3, 10)
    assert (result.mean, result.iqm) == pytest.approx((60, 60))
    assert result.std == pytest.approx(30)  # of the sample 30, 60, 90
    assert result.interval == pytest.approx((30, 90))
    assert result.return_mean == pytest.approx(RANDOM + 0.6 * (EXPERT - RANDOM))
    assert not result.is_few


def test_headline_target_is_fixed_not_the_best() -> None:
    report = Report.of([run(scores=20.0, low_scores=80.0)])
    group = report.groups[0]
    assert [(result.target, result.is_headline) for result in group.results] == [(3600, True), (1800, False)]
    assert group.headline.mean == pytest.approx(20)
    assert "3600*" in results_table(report)
    assert "1800 " in results_table(report)


def test_inconsistent_runs_are_rejected() -> None:
    with pytest.raises(ValueError, match="no episode at the headline target 3600"):
        Report.of([run(scores=(), low_scores=(80.0,))])
    with pytest.raises(ValueError, match=r"has several runs with seed 1: runs/a.*, runs/a"):
        Report.of([run(0), run(1), run(1)])


def test_runs_that_differ_only_in_seed_form_a_group() -> None:
    base = run()
    others = [
        run(1),
        run(configuration="d"),
        run(mode="streaming"),
        replace(base, policy="softmax"),
        run(env_id="Hopper-v5"),
        run(reference=OTHER_REFERENCE),
    ]
    assert [len(group.runs) for group in Report.of([base, *others]).groups] == [2, 1, 1, 1, 1, 1]
    # The same data under two names is one data set.
    assert len(Report.of([base, replace(base, seed=1, task=replace(base.task, dataset="./same"))]).groups) == 1


def test_labels_name_the_settings_that_differ() -> None:
    other = run(configuration="d", settings={"context": 20, "lr": 0.1})
    labels = [group.label for group in Report.of([run(), other, run(dataset="x")]).groups]
    assert labels == ["primal-plus, context 10", "primal-plus, context 20", "primal-plus, context 10"]


def test_a_target_that_a_seed_lacks_has_no_result() -> None:
    report = Report.of([run(0, low_scores=1.0), run(1)])
    assert [result.target for result in report.groups[0].results] == [3600]
    assert "not all seeds have episodes at the targets 1800" in report.warnings[0]
    assert len(report.as_json()["groups"][0]["runs"][0]["episodes"]) == 24


@pytest.mark.parametrize(
    ("num_seeds", "num_episodes", "few"),
    [(3, 10, False), (2, 10, True), (3, 9, True), (1, 100, True), (5, 100, False), (None, 10, False)],
)
def test_few_seeds_or_episodes_are_marked(num_seeds: int | None, num_episodes: int, few: bool) -> None:
    seeds = [None] if num_seeds is None else range(num_seeds)  # an untrained policy has no seed
    report = Report.of([run(seed, (50.0,) * num_episodes) for seed in seeds])
    headline = report.groups[0].headline
    assert (headline.num_seeds, headline.is_few) == (num_seeds, few)
    assert all(("†" in table) == few for table in (results_table(report), tasks_table(report), cells_table(report)))
    assert ("†" in runs_table(report)) == (num_episodes < 10)


@pytest.mark.parametrize(("scores", "is_warned"), [((10, 20, 30, 40), False), ((40, 42, 39, 41), True)])
def test_a_policy_that_does_not_follow_its_target_is_warned_about(scores: tuple[float, ...], is_warned: bool) -> None:
    targets = (3600.0, 1000.0, 2000.0, 3000.0)
    order = np.argsort(np.argsort(targets))
    every = [episode for target, i in zip(targets, order, strict=True) for episode in episodes(target, scores[i])]
    report = Report.of([run(seed, episodes=tuple(every)) for seed in range(3)])
    assert any("does not rise with the target" in warning for warning in report.warnings) == is_warned
    assert report.as_json()["groups"][0]["target_correlation"] == pytest.approx(0.0 if is_warned else 1.0)


def test_labels_name_what_a_run_uses_beyond_the_others() -> None:
    plain, other = run(0, configuration="a"), run(0, configuration="b")
    settings = {"context": 10, "conditioning": "return", "critic_weight": 0.0}
    changed = settings | {"conditioning": "max-return", "critic_weight": 1.0}
    report = Report.of([replace(plain, settings=settings), replace(other, settings=changed)])
    labels = [group.label for group in report.groups]
    assert labels == ["primal-plus", "primal-plus, conditioning max-return, critic_weight 1.0"]
    elsewhere = replace(other, settings=changed, task=replace(other.task, dataset="walker2d-medium-v2"))
    other_data = Report.of([replace(plain, settings=settings), elsewhere], published=PUBLISHED)
    assert [group.label for group in other_data.groups] == labels
    assert other_data.averages() == []  # different methods have no average
    assert other_data.published_for(elsewhere) is None
    assert other_data.published_for(plain) == (74.5, 0.6)


def test_targets_far_above_the_data_do_not_count_for_listening() -> None:
    """It rises with every target up to the data's highest, and fails at a headline target far above."""
    targets = (3600.0, 500.0, 650.0, 800.0, 1000.0)
    scores = dict(zip(targets, (5, 10, 20, 30, 40), strict=True))
    every = tuple(episode for target, score in scores.items() for episode in episodes(target, score))
    data = tuple(np.linspace(400, 1000, 101).tolist())
    assert Report.of([run(0, episodes=every, data_returns=data)]).groups[0].target_correlation == pytest.approx(1.0)
    assert Report.of([run(0, episodes=every)]).groups[0].target_correlation == pytest.approx(0.0)


def test_policies_without_targets_show_what_they_predict(tmp_path: Path) -> None:
    own = tuple(replace(episode, target=None, predicted=3500.0) for episode in episodes(0.0, 50.0))
    report = Report.of([run(seed, targets=(), episodes=own) for seed in range(3)])
    assert "predicted 3500*" in results_table(report)
    none = Report.of([run(0, targets=(), episodes=tuple(replace(episode, predicted=None) for episode in own))])
    assert " none*" in results_table(none)
    write_report(report, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["groups"][0]["headline"] is None


def test_warnings_cover_notes_versions_steps_failures() -> None:
    assert Report.of([run(0), run(1)]).warnings == []
    second = run(1, env_id="Hopper-v5", step=2000, notes=("training is unfinished (step 2000 of 9000)",))
    report = Report.of([run(0, env_id="Hopper-v5"), second], failures=["runs/x: it failed"])
    note, elsewhere, steps, failure = report.warnings
    assert note.endswith("seed 1: training is unfinished (step 2000 of 9000)")
    assert "trained on data from Hopper-v4, evaluated in Hopper-v5" in elsewhere
    assert "seed 0: 1000, seed 1: 2000" in steps
    assert failure == "runs/x: it failed"
    assert all("‡" in table for table in (results_table(report), tasks_table(report), cells_table(report)))


def test_notes_of_the_task_are_given_once() -> None:
    task = replace(TASK, notes=("two actions are clipped",))
    report = Report.of([replace(run(seed), task=task) for seed in (0, 1)])
    assert report.warnings == ["primal-plus on hopper-medium-v2: two actions are clipped"]


def test_averages_are_over_tasks_of_one_version() -> None:
    tasks = [
        run(dataset="a", scores=10.0),
        run(dataset="b", scores=30.0),
        run(dataset="c", scores=90.0, env_id="Hopper-v5", data_env_ids=("Hopper-v5",)),
        run(dataset="a", scores=5.0, policy="softmax"),
    ]
    report = Report.of(tasks)
    (average,) = report.averages()
    assert (average.policy, average.version, average.datasets) == ("primal-plus", "v4", ("a", "b"))
    assert (average.mean, average.is_few) == (20, True)
    assert "20.0† (of 2)" in tasks_table(report).splitlines()[-1]
    assert report.warnings == []
    unlike = Report.of([*tasks, run(dataset="d", policy="softmax")])
    assert "averages in v4 are over different tasks" in unlike.warnings[0]


def test_scores_in_different_units_are_not_averaged() -> None:
    assert Report.of([run(dataset="a"), run(dataset="b", reference=OTHER_REFERENCE)]).averages() == []


@pytest.mark.usefixtures("no_plots")
def test_plain_returns_are_in_no_average(tmp_path: Path) -> None:
    """Returns around 1000 beside scores of 10 and 30: the average is of the scores, and the report says so."""
    scored = [run(dataset="a", scores=10.0), run(dataset="b", scores=30.0)]
    plain = run(dataset="c", scores=30.0, reference=None)
    report = Report.of([*scored, plain])
    (average,) = report.averages()
    assert (average.datasets, average.mean, average.iqm) == (("a", "b"), 20, 20)
    assert "averages leave out tasks without reference returns: c" in report.warnings
    assert "averages leave out tasks without reference returns: c" in write_report(report, tmp_path).read_text()
    assert Report.of([scored[0], plain]).averages() == []
    assert Report.of([plain, run(dataset="d", reference=None)]).averages() == []
    assert not any("averages" in warning for warning in Report.of(scored).warnings)


@pytest.mark.usefixtures("no_plots")
def test_results_without_references_are_returns(tmp_path: Path) -> None:
    """No table and no file calls them normalized, and published scores are not shown beside them."""
    mean = RANDOM + 0.5 * (EXPERT - RANDOM)
    report = Report.of([run(seed, reference=None) for seed in range(3)], published=PUBLISHED)
    result = report.groups[0].headline
    assert (result.mean, result.iqm, result.return_mean) == pytest.approx((mean, mean, mean))
    header, _, row = results_table(report).splitlines()
    assert cells(header)[3:6] == ["return", "IQM", "length"]
    assert cells(row)[3] == f"{mean:.2f} ± 0.00§"
    *_, row = tasks_table(report).splitlines()
    assert cells(row) == ["hopper-medium-v2", f"{mean:.2f} ± 0.00§"]
    assert f"{mean:.2f} ± 0.00§" in runs_table(report)
    assert "| none |" in " ".join(cells_table(report).split())
    page = write_report(report, tmp_path).read_text()
    assert "* hopper-medium-v2 in Hopper-v4: there are no reference returns, so results are plain returns (§)" in page
    (line,) = csv.DictReader((tmp_path / "report.csv").read_text().splitlines())
    assert (line["unit"], line["normalized_mean"], line["normalized_std"]) == ("return", "", "")
    assert [float(line[name]) for name in ("iqm", "return_mean")] == pytest.approx([mean, mean])
    (group,) = json.loads((tmp_path / "report.json").read_text())["groups"]
    assert (group["unit"], group["random_return"], group["profile"]) == ("return", None, None)
    assert group["runs"][0]["summaries"][0]["normalized_mean"] is None


def test_mixed_tables_mark_which_results_are_returns() -> None:
    names = [cells(row)[0] for row in tasks_table(Report.of([run(), run(reference=None)])).splitlines()[2:]]
    assert names[1] == "hopper-medium-v2 in Hopper-v4, plain returns"
    header, _, *rows = results_table(Report.of([run(), run(dataset="x", reference=None)])).splitlines()
    assert cells(header)[3] == "normalized return, or return§"
    assert ["§" in cells(row)[3] for row in rows] == [False, True]
    assert "normalized return" in cells(results_table(Report.of([run()])).splitlines()[0])


@pytest.mark.parametrize("draw", [_bars, _profiles, _curves])
def test_scores_and_returns_share_no_axes(draw: Any) -> None:
    figure = Figure()
    assert draw(figure, Report.of([run(), run(dataset="x", reference=None)]))
    labels = [axes.get_ylabel() if draw is _curves else axes.get_xlabel() for axes in figure.axes]
    scores, returns = labels
    assert scores.startswith("normalized return")
    assert returns.startswith("return")


def test_returns_of_two_environments_share_no_bars() -> None:
    figure = Figure()
    _bars(figure, Report.of([run(), run(dataset="x", reference=None), run(dataset="x", reference=None, env_id="A-v0")]))
    assert [axes.get_title() for axes in figure.axes] == ["", "returns in hopper", "returns in a"]


@pytest.mark.usefixtures("no_plots")
def test_success_is_reported_if_any_task_has_it(written: tuple[Report, Path], tmp_path: Path) -> None:
    def reaching(seed: int, count: int) -> Evaluation:
        goal = run(seed, dataset="goal")
        own = [replace(episode, success=i < count) for i, episode in enumerate(goal.episodes)]
        return replace(goal, episodes=tuple(own))

    report = Report.of([reaching(0, 3), reaching(1, 9), run()])
    assert [group.headline.success_rate for group in report.groups] == [0.5, None]
    header, _, *rows = results_table(report).splitlines()
    assert [cells(row)[cells(header).index("success")] for row in rows] == ["50.0 %", ""]
    header, _, *rows = runs_table(report).splitlines()
    assert [cells(row)[cells(header).index("success")] for row in rows] == ["25.0 %", "75.0 %", ""]
    write_report(report, tmp_path)
    lines = csv.DictReader((tmp_path / "report.csv").read_text().splitlines())
    assert [line["success_rate"] for line in lines] == ["0.5", ""]
    content = json.loads((tmp_path / "report.json").read_text())
    assert [group["results"][0]["success_rate"] for group in content["groups"]] == [0.5, None]
    silent, folder = written
    assert "success" not in results_table(silent) + runs_table(silent) + (folder / "report.csv").read_text()


SHORT = Specification("Hopper-v4", max_episode_steps=15)
SHORT_TEXT = "Hopper-v4 (at most 15 steps)"


@pytest.mark.usefixtures("no_plots")
def test_a_specification_is_another_environment(tmp_path: Path) -> None:
    """It has its own group and row, is named in every file, and is in no average with the plain environment."""
    plain, short = run(), run(specification=SHORT)
    report = Report.of([plain, short])
    assert [len(group.runs) for group in report.groups] == [1, 1]
    assert [group.first.is_elsewhere for group in report.groups] == [False, True]
    assert not replace(short, task=replace(short.task, data_env_ids=(SHORT_TEXT,))).is_elsewhere
    assert f"trained on data from Hopper-v4, evaluated in {SHORT_TEXT}" in " ".join(report.warnings)
    assert len(tasks_table(report).splitlines()) == 4
    for table in (results_table, runs_table, tasks_table):
        names = [cells(row)[0] for row in table(report).splitlines()[2:]]
        assert names == ["hopper-medium-v2 in Hopper-v4", f"hopper-medium-v2 in {SHORT_TEXT}"]
    assert SHORT_TEXT in cells_table(report)
    write_report(report, tmp_path)
    lines = csv.DictReader((tmp_path / "report.csv").read_text().splitlines())
    assert [line["environment"] for line in lines] == ["Hopper-v4", SHORT_TEXT]
    groups = json.loads((tmp_path / "report.json").read_text())["groups"]
    assert [group["environment_text"] for group in groups] == ["Hopper-v4", SHORT_TEXT]
    published = Report.of([plain, short], published=PUBLISHED)
    assert [published.published_for(each) for each in (plain, short)] == [(74.5, 0.6), None]
    assert Report.of([plain, run(dataset="b", specification=SHORT)]).averages() == []
    assert len(Report.of([short, run(dataset="b", specification=SHORT)]).averages()) == 1


@pytest.mark.usefixtures("no_plots")
def test_other_sources_of_targets_and_references_are_named(tmp_path: Path) -> None:
    other = run(dataset="x", target_source="the data", reference_source="Minari")
    page = write_report(Report.of([run(), other]), tmp_path).read_text()
    assert (
        "* x in Hopper-v4: reference returns are from Minari\n* x in Hopper-v4: target returns are from the data"
        in page
    )
    assert "* hopper-medium-v2 in" not in page


def test_the_average_has_the_interval_of_all_runs() -> None:
    runs = [run(seed, score, dataset=name) for name in "ab" for seed, score in enumerate((10.0, 30.0))]
    (average,) = Report.of(runs).averages()
    assert (average.mean, average.iqm) == pytest.approx((20, 20))
    assert average.interval == pytest.approx((10, 30))


def test_published_scores_stand_beside_ours() -> None:
    """They are shown only for the data set that they were published for, not for other data of the same tier."""
    runs = [run(0, dataset="mine"), run(0), run(1), run(2), run(0, policy="linear")]
    header, _, row, own, _average = tasks_table(Report.of(runs, published=PUBLISHED)).splitlines()
    assert cells(header) == ["data set", "primal-plus", "linear", "softmax, published"]
    assert cells(row) == ["hopper-medium-v2", "50.0 ± 0.0 (74.5 ± 0.6)", "50.0†", "(64.2 ± 1.1)"]
    assert cells(own) == ["mine", "50.0†", "", ""]


def test_cells_table_shows_how_each_score_was_obtained() -> None:
    table = cells_table(Report.of([run(0), run(1), run(2), run(0, policy="linear")], published=PUBLISHED))
    row = next(line for line in table.splitlines() if "primal-plus" in line)
    for word in ("50.0 ± 0.0", "74.5 ± 0.6", "0, 1, 2", "12", "1000", "3600", "Hopper-v4", "-20.2723, 3234.3"):
        assert word in row


def test_runs_table_shows_each_run_with_its_spread() -> None:
    *_, row = runs_table(Report.of([run(4, (0.0, 10.0, 20.0, 90.0))])).splitlines()
    expected = ["4", "1000", "3600", "30.0 ± 35.4", "15.0", "0.0", "90.0", "12", "4†"]
    assert cells(row) == ["hopper-medium-v2", "primal-plus", "window", *expected]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    """A report of two seeds and two targets, and the folder of its files."""
    runs = [run(0, low_scores=(1.0,) * 3), run(1, low_scores=(3.0,) * 3)]
    report = Report.of(runs, provenance={"commit": "abc"})
    return report, write_report(report, tmp_path_factory.mktemp("report")).parent


def test_page_shows_table_provenance_and_plots(written: tuple[Report, Path]) -> None:
    report, folder = written
    page, plots = (folder / "report.md").read_text(), sorted(folder.glob("*.png"))
    assert {plot.stem for plot in plots} == {"scores", "targets", "profiles", "curves"}
    assert all(plot.read_bytes().startswith(b"\x89PNG") for plot in plots)
    assert all(f"({plot.name})" in page for plot in plots)
    assert results_table(report) in page
    assert "* commit: abc" in page


def test_csv_has_a_row_for_each_target(written: tuple[Report, Path]) -> None:
    rows = list(csv.DictReader((written[1] / "report.csv").read_text().splitlines()))
    assert [(row["target"], row["headline"]) for row in rows] == [("3600.0", "True"), ("1800.0", "False")]
    assert [float(row["normalized_mean"]) for row in rows] == pytest.approx([50, 2])


def test_json_has_provenance_profile_and_all_episodes(written: tuple[Report, Path]) -> None:
    content = json.loads((written[1] / "report.json").read_text())
    assert content["provenance"] == {"commit": "abc"}
    (group,) = content["groups"]
    assert group["profile"] == {str(t): float(t < 50) for t in range(0, 121, 10)}
    every = [episode for each in group["runs"] for episode in each["episodes"]]
    assert len(every) == 30
    returns = [episode["total_reward"] for episode in every if episode["target"] == 3600]
    np.testing.assert_allclose(returns, RANDOM + 0.5 * (EXPERT - RANDOM))


def test_empty_plots_are_not_made(tmp_path: Path) -> None:
    behavior = run(None, mode=None, step=None, checkpoint=None, curve=(), policy="random")
    assert [plot.name for plot in plot_report(Report.of([behavior]), tmp_path)] == ["scores.png", "profiles.png"]
