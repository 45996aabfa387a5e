"""`rollout.generator: agent`: an agent plays a run's episodes through its gateway."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.config import RunConfig
from penstock.errors import ConfigError
from penstock.gateway.agent import Agent, AgentGenerator
from penstock.gateway.app import serving
from penstock.gateway.graph import Limits
from penstock.gateway.service import Gateway, Tenant
from penstock.gateway.turn import GatewayOptions
from penstock.guard import new_key
from penstock.process import raise_file_limit
from penstock.rollout.chat_template import ChatTemplate
from penstock.rollout.environment import Environment, import_named
from penstock.rollout.generator import Generator
from penstock.rollout.multi_turn import Sampler
from penstock.rollout.tokenizer import Tokenizer
from penstock.rollout.vllm_parser import output_parser

_WHOLE = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "min_tokens": 0,
    "ignore_eos": False,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Parameters that replace the harness's own. Logprobs over a part of the vocabulary cannot be trained on, and a seed
would make all episodes of a task equal."""


class AgentRollouts:
    """The agent of a run, checked before engines start.

    Args:
        config: configuration of the run.
        tokenizer: the policy's tokenizer, with a chat template.
        environment: gives the tasks, and scores the last answer if the agent gives no reward.

    Raises:
        ConfigError: no such callable or command, or both or neither given; no `engine.max_model_len`; no chat template;
            or the named parsers of vLLM are not available.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer, environment: Environment) -> None:
        given, context = config.rollout.agent, config.engine.max_model_len
        if given is None or bool(given.command) == bool(given.callable):
            raise ConfigError("rollout.agent: give either command or callable")
        if context is None:
            raise ConfigError("rollout.generator: agent needs engine.max_model_len, which bounds each turn")
        self._given = given
        self._rollout = config.rollout
        self._agent = _callable(given.callable) if given.callable is not None else _command(given.command)
        self._template = ChatTemplate(tokenizer)
        self._parser = output_parser(tokenizer, tool_parser=given.tool_parser, reasoning_parser=given.reasoning_parser)
        self._environment = environment
        self._options = GatewayOptions(
            config.engine.served_model_name or config.engine.model,
            context,
            given.policy,
            sampling={**_WHOLE, "temperature": config.rollout.temperature},
            max_tokens=config.rollout.max_tokens,
            force_calls=given.force_calls,
        )

    @asynccontextmanager
    async def generator(
        self, client: Sampler, log_dir: Path, *, adapter: str | None = None
    ) -> AsyncGenerator[Generator]:
        """Serve the gateway while the block runs, and yield the generator.

        Args:
            client: source of samples: a fleet or an engine.
            log_dir: folder for the output of commands.
            adapter: name of the LoRA adapter that every turn uses.
        """
        raise_file_limit()
        tenant = Tenant("training", new_key())
        gateway = Gateway(client, self._template, self._options, [tenant], adapter=adapter, parser=self._parser)
        async with serving(gateway) as base_url:
            yield AgentGenerator(
                gateway,
                base_url,
                tenant,
                self._environment,
                self._agent,
                concurrency=self._given.concurrency,
                timeout_s=self._given.timeout_s,
                log_dir=log_dir,
                most_logs=self._given.keep_output,
                limits=Limits(max_turns=self._rollout.max_turns, max_tokens=self._rollout.max_episode_tokens),
            )


def _callable(name: str) -> Agent:
    found = import_named("rollout.agent.callable", name)
    if not inspect.iscoroutinefunction(found):
        raise ConfigError(
            f"rollout.agent.callable {name!r} is no `async def`; a blocking agent runs as rollout.agent.command"
        )
    return found


def _command(words: Sequence[str]) -> Sequence[str]:
    if shutil.which(words[0]) is None:
        raise ConfigError(f"rollout.agent.command: there is no program {words[0]!r} on the PATH; give its path")
    return words
