"""Train a Decision Transformer, watch it in TensorBoard, and see what it reaches.

Without a preset, quick is taken: python train.py --dataset primal/walker2d/medium-v0 --seed 1. A run that was stopped
goes on with: python train.py --resume runs/RUN.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import tyro

from envs.datasets import Dataset, load_dataset
from envs.episodes import DataError
from envs.evaluation import evaluate
from primal_dt.checkpoint import Checkpoint, CheckpointError, CheckpointFolder
from primal_dt.config import PRESETS, Config
from primal_dt.data import WindowSampler
from primal_dt.distributed import Processes, join_processes
from primal_dt.model import DecisionTransformer, ModelShape
from primal_dt.report import summary_table
from primal_dt.rollout import Episode, Policy
from primal_dt.run import Run
from primal_dt.runs import new_run_folder, read_config, write_config
from primal_dt.stopping import StopRequest, catch_signals
from primal_dt.trainer import BadLossError, Trainer

DEFAULT_RANK = 32
SPECTRUM_SEQUENCES = 8
EXIT_MISTAKE, EXIT_BAD_LOSS, EXIT_INTERRUPTED = 1, 3, 130


def main() -> int:
    """Parse, build, run; and say what went wrong, if anything did."""
    try:
        config = parse(sys.argv[1:])
        with join_processes(config.run.device) as processes:
            return train(config, processes)
    except (DataError, CheckpointError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_MISTAKE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def parse(arguments: list[str]) -> Config:
    """The configuration: a preset (``quick`` if none is named), changed by flags; or that of the run to continue."""
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments = ["quick", *arguments]
    config = tyro.extras.overridable_config_cli(
        PRESETS, args=arguments, description=__doc__, config=(tyro.conf.OmitArgPrefixes,)
    )
    if config.run.resume is None:
        return config
    untouched = replace(config, run=replace(config.run, resume=None, device="auto"))
    if untouched not in [preset for _, preset in PRESETS.values()]:
        raise ValueError("--resume takes everything from the run: only --device can be given besides")
    before, content = read_config(Path(config.run.resume))
    run = replace(before.run, resume=config.run.resume, device=config.run.device, threads=content["threads"])
    return replace(before, run=run)


def train(config: Config, processes: Processes) -> int:
    """Data -> model -> trainer -> run."""
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    dataset = load(config, processes)
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
    checkpoint = None if config.run.resume is None else restore(Path(config.run.resume), dataset, trainer)
    with catch_signals(trainer.stop) as request:
        if processes.is_first:
            return lead(config, dataset, trainer, checkpoint, request)
        try:
            for _ in trainer:
                pass
        except BadLossError:
            return EXIT_BAD_LOSS
    return 0


def lead(
    config: Config, dataset: Dataset, trainer: Trainer, checkpoint: Checkpoint | None, request: StopRequest
) -> int:
    """The part of the first process: evaluate, write, show."""
    task = task_facts(config, dataset)
    folder = Path(config.run.resume) if config.run.resume is not None else new_folder(config, dataset, trainer, task)

    def run_episodes(policy: Policy, on_step: Callable[[int], None]) -> list[Episode]:
        return evaluate(
            policy,
            dataset.task,
            targets=task["targets"],
            num_episodes=config.evaluation.eval_episodes,
            seed=config.evaluation.eval_seed,
            on_step=on_step,
        )

    print(f"run folder: {folder}\nwatch it:   tensorboard --logdir {folder.parent}", flush=True)
    run = Run(
        folder,
        config,
        trainer,
        normalizer=dataset.normalizer,
        task=task,
        evaluate=run_episodes,
        spectrum_batch=make_sampler(config, dataset, batch_size=SPECTRUM_SEQUENCES).batch(0).to(trainer.device),
        checkpoint=checkpoint,
        request=request,
    )
    try:
        run.train()
    except BadLossError as error:
        print(f"error: {error}; the last good checkpoint: {run.last_good_checkpoint()}", file=sys.stderr)
        return EXIT_BAD_LOSS
    if request.signal is not None:
        print(f"stopped after step {run.saved_step:,}; to go on: python train.py --resume {folder}")
        return 128 + request.signal
    if run.summaries:
        print(f"\n{dataset.name}, {config.model.attention}, seed {config.run.seed}, step {trainer.step:,}")
        print(f"normalized return: {dataset.task.unit}\n\n{summary_table(run.summaries)}")
    print(f"\ncheckpoint: {run.last_good_checkpoint()}")
    return 0


def load(config: Config, processes: Processes) -> Dataset:
    """The data, fetched or recorded by the first process for all of them."""
    if not processes.is_first:
        processes.wait()
    dataset = load_dataset(config.dataset, env_id=config.env_id, mix_versions=config.mix_versions)
    if processes.is_first:
        processes.wait()
    return dataset


def make_sampler(
    config: Config, dataset: Dataset, *, batch_size: int | None = None, process: int = 0, num_processes: int = 1
) -> WindowSampler:
    """Batches of windows, in the model's units."""
    return WindowSampler(
        dataset.trajectories,
        dataset.normalizer,
        context=config.model.context,
        batch_size=batch_size or config.optimizer.batch_size,
        seed=config.run.seed,
        weighting=config.optimizer.sampling,
        process=process,
        num_processes=num_processes,
    )


