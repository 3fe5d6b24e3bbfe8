"""Image classification with DeiT's recipe: DeiT-Small/16 on ImageNet-100 (Table 5), or small images and models.

FOLDER has an image folder for each class: FOLDER/train/CLASS/*.jpeg and FOLDER/val/CLASS/*.jpeg, as ImageNet-100 does
(test/ works like val/). ``--model`` is the size of a vision transformer without a distillation token. Recipe, by
default: RandAugment, Mixup, CutMix, random erasing, label smoothing, stochastic depth, AdamW, and a cosine schedule
after a linear warm-up; images of at most 32 pixels are shifted instead of cropped. The result is the accuracy on the
test split after the last epoch; no epoch is picked.

With ``--cost`` nothing is trained: every stack makes training steps on random images, and the table shows their time
(taken alternately in one process) and the peak memory (in a fresh process for each stack).
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.batches import EpochOrder, LabeledBatch
from benchmarks.blocks import PENALIZED
from benchmarks.encoder import EncoderShape
from benchmarks.images.augment import Augmentation, AugmentationSettings
from benchmarks.images.cost import Step, report_cost
from benchmarks.images.data import ImageFolder, load_splits, training_batches, whole_batches
from benchmarks.images.model import MODELS, VisionTransformer, build_model, num_tokens
from benchmarks.published import TABLE_5
from benchmarks.runs import RESULT, SavedRun, load_weights, num_parameters, run_stacks, save_run, spread
from benchmarks.settings import EncoderFlags, Primal
from benchmarks.step import top_accuracies
from benchmarks.trainer import Plan, Trainer
from primal_dt.system.files import atomic_write, check_writable
from primal_dt.system.provenance import commit
from primal_dt.system.table import format_table
from primal_dt.training.distributed import Processes, choose_device, join_processes

__all__ = ["Config", "load_encoder", "main", "run_all", "train"]

PRIMAL = Primal(96, 0.05)
"""The published layer for DeiT-Small/16: rank 96, eta 0.05, rank_multi 10."""
SCORES = ("top1", "top5")
TEST_BATCH = 100
LOG_EVERY_STEPS = 20
WARMUP_RATE, LAST_RATE = 1e-6, 1e-5
"""Learning rate before the warm-up and after the last step, as in DeiT."""
RATE_PER_512 = 5e-4
"""DeiT's learning rate for 512 images a step. It is proportional to their number."""


