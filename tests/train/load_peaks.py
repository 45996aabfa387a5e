"""One of two ranks that load checkpoints one after another: `RANK PORT`, then on stdin a JSON row for each checkpoint.

A row has `model`, `config` (of `TrainConfig`) and `whole` (load all of it on each rank). Rank 0 answers with a JSON
row: the most memory of its own that the load took at once, by all that the learner holds, and whether the weights are
those of the checkpoint's files.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from penstock.config import TrainConfig
from penstock.train import fsdp, loading
from penstock.train.policy_model import weights_dtype
from penstock.train.rank_group import Place, RankGroup


class Peak(threading.Thread):
    """Watches memory that this process does not share with files."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.most = self.now()
        self.ended = threading.Event()

    @staticmethod
    def now() -> int:
        return int(re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10

    def run(self) -> None:
        while not self.ended.wait(0.001):
            self.most = max(self.most, self.now())

    def end(self) -> int:
        self.ended.set()
        self.join()
        return self.most - self.before


def stored(model: str) -> dict[str, torch.Tensor]:
    files = loading.checkpoint_files(model)
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def measure(group: RankGroup, model: str, config: TrainConfig) -> dict[str, object]:
    gc.collect()  # the learner before
    peak = Peak()
    peak.start()
    learner = fsdp.ShardedLearner(group, model, config, seed=0, served_dtype="float32")
    taken = peak.end()
    held = weights_dtype(config, group.device)
    found = {name: tensor for unit in range(learner.units) for name, tensor in learner.take(learner.gather(unit))}
    there = {name: tensor.to(held).float() for name, tensor in stored(model).items()}
    size = sum(tensor.numel() for tensor in found.values()) * held.itemsize
    equal = found.keys() == there.keys() and all(torch.equal(found[name], there[name]) for name in there)
    return {"peak": taken / size, "equal": equal}


def main() -> None:
    rank, port = map(int, sys.argv[1:])
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    group = RankGroup(Place(rank, 2, rank, store), one_host=True)
    for line in sys.stdin:
        row = json.loads(line)
        with_files = fsdp.checkpoint_files
        if row["whole"]:
            fsdp.checkpoint_files = lambda _: []
        answer = measure(group, row["model"], TrainConfig.model_validate(row["config"]))
        fsdp.checkpoint_files = with_files
        if rank == 0:
            print(json.dumps(answer), flush=True)
    group.close()


main()
