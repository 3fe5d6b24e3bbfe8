"""Train a Decision Transformer on an offline data set and evaluate it by rollouts.

Give a preset, quick or paper (quick if omitted), and flags that change it:
  python train.py
  python train.py --dataset primal/walker2d/medium-v0 --seed 1
  python train.py paper --attention softmax

List all flags:
  python train.py quick --help

Resume a run:
  python train.py --resume runs/RUN
"""

if __name__ == "__main__":  # before torch is imported
    from primal_dt.system.start import start
    from primal_dt.training.arguments import parse_config

    start(lambda arguments: parse_config(arguments, description=__doc__))

import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from envs.datasets.load import Dataset, load_dataset, reload_dataset
from envs.datasets.part_tasks import DataOptions
from envs.make import make_arena, make_environment
from primal_dt.config import Config
from primal_dt.data.sampler import Batch, WindowSampler
from primal_dt.data.store import StoreError, Verification
from primal_dt.data.trajectories import best_episodes, highest_returns, hold_out
from primal_dt.evaluation.callbacks import StopCheck
from primal_dt.evaluation.evaluate import Arena, evaluate_episodes, target_seed_pairs
from primal_dt.evaluation.report import Report
from primal_dt.evaluation.report_files import write_report
from primal_dt.evaluation.rollout import Episode, RolloutError
from primal_dt.evaluation.score import evaluation_scalars, summarize, summary_table
from primal_dt.evaluation.trained_run import describe_run
from primal_dt.hub.sources import find_policy
from primal_dt.model.loss import Objective
from primal_dt.model.transformer import DecisionTransformer
from primal_dt.policy.policy import DecisionTransformerPolicy
from primal_dt.system.files import check_writable, read_text
from primal_dt.system.process import StopRequest, StopRequestedError, catch_signals, keep_freed_memory, memory_errors
from primal_dt.system.provenance import provenance
from primal_dt.system.terminal import begin_program, explain
from primal_dt.task import RunTask
from primal_dt.training.arguments import parse_config
from primal_dt.training.checkpoint import CheckpointFolder
from primal_dt.training.distributed import Processes, join_processes
from primal_dt.training.guidance import MIN_HORIZON, Guidance, value_range
from primal_dt.training.loggers import LoggerError, find_logger
from primal_dt.training.progress import TrainingProgress
from primal_dt.training.recorder import Recorder, restore
from primal_dt.training.resume import resume_config
from primal_dt.training.run_folder import DataPart, RunRecord, lock_run, make_run_folder, write_record
from primal_dt.training.scalars import headline_name, spectrum_scalars
from primal_dt.training.trainer import BadLossError, Trainer
from primal_dt.training.validation import Validation
from primal_dt.training.warm_start import WarmStart, read_warm_start, resume_warm_start

SPECTRUM_SEQUENCES = 8
VALIDATION_WINDOWS = 256
EXIT_MISTAKE, EXIT_BAD_LOSS, EXIT_INTERRUPTED = 1, 3, 130


def main() -> int:
    """Parse the command line and train. Report user errors without a traceback."""
    begin_program()
    try:
        config, record = parse(sys.argv[1:])
        with memory_errors(), join_processes(config.run.device) as processes:
            return train(config, record, processes)
    except (RolloutError, ValueError, OSError, MemoryError) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        print("stopped; no file is left incomplete", file=sys.stderr)
        return EXIT_INTERRUPTED


def parse(arguments: list[str]) -> tuple[Config, RunRecord | None]:
    """Return the configuration, and the record of the run to resume, if any."""
    config, record = parse_config(arguments, description=__doc__), None
    if config.run.resume is not None:
        config, record = resume_config(config, arguments)
    else:
        check_writable(Path(config.run.out))
    find_logger(config.run.logger)  # fail now, not after the data is loaded
    return config, record


