"""Engine processes on this machine, without Ray or anything else in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.config import EngineConfig
from penstock.engine.command import resolve_profile
from penstock.engine.process import EngineProcess
from penstock.fleet.gpus import place, visible_gpus


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """Starts engines as children of this process; see `launched_engines.Launcher`."""

    api_key: str | None
    """What they ask for from now on."""
    log_dir: Path
    """Each appends to a file of its name."""

    async def launch(self, config: EngineConfig, name: str, gpus: Sequence[str]) -> EngineProcess:
        """Start a server that sees `gpus`, and return when it is ready. Raises EngineStartError or ConfigError."""
        return await EngineProcess.launch(config, name=name, log_dir=self.log_dir, api_key=self.api_key, gpus=gpus)

    async def place(self, config: EngineConfig, taken: Sequence[Sequence[str]]) -> tuple[str, ...]:
        """GPUs of this machine for one engine more. Raises ConfigError where there is no room."""
        return place(config, visible_gpus(), taken) if resolve_profile(config) == "gpu" else ()

    async def release(self, name: str) -> None:
        """Nothing to do: who has which GPUs is known from the engines that there are."""

    async def close(self) -> None:
        """Nothing to do: every engine has ended."""