@dataclass(frozen=True)
class Config(EncoderFlags):
    """Settings of the benchmark."""

    data: Path | None = None
    """Folder with the folders train and val (or test), each with a folder of images for each class."""
    model: str = "deit_small"
    """Size of the model: deit_tiny, deit_small, deit_base, or small (4 layers, width 96)."""
    image_size: int = 224
    """Side of the images in pixels."""
    patch: int = 16
    """Side of a patch in pixels. Must divide --image-size."""
    epochs: int = 300
    """Epochs over the training split."""
    warmup_epochs: float = 5.0
    """Epochs in which the learning rate rises."""
    batch_size: int = 1024
    """Images per step, over all processes."""
    accumulate: int = 1
    """Parts in which a batch is computed, one after another. More parts need less memory."""
    lr: float | None = None
    """Peak learning rate of AdamW. If not given: 5e-4 times --batch-size / 512."""
    weight_decay: float = 0.05
    """Weight decay of matrices."""
    drop_path: float = 0.1
    """Rate of stochastic depth in the last layer."""
    operations: int = 2
    """Operations of RandAugment for each image. 0: none."""
    magnitude: float = 9.0
    """Magnitude of RandAugment, from 0 to 10."""
    erasing: float = 0.25
    """Probability of random erasing."""
    mixup: float = 0.8
    """Parameter of Mixup. 0: none."""
    cutmix: float = 1.0
    """Parameter of CutMix. 0: none."""
    smoothing: float = 0.1
    """Label smoothing."""
    evaluate_every: int = 10
    """Epochs between tests on the way. 0: none. Nothing is chosen by them."""
    workers: int = 0
    """Processes that decode images. 0: the training process does."""
    bf16: bool = False
    """Compute in bfloat16 where that is safe (autocast). For GPUs."""
    compile: bool = False
    """Compile the model with torch.compile. For GPUs."""
    cost: bool = False
    """Measure time and memory of a training step of all stacks, without training. Needs no --data."""
    cost_batch: int = 8
    """For --cost: images per step."""
    cost_seconds: float = 20.0
    """For --cost: seconds to time each stack."""
    cost_classes: int = 100
    """For --cost: number of classes."""
    out: Path = Path("runs/images")
    """Folder for curves and results."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model not in MODELS:
            raise ValueError(f"model must be one of {', '.join(MODELS)}, not {self.model!r}")
        sizes = ("image_size", "patch", "epochs", "batch_size", "accumulate", "cost_batch", "cost_classes")
        if wrong := [name for name in sizes if getattr(self, name) < 1]:
            raise ValueError(f"{wrong[0]} ({getattr(self, wrong[0])}) must be at least 1")
        if self.image_size % self.patch:
            raise ValueError(f"image_size ({self.image_size}) must be divisible by patch ({self.patch})")
        if wrong := [name for name in ("drop_path", "erasing", "smoothing") if not 0 <= getattr(self, name) < 1]:
            raise ValueError(f"{wrong[0]} ({getattr(self, wrong[0])}) must be at least 0 and below 1")
        least = ("warmup_epochs", "weight_decay", "mixup", "cutmix", "operations", "evaluate_every", "workers")
        if wrong := [name for name in least if not 0 <= getattr(self, name) < math.inf]:
            raise ValueError(f"{wrong[0]} ({getattr(self, wrong[0])}) must be finite and at least 0")
        if not 0 < self.magnitude <= 10:
            raise ValueError(f"magnitude ({self.magnitude}) must be above 0 and at most 10")
        if not 0 < self.rate < math.inf or not 0 < self.cost_seconds < math.inf:
            raise ValueError("lr and cost_seconds must be finite and above 0")
        if self.data is None and not self.cost:
            raise ValueError("--data must name a folder with the folders train and val (or test)")

    @property
    def rate(self) -> float:
        """Peak learning rate."""
        return RATE_PER_512 * self.batch_size / 512 if self.lr is None else self.lr

    @property
    def augmentation(self) -> AugmentationSettings:
        """What is drawn for each batch."""
        return AugmentationSettings(
            operations=self.operations,
            magnitude=self.magnitude,
            erasing=self.erasing,
            mixup=self.mixup,
            cutmix=self.cutmix,
            smoothing=self.smoothing,
        )

    def primal(self, attention: str) -> Primal:
        """The primal layers of a stack: the published ones, with the changes that the flags make."""
        return self.with_flags(PRIMAL)

    def shape(self, attention: str, num_classes: int) -> EncoderShape:
        """The shape of a stack's network."""
        size = MODELS[self.model]
        return EncoderShape(
            num_classes=num_classes,
            max_length=num_tokens(self.image_size, self.patch),
            attention=attention,
            num_layers=size.num_layers,
            width=size.width,
            num_heads=size.num_heads,
            mlp_width=4 * size.width,
            dropout=0.0,
            options={"primal": self.primal(attention).options},
            network="vit",
        )

    def settings(self, attention: str, seed: int) -> dict[str, Any]:
        """All settings that the result of a training run depends on."""
        names = ("model", "image_size", "patch", "epochs", "warmup_epochs", "batch_size", "weight_decay", "drop_path")
        assert self.data is not None
        return {
            "images": self.data.name,
            **{name: getattr(self, name) for name in names},
            "lr": self.rate,
            **asdict(self.augmentation),
            "bf16": self.bf16,
            "device": self.device,
            "attention": attention,
            "seed": seed,
            **self.primal_settings(attention, self.primal(attention)),
            "torch": torch.__version__,
        }

    def run_folder(self, attention: str, seed: int) -> Path:
        """Folder of a training run. Different settings have different folders, so that no result is overwritten."""
        assert self.data is not None
        settings = [f"{self.model}-{self.image_size}-{self.patch}", f"{self.epochs}x{self.batch_size}-lr{self.rate:g}"]
        settings += [self.primal(attention).label] if attention in PENALIZED else []
        usual = AugmentationSettings()
        changes = {name: value for name, value in vars(self.augmentation).items() if value != getattr(usual, name)}
        changes |= {
            name: getattr(self, name)
            for name in ("drop_path", "weight_decay", "warmup_epochs")
            if getattr(self, name) != getattr(Config, name)
        }
        settings += ["-".join(f"{name}{value:g}" for name, value in changes.items())] if changes else []
        settings += ["bf16"] if self.bf16 else []
        return self.out / "__".join([self.data.name, attention, *settings, f"s{seed}"])


def rate_at(step: int, config: Config, per_epoch: int) -> float:
    """Learning rate of a step, divided by its peak: a linear warm-up, then a cosine."""
    warmup, steps = config.warmup_epochs * per_epoch, config.epochs * per_epoch
    if step < warmup:
        return (WARMUP_RATE + (config.rate - WARMUP_RATE) * step / warmup) / config.rate
    share = (step - warmup) / max(1, steps - warmup)
    last = min(LAST_RATE, config.rate)
    return (last + (config.rate - last) * (1 + math.cos(math.pi * share)) / 2) / config.rate


