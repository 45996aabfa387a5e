"""A whole training run: engines, learner, environment, folder, and schedule."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.aio import in_thread, settled
from penstock.config import RunConfig, check_on_hub
from penstock.engine.command import check_model
from penstock.engine.layouts import read_shape
from penstock.errors import ConfigError, UserError
from penstock.fleet.fleet import Fleet, FleetStoppedError
from penstock.observe.plots import draw_plots
from penstock.observe.run_folder import RunFolder
from penstock.observe.summary import Reporter, Summary
from penstock.observe.trackers import check_trackers, tracked
from penstock.rollout.environment import (
    Dialogue,
    Environment,
    Task,
    check_tasks,
    load_environment,
    user_code,
)
from penstock.rollout.episodes import generator_for, prepare_turns
from penstock.rollout.generator import Generator
from penstock.rollout.tokenizer import Tokenizer, load_tokenizer
from penstock.rooms import plugged_in
from penstock.train.checkpoint import latest_step
from penstock.train.grpo import Trainee
from penstock.train.interface import Learner, LoraSpec
from penstock.train.learner import LocalLearner, ServedDtype
from penstock.train.losses import loss_named
from penstock.train.ranks import Ranks
from penstock.train.schedules import check_schedule
from penstock.train.trainer import check_resume, train

log = logging.getLogger(__name__)


async def run(
    config: RunConfig,
    *,
    resume: bool,
    reporter: Reporter,
    fresh: bool = False,
    launched: Mapping[str, str] | None = None,
) -> Summary:
    """Do a training run, as `penstock train` does. The folder is `config.run_dir / config.name`.

    All checks that can refuse the run come before the first engine starts. `fresh` deletes an existing run first.
    `launched`: torchrun's variables, if it started this process as rank 0 of the learner (`take_launched`).

    Raises:
        UserError: both `resume` and `fresh`, or another process holds the run (the message names it).
        PenstockError: see `penstock.train.trainer.train`, `Fleet.launch` and `RunFolder`.
    """
    if resume and fresh:
        raise UserError("--resume goes on with a run and --fresh deletes it; give one of them")
    check_schedule(config)
    if read_shape(config.learner_model).quantised:
        raise ConfigError(
            f"the weights in {config.learner_model} are quantised, and a learner trains floats: set train.model to the "
            "checkpoint that they were made of"
        )
    _check_machine(config, launched or {})
    check_trackers(config.trackers)
    path = config.run_dir / config.name
    environment = load_environment(config.environment, config.seed)
    loss_named(config.train.loss)
    tokenizer = _load_tokenizer(config)
    _check_context(config, _prompts(config, environment, tokenizer), await _check_tasks(config, environment))
    agents = plugged_in("generator.agent")(config, tokenizer, environment) if config.rollout.agent else None
    adapter = None if config.train.lora is None or config.train.lora.merge else config.train.lora.name

    def opened(fleet: Fleet) -> AbstractAsyncContextManager[Generator]:
        if agents is not None:
            return agents.generator(fleet, path / "logs" / "agents", adapter=adapter)
        return nullcontext(generator_for(fleet, tokenizer, environment, config.rollout, adapter=adapter))

    with RunFolder.lock(path):
        if fresh and RunFolder.remove(path):
            log.info("removed the earlier run in %s", path)
        folder = RunFolder.open(path) if resume else RunFolder.create(path, config)
        if resume:
            check_resume(config, folder)
        step = latest_step(path) if resume else None
        with folder.capture_log(), tracked(config, folder, step):
            summary = await _run(config, folder, environment, opened, reporter, launched or {}, resume=resume)
        await asyncio.to_thread(draw_plots, [folder], path / "plots.png")
    return summary


def _check_machine(config: RunConfig, launched: Mapping[str, str]) -> None:
    """Refuse what CPUs cannot do, and more ranks than this machine has GPUs, or cores without GPUs."""
    gpus, cores = torch.cuda.device_count(), len(os.sched_getaffinity(0))
    if config.fleet.weight_transport == "cuda_ipc" and not torch.cuda.is_available():
        raise ConfigError("fleet.weight_transport: cuda_ipc needs GPUs, and torch sees none here; set it to auto")
    if config.engine.quantization == "fp8" and _starts_on_cpus(config):  # 90 tokens/s there: rollouts would time out
        raise ConfigError("engine.quantization: fp8 is far too slow on CPUs; choose int8, or engines on a GPU for fp8")
    elsewhere = launched or config.train.ray_address is not None  # torchrun and Ray may use other hosts
    if not elsewhere and config.train.ranks > (gpus or cores):
        has = f"{gpus} GPUs" if gpus else f"{cores} cores and no GPU"
        raise ConfigError(
            f"train.ranks is {config.train.ranks} and this machine has {has}: each rank takes one, so ask for at most "
            f"{gpus or cores}"
        )


def _load_tokenizer(config: RunConfig) -> Tokenizer:
    """Load the tokenizer, and refuse missing checkpoints."""
    tokenizer = config.engine.tokenizer or config.engine.model
    check_model(config.learner_model)
    for name in dict.fromkeys((config.learner_model, tokenizer)):
        if not Path(name).expanduser().is_dir():
            check_on_hub(name, "model")
    return load_tokenizer(tokenizer)


async def _check_tasks(config: RunConfig, environment: Environment) -> list[Task]:
    """Return the held-out tasks and the first training task, after checking them."""
    name, size = config.environment.name, config.eval.size
    with user_code(f"environment {name!r} has no {size} held-out tasks (eval.size)", UserError):
        heldout = await in_thread(partial(environment.heldout_tasks, size), leave_s=0.0)
    check_tasks(heldout, size, f"heldout_tasks({size}) of {name!r}")
    with user_code(f"train_task(0) of {name!r} failed", UserError):
        first = await in_thread(partial(environment.train_task, 0), leave_s=0.0)
    check_tasks([first], 1, f"train_task(0) of {name!r}")
    return [*heldout, first]


def _prompts(config: RunConfig, environment: Environment, tokenizer: Tokenizer) -> Callable[[Task], Sequence[int]]:
    """Return what gives the ids of a task's first prompt. ConfigError: see `prepare_turns`."""
    if config.rollout.agent or not environment.has_turns():
        return lambda task: tokenizer.encode(task.prompt)
    template, _ = prepare_turns(tokenizer, environment)
    return lambda task: template.render(Dialogue(environment, task).opening, environment.tools)


