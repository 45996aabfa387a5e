"""The learner of one process: a causal language model, its optimiser, and one step on a batch of trajectories."""

# transformers ships partial types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from penstock.config import TrainConfig
from penstock.errors import CheckpointError, ConfigError, StateError, UserError
from penstock.train.advantages import ADVANTAGES, group_indices
from penstock.train.batching import MicroBatch, collate, micro_batches
from penstock.train.checkpoint import LearnerState
from penstock.train.logprobs import TokenLogprobs, token_logprobs
from penstock.train.losses import LOG_RATIO_LIMIT, LOSSES, Limits, LossTerms
from penstock.train.packed_attention import use_packed_attention
from penstock.types import Trajectory
from penstock.weights.checkpoint_names import checkpoint_tensors

_HEAD_TRANSFORMS = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Config entries of models that do something to the logits after the output matrix."""
_STORED = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes of a safetensors header that weights can be cast to; of others (quantized ones) the config's goes."""

ServedDtype = Literal["auto", "float32", "bfloat16", "float16"]


class Learner:
    """Holds the weights being trained, in fp32, on CUDA where there is a device.

    It knows no event loop and may be called from any one thread at a time.

    Args:
        model_path: folder or hub name of a causal language model.
        config: optimiser, loss, and sizes; see `TrainConfig`.
        seed: of torch, for models with dropout.
        temperature: of sampling. The engine's logprobs are those after division of the logits by it.
        max_tokens: generation budget; the constant that Dr. GRPO divides by.
        served_dtype: what engines take (`served_tensors`); `auto`: of each tensor that of the checkpoint.

    Attributes:
        version: version of the weights held: 0 as loaded, +1 for each step.

    Raises:
        ConfigError: the model cannot be loaded, or transforms its logits in a way that is not supported.
    """

    def __init__(
        self,
        model_path: str,
        config: TrainConfig,
        *,
        seed: int,
        temperature: float = 1.0,
        max_tokens: int = 1,
        served_dtype: ServedDtype = "float32",
    ) -> None:
        self.config = config
        self.temperature = temperature
        self.max_tokens = max_tokens
        self.version = 0
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._use_threads()
        torch.manual_seed(seed)
        self.model = _load_model(model_path).to(self.device)
        self._stored_dtypes = _stored_dtypes(model_path) if served_dtype == "auto" else {}
        self._served_dtype = _config_dtype(model_path) if served_dtype == "auto" else getattr(torch, served_dtype)
        self._casts: dict[str, Tensor] = {}
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.learning_rate,
            betas=config.adam_betas,
            weight_decay=config.weight_decay,
        )

    def step(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """One optimiser step on the batch; `version` goes up by one.

        The batch is cut into packed micro-batches of at most `micro_batch_tokens` tokens. Their gradients add up, and
        are divided by what the loss and its correction kept. The engine's logprobs are the behaviour policy: there is
        no second forward pass for them.

        Returns:
            `loss`, `grad_norm` (before clipping), `reward_mean`, `tokens` (prompt and response), `seconds`,
            `tokens_per_second`, `trajectories_without_advantage` (fraction); over the policy's tokens the means of
            `LossOutput.metrics` and `entropy` (nats), `ratio_p1`, `ratio_p50`, `ratio_p99`, `ratio_max` and
            `effective_sample_share`; and of
            |trainer logprob - engine logprob| over the policy's tokens: `logprob_diff_mean`, for each staleness s
            `logprob_diff_staleness/s` (mean), and for tokens of the version held before the step
            `logprob_diff_equal_tokens` (count) and `logprob_diff_max_equal`, the latter absent where the count is 0.

        Raises:
            UserError: no trajectories, an empty prompt, or no token that the policy made.
            StateError: the gradient is NaN or infinite; weights and optimiser are as before.
        """
        started = time.perf_counter()
        self._use_threads()
        policy_tokens = _count_policy_tokens(trajectories)
        rewards_N = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
        groups_N = group_indices([t.group_id for t in trajectories])
        advantages_N = ADVANTAGES[self.config.advantage](rewards_N, groups_N).float()

        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        batches = micro_batches(trajectories, advantages_N, self.config.micro_batch_tokens)
        measured = [self._accumulate(batch.to(self.device)) for batch in batches]
        denominator = sum(float(part.denominator) for part in measured)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(max(denominator, 1.0))
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip_norm)
        result = _summed(measured, denominator, policy_tokens)
        if not (math.isfinite(grad_norm) and math.isfinite(result["loss"])):
            raise StateError(
                f"step {self.version + 1} has loss {result['loss']} and a gradient of norm {float(grad_norm)}: nothing "
                "was changed; lower train.learning_rate, and look at the ratios in metrics.jsonl"
            )
        self.optimizer.step()

        log_ratio_K = torch.cat([part.log_ratio_K for part in measured]).cpu()
        versions_K = torch.cat([part.versions_K for part in measured]).cpu()
        result |= _gap_metrics(log_ratio_K) | _difference_metrics(log_ratio_K.abs(), self.version - versions_K)
        tokens = sum(len(t.prompt_ids) + len(t.response_ids) for t in trajectories)
        seconds = time.perf_counter() - started
        self.version += 1
        return result | {
            "grad_norm": float(grad_norm),
            "reward_mean": float(rewards_N.mean()),
            "trajectories_without_advantage": float((advantages_N == 0).float().mean()),
            "tokens": float(tokens),
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
        }

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """`(name in the model, tensor)` of every weight, tied ones once.

        The tensors are the live ones, detached: the next `step` changes them, so copy before it.
        """
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def served_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """`(checkpoint name, tensor)` in the dtypes that engines take: the live tensors where they have those.

        Else copies; of experts, which a model holds in one tensor and a checkpoint in many, too. Casts lie in memory
        that is kept for the next version, so these too are good until the next call. It stays in the same place, which
        engines that map it (`cuda_ipc`) then do once.
        """
        for name, weight in checkpoint_tensors(self.model).items():
            tensor = weight.detach()
            dtype = self._stored_dtypes.get(name, self._served_dtype)
            if dtype == tensor.dtype:
                yield name, tensor
                continue
            if name not in self._casts:
                self._casts[name] = torch.empty_like(tensor, dtype=dtype)
            yield name, self._casts[name].copy_(tensor)

    @torch.no_grad()
    def score(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> list[float]:
        """Logprob of each response token under the weights held, after temperature."""
        size = len(response_ids)
        trajectory = Trajectory(
            prompt_ids=tuple(prompt_ids),
            response_ids=tuple(response_ids),
            loss_mask=(1,) * size,
            logprobs=(0.0,) * size,
            versions=(0,) * size,
            reward=0.0,
            stop_reason="stop",
            group_id="",
        )
        self.model.eval()
        return self._logprobs(collate([trajectory], torch.zeros(1)).to(self.device)).logprobs.tolist()

    def state(self) -> LearnerState:
        """Everything a resumed run needs, copied to the CPU: weights, optimiser, random state, version."""
        tensors = {f"model/{name}": tensor for name, tensor in self.named_tensors()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer/{key}/{name}"] = value
        tensors["rng/cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng/cuda"] = torch.cuda.get_rng_state(self.device)
        copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
        return LearnerState(copies, {"version": self.version})

    def load_state(self, state: LearnerState) -> None:
        """Take up what `state` gave.

        Raises:
            CheckpointError: the state is that of another model; nothing was changed.
        """
        parameters = dict(self.model.named_parameters())
        here = {f"model/{name}": tuple(parameter.shape) for name, parameter in parameters.items()}
        there = {name: tuple(tensor.shape) for name, tensor in state.tensors.items() if name.startswith("model/")}
        for name in sorted(here.keys() | there.keys()):
            if here.get(name) != there.get(name):
                raise CheckpointError(
                    f"the checkpoint is of another model: {name} has shape {here.get(name)} here and {there.get(name)} "
                    "there; resume with the model of that run, or start a new one"
                )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state.tensors[f"model/{name}"])
        self.optimizer.state.clear()
        for key, value in state.tensors.items():
            if key.startswith("optimizer/"):
                _, entry, name = key.split("/", 2)
                place = "cpu" if entry == "step" else self.device  # AdamW counts its steps on the CPU
                self.optimizer.state[parameters[name]][entry] = value.to(place, copy=True)
        torch.set_rng_state(state.tensors["rng/cpu"])
        if self.device.type == "cuda" and "rng/cuda" in state.tensors:
            torch.cuda.set_rng_state(state.tensors["rng/cuda"], self.device)
        self.version = int(state.values["version"])

    def _accumulate(self, batch: MicroBatch) -> _Measured:
        """Add the micro-batch's gradient, not yet divided."""
        config = self.config
        with torch.set_grad_enabled(batch.needs_gradient):
            found = self._logprobs(batch)
            logprobs_B_T = found.logprobs.new_zeros(batch.mask_B_T.shape).masked_scatter(batch.mask_B_T, found.logprobs)
            terms = LossTerms(logprobs_B_T, batch.behaviour_B_T, batch.advantages_B, batch.mask_B_T)
            output = LOSSES[config.loss](terms, _limits(config, self.max_tokens))
            if batch.needs_gradient:
                output.loss.backward()
        log_ratio_K = found.logprobs.detach() - batch.behaviour_B_T[batch.mask_B_T]
        sums = {"loss": output.loss.detach(), "entropy": found.entropy.sum(), **output.metrics}
        return _Measured(output.denominator, sums, log_ratio_K, batch.versions_K)

    def _logprobs(self, batch: MicroBatch) -> TokenLogprobs:
        """Of each token the policy made, `[K]`; the output matrix sees only the positions that predict one."""
        hidden_1_L_H = self.model.base_model(
            input_ids=batch.input_ids_1_L,
            position_ids=batch.position_ids_1_L,
            use_cache=False,
            cu_seq_lens_q=batch.bounds,
            max_length_q=batch.longest,
        ).last_hidden_state
        hidden_K_H = hidden_1_L_H[0, batch.positions_K]
        head = self.model.get_output_embeddings()
        return token_logprobs(hidden_K_H, head.weight, batch.targets_K, self.temperature)

    def _use_threads(self) -> None:
        # Set again in each step: the number belongs to the calling thread.
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)


