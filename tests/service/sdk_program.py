"""Programs with the real SDK, run in a process of their own: `python sdk_program.py URL NAME`. They print one JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import tinker
from tinker import types

TEXT = [3, 5, 7, 5, 3, 9, 5, 7]


def datum(tokens: list[int], weights: list[float] | None = None, **inputs: Any) -> types.Datum:
    """The datum that trains all tokens but the first."""
    if not inputs:
        inputs = {"weights": weights or [1.0] * (len(tokens) - 1)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], **inputs}
    )


def client(url: str, name: str) -> tuple[Any, Any]:
    service = tinker.ServiceClient(base_url=url, api_key=os.environ.get("SDK_KEY", "tml-one"))
    return service, service.create_lora_training_client(base_model=name, rank=8, seed=7).result()


def supervised(url: str, name: str) -> dict[str, Any]:
    """The cookbook's loop for supervised learning: train, save, sample, resume."""
    service, training = client(url, name)
    losses = []
    for _ in range(4):
        forward = training.forward_backward([datum(TEXT), datum(TEXT[::-1])], "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=float(os.environ.get("SDK_RATE", "0.1"))))
        losses.append(forward.result().metrics["loss:sum"])
        metrics = step.result().metrics
    state = training.save_state("step-4").result().path
    sampler_path = training.save_weights_for_sampler("step-4").result().path
    sampling = service.create_sampling_client(model_path=sampler_path)
    params = types.SamplingParams(max_tokens=5, seed=1, temperature=1.0)
    prompt = types.ModelInput.from_ints(TEXT[:3])
    reply = sampling.sample(prompt=prompt, num_samples=2, sampling_params=params).result()
    again = sampling.sample(prompt=prompt, num_samples=2, sampling_params=params).result()
    direct = training.save_weights_and_get_sampling_client("step-4")
    scores = direct.compute_logprobs(types.ModelInput.from_ints(TEXT)).result()
    resumed = service.create_training_client_from_state_with_optimizer(state).result()
    before, after = (
        one.forward([datum(TEXT)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
        for one in (training, resumed)
    )
    return {
        "losses": losses,
        "metrics": metrics,
        "paths": [state, sampler_path],
        "tokens": [[int(token) for token in one.tokens] for one in reply.sequences],
        "again": [[int(token) for token in one.tokens] for one in again.sequences],
        "logprobs": [[float(number) for number in one.logprobs] for one in reply.sequences],
        "scores": scores,
        "forward": [[float(number) for number in numbers] for numbers in (before, after)],
    }


def reinforce(url: str, name: str) -> dict[str, Any]:
    """The cookbook's loop for reinforcement learning: sample groups, train on advantages, with two losses."""
    _, training = client(url, name)
    prompt = types.ModelInput.from_ints(TEXT[:3])
    rewards = []
    for step in range(int(os.environ.get("SDK_STEPS", "6"))):
        sampling = training.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=8, seed=100 + step, temperature=1.0)
        sequences = sampling.sample(prompt=prompt, num_samples=24, sampling_params=params).result().sequences
        scores = [sum(token % 2 == 0 for token in one.tokens) / len(one.tokens) for one in sequences]
        mean = sum(scores) / len(scores)
        rewards.append(mean)
        datums = []
        for one, score in zip(sequences, scores, strict=True):
            ahead = prompt.length - 1
            tokens, logprobs = [int(token) for token in one.tokens], [float(number) for number in one.logprobs]
            datums.append(
                types.Datum(
                    model_input=prompt.append(types.EncodedTextChunk(tokens=tokens[:-1])),
                    loss_fn_inputs={
                        "target_tokens": [0] * ahead + tokens,
                        "logprobs": [0.0] * ahead + logprobs,
                        "advantages": [0.0] * ahead + [score - mean] * len(tokens),
                    },
                )
            )
        loss = ("importance_sampling", "cispo")[step % 2]
        forward = training.forward_backward(datums, loss_fn=loss)
        training.optim_step(types.AdamParams(learning_rate=float(os.environ.get("SDK_RATE", "0.1")))).result()
        outputs = forward.result().loss_fn_outputs
    gaps = [
        abs(float(trained) - float(sampled))
        for output, one in zip(outputs, sequences, strict=True)
        for trained, sampled in zip(list(output["logprobs"].data)[prompt.length - 1 :], one.logprobs, strict=True)
    ]
    return {"rewards": rewards, "gap": max(gaps)}


def errors(url: str, name: str) -> dict[str, Any]:
    """Calls that the service refuses: each raises, at once, and the client goes on."""
    service, training = client(url, name)
    found: dict[str, str] = {}

    def attempt(label: str, call: Any) -> None:
        try:
            call()
            found[label] = "no error"
        except Exception as error:
            found[label] = f"{type(error).__name__}: {error}"

    reinforce = datum(TEXT, logprobs=[-1.0] * 7, advantages=[1.0] * 7)
    attempt("loss", lambda: training.forward_backward([reinforce], "stable_reinforce").result())
    attempt("dropped", lambda: training.optim_step(types.AdamParams()).result())
    attempt("vocabulary", lambda: training.forward([datum([1, 10**6, 2])], "cross_entropy").result())
    attempt("long", lambda: training.forward([datum([1] * 100_000)], "cross_entropy").result())
    attempt("rank", lambda: service.create_lora_training_client(base_model=name, rank=5).result())
    attempt("base", lambda: service.create_lora_training_client(base_model="other/model", rank=8).result())
    attempt("path", lambda: service.create_training_client_from_state("tinker://a:train:0/weights/none").result())
    good = training.forward_backward([reinforce], "importance_sampling").result()
    step = training.optim_step(types.AdamParams(learning_rate=0.1)).result()
    return {"errors": found, "good": good.metrics, "step": step.metrics}


def chunks(url: str, name: str) -> dict[str, Any]:
    """A call in many chunks, which the SDK sends in another order: the gradients of one call."""
    _, training = client(url, name)
    many = [datum(TEXT) for _ in range(2500)]
    for _ in range(int(os.environ.get("SDK_CALLS", "1"))):
        forward = training.forward_backward(many, "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=1e-4))
    return {"loss": forward.result().metrics["loss:sum"], "metrics": step.result().metrics}


if __name__ == "__main__":
    programs = {"supervised": supervised, "reinforce": reinforce, "errors": errors, "chunks": chunks}
    print(json.dumps(programs[sys.argv[2]](sys.argv[1], sys.argv[3])), flush=True)
    # The SDK's threads would wait for their heartbeat.
    os._exit(0)
