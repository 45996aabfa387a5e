"""The facade over a fleet of simulated engines: blocking, asynchronous, timeouts, adapters, the end."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

pytest.importorskip("vllm")

import torch
from vllm import RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest

from patience import WAIT_S, asked
from penstock import AsyncVLLM
from penstock.errors import (
    ConfigError,
    DeadlineError,
    EngineDeadError,
    EngineError,
    EngineHTTPError,
    RequestError,
    StateError,
    UserError,
)
from penstock.facade import vllm_like

SHORT = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SIM = {"profile": "sim", "max_model_len": 512, "extra_args": {"tokens-per-second": 50}}


@pytest.fixture(scope="module")
def service():
    with AsyncVLLM.from_pretrained("any-name", num_replicas=2, **SIM) as service:
        yield service


def test_one_prompt_or_a_batch_of_any_form(service):
    one = service.generate("hello", SHORT)
    assert isinstance(one, RequestOutput)
    assert one.finished
    assert one.prompt == "hello"
    assert len(one.outputs[0].token_ids) == 6
    assert one.outputs[0].finish_reason == "length"
    ids = list(one.prompt_token_ids)
    greedy = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
    forms = ["hello", ids, {"prompt_token_ids": ids}, {"prompt": "hello"}]
    batch = service.generate(forms, greedy)
    assert [isinstance(out, RequestOutput) for out in batch] == [True] * 4
    assert len({tuple(out.outputs[0].token_ids) for out in batch}) == 1
    assert len({tuple(out.prompt_token_ids) for out in batch}) == 1
    by_ids = service.generate(None, greedy, prompt_token_ids=[ids, [7, 8, 9]])
    assert list(by_ids[0].outputs[0].token_ids) == list(batch[0].outputs[0].token_ids)
    assert list(by_ids[1].prompt_token_ids) == [7, 8, 9]


def test_a_batch_keeps_its_order_and_samples_stay_together(service):
    prompts = [[5 + i] * (1 + i % 7) for i in range(60)]
    outs = service.generate(prompt_token_ids=prompts, sampling_params=SamplingParams(n=3, max_tokens=4, logprobs=0))
    assert [list(out.prompt_token_ids) for out in outs] == prompts
    assert [[sample.index for sample in out.outputs] for out in outs] == [[0, 1, 2]] * 60
    for out in outs:
        for sample in out.outputs:
            assert [*[next(iter(entry)) for entry in sample.logprobs]] == list(sample.token_ids)
            assert [(span.version, span.start, span.end) for span in sample.weight_versions] == [
                ("0", 0, len(sample.token_ids))
            ]


def test_bad_calls_are_refused_and_the_service_goes_on(service):
    with pytest.raises(RequestError, match="exactly one"):
        service.generate("a", SHORT, prompt_token_ids=[1])
    with pytest.raises(RequestError, match="structured_outputs"):
        service.generate("a", SHORT, guided_options_request={"regex": "a"})
    with pytest.raises(EngineHTTPError, match="512"):
        service.generate([[5] * 600, [5]], SHORT)
    with pytest.raises(EngineError, match="prompt logprobs"):
        service.generate("a", SamplingParams(prompt_logprobs=1))
    with pytest.raises(UserError, match="no engine 7"):
        service.generate("a", SHORT, actor_index=7)
    with pytest.raises(UserError, match="malformed timeout_seconds"):
        service.generate("a", SHORT, timeout_seconds="x")
    with pytest.raises(UserError, match="no engine 2"):
        service.get_num_unfinished_requests(2)
    assert len(service.generate("a", SHORT).outputs[0].token_ids) == 6


def test_a_timeout_cancels_on_the_engines(service):
    """Each would take 8 s."""
    before = sum(_made(service))
    with pytest.raises(TimeoutError, match=r"40 prompts .* timeout_seconds=1"):
        service.generate(["long"] * 40, LONG, timeout_seconds=1)
    service.call(asked(service.fleet.get_num_unfinished_requests, lambda requests: requests == 0))
    assert sum(_made(service)) - before < 40 * LONG.max_tokens, "all of it was made"


def test_parameters_for_each_prompt(service):
    outs = service.generate(["a", "b"], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=5)])
    assert [len(out.outputs[0].token_ids) for out in outs] == [2, 5]
    with pytest.raises(RequestError, match="1 entries for 2 prompts"):
        service.generate(["a", "b"], [SHORT])


def test_one_replica_or_the_other(service):
    before = _made(service)
    service.generate(["a", "b", "c"], SHORT, actor_index=1)
    after = _made(service)
    assert [b - a for a, b in zip(before, after, strict=True)] == [0, 18]
    assert [service.get_num_unfinished_requests(i) for i in (0, 1)] == service.get_num_unfinished_requests() == [0, 0]
    assert service.get_cache_usage() == [service.get_cache_usage(0), service.get_cache_usage(1)]


def _made(service):
    return [engine.stats.generation_tokens for engine in service.call(service.fleet.engines())]


def test_many_threads(service):
    with ThreadPoolExecutor(16) as pool:
        outs = list(pool.map(lambda i: service.generate([[5 + i]], SHORT)[0], range(64)))
    assert [list(out.prompt_token_ids) for out in outs] == [[5 + i] for i in range(64)]


def test_an_adapter_is_loaded_once_and_asked_for_by_name(service):
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
    lora = LoRARequest("style", 1, "/adapters/style")
    base = service.generate(["a"] * 4, params)
    styled = service.generate(["a"] * 4, params, lora_request=lora)
    again = service.generate("a", params, lora_request=lora)
    assert {tuple(o.outputs[0].token_ids) for o in styled} == {tuple(again.outputs[0].token_ids)}
    assert tuple(base[0].outputs[0].token_ids) != tuple(again.outputs[0].token_ids)
    assert again.lora_request is lora
    with pytest.raises(RequestError, match="another name"):
        service.generate("a", params, lora_request=LoRARequest("style", 1, "/adapters/other"))
    with pytest.raises(RequestError, match="LoRARequest"):
        service.generate("a", params, lora_request="style")


@pytest.mark.parametrize("actor_index", [None, 0])
def test_an_adapter_that_the_fleet_evicted_is_loaded_again(service, actor_index):
    lora = LoRARequest("tone", 2, "/adapters/tone")
    service.generate("a", SHORT, lora_request=lora)
    service.call(service.fleet.unload_adapter("tone"))  # as an eviction does
    assert service.generate("a", SHORT, lora_request=lora, actor_index=actor_index).finished


def test_collective_rpc_and_prefix_cache(service):
    assert len(service.collective_rpc("penstock_checksum", timeout=WAIT_S)) == 2
    service.reset_prefix_cache()
    assert service.get_tp_size() == 1
    assert service.num_replicas == 2
    service.init_weight_update_group()
    assert f"http://{service.get_master_address()}:{service.get_master_port()}" == service.fleet.url
    with pytest.raises(ConfigError, match="simulated"):
        service.get_model_metadata()


def test_wrong_options_start_nothing():
    before = (len(psutil.Process().children(recursive=True)), threading.active_count())
    with pytest.raises(ConfigError, match="did you mean"):
        AsyncVLLM.from_pretrained("any-name", profil="sim")
    for name, nearest in (("num_replica", "num_replicas"), ("num_device", "num_devices")):
        with pytest.raises(ConfigError, match=f"'{name}'; did you mean '{nearest}'"):
            AsyncVLLM.from_pretrained("any-name", profile="sim", **{name: 1})
    with pytest.raises(ConfigError, match="two numbers for one thing"):
        AsyncVLLM.from_pretrained("any-name", num_devices=2, tensor_parallel_size=4, profile="sim")
    with pytest.raises(ConfigError, match="does not exist"):
        AsyncVLLM.from_pretrained("/nowhere/model", profile="cpu")
    assert (len(psutil.Process().children(recursive=True)), threading.active_count()) == before


def test_a_missing_tokenizer_starts_nothing(monkeypatch):
    """An engine may need none (`skip_tokenizer_init`), and nobody would have a service to shut down."""

    def missing(_):
        raise ConfigError("no tokenizer in any-name")

    monkeypatch.setattr(vllm_like, "_tokenizer", missing)
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    with pytest.raises(ConfigError, match="no tokenizer"):
        AsyncVLLM.from_pretrained("any-name", **SIM)
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    for process in left:
        process.kill()
    assert left == []


def test_shutdown_ends_what_it_started_and_later_calls_say_so():
    service = AsyncVLLM.from_pretrained("any-name", **SIM)
    mine = _processes(service)
    assert len(mine) == 2  # an engine and a router
    service.shutdown()
    service.shutdown()
    assert [p for p in mine if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    with pytest.raises(StateError, match="shut down"):
        service.generate("a", SHORT)


def test_a_service_that_nobody_holds_any_more_ends():
    service = AsyncVLLM.from_pretrained("any-name", **SIM)
    mine = _processes(service)
    del service
    gc.collect()
    assert [p for p in mine if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []


def _processes(service):
    urls = {service.fleet.url, *(engine.url for engine in service.call(service.fleet.engines()))}
    ports = {int(url.rpartition(":")[2]) for url in urls}
    children = psutil.Process().children(recursive=True)
    return [p for p in children if ports & {c.laddr.port for c in p.net_connections() if c.status == "LISTEN"}]


def test_an_engine_that_waits_for_weights_is_asked_for_none():
    quick = {"restart_backoff_s": 0.05, "weight_transport": "broadcast"}
    with AsyncVLLM.from_pretrained("any-name", num_replicas=2, **SIM, **quick) as service:
        service.update_weights([("w", torch.ones(8))])
        member = service.fleet._roster.members[1]
        member.process.kill()

        async def waits():
            assert await service.fleet._roster.until(lambda: member.awaiting_weights, deadline_s=WAIT_S)

        service.call(waits())
        with pytest.raises(EngineDeadError, match="engine e1: it is syncing: waits for the next update_weights"):
            service.generate("a", SHORT, actor_index=1)
        assert service.generate("a", SHORT, actor_index=0).outputs[0].weight_versions


def test_one_engine_has_the_deadline_that_the_fleet_has():
    with AsyncVLLM.from_pretrained("any-name", request_timeout_s=0.5, **SIM) as service:
        for actor_index in (None, 0):
            with pytest.raises(DeadlineError):
                service.generate("a", LONG, actor_index=actor_index)


SCRIPT = """
import psutil
from penstock import AsyncVLLM
service = AsyncVLLM.from_pretrained("any-name", profile="sim")
service.call(service.fleet.sample([5, 6], 2))
print(*[p.pid for p in psutil.Process().children(recursive=True)])
"""


def test_a_program_that_forgets_it_ends_and_leaves_nothing():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    left = [int(pid) for pid in done.stdout.split()]
    assert len(left) == 2
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in left if psutil.pid_exists(pid)], timeout=WAIT_S)
    assert alive == []
