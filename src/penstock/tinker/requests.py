"""The SDK's requests: bodies read with limits on size and time, and their fields as checked values."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, Self

import orjson
import zstandard
from google.protobuf.message import DecodeError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from penstock import asgi
from penstock.aio import in_thread
from penstock.checks import LARGEST
from penstock.errors import UserError
from penstock.tinker.schema import check_fields, pb

MOST_BODY = 256 << 20
"""Bytes of training data, also when unpacked. The SDK sends chunks of 5 MB."""
MOST_JSON = 1 << 20
"""Bytes of any other body except a sample's. JSON is parsed at once, and its parser blocks all threads."""
TOKEN_BYTES, SAMPLE_BYTES = 16, 1 << 16
"""Bytes of a token's id in JSON, and of everything else in a request to sample."""
SMALL = 1 << 16
"""Bytes of training data up to which it is parsed at once. A thread parses larger data."""
MOST_OF_TENANT, MOST_OF_PROCESS = 2 * MOST_BODY, 8 * MOST_BODY
"""Bytes of bodies under way. One of the largest fits, packed and unpacked; four tenants may each send one."""
_PIECE = 1 << 20
"""Bytes that are unpacked before they are counted."""
MOST_ID = 999_999_999
"""Largest id in a path."""
MOST_INT = (1 << 31) - 1
"""Largest number that goes to the engines."""
LEAST_TTL_S, MOST_TTL_S = 3600, 10 * 366 * 24 * 3600


class RefusedError(UserError):
    """A refused request. The answer has the status of this error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class BodyBudget:
    """Counts the bytes of bodies under way, per tenant and for the process.

    The first `SMALL` bytes of a request are free, so small requests pass while large ones fill the process.
    """

    def __init__(self) -> None:
        self._used = Counter[str]()
        self._lock = threading.Lock()  # bodies are unpacked in threads

    @contextmanager
    def of(self, tenant: str) -> Generator[Callable[[int], None]]:
        """Yield a function that counts more bytes of one request. At the end of the block, all are returned.

        The function raises RefusedError if there is no room. The SDK then waits and sends the request again.
        """
        size = held = 0

        def take(more: int) -> None:
            nonlocal size, held
            with self._lock:
                charged = max(size + more - SMALL, 0) - held
                if charged:
                    _refuse_over(MOST_OF_TENANT, self._used[tenant] + charged, "your")
                    _refuse_over(MOST_OF_PROCESS, self._used.total() + charged, "all")
                self._used[tenant] += charged
                size, held = size + more, held + charged

        try:
            yield take
        finally:
            with self._lock:
                self._used[tenant] -= held


def _refuse_over(most: int, used: int, whose: str) -> None:
    if used > most:
        raise RefusedError(f"{whose} requests under way fill {most / (1 << 20):g} MiB; wait for them", 429)


def most_of(kind: type[Body] | None, context: int | None) -> int:
    """Return the maximum number of bytes in a body, for a model with `context` tokens."""
    if kind is SampleAddress and context is not None:
        return SAMPLE_BYTES + context * TOKEN_BYTES
    return MOST_BODY if kind in {SampleAddress, TrainingBody} else MOST_JSON


async def read_body(http: Request, most: int, take: Callable[[int], None]) -> bytes:
    """Return the whole body. RefusedError: it is too large, does not arrive, or cannot be unpacked."""
    data = await asgi.read_body(http, most, lambda status, why: RefusedError(why, status), take)
    encoding = http.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return data
    if encoding != "zstd":
        raise RefusedError(f"Content-Encoding {encoding[:40]!r} is not known; send zstd or none", 415)
    return await in_thread(lambda: _unpacked(data, most, take))


def _unpacked(data: bytes, most: int, take: Callable[[int], None]) -> bytes:
    unpacked = bytearray()
    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    try:
        with unpacker.stream_reader(data, read_across_frames=True) as reader:
            while len(unpacked) <= most and (piece := reader.read(_PIECE)):
                take(len(piece))
                unpacked += piece
    except zstandard.ZstdError as error:
        raise RefusedError(f"the body is no zstd: {error}", 400) from error
    if len(unpacked) > most:
        raise RefusedError(f"the unpacked body is over {most / (1 << 20):g} MiB", 413)
    return bytes(unpacked)


# --- fields ----------------------------------------------------------------------------------------------------------


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
            shown = error.errors(include_url=False)[:5]
            raise UserError(
                "; ".join(
                    f"{'.'.join(map(str, e['loc'])) or 'the body'}: {e['msg']} (got {e['input']!r:.80})" for e in shown
                )
            ) from None


class CreateSession(Body):
    """Body of `create_session`."""

    user_metadata: Values | None = None
    project_id: str | None = None
    display_name: str | None = None


class SessionBody(Body):
    """Body of `session_heartbeat`."""

    session_id: str


class FinishSession(Body):
    """Body of `sessions/ID/finish`."""

    reason: dict[str, Any] = Field(default_factory=dict[str, Any])


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


class OptimStep(ModelBody):
    """Body of `optim_step`. The learner knows the names of AdamW's settings."""

    adam_params: dict[str, Annotated[float, Field(strict=True, allow_inf_nan=False)]]
    optimizer_params: dict[str, Any] | None = None


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


class TrainingBody(ModelBody):
    """Body of `forward_backward`, a message of the SDK's schema."""

    forward_only: bool

    @classmethod
    def of(cls, data: bytes) -> Self:
        """Parse a body. UserError: it is malformed."""
        check_fields(data)
        try:
            message = pb.ForwardBackwardRequest.FromString(data)
        except DecodeError as error:
            raise UserError(f"the body is no ForwardBackwardRequest: {error}") from error
        return cls.model_construct(
            model_id=message.model_id, seq_id=message.seq_id or None, forward_only=message.forward_only
        )


class CreateSampler(Body):
    """Body of `create_sampling_session`."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0, le=LARGEST)
    base_model: str | None = None
    model_path: str | None = None


class SamplerBody(Body):
    """Body of `join_sampling_session`."""

    sampling_session_id: str


class RequestBody(Body):
    """Body of `retrieve_future` and `cancel_future`."""

    request_id: str


class CheckpointPath(Body):
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
    """The part of `asample` that names its future."""

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
