"""What is checked of a version before workers see it: in the process of an engine's one core, or of its API server.

One core does it itself (`core.py`), asked past the API server. Of several cores, which have to be asked together,
and of one that cannot be reached past the API server, that one does it (`middleware.py`).

The spec is found out by the API server in either case: to build a model without weights, transformers changes torch's
default dtype for a while, in the whole process, and a core makes tensors meanwhile.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from penstock.errors import EngineError, StateError, WeightsError
from penstock.plugin.spec import WeightSpec
from penstock.plugin.worker import HostBytes
from penstock.weights import delta
from penstock.weights.manifest import WeightManifest
from penstock.wire import version_number

SPEC_S = 600.0
"""Who asks has a deadline of its own; this one ends the thread of one that went away."""


class Preparing:
    """The checks of one engine, in one of its processes."""

    def __init__(self) -> None:
        self._spec: Future[WeightSpec] = Future()
        self._bytes = HostBytes()

    def expect(self, spec: WeightSpec | str) -> None:
        """Which tensors an update must bring, or why that could not be found out; the last word counts."""
        asked = self._spec if not self._spec.done() else Future()
        if isinstance(spec, str):
            asked.set_exception(EngineError(f"which tensors the model has could not be found out: {spec}"))
        else:
            asked.set_result(spec)
        self._spec = asked

    def check(self, body: Any, in_force: Callable[[], int]) -> dict[str, Any]:
        """Read every byte that the host can read. Blocking: for a thread beside the loop that has tokens to serve.

        Args:
            body: of the request, `{"manifest": {...}}`.
            in_force: tells the version that the engine has; of the transport `delta` alone it is asked.

        Returns:
            The manifest for the workers, as JSON.

        Raises:
            WeightsError: it does not fit the model, or its bytes are gone, were changed or hold NaN or infinity.
        """
        manifest = WeightManifest.from_json(field(body, "manifest"))
        try:
            spec = self._spec.result(SPEC_S)
        except TimeoutError:
            raise EngineError(f"the API server has not told within {SPEC_S:g} s which tensors the model has") from None
        spec.check(manifest)
        version = in_force() if manifest.transport == delta.TRANSPORT else 0
        return self._bytes.check(manifest, version).to_json()


def raise_refusal(problems: Sequence[str | None]) -> None:
    """Of what the ranks answered to `penstock_prepare` or `penstock_join_group`: WeightsError where one refuses."""
    if problem := next((problem for problem in problems if problem is not None), None):
        raise WeightsError(problem)


def group_of(body: Any) -> dict[str, Any]:
    """What a request to join a group says, for `penstock_join_group`."""
    if not isinstance(body, dict):
        raise WeightsError("the body must be a JSON object that describes a group")
    return body


def field(body: Any, name: str) -> Any:
    """A field of a request's body. WeightsError: it has none of that name."""
    if not isinstance(body, dict) or name not in body:
        raise WeightsError(f"the body must be a JSON object with {name!r}")
    return body[name]


def version_of(label: str) -> int:
    """The version that vLLM's label of an engine's weights (0.32) means."""
    try:
        return version_number(label)
    except ValueError:
        raise StateError(
            f"the engine's weights are labelled {label!r}, and a version is a whole number; relabel them by POST "
            '/update_weight_version with {"new_version": "0"}, or the number that they have'
        ) from None
