"""What a server without our plugin is found to be, and what an operation that it cannot do says."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from penstock.engine.capabilities import PENSTOCK, Capabilities, EngineInfo
from penstock.engine.command import server_command
from penstock.engine.lacking import DEV_MODE, LACKING
from penstock.engine.vanilla import VanillaControl
from penstock.errors import EngineDeadError, EngineError, EngineHTTPError
from penstock.settings import EngineConfig
from penstock.sim.config import SimConfig
from penstock.sim.server import SimServer

OURS = replace(PENSTOCK, weight_transfer="nccl")
PLAIN = Capabilities(plugin=False, weight_transfer="nccl", lora=False)


async def found(**config: Any) -> EngineInfo:
    async with SimServer(SimConfig(max_model_len=512, **config)) as server:
        control = VanillaControl("e0", server.url)
        try:
            return await control.info()
        finally:
            await control.close()


async def test_with_the_plugin_nothing_is_lacking() -> None:
    info = await found(data_parallel_size=2)
    assert (info.capabilities, info.dp, info.vocab_size, info.engine) == (OURS, 2, 1024, "sim")


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logits"])
async def test_with_the_plugin_logprobs_are_of_what_is_sampled_from_only_where_it_says_so(mode: str) -> None:
    """A person may start the server without the option, and vLLM's default ignores the temperature."""
    assert (await found(logprobs_mode=mode)).capabilities == replace(OURS, sampled_logprobs=False)


async def test_plain_vllm_as_the_docs_start_it() -> None:
    info = await found(plain=True, data_parallel_size=3)
    assert info.capabilities == PLAIN
    assert (info.engine, info.vllm, info.dp, info.max_model_len, info.vocab_size) == ("vllm", "0.32.0", 3, 512, 0)
    assert (info.weight_version, info.paused) == (0, False)
    assert info.instance
    assert info.transports == ()


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ({"scale_out": False}, {"tokens": False}),
        ({"weight_transfer_backend": ""}, {"weight_transfer": None}),
        ({"weight_transfer_backend": "ipc"}, {"weight_transfer": "ipc"}),
        ({"enable_sleep_mode": False}, {"sleep": False}),
        ({"logprobs_mode": "raw_logprobs"}, {"sampled_logprobs": False}),
        ({"vllm_version": "0.26.0"}, {"abort": False, "tokens": False, "weight_transfer": None}),
        (
            {"dev_mode": False},
            {
                **dict.fromkeys(("pause", "abort", "caches", "sleep", "rpc", "sampled_logprobs"), False),
                "weight_transfer": None,
            },
        ),
    ],
    ids="-".join,
)
async def test_what_its_owner_left_out_is_found(config: dict[str, Any], changes: dict[str, Any]) -> None:
    assert (await found(plain=True, **config)).capabilities == replace(PLAIN, **changes)


async def test_versions_and_pauses_of_plain_vllm_are_read() -> None:
    async with SimServer(SimConfig(plain=True)) as server:
        control = VanillaControl("e0", server.url)
        server.engine.weights.label = "7"
        await server.engine.pause()
        info = await control.info()
        assert (info.weight_version, info.paused) == (7, True)
        server.engine.weights.label = "final"
        with pytest.raises(EngineError, match="e0: labels its weights 'final', and a version is a whole number"):
            await control.info()
        await control.close()


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"/v1/models": {"hello": "world"}}, "is neither an engine of Penstock nor a vLLM server"),
        ({"/version": 2}, "is neither an engine of Penstock nor a vLLM server"),
        ({"/version": {"version": "1"}, "/v1/models": {"data": [{"id": "m"}]}}, "max_model_len"),
        ({"/version": {"version": "1"}, "/v1/models": []}, "malformed answers of a vLLM server"),
    ],
)
async def test_something_else_is_said_to_be_something_else(answers: dict[str, Any], says: str) -> None:
    async def other(http: web.Request) -> web.Response:
        return web.json_response(answers[http.path])

    app = web.Application()
    for path in answers:
        app.router.add_get(path, other)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    control = VanillaControl("e0", f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        with pytest.raises(EngineError, match=f"e0: .*{says}"):
            await control.info()
    finally:
        await control.close()
        await runner.cleanup()


async def test_nobody_there_is_said_with_the_address() -> None:
    control = VanillaControl("e0", "http://127.0.0.1:9")
    with pytest.raises(EngineDeadError) as gone:
        await control.info()
    await control.close()
    assert str(gone.value) == (
        "engine e0: GET /penstock/info: nothing answers at http://127.0.0.1:9 (Connection refused)"
    )


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (None, "asks for an API key and none was given; a fleet and its servers share one key"),
        ("other", "does not take the API key that was given"),
    ],
)
@pytest.mark.parametrize("plain", [False, True])
async def test_another_api_key_is_said_with_the_address(key: str | None, says: str, plain: bool) -> None:  # noqa: FBT001
    async with SimServer(SimConfig(max_model_len=512, plain=plain, api_key="sesame")) as server:
        control = VanillaControl("e0", server.url, api_key=key)
        with pytest.raises(EngineHTTPError, match=f"engine e0: {server.url} {says}"):
            await control.info()
        await control.close()


def test_the_command_that_gives_the_plugin_has_all_that_a_launch_gives(tmp_path: Path) -> None:
    """Typed as it is, it starts what `Fleet.launch` would start."""
    variable, python, *typed = shlex.split(LACKING["plugin"][1].split("`")[1])
    assert (variable, python) == (DEV_MODE.split()[-1], "python")
    (tmp_path / "config.json").write_text("{}")
    launched = server_command(EngineConfig(model=str(tmp_path), profile="cpu"), api_key=None).on(8001).argv[1:]
    assert typed[:2] == list(launched[:2])

    def settings(argv: Sequence[str]) -> dict[str, Any]:
        return {name: value for name, value in pairwise(argv) if name.startswith("--")}

    given = settings(launched) | {"--model": "MODEL"}
    assert settings(typed) == {name: given[name] for name in settings(typed)}
    ours = {name for name, value in given.items() if "penstock" in str(value) or name == "--logprobs-mode"}
    assert ours <= settings(typed).keys()


def test_every_capability_can_be_explained() -> None:
    assert set(PENSTOCK.__dataclass_fields__) == set(LACKING)
