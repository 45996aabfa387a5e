"""Many engines used as one: generation through a router, and control of every engine."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from penstock.checks import reading
from penstock.control_types import KV, PauseMode, UpdateReport
from penstock.engine.client import Counters, DataClient
from penstock.engine.openai import OpenAIEngine, T, each_until_lost
from penstock.errors import ConfigError, StateError, UserError
from penstock.fleet.lifecycle import State
from penstock.fleet.roster import Roster
from penstock.fleet.serving import ServingFleet
from penstock.rooms import plugged_in
from penstock.router.state import Admin
from penstock.router_settings import RouterConfig
from penstock.settings import EngineConfig, FleetConfig, ServerSpec

if TYPE_CHECKING:
    from penstock.fleet.adapters import AdapterStatus
    from penstock.fleet.elastic import EngineStatus
    from penstock.fleet.launch import PendingFleet
    from penstock.fleet.update import Operations


class FleetStoppedError(StateError):
    """A call of another process has ended the fleet."""

    def __init__(self) -> None:
        super().__init__("the fleet was stopped, by `penstock fleet stop` or another program")


class Fleet(ServingFleet, OpenAIEngine):
    """N engines behind one router, used as one engine (R1). Get a fleet with `launch` or `connect`.

    Generation goes through the router. Control goes to every engine directly and waits for every answer. An engine that
    fails a call that changes its state is dead, and out of the router's set before the call returns.
    """

    def __init__(
        self,
        url: str,
        roster: Roster,
        operations: Operations,
        elastic: Any,
        data: DataClient,
        owned: AsyncExitStack,
        endpoint: Any = None,
    ) -> None:
        super().__init__(url, roster, operations, data, owned)
        self._elastic = elastic
        self.endpoint = endpoint
        """Control socket for other processes (`service.Endpoint`); None if another process owns the fleet."""

    @property
    def counters(self) -> Counters:
        """Counters of requests sent again, and of tokens requeued and wasted."""
        return self.data.counters

    @staticmethod
    def launch(
        model: str | Path | EngineConfig,
        engines: int | None = None,
        *,
        attach: Sequence[str | ServerSpec] = (),
        fleet: FleetConfig | None = None,
        router: RouterConfig | None = None,
        api_key: str | None = None,
        **options: Any,
    ) -> PendingFleet:
        """Start engines and a router: `async with Fleet.launch("path", engines=2) as fleet:`.

        Await the result instead for a fleet that ends with `teardown`.

        Args:
            model: checkpoint path or hub name, or a whole `EngineConfig`.
            engines: how many to start; default: `fleet.engines`, 1; 0: only attach servers.
            attach: running servers of the same model: `http://HOST:PORT`, followed by `#dp=N` to address N
                data-parallel ranks one by one. They run on after `teardown`.
            fleet: see `FleetConfig`.
            router: see `RouterConfig`.
            api_key: the key that the router asks of clients; default: none, and it listens on 127.0.0.1 only. Launched
                engines have a random key of the fleet; attached servers must have this one.
            options: fields of `EngineConfig`, `FleetConfig` and `RouterConfig`, which override those of a whole config.

        Raises:
            ConfigError: at once, for an unknown option or a wrong value; no process was started.
            EngineStartError: when entered, if an engine or the router does not start; no process is left running.
        """
        from penstock.fleet.launch import launch  # noqa: PLC0415 - launch builds a Fleet

        if engines is not None:
            options["engines"] = engines
        if attach:
            options["attach"] = attach
        return launch(model, options, fleet=fleet, router=router, api_key=api_key)

    @staticmethod
    def connect(
        target: str | Sequence[str | ServerSpec],
        *,
        api_key: str | None = None,
        control_timeout_s: float = 60.0,
        request_timeout_s: float = 3600.0,
        **options: Any,
    ) -> PendingFleet:
        """Use running engines, which run on after `teardown`.

        Args:
            target: the router's URL of a fleet that another process of yours on this machine owns; calls go to that
                owner. Or a list of engine URLs as for `attach` of `launch`: this process owns them from now on, behind
                a router that it starts.
            api_key: the router's key for clients; for engine URLs, the engines' key, which the router then asks for
                too.
            control_timeout_s: deadline of a control call.
            request_timeout_s: deadline of a generation request.
            options: fields of `FleetConfig`, except those of starting engines, and of `RouterConfig`; for a fleet that
                another process owns, only `stream_chunk_tokens`.

        Raises:
            ConfigError: at once, for an unknown option, a wrong value, or an option that the owner has chosen.
            EngineDeadError: when entered, if no process here owns a fleet there, or an engine does not answer;
                `StateError`: the engines serve different weight versions.
        """
        return plugged_in("connect")(
            target, options, api_key=api_key, control_timeout_s=control_timeout_s, request_timeout_s=request_timeout_s
        )

    # --- sizes -------------------------------------------------------------------------------------------------------

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks of an engine (the most, if they differ)."""
        return max(m.info.tp for m in self._roster.members)

    @property
    def pp_size(self) -> int:
        """Pipeline-parallel ranks of an engine (the most, if they differ)."""
        return max(m.info.pp for m in self._roster.members)

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks of all engines, dead ones included; at least one each."""
        return sum(m.info.dp for m in self._roster.members if m.state is not State.STOPPED)

    @property
    def dtype(self) -> str | None:
        """Torch's name of the engines' dtype, such as `bfloat16`; None: unknown."""
        return next((m.info.dtype for m in self._roster.members if m.info.dtype), None)

    @property
    def router_admin(self) -> Admin:
        """The router's control side, with the key it needs."""
        return cast("Admin", self._roster.admin)  # side rooms make each, with its state

    async def set_policy(
        self,
        policy: str | Sequence[str],
        *,
        prefix_length: int | None = None,
        overload_threshold: float | None = None,
    ) -> None:
        """Place requests by other policies from now on; sessions stay where they live.

        See `RouterConfig` for the options; one left out stays as it is. ConfigError: an option is wrong.
        """
        with reading("policy", ConfigError):
            names = policy if isinstance(policy, str) else ",".join(policy)
        given = {"policy": names, "prefix_length": prefix_length, "overload_threshold": overload_threshold}
        await self._elastic.set_policy({name: value for name, value in given.items() if value is not None})

    def key_of(self, engine: str) -> str | None:
        """Return the key for direct calls to an engine, or None. Never show or log it."""
        return next((member.api_key for member in self._roster.members if member.name == engine), None)

    def each_while_serving(self, items: AsyncGenerator[T]) -> AsyncGenerator[T]:
        """Yield the items of a stream, never None; raise as `while_serving`."""
        self._check_open()
        return each_until_lost(self._roster, items)

    # --- pause, resume, memory ---------------------------------------------------------------------------------------

    async def pause_generation(
        self,
        mode: PauseMode = PauseMode.KEEP,
        *,
        clear_cache: bool = True,
        timeout_s: float | None = None,
        adapter: str | None = None,
    ) -> None:
        """Stop making tokens on every engine (R22, R23). New requests wait in the router.

        While mode `wait` waits for requests, `abort_generation` ends them at once and `resume_generation` undoes the
        pause. Cancelling this call undoes a pause of any mode; over `connect`, `wait` waits first.

        Args:
            mode: the treatment of requests in flight.
            clear_cache: recompute KV at resume, so that no cached block outlives its weights (G5).
            timeout_s: seconds after which the pause is undone and generation goes on. Without it, a late engine is dead
                after a control call's deadline. Mode `wait` lasts as long as the longest request in flight, so there a
                request's deadline applies.
            adapter: pause only the requests of this LoRA adapter (R25). They stop at a token and keep their tokens.
                Resume recomputes them under the version then in force. All other requests go on. `mode` must be `keep`;
                `clear_cache` and `timeout_s` have no effect.

        Raises:
            StateError: already paused.
            UserError: another mode than `keep` with `adapter`.
            DeadlineError: not within `timeout_s`.
        """
        if adapter is not None:
            if PauseMode(mode) is not PauseMode.KEEP:
                raise UserError(
                    f"mode is {mode!s}, which one adapter's pause has not: its requests stop at a token and keep their "
                    "tokens; leave mode out"
                )
            await self._operations.adapters.pause(adapter)
            return
        await self._operations.pause(mode, clear_cache=clear_cache, timeout_s=timeout_s)

    async def resume_generation(self, *, adapter: str | None = None) -> None:
        """Resume after `pause_generation` with the same `adapter`. StateError: not paused."""
        await (self._operations.resume() if adapter is None else self._operations.adapters.resume(adapter))

    async def wait_until_resumed(self, adapter: str, *, timeout_s: float) -> None:
        """Wait until an adapter is not paused. DeadlineError: `timeout_s` seconds passed."""
        await self._operations.adapters.wait(adapter, timeout_s)

    async def abort_generation(self) -> None:
        """End requests in flight with their tokens and reason `abort`; serve new ones."""
        if self.data.unreported is not None:
            self.data.unreported.expect_aborts()
        await self._operations.abort()

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes on every engine, and recompute running requests."""
        await self._operations.reset_prefix_cache()

    async def sleep(self, level: int = 1) -> None:
        """Free memory for a colocated trainer (R26); requests wait until `wake_up`.

        Requests wait until all memory is back; those in flight then go on from their tokens. Level 2 drops the weights,
        so requests also wait for the next update.
        """
        await self._operations.sleep(level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back on every engine; `tags`: only `weights` or `kv_cache`."""
        await self._operations.wake_up(tags)

    # --- weights -----------------------------------------------------------------------------------------------------

    async def init_weight_update_communicator(self, init_info: Mapping[str, Any]) -> None:
        """Call vLLM's native `/init_weight_transfer_engine` on every engine.

        A `rank_offset` in `init_info` is the first engine's. Each later engine's is greater by the ranks before it.
        """
        await self._operations.native.init(init_info)

    async def update_named_weights(self, update_info: Mapping[str, Any], *, version: int) -> None:
        """Run vLLM's native update on every engine.

        The fleet keeps no copy of these weights. An engine that joins later waits for the next `update_weights`.

        Raises:
            StateError: generation is not paused.
            UserError: `version` is not greater than every earlier one.
        """
        await self._operations.native.update(update_info, version)

    async def recovered(self, report: UpdateReport, *, timeout_s: float = 60.0) -> UpdateReport:
        """Return an update's report with `tokens_lost` once engines are as fast as before.

        The next update and `timeout_s` seconds also end the wait; the report then has the loss so far. Dead engines
        have no loss.
        """
        if not isinstance(cast("object", report), UpdateReport):
            raise UserError(f"recovered takes the report of an update, got {repr(report)[:200]}; give what it returned")
        names = [engine.engine for engine in report.engines]
        losses = await self._elastic.losses(names, report.version, report.adapter, timeout_s)
        return replace(report, engines=tuple(replace(one, loss=losses.get(one.engine)) for one in report.engines))

    # --- engines that come and go ------------------------------------------------------------------------------------

    async def add_engines(self, count: int = 1) -> tuple[str, ...]:
        """Start more engines; return their names once they serve the fleet's weights.

        Raises:
            StateError: this fleet launched no engines.
            ConfigError: no GPU has room.
            EngineStartError: the error of the first that did not start; the others serve.
        """
        self._check_open()
        return await self._elastic.add(count)

    async def attach(self, *servers: str | ServerSpec) -> tuple[str, ...]:
        """Let running servers serve in this fleet too; return their names.

        A server with other weights gets the fleet's, if it has our plugin and the weights are here. Otherwise it waits
        for an update, and serves no request before.

        Args:
            servers: `http://HOST:PORT`, followed by `#dp=N` to address N data-parallel ranks one by one.

        Raises:
            ConfigError: a malformed address.
            UserError: a server belongs to this fleet already.
            EngineDeadError, EngineHTTPError: no program answers there, or the program is no engine.
        """
        self._check_open()
        return await self._elastic.attach([spec.model_dump() for spec in plugged_in("attach.specs")(servers)])

    async def drain(self, engine: str | int, *, timeout_s: float | None = None) -> bool:
        """Send an engine no new session; return whether it finished the rest in time.

        `engine`: its name or index. Later turns of its sessions still go there, until they finish or
        `router.session_ttl_s` has passed. `timeout_s`: seconds, by default `fleet.drain_timeout_s`.

        Raises:
            UserError: the engine is unknown, or fewer than `min_engines` others are left.
            StateError: the engine does not serve.
        """
        self._check_open()
        return await self._elastic.drain(engine, timeout_s)

    async def remove(self, engine: str | int, *, timeout_s: float | None = None) -> None:
        """End an engine when its requests have finished; raises as `drain`.

        Its sessions, and requests left after `timeout_s`, go on elsewhere.
        """
        self._check_open()
        await self._elastic.remove(engine, timeout_s)

    async def get_num_unfinished_requests(self, index: int | None = None) -> int:
        """Count requests running or waiting on engine `index` or all, not in the router."""
        self._check_open()
        return sum(stats.running + stats.waiting for stats in await self._elastic.stats(index))

    async def get_cache_usage(self, index: int | None = None) -> float:
        """Return the fraction of KV blocks in use on engine `index`, or the mean over all."""
        self._check_open()
        usages = [stats.kv_cache_usage for stats in await self._elastic.stats(index)]
        return sum(usages) / len(usages)

    async def collective_rpc(
        self, method: str, timeout_s: float = 60.0, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call a worker method on every worker; results are by engine, then by rank.

        Raises:
            FanOutError: some engines failed; it holds errors and answers. A single engine: its own error.
        """
        self._check_open()
        if isinstance(args, str):
            raise UserError(f"args is the text {args!r}; give a list of arguments")
        with reading("arguments of collective_rpc"):  # the encoder of requests would write NaN as null
            json.dumps((*args, kwargs), allow_nan=False, default=str)
        return await self._operations.collective_rpc(method, timeout_s, args, kwargs)

    async def update_adapter(
        self,
        name: str,
        tensors: Iterable[tuple[str, Any]],
        *,
        config: Mapping[str, Any],
        version: int | None = None,
        kv: KV = "recompute",
    ) -> UpdateReport:
        """Put a new version of a LoRA adapter in force while requests are in flight.

        Only these tensors are sent. The adapter's requests in flight go on under the new version, and the spans of
        their tokens name adapter and version. New requests find no KV of an older version.

        Args:
            name: name by which requests select it, as `model` or `adapter`.
            tensors: `(PEFT's checkpoint name, torch tensor or numpy array)`.
            config: PEFT's `adapter_config` as a mapping: `r`, `lora_alpha`, `target_modules`, ...
            version: greater than any earlier one of this name; default: the last one + 1, at first 1.
            kv: KV of the adapter's requests in flight: `recompute` or `keep_in_flight`, as for `update_weights`; `keep`
                equals `keep_in_flight` here.

        Raises:
            WeightsError: it does not fit the model, or holds NaN; the previous version stays in force.
            MissingCapabilityError: an engine takes no adapters.
            StateError: there is no room for another name.
        """
        return await self._operations.adapters.update(name, tensors, config, version, kv)

    async def load_adapter(self, name: str, path: str, *, timeout_s: float) -> UpdateReport | None:
        """Load a LoRA adapter saved by PEFT as a new version; None: it is unchanged."""
        return await self._operations.adapters.load(name, path, timeout_s)

    async def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter on every engine. StateError: it has requests in flight."""
        await self._operations.adapters.unload(name)

    async def pin_adapter(self, name: str, *, pinned: bool = True) -> None:
        """Protect an adapter from eviction at `fleet.max_adapters`, or end that."""
        await self._operations.adapters.pin(name, pinned=pinned)

    async def adapters(self) -> Mapping[str, AdapterStatus]:
        """Return every LoRA adapter's version, and its requests over all engines, by name."""
        return await self._operations.adapters.statuses()

    async def engines(self, *, stats: bool = True) -> tuple[EngineStatus, ...]:
        """Return each engine that ever joined: state, reason, and with `stats` its load."""
        self._check_open()
        return await self._elastic.statuses(stats=stats)

    async def _end(self) -> None:
        try:
            await super()._end()
        finally:
            if self.endpoint is not None:
                await self.endpoint.close()

    def _ended(self) -> StateError:
        if self.endpoint is not None and self.endpoint.stopping.is_set():
            return FleetStoppedError()
        return super()._ended()
