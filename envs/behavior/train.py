"""Trains the behavior policies of the built-in data sets: ``python -m envs.behavior.train hopper``.

The algorithm is PPO from Stable-Baselines3 (the extra ``record``). Every 25,000 steps, the program saves a snapshot of
the policy and the training state. It can be stopped at any time; when started again, it resumes from the last snapshot,
with new episodes.
"""

import json
import random
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import gymnasium
import numpy as np
import torch
import tyro
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from tqdm import tqdm

from envs.behavior.policies import BehaviorPolicy, GaussianPolicy, load_policy
from envs.behavior.record import run_episode
from envs.make import make_environment
from envs.tasks import ENVIRONMENTS, Task, task_of
from primal_dt.evaluation.score import normalized
from primal_dt.system.files import atomic_write
from primal_dt.system.table import format_table

SNAPSHOT_EVERY_STEPS = 25_000
NUM_ENVIRONMENTS = 8
EPISODES_PER_MEAN = 50
"""The training return is the mean over this number of most recent episodes, with sampled actions."""
NUM_REPLAY = 6
MEDIUM_SCORES = (30.0, 50.0)
CHOICE_SEEDS, CARD_SEEDS = range(20_000, 20_030), range(10_000, 10_100)
README_HEAD = """# Behavior policies

The built-in data sets are recorded from these policies: networks with two hidden layers, stored as numpy arrays. The
policies of an environment are snapshots of one PPO training, started with the command below. Expert is the snapshot
with the highest training return. Medium is the first snapshot with scores from 30 to 50. The returns below are from
other episodes than those used for this choice. Scores are normalized returns, with D4RL's reference returns.

`primal/.../medium-v0` and `expert-v0` are recorded from the policies of the same name, with sampled actions.
`medium-expert-v0` is recorded from both in equal parts, `medium-replay-v0` from all `replay` snapshots in equal parts,
and `random-v0` from uniform actions. `envs/behavior/train.py` writes this page.
"""


@dataclass(frozen=True)
class Recipe:
    """PPO's settings for one environment. All other settings are the defaults of Stable-Baselines3."""

    steps: int
    """The total number of environment steps."""
    hidden: int = 64
    """The units in each of the two hidden layers, for both the policy and the value function."""
    activation: Literal["tanh", "relu"] = "tanh"
    learning_rate: float = 3e-4
    """The initial learning rate; it decays linearly to zero."""
    rollout_steps: int = 2048
    """The steps between two updates, summed over all environments."""
    batch_size: int = 256
    epochs: int = 10
    clip: float = 0.2
    gamma: float = 0.99
    gae_lambda: float = 0.95
    entropy: float = 0.0
    log_std: float = -0.5
    """The initial log standard deviation of the action noise."""


RECIPES = {
    "hopper": Recipe(steps=3_000_000, gamma=0.995),
    # The tuned settings of RL Baselines3 Zoo, except for the learning rate, which starts higher and decays here.
    "halfcheetah": Recipe(
        steps=3_000_000,
        hidden=256,
        activation="relu",
        learning_rate=1e-4,
        batch_size=128,
        epochs=15,
        clip=0.1,
        gamma=0.98,
        gae_lambda=0.92,
        entropy=4e-4,
        log_std=-2.0,
    ),
    "walker2d": Recipe(steps=3_000_000),
}


def make_model(env_id: str, recipe: Recipe, seed: int) -> tuple[PPO, VecNormalize]:
    """Create an untrained PPO model and its environments."""

    def make() -> gymnasium.Env[Any, Any]:
        return gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make(env_id))

    environments = VecNormalize(DummyVecEnv([make] * NUM_ENVIRONMENTS), gamma=recipe.gamma)
    activation = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}[recipe.activation]
    model = PPO(
        "MlpPolicy",
        environments,
        n_steps=recipe.rollout_steps // NUM_ENVIRONMENTS,
        batch_size=recipe.batch_size,
        n_epochs=recipe.epochs,
        learning_rate=lambda remaining: recipe.learning_rate * remaining,
        clip_range=recipe.clip,
        gamma=recipe.gamma,
        gae_lambda=recipe.gae_lambda,
        ent_coef=recipe.entropy,
        policy_kwargs={
            "net_arch": [recipe.hidden, recipe.hidden],
            "activation_fn": activation,
            "log_std_init": recipe.log_std,
        },
        device="cpu",
        seed=seed,
    )
    return model, environments


def behavior_policy(model: PPO, environments: VecNormalize, activation: str) -> GaussianPolicy:
    """Export the model's policy to numpy."""
    weights = {name: value.detach().numpy().copy() for name, value in model.policy.state_dict().items()}
    box, moments = environments.action_space, environments.obs_rms
    assert isinstance(box, gymnasium.spaces.Box)
    assert isinstance(moments, RunningMeanStd)
    return GaussianPolicy(
        state_mean=moments.mean.astype(np.float32),
        state_std=np.sqrt(moments.var + environments.epsilon).astype(np.float32),
        weight1=weights["mlp_extractor.policy_net.0.weight"],
        bias1=weights["mlp_extractor.policy_net.0.bias"],
        weight2=weights["mlp_extractor.policy_net.2.weight"],
        bias2=weights["mlp_extractor.policy_net.2.bias"],
        weight3=weights["action_net.weight"],
        bias3=weights["action_net.bias"],
        log_std=weights["log_std"],
        low=box.low,
        high=box.high,
        activation=activation,
    )


