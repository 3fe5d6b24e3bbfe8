"""The part of a model card that shows how to use the policy: code that runs in an environment of any kind."""

from primal_dt.task import RunTask

__all__ = ["usage"]

PLAIN = """\
import gymnasium
from primal_dt import load_policy

policy = load_policy("{source}")
environment = gymnasium.make("{env_id}")
"""
"""For environments whose observations and actions are vectors."""
ANY = """\
from envs.make import make_environment
from envs.tasks import task_of_run
from primal_dt.hub.sources import find_policy
from primal_dt.training.checkpoint import load_checkpoint

checkpoint = load_checkpoint(find_policy("{source}"))
policy = checkpoint.policy()
environment = make_environment(task_of_run(checkpoint.task{trusted}
"""
EPISODE = """\
observation, _ = environment.reset(seed=0)
{reset}
ended, total = False, 0.0
while not ended:
    observation, reward, terminated, truncated, _ = environment.step(policy.act(observation))
    policy.observe(reward)
    ended, total = terminated or truncated, total + reward
print(total)"""
NO_ENVIRONMENT = """\
from primal_dt import load_policy

policy = load_policy("{source}")
{reset}
action = policy.act(observation)  # the entries of the data, in their order and units
policy.observe(reward)"""


def usage(task: RunTask, *, source: str, has_choices: bool) -> list[str]:
    """Write the paragraphs and the code for a policy.

    Args:
        task: the policy's task.
        source: what a reader passes to ``load_policy``.
        has_choices: whether actions are choices.
    """
    form = PLAIN + EPISODE if task.is_in_table else ANY + EPISODE if task.env_id else NO_ENVIRONMENT
    code = form.format(
        source=source,
        env_id=task.env_id,
        trusted=f", trusted=True))  # imports {', '.join(task.imported)}" if task.imported else "))",
        reset=f"policy.reset({task.targets[0]!r})  # the return to aim for" if task.targets else "policy.reset()",
    )
    parts = [f"```python\n{code}\n```"]
    if form.startswith(ANY):
        parts.append(
            "`make_environment` gives observations as vectors, dictionaries flattened as by "
            "`gymnasium.spaces.flatten`, and takes actions as the policy returns them."
        )
    if has_choices:
        parts.append(
            "The policy returns choices as whole numbers from 0 on, in an array. In an environment that you make "
            "yourself, with one choice from 0 on: `environment.step(int(action[0]))`."
        )
    if task.env_id:
        what = source.replace("pretrained:", "--pretrained ")
        trust = " --trust-env" if task.imported else ""
        parts.append("With primal-dt's repository, this evaluates the policy and records a video:")
        parts.append(f"```sh\npython evaluate.py {what} --episodes 10 --video{trust}\n```")
    parts.append(
        "The files are numbers and plain values (`model.safetensors`, `config.json`): loading them executes no code. "
        "Observations and actions are in raw units; the standardization is part of the policy."
    )
    return parts
