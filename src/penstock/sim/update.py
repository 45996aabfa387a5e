"""Weight updates of the simulated engine: ours (prepare, apply) and vLLM's own (init, start, update, finish)."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from penstock.errors import StateError
from penstock.sim.broadcast import SimGroup
from penstock.sim.faults import FaultKind, Phase
from penstock.sim.sequence import version_of
from penstock.sim.weights import check_manifest
from penstock.sim.weights import checksum as checksum_of
from penstock.types import PauseMode
from penstock.weights.broadcast import TRANSPORT as BROADCAST
from penstock.weights.manifest import WeightManifest

if TYPE_CHECKING:
    from penstock.sim.engine import SimEngine


class WeightState:
    """Which weights are in force, how they are labelled, and the update under way."""

    def __init__(self, engine: SimEngine) -> None:
        self.label = "default"
        """What tokens are labelled with; vLLM's word for the weights as loaded."""
        self.identity = 0
        """The weights themselves: what tokens depend on. Equal to the label's version unless somebody errs."""
        self.checksum = "0" * 16
        self.kv_kept: int | None = None
        """The version of the last update, if that kept the KV cache."""
        self.unfit: str | None = None
        """Why generation would kill the engine: an update failed half-way."""
        self.group = SimGroup()
        """Over which it receives what is broadcast."""
        self._engine = engine
        self._prepared: tuple[WeightManifest, str] | None = None
        self._initialised = False
        self._round: str | None = None
        """Step of vLLM's protocol that was done last: `started` or `updated`."""
        self._unnamed = itertools.count(-1, -1)

    @property
    def version(self) -> int:
        """The label as our integer."""
        return version_of(self.label)

    # --- ours ---------------------------------------------------------------------------------------------------------

    async def prepare(self, manifest: WeightManifest) -> None:
        """Check an offered version while generating; nothing in force changes.

        Raises:
            WeightsError: it does not fit.
        """
        engine = self._engine
        await engine.at(Phase.PREPARE)
        await engine.clock.sleep(engine.config.prepare_seconds)
        engine.check_alive()
        if manifest.transport == BROADCAST:
            self.group.check(manifest)
        self._prepared = (manifest, check_manifest(manifest, engine.config.tensor_specs))

    async def apply(self, version: int, *, clear_cache: bool = True) -> dict[str, Any]:
        """Pause (keep), load what was prepared, label it, resume; an engine that was paused stays paused.

        Returns:
            `version`, `seconds` of each phase, `preempted`, `checksum`, as ARCHITECTURE.md has it.

        Raises:
            StateError: that version was not prepared; nothing was changed.
            TransferError: its bytes did not all come. The engine is torn, and paused until a version came whole.
        """
        prepared = self._prepared
        if prepared is None or prepared[0].version != version:
            has = "none is" if prepared is None else f"{prepared[0].version} is"
            raise StateError(f"weight version {version} was not prepared ({has}); call prepare first")
        self._prepared = None
        engine, clock = self._engine, self._engine.clock
        begin = clock.time()
        preempted = await engine.pause(PauseMode.KEEP, clear_cache=clear_cache)
        paused = clock.time()
        engine.holds.weights_are_out()
        checksum = await self._load(prepared[0], prepared[1])
        self.kv_kept = None if clear_cache else version
        loaded = clock.time()
        await engine.holds.weights_are_in()
        end = clock.time()
        seconds = {"pause": paused - begin, "load": loaded - paused, "resume": end - loaded, "bubble": end - begin}
        return {"version": version, "seconds": seconds, "preempted": preempted, "checksum": checksum}

    async def _load(self, manifest: WeightManifest, checksum: str) -> str:
        engine, version = self._engine, manifest.version
        self.unfit = f"loading version {version} did not end"
        await engine.at(Phase.LOAD)
        await engine.clock.sleep(engine.config.load_seconds)
        if manifest.transport == BROADCAST:
            checksum = checksum_of(await self.group.receive(manifest))
        engine.check_alive()
        self.unfit = None
        self.identity, self.checksum = version, checksum
        if engine.faults.take(Phase.LOAD, FaultKind.WRONG_LABEL) is None:
            self.label = str(version)
        wrong = engine.faults.take(Phase.LOAD, FaultKind.WRONG_CHECKSUM)
        return checksum if wrong is None else checksum[::-1]

    # --- vLLM's -------------------------------------------------------------------------------------------------------

    def init_transfer(self) -> None:
        """`/init_weight_transfer_engine`."""
        self._engine.check_alive()
        self._initialised = True

    def start(self) -> None:
        """`/start_weight_update`. While requests run it kills the engine, as it kills vLLM.

        Raises:
            StateError: not initialised, or a round is under way.
            EngineDeadError: it was not paused.
        """
        engine = self._engine
        engine.check_alive()
        if not self._initialised:
            raise StateError("Weight transfer engine is not initialized; call /init_weight_transfer_engine first.")
        if self._round is not None:
            raise StateError("A weight update is already active; finish it first.")
        if engine.scheduler.running and not engine.paused:
            engine.die(FaultKind.CORE_DEATH, "start_weight_update while requests run")
            engine.check_alive()
        self._round = "started"
        self.unfit = "a weight update was started and not finished"

    async def update(self) -> None:
        """`/update_weights`. Raises StateError before `start`; a failure after it leaves the engine unfit."""
        self._engine.check_alive()
        if self._round is None:
            raise StateError("start_weight_update must be called before update_weights.")
        await self._engine.at(Phase.LOAD)
        await self._engine.clock.sleep(self._engine.config.load_seconds)
        self._engine.check_alive()
        self._round = "updated"

    def finish(self, version: str | None) -> None:
        """`/finish_weight_update`: the weights are in force, labelled `version` where one is given."""
        self._engine.check_alive()
        if self._round is None:
            raise StateError("start_weight_update must be called before finish_weight_update.")
        if self._round == "updated":
            self.unfit = None
            self.identity = next(self._unnamed) if version is None else version_of(version)
        if version is not None:
            self.label = version
        self._round = None

    def relabel(self, version: str) -> None:
        """`/update_weight_version`: another label for the same weights."""
        self._engine.check_alive()
        self.label = version