@dataclass(frozen=True, slots=True)
class _Measured:
    """Of one micro-batch: the loss's denominator, sums over its policy tokens, and what is known of each of them."""

    denominator: Tensor
    sums: Mapping[str, Tensor]
    log_ratio_K: Tensor
    """log pi - log mu."""
    versions_K: Tensor


def _count_policy_tokens(trajectories: Sequence[Trajectory]) -> int:
    if not trajectories:
        raise UserError("a training step needs at least one trajectory, got none")
    if any(not t.prompt_ids for t in trajectories):
        raise UserError("a trajectory has an empty prompt; its first token would have nothing to be predicted from")
    tokens = sum(sum(t.loss_mask) for t in trajectories)
    if not tokens:
        raise UserError(f"none of the {len(trajectories)} trajectories has a token that the policy made")
    return tokens


def _limits(config: TrainConfig, max_tokens: int) -> Limits:
    return Limits(
        low=config.clip_low,
        high=config.clip_high,
        correction=config.correction,
        importance_cap=config.importance_cap,
        ratio_band=config.ratio_band,
        probability_gap=config.probability_gap,
        sequence_gap=config.sequence_gap,
        max_tokens=max_tokens,
    )


def _load_model(model_path: str) -> Any:
    hf_logging.disable_progress_bar()  # it would write over the live display
    try:
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load model {model_path!r} for training: {error}") from error
    for name in _HEAD_TRANSFORMS:
        if getattr(model.config, name, None) not in (None, 1.0):
            raise ConfigError(f"model {model_path!r} sets {name}, which the learner does not support")
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError(f"model {model_path!r} has a bias in its output layer, which the learner does not support")
    use_packed_attention(model, model_path)
    return model


