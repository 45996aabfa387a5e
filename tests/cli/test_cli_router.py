"""`penstock serve --router vllm-router`: the same address, someone else's router behind it."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from openai import AuthenticationError, OpenAI
from run_cli import penstock, serving

installed = pytest.mark.skipif(
    find_spec("vllm_router") is None, reason="vllm-router is not installed (requirements/cpu.lock has it)"
)


@installed
def test_serve_behind_vllm_router_and_leave_nothing(tmp_path: Path) -> None:
    args = ("serve", "some-model", "--sim", "--engines", "2", "--router", "vllm-router", "--port", "0")
    with serving(tmp_path / "log", *args, "router.policy=round-robin", PENSTOCK_API_KEY="secret") as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)
        chat = client.chat.completions.create(
            model="some-model", messages=[{"role": "user", "content": "Hello"}], max_tokens=5
        )
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 5
        streamed = client.completions.create(model="some-model", prompt="Hello", max_tokens=5, stream=True)
        assert len("".join(chunk.choices[0].text for chunk in streamed if chunk.choices)) == 5
        with pytest.raises(AuthenticationError):
            client.with_options(api_key="wrong").completions.create(model="some-model", prompt="Hello")
        asked = penstock("status", server.url, PENSTOCK_API_KEY="secret")
        assert (asked.returncode, f"`penstock fleet list --url {server.url}` shows" in asked.stderr) == (1, True)
        assert len(server.family) == 5, "serve, two engines, the router and who ends it with us"
        assert server.signal(signal.SIGINT) == 0
        assert server.process.stdout is not None
        usage = server.process.stdout.read()
        assert ("penstock fleet list" in usage, "penstock status" in usage) == (True, False)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("router.kind=envoy", "router.kind"),
        ("router.url=nowhere", "router.url"),
    ],
)
def test_a_wrong_router_is_one_line(option: str, said: str) -> None:
    done = penstock("serve", "some-model", "--sim", "--port", "0", option)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr


def test_a_wrong_router_by_flag_names_those_there_are() -> None:
    done = penstock("serve", "some-model", "--sim", "--router", "envoy")
    assert done.returncode == 2
    assert "'penstock' or 'vllm-router'" in done.stderr


@installed
def test_a_router_open_to_other_machines_is_refused_whatever_the_key() -> None:
    args = ("serve", "some-model", "--sim", "--router", "vllm-router", "--host", "0.0.0.0", "--port", "0")
    done = penstock(*args, PENSTOCK_API_KEY="secret")
    assert done.returncode == 2
    assert "keep 127.0.0.1" in done.stderr
