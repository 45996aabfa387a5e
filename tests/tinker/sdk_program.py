"""What a user of the SDK writes; prints what came of it as JSON."""

from __future__ import annotations

import json

import tinker
from tinker import types

BASE = "sorter"


def datum(tokens: list[int]) -> types.Datum:
    weights = types.TensorData(data=[1.0] * len(tokens), dtype="float32", shape=[len(tokens)])
    targets = types.TensorData(data=tokens, dtype="int64", shape=[len(tokens)])
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": targets, "weights": weights}
    )


def main() -> None:
    service = tinker.ServiceClient()
    models = tinker.RestClient().get_server_capabilities().result().supported_models
    assert [model.model_name for model in models] == [BASE]
    training = service.create_lora_training_client(base_model=BASE, rank=4).result()
    forward_backward = training.forward_backward([datum([1, 2, 3]), datum([4, 5, 6, 7])], "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=1e-3))
    loss = forward_backward.result().metrics["loss:sum"]
    assert [len(out["logprobs"].data) for out in forward_backward.result().loss_fn_outputs] == [3, 4]
    step.result()
    saved = training.save_state("first").result().path
    sampler = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=3, stop=[])
    drawn = sampler.sample(types.ModelInput.from_ints([5, 6, 7]), num_samples=2, sampling_params=params).result()
    restored = service.create_training_client_from_state(saved).result()
    named = training.save_weights_for_sampler("second").result().path
    base = service.create_sampling_client(base_model=BASE).result()
    for client in (service.create_sampling_client(model_path=named).result(), base):
        client.sample(types.ModelInput.from_ints([1]), num_samples=1, sampling_params=params).result()
    assert restored.get_info().lora_rank == 4
    try:
        training.forward_backward([datum([1])], "no such loss").result()  # type: ignore[arg-type]
    except tinker.RequestFailedError as error:
        refused = str(error)
    assert "no such loss" in refused
    rest = tinker.RestClient()
    paths = [checkpoint.tinker_path for checkpoint in rest.list_user_checkpoints().result().checkpoints]
    assert sorted(paths) == sorted([saved, named])
    service.close("success").result()
    lengths = [len(sequence.tokens) for sequence in drawn.sequences]
    print(json.dumps({"loss": loss, "lengths": lengths, "finished": True}))


main()
