#!/usr/bin/env bash
# Builds .venv for a machine without a GPU: torch's CPU build, vLLM's CPU build, everything pinned, Penstock itself.
# Safe to run again: what is already there stays. PYTHON names the interpreter to build on (default: python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly TORCH="torch==2.13.0+cpu"
readonly TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"
readonly VENV=.venv

say() { printf '==> %s\n' "$*"; }
fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 2
}

# What requirements/cpu.lock has wheels for.
is_fitting() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.11 python3.12 python3.13; do
        if is_fitting "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11, 3.12 or 3.13 is needed; install one, or name it: make setup PYTHON=/path/to/python3.12"
}

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check -qq "$@"; }

if ! is_fitting "$VENV/bin/python"; then
    python=$(find_python)
    say "creating $VENV with $("$python" --version)"
    "$python" -m venv "$VENV" || fail "cannot create $VENV (on Debian and Ubuntu: apt install python3-venv)"
fi

# reasoning-gym needs pycosat, which is published as source only.
can_compile() {
    command -v "${CC:-cc}" >/dev/null && "$VENV/bin/python" -c \
        'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
}
"$VENV/bin/python" -c 'import pycosat' 2>/dev/null || can_compile \
    || fail "a C compiler and Python's headers are needed (on Debian and Ubuntu: apt install gcc python3-dev)"

if ! "$VENV/bin/python" -c 'import torch, sys; sys.exit(torch.__version__ != "2.13.0+cpu")' 2>/dev/null; then
    say "installing $TORCH"
    # A machine may have CPU builds at hand (a mirror, a folder of wheels); PyPI itself has none.
    pip install --no-deps "$TORCH" 2>/dev/null \
        || pip install --no-deps --index-url "$TORCH_CPU_INDEX" "$TORCH" \
        || fail "could not install $TORCH, neither from pip's own index nor from $TORCH_CPU_INDEX"
fi

say "installing requirements/cpu.lock (vLLM for CPU, the trainer's libraries, the development tools; a few minutes)"
pip install --no-deps --requirement requirements/cpu.lock
say "installing penstock"
pip install --no-deps --no-build-isolation --editable .

version=$("$VENV/bin/python" -c 'import vllm; print(vllm.__version__)' 2>/dev/null) \
    || fail "vLLM does not import; see: $VENV/bin/python -c 'import vllm'"
say "ready: vLLM $version (CPU), $("$VENV/bin/penstock" --version)"
