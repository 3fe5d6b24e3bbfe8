"""Train a Decision Transformer, watch it in TensorBoard, and see what it reaches.

Without a preset, quick is taken: python train.py --dataset primal/walker2d/medium-v0 --seed 1. All flags are explained
by: python train.py quick --help. A run that was stopped goes on with: python train.py --resume runs/RUN.
"""

if __name__ == "__main__":  # importing takes seconds, in which Ctrl-C shall end the program without a traceback
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import tyro

from envs.datasets.checks import DataError
from envs.datasets.load import Dataset, load_dataset
from envs.make import make_environment
from envs.training import dataset_again, make_sampler, model_shape, task_facts
from primal_dt.config import PRESETS, Config
from primal_dt.evaluation.evaluate import Watch, evaluate
from primal_dt.evaluation.report import Report
from primal_dt.evaluation.report_files import write_report_and_plots
from primal_dt.evaluation.rollout import Episode, Policy, RolloutError
from primal_dt.evaluation.score import summary_table
from primal_dt.evaluation.trained_run import describe_trained, open_trained
from primal_dt.model.transformer import DecisionTransformer
from primal_dt.system.files import check_writable
from primal_dt.system.memory import keep_freed_memory
from primal_dt.system.stopping import StopRequest, catch_signals
from primal_dt.system.terminal import begin_program, explain
from primal_dt.training.checkpoint import Checkpoint, CheckpointError, CheckpointFolder
from primal_dt.training.distributed import Processes, join_processes
from primal_dt.training.recorder import Run
from primal_dt.training.run_folder import facts, lock_run, named_run_folder, new_run_folder, read_config, write_config
from primal_dt.training.trainer import BadLossError, Trainer

SPECTRUM_SEQUENCES = 8
EXIT_MISTAKE, EXIT_BAD_LOSS, EXIT_INTERRUPTED = 1, 3, 130


def main() -> int:
    """Parse, build, run; and say what went wrong, if anything did."""
    begin_program()
    try:
        config, before = parse(sys.argv[1:])
        with join_processes(config.run.device) as processes:
            return train(config, before, processes)
    except (DataError, CheckpointError, RolloutError, ValueError, OSError) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        print("stopped; nothing is left half written", file=sys.stderr)
        return EXIT_INTERRUPTED


def parse(arguments: list[str], *, program: str | None = None) -> tuple[Config, dict[str, Any] | None]:
    """The configuration: a preset (``quick`` if none is named), changed by flags; or that of the run to continue.

    In the latter case also all else that the run wrote down at its beginning. Messages call the program as it was
    called, if they are not told otherwise.
    """
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = ["quick", *arguments]
    config = tyro.extras.overridable_config_cli(
        PRESETS, prog=program, args=arguments, description=__doc__, config=(tyro.conf.OmitArgPrefixes,)
    )
    if config.run.resume is None:
        check_writable(Path(config.run.out))
        return config, None
    given = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    if given - {"--resume", "--device"}:
        raise ValueError("--resume takes everything from the run: only --device can be given besides")
    first, content = read_config(Path(config.run.resume))
    device = first.run.device if config.run.device == "auto" else config.run.device
    run = replace(first.run, resume=config.run.resume, device=device, threads=content["threads"])
    return replace(first, run=run), content


def train(config: Config, before: dict[str, Any] | None, processes: Processes) -> int:
    """Data -> model -> trainer -> run."""
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    if processes.device.type == "cpu":
        keep_freed_memory()
    dataset = load(config, before, processes)
    torch.manual_seed(config.run.seed)
    model = DecisionTransformer(model_shape(config, dataset)).to(processes.device)
    trainer = Trainer(
        model,
        make_sampler(config, dataset, process=processes.rank, num_processes=processes.count),
        config.optimizer,
        eta=config.model.eta,
        seed=config.run.seed,
        log_every_steps=config.run.log_every_steps,
    )
    with catch_signals(trainer.stop) as request:
        if processes.is_first:
            folder = new_folder(config, dataset, trainer) if before is None else Path(str(config.run.resume))
            with lock_run(folder):
                return lead(folder, config, dataset, trainer, request)
        try:
            if before is not None:
                restore(Path(str(config.run.resume)), trainer)
            for _ in trainer:
                pass
        except BadLossError:
            return EXIT_BAD_LOSS
    return 0


