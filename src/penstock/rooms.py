"""The places of the spine where side rooms plug in; a setting or a call imports a room when it needs it.

The spine is the code that one generate, one update and one death need on engines launched here (ARCHITECTURE.md). It
imports no side room. So its readers need not know any, and an engine or a router loads only the rooms it uses.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

PLACES = {
    "access_log": "penstock.router.figures:log_access",
    "adapters": "penstock.fleet.adapters:FleetAdapters",
    "adapters.copy": "penstock.plugin.adapter_worker:copy_again",
    "adapters.core": "penstock.plugin.adapters:CoreAdapters",
    "adapters.mends": "penstock.plugin.adapter_worker:mend",
    "adapters.served": "penstock.plugin.served_adapters:ServedAdapters",
    "attach.answers": "penstock.fleet.attach:until_it_answers",
    "attach.check": "penstock.fleet.attach:check_beside",
    "attach.reread": "penstock.fleet.attach:reread",
    "attach.silence": "penstock.fleet.attach:silence",
    "attach.specs": "penstock.fleet.attach:specs_of",
    "capabilities.lacking": "penstock.engine.lacking:missing_capability",
    "checkpoint.tensors": "penstock.weights.checkpoint_names:tensors_of_config",
    "compat.bare": "penstock.plugin.compat:without_adapters",
    "compat.labels": "penstock.plugin.compat:add_labels",
    "compat.server": "penstock.plugin.compat:run_server",
    "connect": "penstock.fleet.remote:connect",
    "control.verbs": "penstock.engine.verbs:EngineVerbs",
    "delivery.broadcast": "penstock.fleet.delivery:Delivery",
    "experts.add": "penstock.engine.experts:add_experts",
    "figures": "penstock.router.figures:text",
    "generator.agent": "penstock.gateway.agent:AgentRollouts",
    "kept_kv.core": "penstock.plugin.kept_kv:KeptKV",
    "launcher.ray": "penstock.fleet.ray_engines:RayLauncher",
    "load.direct": "penstock.plugin.direct:DirectLoads",
    "launch.says": "penstock.start_report:says",
    "lent.check": "penstock.weights.transfer:check_same_bits",
    "native": "penstock.fleet.native:NativeCalls",
    "options.validate": "penstock.options:validate",
    "policy.bounded-sticky": "penstock.router.policies:BoundedSticky",
    "policy.kv-cache": "penstock.router.other_policies:KVCache",
    "policy.prefix-aware": "penstock.router.other_policies:PrefixAware",
    "policy.requests": "penstock.router.other_policies:Requests",
    "policy.round-robin": "penstock.router.other_policies:RoundRobin",
    "prefix_hashes": "penstock.prefix_hash:prefix_hashes",
    "progress.answers": "penstock.plugin.answers:AnswerReporter",
    "quantise.loader": "penstock.plugin.quantised:register_loader",
    "quantise.schemes": "penstock.plugin.quantised:find_schemes",
    "quantise.tensors": "penstock.plugin.quantised:load",
    "replies.core": "penstock.plugin.worker_replies:sendable",
    "replies.workers": "penstock.plugin.worker_replies:drain_worker_replies",
    "router.hinted_sticky": "penstock.router.other_policies:HintedSticky",
    "router.kv_usage": "penstock.router.kv:report_usage",
    "router.memory": "penstock.router.memory:Memory",
    "router.other_calls": "penstock.router.other_calls:calls",
    "router.own_calls": "penstock.router.other_calls:open_call",
    "router.running": "penstock.fleet.running_router:open_running",
    "router.running.check": "penstock.fleet.running_router:check",
    "router.unserved": "penstock.router.unserved:refusal",
    "router.unserved.kind": "penstock.router.unserved:kind_of_path",
    "router.workers": "penstock.router.workers:router_of_worker",
    "routes": "penstock.plugin.routes:Routes",
    "sleep": "penstock.plugin.sleeping:sleep",
    "spec": "penstock.plugin.spec:expected_weights",
    "spec.schemes": "penstock.plugin.spec:schemes_of",
    "sums.kernel": "penstock.weights.transfer:kernel_of",
    "sums.warm_up": "penstock.weights.transfer:warm_up",
    "token_meter.loss": "penstock.plugin.token_meter:loss_of",
    "token_meter": "penstock.plugin.token_meter:TokenMeter",
    "wake_up": "penstock.plugin.sleeping:wake_up",
    # For each transport: the trainer's store, an engine core's check of the bytes, and a worker's source.
    "store.broadcast": "penstock.weights.broadcast:BroadcastStore",
    "store.cuda_ipc": "penstock.weights.cuda_ipc:CudaIpcStore",
    "store.delta": "penstock.weights.delta:DeltaStore",
    "store_needs.delta": "penstock.weights.delta:zstd",
    "store.disk": "penstock.weights.disk:DiskStore",
    "check.delta": "penstock.weights.delta:bring",
    "check.disk": "penstock.weights.disk:check_file",
    "check.shared_memory": "penstock.weights.shared_memory:check_mapped",
    "source.broadcast": "penstock.weights.broadcast:BroadcastSource",
    "source.cuda_ipc": "penstock.weights.cuda_ipc:IpcSource",
    "source.delta": "penstock.weights.shared_memory:SharedMemorySource",  # workers map the file that the check makes
    "source.disk": "penstock.weights.disk:DiskSource",
    "source.shared_memory": "penstock.weights.shared_memory:SharedMemorySource",
}
"""Maps a place to `module:name`."""


def plugged_as(kind: str) -> list[str]:
    """Return the choices of a kind, sorted: the names after its dot."""
    return sorted(name for known, dot, name in (place.partition(".") for place in PLACES) if dot and known == kind)


def plugged_in(place: str) -> Any:
    """Import and return the class or function at a place. KeyError: no such place."""
    module, _, name = PLACES[place].partition(":")
    return getattr(import_module(module), name)
