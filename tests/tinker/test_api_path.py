"""The whole path through the API, over a small learner and simulated engines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tinker_rig import BASE, rig

from penstock.tinker.schema import pb

pytestmark = pytest.mark.usefixtures("shared_fleet")


def batch(model: str, seq: int, tokens: list[int], loss: str = "cross_entropy") -> bytes:
    message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn=loss)
    message.data.add().model_input.add().encoded_text.tokens = np.asarray(tokens, np.int32).tobytes()
    return message.SerializeToString()


async def test_a_model_trains_is_put_on_the_engines_and_samples(tmp_path: Path) -> None:
    async with rig(tmp_path) as service:
        model = await service.model()
        session = model.partition(":")[0]
        info = await service.post("get_info", {"model_id": model})
        assert (info["model_data"]["model_name"], info["lora_rank"]) == (BASE, 4)
        answer = await service.http.post(
            "/api/v1/forward_backward",
            content=batch(model, 1, [1, 2, 3]),
            headers={"X-API-Key": "tml-key-of-alice", "Content-Type": "application/x-protobuf"},
        )
        output = pb.ForwardBackwardOutput.FromString(await service.result(answer.json()))
        assert output.metrics["loss:sum"] == 1.5
        assert await service.result(await service.step(model, 2)) == {"metrics": {"grad_norm:mean": 1e-3}}
        saved = await service.result(
            await service.post(
                "save_weights_for_sampler", {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 0}
            )
        )
        assert saved["sampling_session_id"] == f"{session}:sample:0"
        (sequence,) = (await service.sample(saved["sampling_session_id"])).sequences
        assert len(np.frombuffer(sequence.tokens, np.int32)) == len(np.frombuffer(sequence.logprobs, np.float32)) == 8
        base = await service.sampler(session, 1)
        (plain,) = (await service.sample(base)).sequences
        assert plain.tokens != sequence.tokens, "the adapter's tokens are not the base's"
        assert [kind for kind, _ in service.learner.done] == [
            "create_model", "forward_backward", "optim_step", "save_weights_for_sampler",
        ]  # fmt: skip
