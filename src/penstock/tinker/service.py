"""The Tinker service's owner: runs the fleet, a learner and an API process."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.checks import parse_json, reading
from penstock.config import LoraConfig, TrainConfig, check_on_hub
from penstock.engine.command import resolve_profile
from penstock.errors import ConfigError, UserError
from penstock.fleet.fleet import Fleet
from penstock.fleet.gpus import usable_gpus
from penstock.fleet.service import LONGEST
from penstock.guard import new_key
from penstock.router_settings import RouterConfig
from penstock.settings import EngineConfig, FleetConfig
from penstock.tinker.children import SupervisedChild
from penstock.tinker.database import DATABASE, open_engine
from penstock.tinker.tenants import read_keys, refuse_open_service

API_START_S = 300.0
SHARED_GPU = 0.4
"""Default share of GPU memory for engines, if the learner must share their GPUs."""
MAX_LORAS, MAX_RANK = 8, 32
"""Default number of adapters in one batch, and their default rank; 32 is the SDK's default rank."""
KEPT_LORAS = 4
"""Factor of `max_loras`: adapters that an engine keeps in memory. While it reads others, all requests wait."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Configuration of `penstock tinker`.

    Attributes:
        port: port of the API; 0 picks a free port.
        keys: file of the tenants' keys; None: one tenant, any key.
        database: SQLAlchemy's URL; None: SQLite in the data folder.
    """

    engine: EngineConfig
    fleet: FleetConfig
    router: RouterConfig
    train: TrainConfig
    data: Path
    host: str = "127.0.0.1"
    port: int = 0
    keys: Path | None = None
    database: str | None = None

    @property
    def base_model(self) -> str:
        """Name of the base model for clients."""
        return self.engine.served_model_name or self.engine.model


@dataclass(frozen=True, slots=True)
class Service:
    """A running service.

    Attributes:
        url: value of TINKER_BASE_URL for clients.
    """

    url: str
    fleet: Fleet
    learner: SupervisedChild
    api: SupervisedChild


@asynccontextmanager
async def serving(config: ServiceConfig) -> AsyncGenerator[Service]:
    """Run the service while the block runs.

    Raises:
        ConfigError: the folder or the database cannot be used, or an option is wrong.
        UserError: another service uses the folder.
        EngineStartError: an engine or a process did not start. No process is left running.
    """
    # Both checks come before anything starts.
    refuse_open_service(config.host, read_keys(config.keys))
    if (url := config.database) is not None:
        await asyncio.to_thread(lambda: open_engine(url).dispose())
    with _owned(config.data) as data:
        engine, (about, vocabulary) = adapted(config), model_card(config)
        logs = data / "logs"
        fleet_config = config.fleet.model_copy(update={"log_dir": config.fleet.log_dir or logs})
        # The router serves tenants' adapters, so it answers only the service's processes, by the owner's key.
        async with AsyncExitStack() as stack:
            launched = Fleet.launch(engine, fleet=fleet_config, router=config.router, api_key=new_key())
            fleet = await stack.enter_async_context(launched)
            learner = _learner(config, engine, data, fleet.url, about, vocabulary)
            api = _api(config, data, fleet.url, about)
            for child in (learner, api):
                await child.start()
                stack.push_async_callback(child.stop)
            api.options["port"] = int(api.url.rpartition(":")[2])  # also after a restart, because clients know it
            yield Service(api.url, fleet, learner, api)


def adapted(config: ServiceConfig) -> EngineConfig:
    """Return the engine's configuration with adapters, and room for a learner."""
    engine = config.engine
    usual = {"max_loras": MAX_LORAS, "max_lora_rank": MAX_RANK}
    values: dict[str, Any] = {"enable_lora": True} | {
        k: v for k, v in usual.items() if k not in engine.model_fields_set
    }
    if resolve_profile(engine) != "sim" and not {"max-cpu-loras", "max_cpu_loras"} & engine.extra_args.keys():
        most = KEPT_LORAS * values.get("max_loras", engine.max_loras)
        values["extra_args"] = {**engine.extra_args, "max-cpu-loras": most}
    gpus = usable_gpus(engine)
    ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
    shared = gpus and config.fleet.engines * ranks + config.train.ranks > len(gpus)
    if shared and "gpu_memory_utilization" not in engine.model_fields_set:
        values["gpu_memory_utilization"] = SHARED_GPU
    return engine.model_copy(update=values)