def _check_context(config: RunConfig, prompt_of: Callable[[Task], Sequence[int]], tasks: Sequence[Task]) -> None:
    """Refuse prompts that leave no room for a response. Else an engine would refuse the first request."""
    most, response = config.engine.max_model_len, config.rollout.max_tokens
    if most is None:
        return
    longest = max(tasks, key=lambda task: len(task.prompt))
    prompt = len(prompt_of(longest))
    needed = prompt + (1 if config.rollout.agent else response)  # a gateway shortens an agent's responses
    if needed > most:
        raise ConfigError(
            f"engine.max_model_len is {most}, and task {longest.id!r} has a prompt of {prompt} tokens and responses of "
            f"up to {response} (rollout.max_tokens): set max_model_len to {needed} or more, or ask for shorter ones"
        )


async def _run(
    config: RunConfig,
    folder: RunFolder,
    environment: Environment,
    open_generator: Callable[[Fleet], AbstractAsyncContextManager[Generator]],
    reporter: Reporter,
    launched: Mapping[str, str],
    *,
    resume: bool,
) -> Summary:
    """Run from the start of the engines to their end."""
    ranks = Ranks(config.train.ranks, folder.path / "logs", launched, config.train.ray_address)
    if (refused := config.refused_ranks(ranks.count)) is not None:  # torchrun may start more ranks than configured
        raise ConfigError(refused)
    fleet_config = config.fleet
    if fleet_config.log_dir is None:
        fleet_config = fleet_config.model_copy(update={"log_dir": folder.path / "logs"})
    reporter.on_phase("launch")
    opening = Fleet.launch(config.engine, fleet=fleet_config, router=config.router)
    async with ranks:
        # The learner loads in a thread while the engines start, and ends their start if it fails. A colocated learner
        # loads while they sleep.
        loading = None if config.train.schedule == "colocated" else asyncio.create_task(_load(config, ranks))
        started = asyncio.Event()

        async def work() -> Summary:
            async with opening as fleet, open_generator(fleet) as generator:
                started.set()
                reporter.on_fleet(fleet.url)
                training = train(
                    config,
                    fleet,
                    trainee=await (loading or _load(config, ranks, fleet)),
                    generator=generator,
                    environment=environment,
                    folder=folder,
                    reporter=reporter,
                    resume=resume,
                    loads=lambda: _in_flight(fleet),
                )
                return await ranks.during(_unless_stopped(fleet, training))

        async def failure() -> None:
            if loading is not None:
                await asyncio.gather(loading, return_exceptions=True)
                if not started.is_set():  # later, `work` hears of it, and the end of its engines must not be cut off
                    loading.result()
            await asyncio.Event().wait()

        return (await settled(work(), failure())).result()


