"""Who meets where to form the group over which weights are broadcast: what the trainer tells every engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self, cast, get_args

from penstock.errors import WeightsError

Backend = Literal["nccl", "tcp"]

SHOWN = 500
"""Characters of a malformed group in the message."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group, and where in it an engine is.

    Attributes:
        address: where the trainer's `Meeting` listens; the trainer is rank 0.
        port: of that.
        world_size: the trainer and every worker of every engine.
        rank_offset: rank of the first worker of the engine that gets this.
        epoch: names the group; there is another one after every change of membership.
        backend: `nccl` among GPUs, `tcp` among CPUs.
        timeout_s: seconds for forming it, and for sending one version over it.
        key: what members prove to have; never shown.
    """

    address: str
    port: int
    world_size: int
    rank_offset: int
    epoch: str
    backend: Backend
    timeout_s: float
    key: str = field(repr=False)

    def at(self, rank_offset: int) -> Self:
        """The same group, as the engine with that first rank gets it."""
        return replace(self, rank_offset=rank_offset)

    def to_json(self) -> dict[str, Any]:
        """As it goes over the wire."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read what `to_json` wrote. Raises WeightsError where a field is missing or makes no sense."""
        if not isinstance(data, Mapping):
            raise WeightsError(f"a group is a JSON object, got {type(data).__name__}")
        fields = cast("Mapping[str, Any]", data)
        try:
            spec = cls(
                address=str(fields["address"]),
                port=int(fields["port"]),
                world_size=int(fields["world_size"]),
                rank_offset=int(fields["rank_offset"]),
                epoch=str(fields["epoch"]),
                backend=fields["backend"],
                timeout_s=float(fields["timeout_s"]),
                key=str(fields["key"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            shown = {name: value for name, value in fields.items() if name != "key"}
            raise WeightsError(f"malformed group {str(shown)[:SHOWN]}: {error!r}") from error
        if spec.backend not in get_args(Backend):
            raise WeightsError(f"a group's backend is one of {', '.join(get_args(Backend))}, got {spec.backend!r}")
        if not (0 < spec.rank_offset < spec.world_size and 0 < spec.port < 2**16 and 0 < spec.timeout_s < float("inf")):
            raise WeightsError(f"malformed group {spec}: 0 < rank_offset < world_size, a port and a timeout are needed")
        if not spec.key:
            raise WeightsError(f"malformed group {spec}: it has no key")
        return spec