def train(config: Config, record: RunRecord | None, processes: Processes) -> int:
    """Load the data, build the model and the trainer, and train."""
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    if processes.device.type == "cpu":
        keep_freed_memory()
    start = warm_start(config, record)
    dataset = load(config, record, processes)
    if start is not None:
        dataset = replace(dataset, kept_normalizer=start.normalizer)
    verification = Verification(dataset.store)
    trainer = make_trainer(config, dataset, processes, start)
    with catch_signals(trainer.stop) as request:
        if not processes.is_main:
            return follow(config, trainer, verification)
        folder = Path(config.run.resume) if config.run.resume else new_folder(config)
        with lock_run(folder, is_new=not config.run.resume):
            try:
                with memory_errors():
                    if not config.run.resume:
                        write_record(folder, make_record(config, dataset, trainer, start))
                    return run(folder, config, dataset, verification, trainer, request)
            except (OSError, MemoryError, StoreError, LoggerError) as error:
                print(f"error: {explain(error)}\n{how_to_resume(folder)}", file=sys.stderr)
                return EXIT_MISTAKE


def run(
    folder: Path,
    config: Config,
    dataset: Dataset,
    verification: Verification,
    trainer: Trainer,
    request: StopRequest,
) -> int:
    """Train on rank 0, which also evaluates, logs, saves checkpoints and writes the report.

    Nothing is logged or saved before the data is verified.
    """
    curves = shlex.join(["tensorboard", "--logdir", str(folder.parent)])
    print(f"run folder: {folder}\nwatch it:   {curves}", flush=True)
    task, evaluation = run_task(config, dataset), config.evaluation
    pairs = target_seed_pairs(task.targets, num_episodes=evaluation.eval_episodes, seed=evaluation.eval_seed)
    arena = make_arena(dataset.task) if evaluation.eval_every_steps else None
    spectrum = make_sampler(config, dataset, batch_size=SPECTRUM_SEQUENCES, weighting=config.optimizer.sampling)
    spectrum_batch = spectrum.batch(0).to(trainer.device)
    validation = make_validation(config, dataset, trainer.device)
    checkpoint = restore(trainer, folder, on_problem=partial(print, file=sys.stderr)) if config.run.resume else None
    progress = TrainingProgress(steps=config.optimizer.steps, done=trainer.step)
    make_logger = find_logger(config.run.logger)
    recorder = Recorder(
        folder,
        trainer,
        normalizer=dataset.normalizer,
        task=task,
        config=asdict(config),
        checkpoint=checkpoint,
        logger=make_logger() if make_logger is not None else None,
    )
    episodes: list[Episode] = []
    try:
        with closing(recorder), closing(progress):
            if config.model.init_from is not None and checkpoint is None:
                verification.wait()
                recorder.save()  # a resumed run does not need the other run
            for metrics in chain(recorder.unfinished, trainer):
                verification.wait()
                step, is_last = metrics.step, metrics.step == config.optimizer.steps
                progress.update(metrics)
                scalars = {**metrics.scalars, **validation.scalars(trainer.model)}
                if trainer.guidance is not None:
                    progress.warn(trainer.guidance.problem(scalars))
                if arena is not None and (is_last or is_due(evaluation.eval_every_steps, step)):
                    try:
                        with progress.evaluating():
                            episodes = roll_out(trainer, dataset, arena, pairs, request)
                    except StopRequestedError:
                        recorder.save(unfinished=scalars)  # a resumed run evaluates this step first
                        break
                    scalars |= evaluation_scalars(summarize(episodes, task.reference), headline=task.headline)
                    progress.score(scalars[headline_name(task.reference)], is_plain=task.reference is None)
                if is_due(config.run.spectrum_every_steps, step):
                    scalars |= spectrum_scalars(trainer.model, spectrum_batch)
                recorder.log(scalars)
                if is_due(config.run.save_every_steps, step):
                    recorder.save()
            else:
                verification.wait()
                recorder.save()
                if trainer.step == config.optimizer.steps:
                    recorder.finish()
                    if arena is not None and not episodes and not is_reported(folder / "report"):
                        with progress.evaluating(), suppress(StopRequestedError):
                            episodes = roll_out(trainer, dataset, arena, pairs, request)  # killed before the report
    except BadLossError as error:
        verification.wait()  # damaged data is the better explanation
        print(f"error: {error}; the last good checkpoint: {recorder.last_checkpoint()}", file=sys.stderr)
        return EXIT_BAD_LOSS
    if request.signal is not None:
        print(f"stopped after step {recorder.saved_step:,}; to resume: {resume_command(folder)}")
        return 128 + request.signal
    if episodes:
        publish(recorder, episodes, folder / "report")
    print(f"run folder: {folder}\ncheckpoint: {recorder.last_checkpoint()}\ncurves:     {curves}")
    return 0


