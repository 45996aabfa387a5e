"""Resumes a run from its last checkpoint. No step is recorded twice, and none is missing.

A checkpoint holds the learner (weights, optimiser, random state) and `Progress`. It holds no rollouts, because the task
of group `i` depends only on the seed and `i`. The groups in flight at a kill are generated again, from the same tasks
and under weights that are never older. In a synchronous run, their sampling seeds and weights are the same too, so the
resumed run equals an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from penstock.config import RunConfig
from penstock.errors import CheckpointError, UserError
from penstock.observe.run_folder import RunFolder
from penstock.train import checkpoint
from penstock.train.grpo import Trainee


@dataclass(slots=True)
class Progress:
    """Progress of a run, which a checkpoint holds in addition to the learner.

    Attributes:
        generated_tokens: response tokens of all completed groups.
        wasted_tokens: tokens discarded, those of aborted samples among them.
        resumed_at: steps at which the run was resumed.
        seconds: seconds by activity (`Stopwatch.totals`), at the last checkpoint.
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
        """Tokens that were generated and may still be trained on."""
        return self.generated_tokens - self.trained_tokens - self.wasted_tokens

    def resumed(self, dropped: Sequence[Mapping[str, float]]) -> None:
        """Count the cost of a kill, given the rows of the steps after the checkpoint.

        The cost is every recorded token generated since the checkpoint, and the unconsumed tokens at the checkpoint.
        """
        self.wasted_tokens += self.unconsumed_tokens
        lost = int(sum(row["generated_tokens"] for row in dropped))
        self.generated_tokens += lost
        self.wasted_tokens += lost
        self.resumed_at.append(self.step)


def check(config: RunConfig, folder: RunFolder) -> None:
    """Raise the errors of `take_up` that are known before anything is loaded."""
    folder.check_resumable(config)
    step = checkpoint.latest_step(folder.path)
    if step > config.train.steps:
        raise UserError(f"{folder.path} is at step {step}, beyond train.steps={config.train.steps}; ask for more steps")


def take_up(config: RunConfig, folder: RunFolder, trainee: Trainee) -> Progress:
    """Load the last checkpoint into `trainee`, if any. Cut the folder's records back to it, or to the start.

    Raises:
        ConfigError: the configuration differs from the run's.
        UserError: the run is beyond `train.steps`.
        CheckpointError: the checkpoint is damaged or belongs to another model; nothing is changed.
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
        checkpoint.rewrite(path, {**values, "run": asdict(progress)})  # else a kill before the next checkpoint loses it
    else:
        progress.resumed(folder.truncate(0))
    folder.write_config(config)
    return progress
