"""LoRA adapters of the simulated engine: names, and whose tokens they make."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import UserError
from penstock.sim.config import SimConfig


class AdapterNotFoundError(UserError):
    """No adapter of that name is loaded."""


class Adapters:
    """Loaded adapters by name. Their path decides the tokens: other bytes, other path."""

    def __init__(self, config: SimConfig) -> None:
        self._config = config
        self._paths: dict[str, str] = {}

    @property
    def loaded(self) -> Mapping[str, str]:
        """Paths by name."""
        return self._paths

    def load(self, name: str, path: str, *, in_place: bool = False) -> None:
        """Load one. Requests in flight under this name go on with the new weights in mid-sequence, as in vLLM.

        Raises:
            UserError: the name is taken and `in_place` is not set, or there is no room.
        """
        if not name or not path:
            raise UserError("Both 'lora_name' and 'lora_path' must be provided.")
        if name == self._config.served_model_name:
            raise UserError(f"The lora adapter '{name}' conflicts with a served base model.")
        if name in self._paths and not in_place:
            raise UserError(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True."
            )
        if name not in self._paths and len(self._paths) >= self._config.max_loras:
            raise UserError(f"No room for lora adapter '{name}': {self._config.max_loras} are loaded.")
        self._paths[name] = path

    def unload(self, name: str) -> None:
        """Forget one. Raises AdapterNotFoundError."""
        if not name:
            raise UserError("'lora_name' needs to be provided to unload a LoRA adapter.")
        if name not in self._paths:
            raise AdapterNotFoundError(f"The lora adapter '{name}' cannot be found.")
        del self._paths[name]

    def path(self, name: str | None) -> str:
        """What an adapter's tokens depend on; empty for the base model and for one unloaded under its requests."""
        return self._paths.get(name, "") if name is not None else ""
