"""The SDK's requests as checked values. Fields that are not read are left to the SDK."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from penstock.checks import LARGEST
from penstock.errors import UserError

MOST_ID = 999_999_999
"""Largest id in a path."""
MOST_INT = (1 << 31) - 1
"""Largest number that goes to the engines."""
LEAST_TTL_S, MOST_TTL_S = 3600, 10 * 366 * 24 * 3600


def _storable(values: dict[str, Any]) -> dict[str, Any]:
    try:
        orjson.dumps(values)
    except orjson.JSONEncodeError as error:
        raise ValueError(f"it cannot be kept: {error}") from None
    return values


Stored = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
Values = Annotated[dict[str, Any], AfterValidator(_storable)]
"""Values of the client's choice. Values that cannot be written again are refused."""


class Body(BaseModel):
    """Base class of JSON bodies."""

    model_config = ConfigDict(protected_namespaces=(), extra="ignore")

    @classmethod
    def of(cls, data: bytes) -> Self:
        """Parse a body. UserError: it is malformed; the message names the fields."""
        try:
            return cls.model_validate_json(data or b"{}")
        except ValidationError as error:
            raise UserError(wrong(error)) from None


def wrong(error: ValidationError) -> str:
    """Return in one line what is wrong with a request."""
    shown = error.errors(include_url=False)[:5]
    return "; ".join(
        f"{'.'.join(map(str, e['loc'])) or 'the body'}: {e['msg']} (got {e['input']!r:.80})" for e in shown
    )


class CreateSession(Body):
    """Body of `create_session`."""

    tags: list[str] = Field(default_factory=list[str])
    user_metadata: Values | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionBody(Body):
    """Body of `session_heartbeat`."""

    session_id: str


class FinishSession(Body):
    """Body of `sessions/ID/finish`."""

    reason: dict[str, Any] = Field(default_factory=dict[str, Any])
    detail: str | None = None


class LoraConfig(Body):
    """The adapter that a model trains."""

    rank: int = Field(ge=1, le=1024)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Body):
    """Body of `create_model`."""

    session_id: str
    model_seq_id: int = Field(ge=0, le=MOST_ID)
    base_model: str
    user_metadata: Values | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: Values = Field(default_factory=lambda: {"type": "adamw"})


class ModelBody(Body):
    """Body of an operation on a model, and of `get_info`."""

    model_id: str
    seq_id: Stored | None = None


class SaveWeights(ModelBody):
    """Body of `save_weights`."""

    path: str | None = None
    ttl_seconds: int | None = Field(default=None, ge=LEAST_TTL_S, le=MOST_TTL_S)
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(SaveWeights):
    """Body of `save_weights_for_sampler`."""

    sampling_session_seq_id: int | None = Field(default=None, ge=0, le=LARGEST)
    kind: Literal["snapshot", "inflight"] = "snapshot"


class LoadWeights(Body):
    """Body of `load_weights`, into an existing model or as a new one's first request."""

    model_id: str | None = None
    seq_id: Stored | None = None
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0, le=MOST_ID)
    base_model: str | None = None
    user_metadata: Values | None = None
    path: str
    optimizer: bool
    optimizer_config: Values | None = None
    weights_access_token: str | None = None


class CreateSampler(Body):
    """Body of `create_sampling_session`."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0, le=LARGEST)
    base_model: str | None = None
    model_path: str | None = None


class RequestBody(Body):
    """Body of `retrieve_future` and `cancel_future`."""

    request_id: str


class TinkerPath(Body):
    """Body of `weights_info`."""

    tinker_path: str


class Ttl(Body):
    """Body of `.../ttl`."""

    ttl_seconds: int | None = Field(default=None, ge=LEAST_TTL_S, le=MOST_TTL_S)


class Chunk(Body):
    """A part of a prompt."""

    type: str = "encoded_text"
    tokens: list[int] = Field(default_factory=list[int])


class Prompt(Body):
    """A prompt as a list of chunks."""

    chunks: list[Chunk]


class Sampling(Body):
    """Sampling parameters of a request."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[Annotated[int, Field(ge=0, le=MOST_INT)]] | None = None
    temperature: float = 1.0
    top_k: int = Field(default=-1, le=MOST_INT)
    top_p: float = 1.0


class SampleAddress(Body):
    """The part of `asample` that names its future; also the body of `join_sampling_session`."""

    sampling_session_id: str | None = None
    seq_id: Stored | None = None
    num_samples: int = 1


class SampleBody(SampleAddress):
    """Body of `asample`."""

    prompt: Prompt
    sampling_params: Sampling
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0)
    topk_sample_logprobs: int = Field(default=0, ge=0)
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
