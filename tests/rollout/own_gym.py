"""An environment registered with SkyRL's gym, which needs its own instance for each episode."""

from __future__ import annotations

from typing import Any

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv

ALIVE: list[Any] = []


class Counts(BaseTextEnv):
    """Answers with the number of its steps; the reward of a step is that number."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()
        self.config, self.extras = env_config, extras
        ALIVE.append(self)

    def init(self, prompt: Any) -> Any:
        return [{"role": "system", "content": self.config.rule}, *prompt], {}

    def step(self, action: str) -> Any:
        self.turns += 1
        done = self.turns == self.extras["max_turns"]
        said = [] if done else [{"role": "user", "content": f"step {self.turns}"}]
        out = {"observations": said, "reward": float(self.turns), "done": done, "metadata": {}}
        return {**out, "postprocessed_action": action + "!"} if self.extras.get("rewrites") else out

    def close(self) -> None:
        ALIVE.remove(self)


if "counts" not in skyrl_gym.registry:
    skyrl_gym.register("counts", entry_point=Counts)
