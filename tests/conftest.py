"""Real vLLM engines shared by the whole run: they take 20-40 s to start on two cores."""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from hold import Hold
    from http_engine import HTTPEngine
    from nano_models import History
    from penstock.control_types import KV
    from penstock.engine.launch import EngineProcess
    from penstock.weights.manifest import WeightManifest

# Models here are so small that a second thread costs more than it gives; before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Each process that imports aiohttp, and each client of httpx, reads all certificates of the system, which takes 60 ms.
os.environ.setdefault("SSL_CERT_FILE", str(Path(__file__).with_name("certificate.pem")))

# Engines of tests import `held_scheduler`.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])

if find_spec("hypothesis") is not None:  # a GPU machine need not have it
    from hypothesis import HealthCheck, settings

    # That a machine stands still for a while says nothing about what is tested.
    settings.register_profile("ours", parent=settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("ours")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, what needs real engines is left to one process."""
    from spread import ByFile

    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Leave what was imported out of collections of garbage: they walked a million objects, and each took a second."""
    gc.collect()
    gc.freeze()


LIVE_KEY = "of-the-engine-of-these-tests"


@pytest.fixture(autouse=True)
def _warnings_are_logged() -> None:
    """To build its app, vLLM sets the root logger's level to ERROR; tests of messages need the default."""
    logging.getLogger().setLevel(logging.WARNING)


@dataclass
class LiveEngine:
    """A real vLLM CPU engine, and what it has served."""

    key = LIVE_KEY

    engine: HTTPEngine
    process: EngineProcess
    history: History
    model_path: Path
    hold: Hold
    """Of its requests, so that they are in flight when something comes."""

    async def update(self, model: Any, kv: KV = "recompute") -> Any:
        """Put `model` in force and remember it under its version."""
        report = await self.engine.update_weights(model.named_parameters(), kv=kv)
        self.history.models[report.version] = model
        return report

    def took(self, manifest: WeightManifest, model: Any) -> None:
        """Note a version that came past `update`."""
        self.engine._store.commit(manifest)
        self.engine._version = manifest.version
        self.history.models[manifest.version] = model


@pytest.fixture(scope="session")
def nano_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A nano checkpoint with tied embeddings."""
    from nano_models import save_dense

    return save_dense(tmp_path_factory.mktemp("nano"))


@pytest.fixture(scope="session")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Hold:
    """Of requests in engines that were started with its `extra_args`."""
    from hold import Hold

    return Hold(tmp_path_factory.mktemp("hold"))


@pytest.fixture(scope="session")
async def live(nano_path: Path, hold: Hold, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LiveEngine]:
    """One real engine on the nano checkpoint."""
    from http_engine import launched_engine
    from nano_models import History
    from penstock.settings import EngineConfig

    # The same tests run on a GPU machine: PENSTOCK_TEST_ENGINE='{"profile": "gpu", "extra_args": {...}}'.
    given = json.loads(os.environ.get("PENSTOCK_TEST_ENGINE", '{"profile": "cpu"}'))
    tools = {"enable-auto-tool-choice": True, "tool-call-parser": "hermes"}
    tools |= {"weight-transfer-config": '{"backend": "tests_shm"}'}  # `native_backend.py`
    options = {"model": str(nano_path), "max_model_len": 1024, "dtype": "float32"}
    extra_args = {**tools, **hold.extra_args, **given.get("extra_args", {})}
    config = EngineConfig(**{**options, **given, "extra_args": extra_args})
    logs = tmp_path_factory.mktemp("logs")
    async with launched_engine(config, "live", logs, api_key=LIVE_KEY) as (engine, process):
        yield LiveEngine(engine, process, History.of(nano_path), nano_path, hold)
