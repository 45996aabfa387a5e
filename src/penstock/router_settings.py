"""Settings of a router, and the base of every section of the configuration (`settings.py` has the others)."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Annotated, Literal, cast, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from penstock.checks import LARGEST, did_you_mean
from penstock.errors import ConfigError
from penstock.rooms import plugged_in

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
LAST_PORT = 65_535
Port = Annotated[int, Field(ge=0, le=LAST_PORT)]


class Section(BaseModel):
    """Base of every section: frozen, closed to unknown keys, and every number finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


PolicyName = Literal["bounded-sticky", "prefix-aware", "kv-cache", "requests", "round-robin"]


def _names(given: object) -> str:
    """Read texts, in a list or separated by commas, as a text with commas."""
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, (list, tuple)):
        raise ValueError("must be a list, or texts with commas between them")  # noqa: TRY004 - pydantic's
    return ",".join(str(name).strip() for name in cast("Sequence[object]", names) if str(name).strip())


def _policy_names(given: str) -> str:
    if not given:
        raise ValueError("must be the name of a policy, or a list of such names")
    names, known = given.split(","), get_args(PolicyName)
    for place, name in enumerate(names):
        if name not in known:
            raise ValueError(f"there is no policy {name!r}; {did_you_mean(name, known)}")
        if name in names[:place]:
            raise ValueError(f"{name!r} is named twice")
    return given


def _data_paths(names: str) -> str:
    """Refuse a path for one engine only, or one that servers read in different ways."""
    for name in filter(None, names.split(",")):
        if (kind := plugged_in("router.unserved.kind")(name.encode())) != "other":
            raise ValueError(f"cannot have {name!r}: that is {kind}, and not a call that any engine may answer")
    return names


class RouterConfig(Section):
    """The data plane in front of a fleet."""

    kind: Literal["penstock", "vllm-router"] = "penstock"
    """`vllm-router`: the router at `url` instead of ours, with its own features (docs/how-to/other-servers.md)."""
    url: Annotated[str, Field(pattern=r"^http://[^/\s]+$")] | None = None
    """Address of a running router of this kind, which gets this fleet's engines; default: start a new router."""
    host: str = "127.0.0.1"
    port: Port = 0
    """0: any free port."""
    control_port: Port = 0
    """Port of control calls, as the fleet's to its router; 0: any free one. Of several workers, each has the next."""
    policy: Annotated[str, BeforeValidator(_names), AfterValidator(_policy_names)] = "bounded-sticky"
    """One or more `PolicyName`; a policy without a preference passes to the next."""
    prefix_length: Annotated[Positive, Field(le=LARGEST)] = 2048
    """Shortest shared prefix, in tokens, for which an engine is preferred."""
    overload_threshold: Annotated[float, Field(ge=1)] = 1.5
    """`prefix-aware` skips an engine with more outstanding requests than this multiple of the mean."""
    balance_factor: Annotated[float, Field(ge=1)] = 1.1
    """`bounded-sticky` places up to this multiple of the mean of resident tokens, plus `slack_tokens`."""
    slack_tokens: Annotated[int, Field(ge=0)] = 8192
    kv_admission: Annotated[float, Field(gt=0)] = 0.92
    """`bounded-sticky`: new sessions wait while resident and expected tokens exceed this share of every KV cache."""
    session_ttl_s: Seconds = 1800.0
    """Seconds without a request after which a session is forgotten."""
    engine_metrics_interval_s: Annotated[float, Field(ge=0)] = 1.0
    """Seconds between two reads of an engine's KV usage; 0: never."""
    workers: Positive = 1
    """Processes that share the port."""
    max_hold_s: Seconds = 300.0
    """Most seconds that a request waits for an engine that can serve it; then 503 with Retry-After."""
    max_held: Positive = 100_000
    """Most requests that wait for a gate, an engine, or room on one."""
    max_held_bytes: Positive = 4 * 2**30
    """Most bytes kept of requests that wait or come in pieces, until their answers begin; then 503. They take up to 1.2
    times as much memory, since buffers of bodies in pieces grow ahead."""
    max_header_bytes: Positive = 65_536
    max_body_bytes: Positive = 256 * 2**20
    header_timeout_s: Seconds = 20.0
    body_timeout_s: Seconds = 600.0
    """Deadline of a request's whole body, without the time in which the router does not read it."""
    data_paths: Annotated[
        str, BeforeValidator(_names), Field(pattern=r"^(/[0-9A-Za-z._~/-]+(,|$))*$"), AfterValidator(_data_paths)
    ] = ""
    """Further paths, exactly as written, that go to engines; a list or separated by commas."""
    allowed_hosts: Annotated[str, BeforeValidator(_names)] = ""
    """Further names of this router for `Host` in calls to `/router/*`; a list or separated by commas."""
    access_log: bool = False
    """Write one JSON line per request to the router's log."""

    @property
    def known_url(self) -> str | None:
        """The router's address, if it is known before a start."""
        return self.url or (base_url(self.host, self.port) if self.port else None)


def base_url(host: str, port: int) -> str:
    """Return the URL of a port and a host, which may be an IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


KEY_ENV, ADMIN_KEY_ENV = "PENSTOCK_API_KEY", "PENSTOCK_ROUTER_ADMIN_KEY"
"""Environment variables for a router's key of clients, and its key of calls that change it. On the command line, every
user of the machine could read them."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server on `host`; unknown: False."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refuse_open_host(host: str, api_key: str | bytes | None) -> None:
    """Raise ConfigError if a router would listen to other machines without a key."""
    if not api_key and not is_loopback(host):
        raise ConfigError(
            f"router.host {host!r} opens the router to other machines and there is no API key; set one (of penstock "
            f"serve and the router: {KEY_ENV}, of Fleet.launch: api_key), or keep 127.0.0.1"
        )