def lead(folder: Path, config: Config, dataset: Dataset, trainer: Trainer, request: StopRequest) -> int:
    """The part of the first process: evaluate, write, show."""
    task = task_facts(config, dataset)

    class GivesWay(Watch):
        def step(self, running: int) -> None:
            request.give_way()

    def run_episodes(policy: Policy) -> list[Episode]:
        return evaluate(
            policy,
            dataset.task,
            targets=task["targets"],
            num_episodes=config.evaluation.eval_episodes,
            seed=config.evaluation.eval_seed,
            watches=[GivesWay()],
        )

    curves = shlex.join(["tensorboard", "--logdir", str(folder.parent)])
    print(f"run folder: {folder}\nwatch it:   {curves}", flush=True)
    run = Run(
        folder,
        config,
        trainer,
        normalizer=dataset.normalizer,
        task=task,
        evaluate=run_episodes,
        spectrum_batch=make_sampler(config, dataset, batch_size=SPECTRUM_SEQUENCES).batch(0).to(trainer.device),
        checkpoint=None if config.run.resume is None else restore(folder, trainer, aloud=True),
        request=request,
    )
    try:
        run.train()
    except BadLossError as error:
        print(f"error: {error}; the last good checkpoint: {run.last_good_checkpoint()}", file=sys.stderr)
        return EXIT_BAD_LOSS
    if request.signal is not None:
        again = shlex.join(["python", sys.argv[0], "--resume", str(folder)])
        print(f"stopped after step {run.saved_step:,}; to go on: {again}")
        return 128 + request.signal
    if run.episodes:
        publish(folder, run.episodes)
    print(f"run folder: {folder}\ncheckpoint: {run.last_good_checkpoint()}")
    print(f"curves:     {curves}")
    return 0


def publish(folder: Path, episodes: list[Episode]) -> None:
    """The table of the last evaluation, and a report in the run's folder."""
    trained = open_trained(folder)
    evaluated = describe_trained(trained, episodes, mode="window")
    print(f"\n{evaluated.dataset}, {evaluated.policy}, seed {evaluated.seed}, step {evaluated.step:,}")
    print(f"normalized return: {trained.task.unit}\n\n{summary_table(evaluated.summaries())}\n")
    path = write_report_and_plots(Report.of([evaluated], facts=facts()), folder / "report")
    print(f"report:     {path}")


def load(config: Config, before: dict[str, Any] | None, processes: Processes) -> Dataset:
    """The data, fetched or recorded by the first process for all of them, and an environment to evaluate in."""
    name = config.dataset if before is None else dataset_again(before["parts"])
    if processes.is_first:
        try:
            dataset = load_dataset(name, env_id=config.env_id, mix_versions=config.mix_versions)
            if before is not None and before["task"]["fingerprint"] != dataset.store.fingerprint:
                raise DataError(f"the data set {name!r} is not what it was when {config.run.resume} was trained on it")
            if config.evaluation.eval_every_steps:
                make_environment(dataset.task).close()  # if that fails, better now than at the first evaluation
        except BaseException:
            processes.agree(False)
            raise
        processes.agree(True)
        return dataset
    if not processes.agree(True):
        raise SystemExit(EXIT_MISTAKE)  # the first process says why
    return load_dataset(name, env_id=config.env_id, mix_versions=config.mix_versions)


def new_folder(config: Config, dataset: Dataset, trainer: Trainer) -> Path:
    """A run's folder, with its configuration in it."""
    out, run = Path(config.run.out), config.run
    if run.name is None:
        folder = new_run_folder(out, dataset=config.dataset, attention=config.model.attention, seed=run.seed)
    else:
        folder = named_run_folder(out, run.name)
    content = {
        "task": task_facts(config, dataset),
        "parts": [{"name": part.name, "path": str(part.path.resolve())} for part in dataset.parts],
        "threads": torch.get_num_threads(),
        "device": str(trainer.device),
        "num_parameters": trainer.model.num_parameters(),
    }
    write_config(folder, config, content)
    return folder


def restore(folder: Path, trainer: Trainer, *, aloud: bool = False) -> Checkpoint | None:
    """Go back to the newest whole checkpoint of a run; or to its beginning, if it was stopped before the first."""
    checkpoints = CheckpointFolder(folder / "checkpoints")
    if not checkpoints.paths():
        if aloud:
            print(f"{folder} has no checkpoint yet: it begins anew", file=sys.stderr)
        return None
    path, checkpoint, problems = checkpoints.newest(trainer.device)
    for damaged, problem in problems.items():
        if aloud:
            print(f"{problem}; going on from {path.name}", file=sys.stderr)
            checkpoints.set_aside(damaged)
    trainer.model.load_state_dict(dict(checkpoint.weights))
    trainer.load_state_dict(dict(checkpoint.training["trainer"]))
    return checkpoint


if __name__ == "__main__":
    sys.exit(main())
