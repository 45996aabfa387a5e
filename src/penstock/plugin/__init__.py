"""The only code that runs inside vLLM, through vLLM's own extension points.

- `register` (entry point `vllm.general_plugins`): control in the engine core.
- `worker.WorkerExtension` (`--worker-extension-cls`): loads and checksums weights on a worker.
- `middleware.PenstockMiddleware` (`--middleware`): our routes on the API server.
- `server`: starts vLLM's API server as a child that ends with its launcher.

Works with vLLM 0.26 to 0.33. `compat.py` handles their differences; `vllm_names.txt` lists every name of vLLM in use.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from penstock.errors import PenstockError
from penstock.rooms import plugged_in

QUANTISING_LOADER = "penstock_quantising"
"""Name of our loader for vLLM's `--load-format`. It quantises a checkpoint of floats while reading it."""
LOADER_VARIABLE = "PENSTOCK_LOADER"
"""Environment variable with that name as its value, set if the loader is needed."""
INSTANCE_VARIABLE = "PENSTOCK_INSTANCE"
"""Environment variable that gives the id of one server to its processes."""


def register() -> None:
    """Extend the core. vLLM calls this in every process, maybe more than once."""
    from penstock.plugin import patches  # noqa: PLC0415 - only inside vLLM

    patches.install()
    if os.environ.get(LOADER_VARIABLE):
        plugged_in("quantise.loader")()


def takes_adapters() -> bool:
    """Whether vLLM allows adapters to come at run time, as in `vllm.envs`."""
    return os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0").strip().lower() in {"1", "true"}


def attempt(work: Callable[[], Any], what: str) -> tuple[Any, Exception | None]:
    """Call `work`. Return its result, or its error for another thread or process.

    vLLM passes on only the text of an error, or ends the process. An error that is not ours is logged here, by vLLM's
    logger, the only one with a handler in a worker.
    """
    logger = logging.getLogger("vllm.penstock")
    try:
        return work(), None
    except Exception as error:
        if not isinstance(error, PenstockError):
            logger.exception("%s failed", what)
        return None, error