async def _unless_stopped(fleet: Fleet, work: Coroutine[Any, Any, Summary]) -> Summary:
    """Return the result of `work`; if a call stops the fleet, cancel it and raise FleetStoppedError."""
    done = await settled(work, fleet.endpoint.stopping.wait())
    if fleet.endpoint.stopping.is_set():
        raise FleetStoppedError from None if done.cancelled() else done.exception()  # requests failed with the fleet
    return done.result()


async def _in_flight(fleet: Fleet) -> dict[str, int]:
    """Return the number of unfinished requests that each engine has from the router."""
    return {engine.name: engine.outstanding for engine in (await fleet.router_admin.engines()).engines}


async def _load(config: RunConfig, ranks: Ranks, fleet: Fleet | None = None) -> Trainee:
    """Load the learner, while `fleet` sleeps if it is given. A starting vLLM needs its share of the GPU free."""
    if fleet is not None:
        await fleet.sleep(1)
    learner = await ranks.load(config.learner_model, config.train, seed=config.seed, served_dtype=_served_dtype(config))
    trainee = await asyncio.to_thread(trainee_of, config, learner)
    if fleet is not None:
        await fleet.wake_up()
    return trainee


def trainee_of(config: RunConfig, learner: Learner) -> Trainee:
    """Return what a run trains: the learner's base weights, or a new adapter on them."""
    trainee = Trainee(learner, config.train, config.rollout.temperature, config.rollout.max_tokens)
    if (lora := config.train.lora) is not None:
        flags = {name: getattr(lora, name) for name in ("train_attn", "train_mlp", "train_unembed")}
        learner.create_adapter(lora.name, LoraSpec(lora.rank, lora.alpha, seed=config.seed, **flags))
        return replace(trainee, adapter=lora.name, merge=lora.merge)
    if config.train.kl_coefficient:
        return replace(trainee, reference=LocalLearner(config.learner_model, config.train, seed=config.seed))
    return trainee


def _served_dtype(config: RunConfig) -> ServedDtype:
    """Return the engines' dtype as far as it is known here. `auto`, the checkpoint's own, fits all engines.

    Engines that Penstock starts on CPUs serve in fp32, whatever the checkpoint has. With `auto` they would get rounded
    weights. The dtype of attached servers and of engines on a Ray cluster is unknown.
    """
    if config.engine.dtype != "auto" or config.fleet.attach:
        return config.engine.dtype
    return "float32" if _starts_on_cpus(config) else "auto"


def _starts_on_cpus(config: RunConfig) -> bool:
    """Whether this run's engines use vLLM's CPU build, as far as it is known here."""
    here = config.engine.profile == "auto" and config.fleet.launcher == "local" and not torch.cuda.is_available()
    return here or config.engine.profile == "cpu"