def is_reported(folder: Path) -> bool:
    """Return whether a folder has a whole report."""
    try:
        json.loads(read_text(folder / "report.json"))
        return all(bool(read_text(folder / name)) for name in ("report.md", "report.csv"))
    except (OSError, ValueError, RecursionError):
        return False


def how_to_resume(folder: Path) -> str:
    """Return a run's last checkpoint, and the command that resumes from it."""
    if not (folder / "config.json").exists():
        return "nothing was saved yet; give the same command to start again"
    saved = CheckpointFolder(folder / "checkpoints").paths()
    last = saved[-1] if saved else "none (nothing was saved yet)"
    return f"last checkpoint: {last}\nto resume: {resume_command(folder)}"


def resume_command(folder: Path) -> str:
    """Return the command that resumes a run."""
    return shlex.join(["python", sys.argv[0], "--resume", str(folder)])


def roll_out(
    trainer: Trainer, dataset: Dataset, arena: Arena, pairs: Sequence[tuple[float | None, int]], request: StopRequest
) -> list[Episode]:
    """Evaluate the trainer's model: one episode for each target and seed. Raises if a stop is requested."""
    policy = DecisionTransformerPolicy(
        trainer.model, dataset.normalizer, reproducible=True, past_end="error", critic=trainer.critic
    )
    return evaluate_episodes(policy, arena, pairs, callbacks=[StopCheck(request)])


def follow(config: Config, trainer: Trainer, verification: Verification) -> int:
    """Train on the other ranks, which write nothing."""
    if config.run.resume is not None:
        restore(trainer, Path(config.run.resume))
    try:
        for _ in trainer:
            verification.wait()
    except BadLossError:
        verification.wait()
        return EXIT_BAD_LOSS
    return 0


def is_due(every_steps: int, step: int) -> bool:
    """Return whether an action is due at this step. An interval of 0 means never."""
    return every_steps > 0 and step % every_steps == 0


def load(config: Config, record: RunRecord | None, processes: Processes) -> Dataset:
    """Load the data set, which rank 0 downloads or records for all ranks, and check the environment."""

    def read() -> Dataset:
        if record is not None:
            return reload_dataset(record, trust=config.trust_env)
        return load_dataset(config.dataset, DataOptions.of(config))

    if not processes.is_main:
        if not processes.agree(True):
            raise SystemExit(EXIT_MISTAKE)  # rank 0 prints the reason
        return read()
    try:
        dataset = read()
        if config.evaluation.eval_every_steps:
            make_environment(dataset.task).close()  # fail now, not at the first evaluation
    except BaseException:
        processes.agree(False)
        raise
    processes.agree(True)
    return dataset


def warm_start(config: Config, record: RunRecord | None) -> WarmStart | None:
    """Return the weights of another run that this run starts with, or started with, if any."""
    if record is not None:
        return resume_warm_start(Path(str(config.run.resume)), record)
    return None if config.model.init_from is None else read_warm_start(find_policy(config.model.init_from))