def train(
    config: Config, attention: str, seed: int, splits: tuple[ImageFolder, ImageFolder], processes: Processes
) -> SavedRun:
    """Train one classifier, test it, and save both."""
    (training, test), device, primal = splits, processes.device, config.primal(attention)
    torch.manual_seed(seed)
    shape = config.shape(attention, len(training.classes))
    model = build_model(shape, patch=config.patch, drop_path=config.drop_path).to(device)
    order = EpochOrder(len(training.paths), config.batch_size, seed)
    per_epoch = order.steps_per_epoch
    steps = config.epochs * per_epoch
    optimizer = torch.optim.AdamW(model.weight_groups(config.weight_decay), lr=config.rate)

    def batches_from(step: int) -> Any:
        return training_batches(
            training,
            order,
            side=config.image_size,
            steps=range(step, steps),
            device=device,
            workers=config.workers,
            rank=processes.rank,
            count=processes.count,
        )

    def tested() -> dict[str, float]:
        batches = whole_batches(test, side=config.image_size, size=TEST_BATCH, device=device)
        found = top_accuracies(model, batches, processes, tops=(1, min(5, len(test.classes))))
        return {f"test/{name}": score for name, score in zip(SCORES, found, strict=True)}

    settings, folder = config.settings(attention, seed), config.run_folder(attention, seed)
    version = commit()  # of the code that trains, even if it changes meanwhile
    trainer = Trainer(
        model,
        optimizer,
        batches_from,
        Plan(
            steps,
            seed,
            eta=primal.eta if attention in PENALIZED else 0.0,
            penalty=primal.penalty,
            accumulate=config.accumulate,
            bf16=config.bf16,
            compile=config.compile,
            log_every_steps=min(LOG_EVERY_STEPS, per_epoch),
            save_every_steps=per_epoch,
            evaluate_every_steps=config.evaluate_every * per_epoch,
        ),
        folder,
        settings=settings,
        processes=processes,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, config, per_epoch)),
        evaluate=tested,
        prepare=Augmentation(config.augmentation, len(training.classes)),
    )
    found = trainer.run(name=f"{attention}, seed {seed}", final=tested, again=config.again)
    scores = {name: found[f"test/{name}"] for name in SCORES}
    run = SavedRun(scores, version, num_parameters(model))
    if processes.is_main:
        save_run(folder, model, settings, run, shape=asdict(shape), source=config.data)
    trainer.finish()
    return run


def load_encoder(folder: Path, sequences: int) -> tuple[VisionTransformer, LabeledBatch]:
    """Load a trained model and images of its test split, evenly spaced over the classes."""
    content = json.loads((folder / RESULT).read_text())
    settings = content["settings"]
    _, test = load_splits(Path(content["source"]))
    model = build_model(EncoderShape(**content["shape"]), patch=settings["patch"])
    load_weights(folder, model)
    number = min(sequences, len(test.paths))
    chosen = [row * len(test.paths) // number for row in range(number)]
    some = ImageFolder([test.paths[row] for row in chosen], test.labels[chosen], test.classes)
    return model.eval(), next(whole_batches(some, side=settings["image_size"], size=number, device=torch.device("cpu")))


def table(config: Config, runs: dict[str, list[SavedRun]]) -> str:
    """Table of our accuracies beside the paper's for DeiT-Small/16 on ImageNet-100."""
    assert config.data is not None
    rows = []
    for attention, seen in runs.items():
        paper = TABLE_5.get(attention)
        cells = [spread([run.scores[name] for run in seen]) for name in SCORES]
        shown = ["", ""] if paper is None else [f"{paper[name]:.1f}" for name in SCORES]
        rows.append([attention, *cells, f"{seen[0].num_parameters:,}", *shown])
    header = [
        f"{config.data.name}, {config.model}",
        "top-1, %",
        "top-5, %",
        "parameters",
        "ImageNet-100: top-1",
        "top-5",
    ]
    return format_table(header, rows)


def run_all(config: Config, processes: Processes) -> dict[str, list[SavedRun]]:
    """Train every stack with every seed, unless a finished run has the result: stack -> results."""
    config.use_threads()
    assert config.data is not None
    splits = load_splits(config.data)
    return run_stacks(
        config,
        lambda attention, seed: train(config, attention, seed, splits, processes),
        lambda run: f"top-1 {run.scores['top1']:.2f} %, top-5 {run.scores['top5']:.2f} %",
        processes,
    )


def main(config: Config) -> None:
    """Train or measure, print, save."""
    check_writable(config.out)
    if config.cost:
        config.use_threads()
        step = Step(config.model, config.image_size, config.patch, config.cost_batch, config.cost_classes, config.bf16)
        steps = {name: (config.shape(name, config.cost_classes), config.primal(name).eta) for name in config.attention}
        report_cost(step, steps, seconds=config.cost_seconds, device=choose_device(config.device), out=config.out)
        return
    with join_processes(config.device) as processes:
        runs = run_all(config, processes)
    if not processes.is_main:
        return
    print(f"\n{table(config, runs)}\n\nThe last two columns are the paper's, of DeiT-Small/16 (Table 5).")
    assert config.data is not None
    path = config.out / f"{config.data.name}-{config.model}.json"
    every = [
        {**config.settings(attention, seed), **asdict(run)}
        for attention, seen in runs.items()
        for seed, run in zip(config.seeds, seen, strict=True)
    ]
    with atomic_write(path) as file:
        file.write(json.dumps(every, indent=1).encode())
    print(f"Saved {path}; curves: tensorboard --logdir {config.out}")
