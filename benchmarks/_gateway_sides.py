"""Sides of `gateway.py`: our gateway and two peers as processes, what they stand before, and a tokenizer for all.

The peers have environments of their own: `PENSTOCK_VERIFIERS_PYTHON` is a Python with verifiers 0.4.0, and
`PENSTOCK_COOKBOOK_PATH` a folder that `pip install --target` filled with tinker-cookbook 0.6.1 (as `make test-tinker`
does in `.venv-tinker`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _common
import psutil

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "tests"))

from chat_model import MARKERS, TEMPLATE  # noqa: E402

KEY = "key-of-the-benchmark"
MODEL = "sim-model"
VOCABULARY = 4096
CONTEXT = 16_384
START_S = 90.0
ANSWER_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Side:
    """A gateway under load: its process, and address and key of a session by its number."""

    name: str
    process: subprocess.Popen[Any]
    address: Callable[[int], tuple[str, str]]

    def cpu_s(self) -> float:
        """Processor time of its process, all threads (clock_getcpuclockid(3)); a peer's store beside it is left out."""
        return time.clock_gettime((~self.process.pid << 3) | 2)

    def resident_mib(self) -> float:
        """Resident memory."""
        return psutil.Process(self.process.pid).memory_info().rss / 2**20


def save_tokenizer(folder: Path) -> Path:
    """Save a tokenizer with the markers and the chat template of Qwen3, trained on this project's documentation."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=list(MARKERS), show_progress=False)
    tokenizer.train([str(file) for file in sorted((HERE.parent / "docs").rglob("*.md"))], trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in MARKERS[:4]])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKERS[4:]])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "unk_token": "<unk>", "clean_up_tokenization_spaces": False, "chat_template": TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def engine(**options: Any) -> Iterator[str]:
    """A simulated engine; gives its URL."""
    port = _common.free_port()
    given = {"vocab_size": VOCABULARY, "max_model_len": CONTEXT, "served_model_name": MODEL, **options}
    words = ["-m", "penstock", "sim", "--port", str(port), *(f"{key}={value}" for key, value in given.items())]
    with _process([sys.executable, *words], stdout=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        _until(f"{url}/health", process)
        yield url


@contextmanager
def penstock(engine_url: str, tokenizer: Path, *options: str, name: str = "penstock") -> Iterator[Side]:
    """Our gateway, as the command starts it."""
    port = _common.free_port()
    words = ["-m", "penstock", "gateway", engine_url, "--tokenizer", str(tokenizer), "--port", str(port), *options]
    environment = {**os.environ, "PENSTOCK_GATEWAY_KEY": KEY}
    with _process([sys.executable, *words], stdout=subprocess.DEVNULL, env=environment) as process:
        base = f"http://127.0.0.1:{port}"
        _until(f"{base}/health", process)
        yield Side(name, process, lambda number: (f"{base}/s/n{number}/v1/chat/completions", KEY))


@contextmanager
def verifiers(engine_url: str, tokenizer: Path, sessions: int) -> Iterator[Side]:
    """The interception server of verifiers with its training client."""
    words = [os.environ["PENSTOCK_VERIFIERS_PYTHON"], str(HERE / "_verifiers_side.py"), engine_url, MODEL]
    words += [str(tokenizer), str(sessions), str(ANSWER_TOKENS)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with _process(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        assert process.stdout is not None  # noqa: S101 - a pipe was asked for
        info = json.loads(process.stdout.readline())
        url = f"{info['url']}/v1/chat/completions"
        yield Side("verifiers", process, lambda number: (url, info["keys"][number]))


@contextmanager
def cookbook(tokenizer: Path, folder: Path) -> Iterator[Side]:
    """The capture proxy of tinker-cookbook with its store, before a Tinker service that answers at once."""
    stub = [sys.executable, str(HERE / "_tinker_stub.py"), str(ANSWER_TOKENS)]
    with _process(stub, stdout=subprocess.PIPE) as service:
        assert service.stdout is not None  # noqa: S101
        url, port = service.stdout.readline().decode().strip(), _common.free_port()
        words = [sys.executable, "-m", "tinker_cookbook.capture.proxy.serve", "--port", str(port)]
        words += ["--base-model", str(tokenizer), "--renderer-name", "qwen3", "--store-data-dir", str(folder / "store")]
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), os.environ["PENSTOCK_COOKBOOK_PATH"])))
        environment = {**os.environ, "PYTHONPATH": path, "TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-benchmark"}
        with _process(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as process:
            base = f"http://127.0.0.1:{port}"
            _until(f"{base}/healthz", process)
            yield Side(
                "tinker-cookbook", process, lambda number: (f"{base}/r/run/b/traj/{number}/v1/chat/completions", KEY)
            )


def _until(url: str, process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):  # noqa: S310 - of this file
                return
        except (OSError, urllib.error.URLError):
            pass  # not listening yet
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.args} did not get ready (exit status {process.poll()})")
        time.sleep(0.1)


@contextmanager
def _process(words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    process = subprocess.Popen(words, **options)
    try:
        children = psutil.Process(process.pid)
        yield process
        left = children.children(recursive=True)  # such as a peer's store
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
    for child in left:
        if child.is_running():
            child.kill()
