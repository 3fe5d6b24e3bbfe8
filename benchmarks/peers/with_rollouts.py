"""Rollouts of this project: a step of all environments of an evaluation, with random weights in HalfCheetah."""

from contextlib import ExitStack
from functools import partial

import torch
from serve import Episodes, Extras, Request, Step, serve

from benchmarks.rollout import TASK, Config, Session, model_shape
from envs.make import make_environment
from primal_dt.data.normalizer import Normalizer
from primal_dt.evaluation.evaluate import choose_workers
from primal_dt.evaluation.vector import Environments
from primal_dt.model.transformer import DecisionTransformer
from primal_dt.policy.policy import DecisionTransformerPolicy

NUM_ENVIRONMENTS = 64
"""As many as ``evaluate.py`` runs at a time by default."""


def build(request: Request, episodes: Episodes) -> tuple[Step, Extras]:
    """Build a step of all environments, in window mode."""
    torch.set_num_threads(request.threads)
    config = Config(width=request.width, context=request.context)
    model = DecisionTransformer(model_shape(config, request.attention, request.context)).eval()
    units = Normalizer.of(episodes.observations.reshape(-1, episodes.observations.shape[-1]), return_scale=1000.0)
    workers = choose_workers(NUM_ENVIRONMENTS)
    environments = Environments(partial(make_environment, TASK), NUM_ENVIRONMENTS, num_workers=workers)
    stack = ExitStack()
    stack.enter_context(environments)
    policy = DecisionTransformerPolicy(model, units, reproducible=True)
    return Session(policy, environments, warm_up=request.context).step, {}


if __name__ == "__main__":  # the processes of environments import this module
    serve(build)