def make_trainer(config: Config, dataset: Dataset, processes: Processes, start: WarmStart | None = None) -> Trainer:
    """Build the model and its trainer, with critics if they are wanted. The optimizers always start from zero."""
    trajectories, normalizer, shape = dataset.trajectories, dataset.normalizer, dataset.model_shape(config.model)
    torch.manual_seed(config.run.seed)
    model = DecisionTransformer(shape if start is None else start.fit(shape)).to(processes.device)
    if start is not None:
        start.load_model(model)
        if processes.is_main and (problem := start.problem(dataset.own_normalizer)):
            print(f"warning: {problem}", file=sys.stderr)
    if model.shape.conditioning == "max-return":
        highest = highest_returns(trajectories, model.shape.max_timesteps)
        cap = torch.from_numpy(normalizer.returns(highest)).to(processes.device)
        model.return_cap.copy_(cap if start is None else cap.maximum(model.return_cap))
    guidance = None
    if config.optimizer.critic_weight:
        guidance = Guidance(
            model,
            weight=config.optimizer.critic_weight,
            values=value_range(trajectories),
            reward_scale=normalizer.return_scale,
        )
        if start is not None:
            start.load_critics(guidance)
    episodes, _ = hold_out(len(trajectories.lengths), config.optimizer.validation)
    return Trainer(
        model,
        make_sampler(
            config,
            dataset,
            batch_size=config.optimizer.batch_size,
            episodes=best_episodes(trajectories, episodes, config.optimizer.top_fraction),
            context=config.model.context if guidance is None else max(config.model.context, MIN_HORIZON),
            weighting=config.optimizer.sampling,
            is_terminated=None if guidance is None else dataset.is_terminated,
            process=processes.rank,
            num_processes=processes.count,
        ),
        config.optimizer,
        objective=Objective(
            eta=config.model.eta,
            penalty=config.model.penalty,
            expectile=config.model.expectile,
            return_size=float(np.abs(trajectories.returns_to_go).mean()) / normalizer.return_scale or 1.0,
        ),
        seed=config.run.seed,
        log_every_steps=config.run.log_every_steps,
        guidance=guidance,
    )


def make_validation(config: Config, dataset: Dataset, device: torch.device) -> Validation:
    """Draw the windows that the model is measured on during training."""
    trajectories = dataset.trajectories
    training, held_out = hold_out(len(trajectories.lengths), config.optimizer.validation)

    def windows(episodes: NDArray[np.int64]) -> Batch:  # the same for every seed and sampling
        return (
            make_sampler(config, dataset, batch_size=VALIDATION_WINDOWS, seed=0, episodes=episodes).batch(0).to(device)
        )

    low, high = np.quantile(trajectories.returns_to_go, (0.1, 0.9)) / dataset.normalizer.return_scale
    if not len(held_out):
        return Validation(windows(training), (low, high))
    return Validation(windows(held_out), (low, high), windows(best_episodes(trajectories, held_out, 0.1)))


def make_sampler(config: Config, dataset: Dataset, **options: Any) -> WindowSampler:
    """Build a sampler of windows, by default of the model's context and with the run's seed."""
    usual = {"context": config.model.context, "seed": config.run.seed}
    return WindowSampler(dataset.trajectories, dataset.normalizer, **usual | options)


def run_task(config: Config, dataset: Dataset) -> RunTask:
    """The run's task. A policy that is not conditioned on a given return has no targets."""
    task = dataset.run_task(config.evaluation.targets)
    return task if config.model.conditioning == "return" else replace(task, targets=())


def new_folder(config: Config) -> Path:
    """Create the run folder."""
    return make_run_folder(
        Path(config.run.out),
        config.run.name,
        dataset=config.dataset,
        attention=config.model.attention,
        seed=config.run.seed,
    )


def make_record(config: Config, dataset: Dataset, trainer: Trainer, start: WarmStart | None) -> RunRecord:
    """Describe the run, for ``config.json``."""
    return RunRecord(
        config=config,
        task=run_task(config, dataset),
        parts=tuple(DataPart(part.name, str(part.path.resolve())) for part in dataset.parts),
        threads=torch.get_num_threads(),
        device=str(trainer.device),
        num_parameters=trainer.model.num_parameters(),
        initial_weights=None if start is None else start.source,
    )


def publish(recorder: Recorder, episodes: list[Episode], folder: Path) -> None:
    """Print the table of the last evaluation, and write a report."""
    task, step, checkpoint = recorder.task, recorder.trainer.step, recorder.last_checkpoint()
    evaluation = describe_run(
        recorder.config, task, episodes, step=step, checkpoint=checkpoint, mode="window", curve=recorder.score_curve
    )
    print(f"\n{task.dataset}, {evaluation.policy}, seed {evaluation.seed}, step {step:,}")
    unit = f"{'return' if evaluation.is_plain else 'normalized return'}: {task.unit}"
    print(f"{unit}\n\n{summary_table(evaluation.summaries())}\n")
    report = Report.of([evaluation], provenance=provenance())
    for note in task.notes:
        print(f"note: {note}")
    print(f"report:     {write_report(report, folder)}")


if __name__ == "__main__":
    sys.exit(main())
