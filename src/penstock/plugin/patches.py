"""Extensions of vLLM's classes, applied when an engine starts: our calls in its cores, and repairs (`plugged_in`).

vLLM (0.26 to 0.33) has no extension point for calls in a core. `install` adds utility methods, and a new kind of item
in the core's input queue.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from penstock.plugin import takes_adapters
from penstock.plugin.core import CoreControl, control_of
from penstock.plugin.pause import PauseState
from penstock.plugin.steps import taking_calls
from penstock.rooms import plugged_in


def install() -> None:
    """Extend the classes of this process. A second call is harmless."""
    from vllm.v1.engine.core import EngineCoreProc  # noqa: PLC0415 - only inside vLLM
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor  # noqa: PLC0415 - only inside vLLM

    if not hasattr(EngineCoreProc, "penstock_control_port"):
        _add_calls(EngineCoreProc)
    if not hasattr(MultiprocExecutor.collective_rpc, "__wrapped__"):
        MultiprocExecutor.collective_rpc = plugged_in("replies.workers")(MultiprocExecutor.collective_rpc)
    # An engine may also have fixed adapters. Its cores and workers inherit its arguments.
    if takes_adapters() or any(option.replace("_", "-").startswith("--enable-lora") for option in sys.argv):
        plugged_in("adapters.mends")()


def _add_calls(core_class: Any) -> None:
    if not hasattr(core_class, "set_weight_version"):
        plugged_in("compat.labels")(core_class)
    core_class._handle_client_request = taking_calls(core_class._handle_client_request)  # noqa: SLF001
    core_class.penstock_rpc = core_class.collective_rpc  # our own calls keep track of the weights themselves
    core_class.collective_rpc = plugged_in("replies.core")(core_class.collective_rpc)
    for name in ("control_port", "last_update", "control"):
        setattr(core_class, f"penstock_{name}", _utility(getattr(CoreControl, name), control_of))
    of_pausing = (PauseState.pause, PauseState.resume, PauseState.weights_are_in)
    for method in (*of_pausing, plugged_in("sleep"), plugged_in("wake_up")):
        utility = _utility(method, lambda core: control_of(core).pausing)
        setattr(core_class, f"penstock_{method.__name__}", utility)


def _utility(method: Callable[..., Any], owner: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(method)  # vLLM reads the signature
    def call(core: Any, *args: Any) -> Any:
        return method(owner(core), *args)

    return call
