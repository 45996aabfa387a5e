"""A whole training run from its configuration: engines, learner, environment, folder, and the schedule over them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import torch

from penstock.config import RunConfig
from penstock.errors import UserError
from penstock.fleet.fleet import Fleet
from penstock.observe.plots import draw_plots
from penstock.observe.run_folder import RunFolder
from penstock.observe.summary import Reporter, Summary
from penstock.rollout.environment import Environment, check_tasks, load_environment, user_code
from penstock.rollout.single_turn import SingleTurnGenerator
from penstock.rollout.tokenizer import Tokenizer, load_tokenizer
from penstock.train.async_trainer import train
from penstock.train.grpo import Trainee
from penstock.train.interface import LoraSpec
from penstock.train.learner import LocalLearner, ServedDtype
from penstock.train.resume import check as check_resume
from penstock.types import SamplingParams

log = logging.getLogger(__name__)


async def run(config: RunConfig, *, resume: bool, reporter: Reporter, fresh: bool = False) -> Summary:
    """Do a training run, as `penstock train` does. The folder is `config.run_dir / config.name`.

    Everything that can be refused is refused before an engine is started.

    Args:
        config: of the run.
        resume: go on with the run in the folder.
        reporter: gets every event of the run.
        fresh: delete the run in the folder first, if there is one.

    Raises:
        UserError: both `resume` and `fresh`, or another process holds the run (it is named).
        PenstockError: see `penstock.train.async_trainer.train`, `Fleet.launch` and `RunFolder`.
    """
    if resume and fresh:
        raise UserError("--resume goes on with a run and --fresh deletes it; give one of them")
    path = config.run_dir / config.name
    environment = load_environment(config.environment, config.seed)
    tokenizer = load_tokenizer(config.engine.tokenizer or config.engine.model)
    await _check_tasks(config, environment)
    with RunFolder.lock(path):
        if fresh and RunFolder.remove(path):
            log.info("removed the earlier run in %s", path)
        folder = RunFolder.open(path) if resume else RunFolder.create(path, config)
        if resume:
            check_resume(config, folder)
        with folder.capture_log():
            summary = await _run(config, folder, environment, tokenizer, reporter, resume=resume)
        await asyncio.to_thread(draw_plots, folder)
    return summary


async def _check_tasks(config: RunConfig, environment: Environment) -> None:
    name, size = config.environment.name, config.eval.size
    with user_code(f"environment {name!r} has no {size} held-out tasks (eval.size)", UserError):
        heldout = await asyncio.to_thread(environment.heldout_tasks, size)
    check_tasks(heldout, size, f"heldout_tasks({size}) of {name!r}")
    with user_code(f"train_task(0) of {name!r} failed", UserError):
        first = await asyncio.to_thread(environment.train_task, 0)
    check_tasks([first], 1, f"train_task(0) of {name!r}")


async def _run(
    config: RunConfig,
    folder: RunFolder,
    environment: Environment,
    tokenizer: Tokenizer,
    reporter: Reporter,
    *,
    resume: bool,
) -> Summary:
    """From the start of the engines to their end."""
    fleet_config = config.fleet
    if fleet_config.log_dir is None:
        fleet_config = fleet_config.model_copy(update={"log_dir": folder.path / "logs"})
    reporter.on_phase("launch")
    opening = Fleet.launch(config.engine, fleet=fleet_config, router=config.router)
    # The learner loads in a thread while the engines start.
    loading = asyncio.create_task(asyncio.to_thread(_learner, config))
    try:
        async with opening as fleet:
            trainee = await loading
            generator = SingleTurnGenerator(
                fleet,
                tokenizer,
                environment,
                SamplingParams(max_tokens=config.rollout.max_tokens, temperature=config.rollout.temperature),
                config.rollout.concurrency,
            )
            training = train(
                config,
                fleet,
                learner=trainee,
                generator=generator,
                environment=environment,
                folder=folder,
                reporter=reporter,
                resume=resume,
            )
            endpoint = fleet.endpoint
            return await (endpoint.during(training) if endpoint is not None else training)
    finally:
        loading.cancel()


def _learner(config: RunConfig) -> Trainee:
    learner = LocalLearner(config.engine.model, config.train, seed=config.seed, served_dtype=_served_dtype(config))
    trainee = Trainee(learner, config.train, config.rollout.temperature, config.rollout.max_tokens)
    if (lora := config.train.lora) is None:
        if config.train.kl_coefficient:
            reference = LocalLearner(config.engine.model, config.train, seed=config.seed)
            trainee = replace(trainee, reference=reference)
        return trainee
    flags = {name: getattr(lora, name) for name in ("train_attn", "train_mlp", "train_unembed")}
    learner.create_adapter(lora.name, LoraSpec(lora.rank, lora.alpha, seed=config.seed, **flags))
    return replace(trainee, adapter=lora.name, merge=lora.merge)


def _served_dtype(config: RunConfig) -> ServedDtype:
    """Return the engines' dtype as far as it is known here; `auto`, the checkpoint's own, fits all of them.

    Engines that Penstock starts on CPUs serve in fp32, whatever the checkpoint has, and would get rounded weights by
    `auto`. Of servers that others started, and of what a Ray cluster has, nothing is known.
    """
    engine, fleet = config.engine, config.fleet
    if engine.dtype != "auto" or fleet.attach:
        return engine.dtype
    here = engine.profile == "auto" and fleet.launcher == "local" and not torch.cuda.is_available()
    return "float32" if here or engine.profile == "cpu" else "auto"