def model_card(config: ServiceConfig) -> tuple[dict[str, Any], int]:
    """Return the base model's facts for clients, and the size of its vocabulary.

    Raises:
        ConfigError: the model's configuration cannot be read.
    """
    values = _model_config(config.engine.model)
    tokenizer = config.engine.tokenizer or config.engine.model
    with reading(f"config.json of {config.engine.model}", ConfigError):
        text = values.get("text_config", values)
        longest, vocabulary = int(text["max_position_embeddings"]), int(text["vocab_size"])
        arch = str(values["architectures"][0])
    return {
        "base_model": config.base_model,
        "tokenizer": str(Path(tokenizer).resolve()) if Path(tokenizer).is_dir() else tokenizer,
        "max_context_length": config.engine.max_model_len or longest,
        "arch": arch,
    }, vocabulary


def _model_config(model: str) -> dict[str, Any]:
    """Read `config.json` of a folder or a hub name. transformers would need seconds of imports for this."""
    file = Path(model).expanduser() / "config.json"
    try:
        if not file.parent.is_dir():
            from huggingface_hub import hf_hub_download  # noqa: PLC0415  # pyright: ignore[reportUnknownVariableType]

            check_on_hub(model, "model")
            file = Path(hf_hub_download(model, "config.json"))
        return parse_json(file.read_bytes(), str(file), ConfigError)
    except OSError as error:  # the hub's errors included
        why = error.strerror or str(error).strip().partition("\n")[0]
        raise ConfigError(f"{file} cannot be read: {why}; MODEL is a checkpoint folder or a hub name") from error


def _learner(
    config: ServiceConfig, engine: EngineConfig, data: Path, fleet_url: str, about: dict[str, Any], vocabulary: int
) -> SupervisedChild:
    options = {
        "model": engine.model,
        "name": config.base_model,
        "folder": str(data / "learner"),
        "socket": str(data / "learner.sock"),
        "fleet": fleet_url,
        "max_rank": engine.max_lora_rank,
        "vocabulary": vocabulary,
        "max_tokens": about["max_context_length"],
        "train": config.train.model_copy(update={"lora": LoraConfig()}).model_dump(mode="json"),
    }
    env = {"CUDA_VISIBLE_DEVICES": ",".join(usable_gpus(engine)[: config.train.ranks])}
    log, start_s = data / "logs" / "learner.log", engine.start_timeout_s
    module = "penstock.tinker.learner_process"
    return SupervisedChild("learner", module, options, log, start_s, env, health="/models")


def _api(config: ServiceConfig, data: Path, fleet_url: str, about: dict[str, Any]) -> SupervisedChild:
    options = {
        "data": str(data),
        "keys": None if config.keys is None else str(config.keys),
        "learner": str(data / "learner.sock"),
        "fleet": fleet_url,
        "about": about,
        "host": config.host,
        "port": config.port,
    }
    env = {DATABASE: config.database or f"sqlite:///{data / 'service.db'}"}
    log, module = data / "logs" / "api.log", "penstock.tinker.api"
    return SupervisedChild("API process", module, options, log, API_START_S, env, health="/api/v1/healthz")


@contextmanager
def _owned(given: Path) -> Generator[Path]:
    """Own the data folder in this process alone while the block runs. Yield its absolute path."""
    data = given.expanduser().resolve()
    if len(os.fsencode(data / "learner.sock")) > LONGEST:
        raise UserError(f"--data {data} is too long a path for a socket; choose a shorter one")
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (mode := data.stat().st_mode) & 0o077:
            raise ConfigError(f"--data {data} is open to other users (mode {mode & 0o777:o}): chmod 700 it")
        (data / "logs").mkdir(exist_ok=True)
        lock = (data / "owner.lock").open("w")
    except OSError as error:
        raise ConfigError(f"--data {data} cannot be used: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another service uses --data {data}; stop it, or choose another folder") from None
        yield data