def _stored_dtypes(model_path: str) -> dict[str, torch.dtype]:
    """Of each tensor in the headers of a checkpoint's folder; nothing where there are none to look into."""
    folder = Path(model_path)
    dtypes: dict[str, torch.dtype] = {}
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                stored = tensors.get_slice(name).get_dtype()
                if stored in _STORED:
                    dtypes[name] = _STORED[stored]
    return dtypes


def _config_dtype(model_path: str) -> torch.dtype:
    """What the checkpoint's config says; an engine goes by it where it has no headers, as under a hub name."""
    config: Any = AutoConfig.from_pretrained(model_path)
    return config.dtype or config.get_text_config().dtype or torch.float32


def _summed(measured: Sequence[_Measured], denominator: float, policy_tokens: int) -> dict[str, float]:
    """The batch's loss, and means of the other sums over the policy's tokens."""
    sums = {name: sum(float(part.sums[name]) for part in measured) for name in measured[0].sums}
    loss = sums.pop("loss") / max(denominator, 1.0)
    return {"loss": loss, **{name: total / policy_tokens for name, total in sums.items()}}


def _gap_metrics(log_ratio_K: Tensor) -> dict[str, float]:
    """Quantiles of the ratio pi / mu, and the share of tokens that importance weighting leaves effective.

    The effective sample size of weights w is (sum w)^2 / sum w^2 (Kish 1965), here as a share of the tokens.
    """
    ratio_K = log_ratio_K.double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    ordered_K = ratio_K.sort().values
    last = len(ordered_K) - 1
    quantiles = {f"ratio_p{q}": float(ordered_K[round(last * q / 100)]) for q in (1, 50, 99)}
    share = float(ratio_K.sum() ** 2 / (ratio_K.square().sum() * len(ratio_K)))
    return {**quantiles, "ratio_max": float(ordered_K[-1]), "effective_sample_share": share}


def _difference_metrics(difference_K: Tensor, staleness_K: Tensor) -> dict[str, float]:
    """Figures of |trainer - engine logprob| by trainer version minus token version."""
    equal_K = difference_K[staleness_K == 0]
    result = {
        "logprob_diff_mean": float(difference_K.mean()),
        "logprob_diff_equal_tokens": float(len(equal_K)),
    }
    if len(equal_K):
        result["logprob_diff_max_equal"] = float(equal_K.max())
    for staleness in staleness_K.unique().tolist():
        result[f"logprob_diff_staleness/{staleness}"] = float(difference_K[staleness_K == staleness].mean())
    return result