class Keeper(BaseCallback):
    """Callback that saves a snapshot and the training state every ``SNAPSHOT_EVERY_STEPS`` steps."""

    def __init__(self, folder: Path, recipe: Recipe, progress: "tqdm[Any]") -> None:
        super().__init__()
        self.folder = folder
        self.recipe = recipe
        self.progress = progress
        self.returns: deque[float] = deque(maxlen=EPISODES_PER_MEAN)
        self.curve: list[tuple[int, float]] = []
        """The (steps, training return) of each snapshot."""

    def _on_rollout_start(self) -> None:
        self.progress.update(self.num_timesteps - self.progress.n)
        due = self.curve[-1][0] + SNAPSHOT_EVERY_STEPS if self.curve else 0
        if self.num_timesteps >= due:
            self.keep()

    def _on_step(self) -> bool:
        self.returns.extend(float(info["episode"]["r"]) for info in self.locals["infos"] if "episode" in info)
        return True

    def keep(self) -> None:
        """Save the snapshot, then the training state that refers to it."""
        assert isinstance(self.model, PPO)
        environments = self.model.get_vec_normalize_env()
        assert environments is not None
        mean = float(np.mean(self.returns)) if self.returns else float("nan")
        self.progress.set_postfix_str(f"training return {mean:.0f}")
        self.curve.append((self.num_timesteps, mean))
        policy = behavior_policy(self.model, environments, self.recipe.activation)
        policy.save(snapshot_path(self.folder, self.num_timesteps))
        state = {
            "steps": self.num_timesteps,
            "curve": self.curve,
            "returns": list(self.returns),
            "policy": self.model.policy.state_dict(),
            "optimizer": self.model.policy.optimizer.state_dict(),
            "updates": self.model._n_updates,
            "statistics": {
                name: (torch.as_tensor(moments.mean), torch.as_tensor(moments.var), float(moments.count))
                for name, moments in (("obs_rms", environments.obs_rms), ("ret_rms", environments.ret_rms))
                if isinstance(moments, RunningMeanStd)
            },
        }
        with atomic_write(self.folder / "state.pt") as file:
            torch.save(state, file)

    def restore(self, model: PPO, environments: VecNormalize) -> None:
        """Restore the last saved training state, if there is one."""
        path = self.folder / "state.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        model.policy.load_state_dict(state["policy"])
        model.policy.optimizer.load_state_dict(state["optimizer"])
        model._n_updates = state["updates"]
        model.num_timesteps = state["steps"]
        for name, (mean, variance, count) in state["statistics"].items():
            moments = getattr(environments, name)
            moments.mean, moments.var, moments.count = mean.numpy(), variance.numpy(), count
        self.curve = [(int(steps), float(mean)) for steps, mean in state["curve"]]
        self.returns.extend(state["returns"])
        # Use other episodes and other noise than at the start of the training.
        model.set_random_seed((model.seed or 0) + state["steps"])


def snapshot_path(folder: Path, steps: int) -> Path:
    """The path of the snapshot after ``steps`` steps."""
    return folder / "snapshots" / f"{steps:09d}.npz"


def train(name: str, *, seed: int, folder: Path) -> list[tuple[int, float]]:
    """Train in one environment, or resume training, and return the curve of (steps, training return)."""
    recipe = RECIPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    random.seed(seed)
    model, environments = make_model(f"{ENVIRONMENTS[name].gymnasium_name}-v5", recipe, seed)
    with tqdm(total=recipe.steps, unit=" steps", desc=name) as progress:
        keeper = Keeper(folder, recipe, progress)
        keeper.restore(model, environments)
        progress.initial = progress.n = model.num_timesteps
        if model.num_timesteps < recipe.steps:
            model.learn(recipe.steps - model.num_timesteps, callback=keeper, reset_num_timesteps=False)
            keeper.keep()
    return keeper.curve


def choose(curve: list[tuple[int, float]], name: str, score_of: Callable[[int], list[float]]) -> dict[str, int]:
    """Choose the expert, medium and replay snapshots.

    Expert is the snapshot with the highest training return. Medium is the first snapshot whose scores, sampled and
    deterministic, are both within ``MEDIUM_SCORES``. The replay policies are spaced evenly from the first snapshot to
    medium. The episodes used for the choice are not those that the model card reports.

    Args:
        curve: the (steps, training return) of each snapshot.
        name: the environment's name.
        score_of: maps steps to the scores of that snapshot.

    Returns:
        The steps of each chosen policy's snapshot.
    """
    training = normalized([mean for _, mean in curve], ENVIRONMENTS[name].reference)
    low, high = MEDIUM_SCORES
    candidates = np.flatnonzero((training >= low - 10) & (training <= high + 10))
    for medium in candidates.tolist():
        if all(low <= score <= high for score in score_of(curve[medium][0])):
            break
    else:
        raise SystemExit(f"no snapshot of {name} scores from {low} to {high}, both sampled and deterministic")
    replay = np.unique(np.linspace(0, medium, NUM_REPLAY).round().astype(int))
    chosen = {"medium": medium, "expert": int(np.nanargmax(training))}
    chosen |= {f"replay{i}": int(index) for i, index in enumerate(replay)}
    return {policy: curve[index][0] for policy, index in chosen.items()}


