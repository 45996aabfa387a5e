"""How one simulated engine is built."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.errors import ConfigError
from penstock.sim.faults import Fault
from penstock.sim.tokens import Model
from penstock.types import TensorSpec


@dataclass(frozen=True, slots=True)
class SimConfig:
    """One simulated engine. Sizes in tokens, times in seconds."""

    name: str = "sim"
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port."""
    api_key: str | None = field(default=None, repr=False)
    served_model_name: str = "sim-model"
    max_body_bytes: int = 64 * 2**20

    vocab_size: int = 1024
    eos_token_id: int = 0
    eos_share: float = 0.0
    """Probability that a token is EOS; 0: samples end at `max_tokens` or a stop token only."""
    seed: int = 0
    """For requests without one. With the same seed, all engines give the same answers."""
    max_model_len: int = 4096
    """A longer prompt + max_tokens is refused with 400, as by vLLM 0.26; 0.32 clamps max_tokens."""

    tokens_per_second: float = 1000.0
    """Decoding rate of one sample alone."""
    sequence_seconds: float = 5e-6
    """Added to a step by each further sample of the batch."""
    prefill_tokens_per_second: float = 200_000.0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    """Prompt tokens computed in one step, at most."""
    block_size: int = 16
    kv_blocks: int = 16_384
    enable_prefix_caching: bool = True

    load_seconds: float = 0.005
    tensor_specs: tuple[TensorSpec, ...] | None = None
    """Tensors of an update; None: any."""
    max_loras: int = 16
    logprobs_mode: str = "processed_logprobs"
    """Reported only; logprobs are the same in any mode."""
    data_parallel_size: int = 1
    """Ranks, each with a scheduler and a cache of its own, behind one address."""

    plain: bool = False
    """Speak as vLLM without Penstock's plugin; the options below have an effect only then."""
    vllm_version: str = "0.32.0"
    """Before 0.32 vLLM has no weight versions."""
    dev_mode: bool = True
    """VLLM_SERVER_DEV_MODE=1."""
    scale_out: bool = True
    """`--enable-scale-out`: the token endpoint."""
    enable_sleep_mode: bool = True
    weight_transfer_backend: str = "nccl"
    """From `--weight-transfer-config`; empty: not given."""
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        positive = ("vocab_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_blocks")
        for name in (*positive, "tokens_per_second", "prefill_tokens_per_second", "max_body_bytes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"sim option {name} must be positive, got {getattr(self, name)}")
        if self.data_parallel_size < 1:
            raise ConfigError(f"sim option data_parallel_size must be at least 1, got {self.data_parallel_size}")
        if self.kv_blocks * self.block_size < self.max_model_len:
            raise ConfigError(
                f"sim options: {self.kv_blocks} KV blocks of {self.block_size} tokens cannot hold one sequence of "
                f"max_model_len={self.max_model_len}; raise kv_blocks or lower max_model_len"
            )

    @property
    def keeps_versions(self) -> bool:
        """It has weight versions, and labels tokens with them."""
        return not self.plain or tuple(map(int, self.vllm_version.split(".")[:2])) >= (0, 32)

    @property
    def model(self) -> Model:
        """The part of it that decides tokens; give it to `verify`."""
        return Model(self.vocab_size, self.eos_token_id, self.eos_share, self.seed)