def model_shape(config: Config, dataset: Dataset) -> ModelShape:
    """The model that a configuration and a task ask for."""
    environment, model = dataset.task.environment, config.model
    longest = int(dataset.trajectories.lengths.max())
    return ModelShape(
        state_width=environment.state_width,
        action_low=(environment.action_box.low,) * environment.action_width,
        action_high=(environment.action_box.high,) * environment.action_width,
        attention=model.attention,
        width=model.width,
        num_heads=model.num_heads,
        num_layers=model.num_layers,
        context=model.context,
        rank=model.rank or dataset.task.paper_rank or DEFAULT_RANK,
        dropout=model.dropout,
        max_timesteps=max(environment.episode_limit, longest),
    )


def task_facts(config: Config, dataset: Dataset) -> dict[str, Any]:
    """What a policy has to know of its task where the data is not."""
    environment = dataset.task.environment
    return {
        "env_id": dataset.task.env_id,
        "tier": dataset.task.tier,
        "dataset": dataset.name,
        "fingerprint": dataset.store.fingerprint,
        "targets": list(config.evaluation.targets or environment.targets),
        "random_return": environment.reference.random_return,
        "expert_return": environment.reference.expert_return,
    }


def new_folder(config: Config, dataset: Dataset, trainer: Trainer, task: dict[str, Any]) -> Path:
    """A run's folder, with its configuration in it."""
    folder = new_run_folder(
        Path(config.run.out), dataset=config.dataset, attention=config.model.attention, seed=config.run.seed
    )
    facts = {
        "task": task,
        "parts": [{"name": part.name, "path": str(part.path)} for part in dataset.parts],
        "threads": torch.get_num_threads(),
        "device": str(trainer.device),
        "num_parameters": trainer.model.num_parameters(),
    }
    write_config(folder, config, facts)
    return folder


def restore(folder: Path, dataset: Dataset, trainer: Trainer) -> Checkpoint | None:
    """Go back to the newest whole checkpoint of a run; or to its beginning, if it was stopped before the first."""
    checkpoints = CheckpointFolder(folder / "checkpoints")
    if not checkpoints.paths():
        print(f"{folder} has no checkpoint yet: it begins anew", file=sys.stderr)
        return None
    path, checkpoint, problems = checkpoints.newest(trainer.device)
    for problem in problems:
        print(f"{problem}; going on from {path.name}", file=sys.stderr)
    if checkpoint.task["fingerprint"] != dataset.store.fingerprint:
        raise ValueError(f"the data set {dataset.name!r} is not what it was when {folder} was trained on it")
    trainer.model.load_state_dict(dict(checkpoint.weights))
    trainer.load_state_dict(dict(checkpoint.training["trainer"]))
    return checkpoint


if __name__ == "__main__":
    sys.exit(main())