def measure(policy: BehaviorPolicy, task: Task, seeds: range, label: str) -> dict[str, float]:
    """Measure a policy's return and score over episodes with these seeds."""
    env = make_environment(task)
    returns = [
        run_episode(env, policy, seed=seed).rewards.sum() for seed in tqdm(seeds, desc=label, leave=False, disable=None)
    ]
    env.close()
    scores = normalized(returns, task.environment.reference)
    return {
        "return_mean": round(float(np.mean(returns)), 1),
        "return_std": round(float(np.std(returns)), 1),
        "score": round(float(np.mean(scores)), 1),
    }


def measure_both(path: Path, task: Task, seeds: range, label: str) -> dict[str, dict[str, float]]:
    """Measure a snapshot's returns with and without action noise."""
    policy = GaussianPolicy.load(path)
    return {
        "sampled": measure(policy, task, seeds, f"{label}, sampled"),
        "deterministic": measure(replace(policy, deterministic=True), task, seeds, f"{label}, deterministic"),
    }


def write_card(name: str, chosen: dict[str, int], task: Task, *, seed: int, snapshots: Path, folder: Path) -> None:
    """Copy the chosen policies, measure them, and write the model card."""
    uniform = measure(load_policy("random", task), task, CARD_SEEDS, f"{name}/random")
    policies: dict[str, Any] = {"random": {"steps": 0, "sampled": uniform}}
    for policy, steps in chosen.items():
        path = snapshot_path(snapshots, steps)
        GaussianPolicy.load(path).save(folder / name / f"{policy}.npz")
        policies[policy] = {"steps": steps, **measure_both(path, task, CARD_SEEDS, f"{name}/{policy}")}
    replay = [f"{name}/{policy}" for policy in chosen if policy.startswith("replay")]
    card = {
        "environment": task.env_id,
        "command": f"python -m envs.behavior.train {name} --seed {seed}",
        "seed": seed,
        "algorithm": "PPO, Stable-Baselines3 " + version("stable-baselines3"),
        "recipe": asdict(RECIPES[name]),
        "measured_over": f"{len(CARD_SEEDS)} episodes, seeds {CARD_SEEDS[0]} to {CARD_SEEDS[-1]}",
        "policies": policies,
        "replay": [{"policy": policy, "share": round(1 / len(replay), 4)} for policy in replay],
    }
    (folder / name / "card.json").write_text(json.dumps(card, indent=2) + "\n")


def write_readme(folder: Path) -> None:
    """Write all model cards to one page."""
    text = README_HEAD
    for path in sorted(folder.glob("*/card.json")):
        card = json.loads(path.read_text())
        rows = [
            [policy, f"{entry['steps']:,}", *(_cell(entry.get(mode)) for mode in ("sampled", "deterministic"))]
            for policy, entry in card["policies"].items()
        ]
        text += f"\n## {card['environment']}\n\n`{card['command']}` ({card['algorithm']}, "
        text += f"{card['recipe']['steps']:,} steps; returns over {card['measured_over']})\n\n"
        text += format_table(["policy", "after steps", "sampled: return, score", "deterministic"], rows) + "\n"
    (folder / "README.md").write_text(text)


def _cell(entry: dict[str, float] | None) -> str:
    return "-" if entry is None else f"{entry['return_mean']:.0f} ± {entry['return_std']:.0f}, {entry['score']:.1f}"


def main(
    environment: Annotated[Literal["hopper", "halfcheetah", "walker2d"], tyro.conf.Positional],
    seed: int = 0,
    snapshots: Path = Path("runs/policies"),
    out: Path = Path("runs/policies/chosen"),
) -> None:
    """Train the behavior policies of one environment and write their model card.

    An interrupted training resumes when the command is run again.

    Args:
        environment: Environment to train in.
        seed: Training seed.
        snapshots: Folder for the snapshots and the training state.
        out: Folder for the chosen policies and their card; envs/behavior/weights replaces those of the package.
    """
    torch.set_num_threads(1)
    curve = train(environment, seed=seed, folder=snapshots / environment)
    task = task_of(f"{ENVIRONMENTS[environment].gymnasium_name}-v5")

    def score_of(steps: int) -> list[float]:
        path = snapshot_path(snapshots / environment, steps)
        return [
            mode["score"] for mode in measure_both(path, task, CHOICE_SEEDS, f"{environment}, {steps:,} steps").values()
        ]

    chosen = choose(curve, environment, score_of)
    write_card(environment, chosen, task, seed=seed, snapshots=snapshots / environment, folder=out)
    write_readme(out)
    print(f"the policies of {environment} and their card are in {out / environment}")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning)
    tyro.cli(main)
