"""Taking up a run where its last checkpoint left it, with no step recorded twice and none missing.

A checkpoint holds the learner (weights, optimiser, random state) and `Progress`. Rollouts are not in it: the task of
group `i` is a function of the seed and `i` alone, so the groups in flight at a kill are generated again from the same
tasks, under weights that are never older than those before. In a synchronous run so are their sampling seeds and
weights, and the resumed run equals one that was never cut off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.config import RunConfig
from penstock.errors import CheckpointError, UserError
from penstock.observe.run_folder import RunFolder
from penstock.train import checkpoint
from penstock.train.grpo import Trainee


@dataclass(slots=True)
class Progress:
    """How far a run is; what a checkpoint holds next to the learner.

    Attributes:
        step: finished steps.
        generated_tokens: response tokens of all groups completed.
        trained_tokens: those trained on.
        wasted_tokens: those thrown away.
        aborted_samples: samples thrown away because they were aborted; their tokens are among the wasted.
        resumed_at: steps at which the run was taken up again.
        seconds: by activity (`Stopwatch.totals`), at the last checkpoint.
        carried: groups that were submitted and not trained on, at the last checkpoint.
    """

    step: int = 0
    generated_tokens: int = 0
    trained_tokens: int = 0
    wasted_tokens: int = 0
    aborted_samples: int = 0
    resumed_at: list[int] = field(default_factory=list[int])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    carried: list[int] = field(default_factory=list[int])

    @property
    def unconsumed_tokens(self) -> int:
        """Generated, and waiting to be trained on."""
        return self.generated_tokens - self.trained_tokens - self.wasted_tokens

    def resumed(self, dropped: Sequence[Mapping[str, float]]) -> None:
        """Count what a kill cost, given the rows of the steps after the checkpoint.

        That is every token generated since the checkpoint, as far as a row tells of it, and what was waiting then.
        """
        self.wasted_tokens += self.unconsumed_tokens
        lost = int(sum(row["generated_tokens"] for row in dropped))
        self.generated_tokens += lost
        self.wasted_tokens += lost
        self.resumed_at.append(self.step)


def save_checkpoint(folder: RunFolder, trainee: Trainee, progress: Mapping[str, Any]) -> None:
    """Write the state after `progress["step"]` steps; `progress` holds the fields of `Progress`. Blocks."""
    checkpoint.save(
        folder.path, progress["step"], lambda path: {"learner": dict(trainee.save(path)), "run": dict(progress)}
    )


def check(config: RunConfig, folder: RunFolder) -> None:
    """Refuse what `take_up` would, as far as it is known before anything is loaded; raises as it does."""
    folder.check_resumable(config)
    step = checkpoint.latest_step(folder.path)
    if step > config.train.steps:
        raise UserError(f"{folder.path} is at step {step}, beyond train.steps={config.train.steps}; ask for more steps")


def take_up(config: RunConfig, folder: RunFolder, trainee: Trainee) -> Progress:
    """Load the last checkpoint into `trainee`, and cut the folder's records back to it; without one, to the start.

    Raises:
        ConfigError: the configuration is not the run's.
        UserError: the run is further than `train.steps`.
        CheckpointError: the checkpoint is damaged, or of another model; nothing was changed.
    """
    check(config, folder)
    progress = Progress()
    path = checkpoint.latest(folder.path)
    if path is not None:
        _, values = checkpoint.load(path)
        try:
            progress, of_learner = Progress(**values["run"]), values["learner"]
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"checkpoint {path} is not one of a training run: {error!r}") from error
        trainee.load(path, of_learner)
        progress.resumed(folder.truncate(progress.step))
        checkpoint.rewrite(path, {**values, "run": asdict(progress)})  # a kill before the next checkpoint would lose it
    else:
        progress.resumed(folder.truncate(0))
    folder.write_config(config)
    return progress
