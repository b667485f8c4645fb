"""Programs with the real SDK, run in a process of their own: `python sdk_program.py URL NAME`. They print one JSON."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
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
    """The cookbook's loop for reinforcement learning, call by call, with two losses.

    A step saves weights, makes a sampling client, submits a group for each prompt, then trains on what it sampled.
    Half of the steps save under a name, as the cookbook does, and half of them without.
    """
    service, training = client(url, name)
    prompts = [types.ModelInput.from_ints(TEXT[start : start + 3]) for start in range(3)]
    rewards, gaps = [], []
    for step in range(int(os.environ.get("SDK_STEPS", "6"))):
        if step % 2:
            sampling = training.save_weights_and_get_sampling_client().result()
        else:
            path = training.save_weights_for_sampler(f"{step:06d}").result().path
            sampling = service.create_sampling_client(model_path=path)
        # All groups are submitted before the first is read.
        params = types.SamplingParams(max_tokens=8, seed=100 * step, temperature=1.0)
        groups = [sampling.sample(prompt=prompt, num_samples=8, sampling_params=params) for prompt in prompts]
        datums, sampled_logprobs, step_rewards = [], [], []
        for prompt, group in zip(prompts, groups, strict=True):
            sequences = group.result().sequences
            scores = [sum(token % 2 == 0 for token in one.tokens) / len(one.tokens) for one in sequences]
            mean = sum(scores) / len(scores)
            step_rewards += scores
            for one, score in zip(sequences, scores, strict=True):
                ahead = prompt.length - 1
                tokens, logprobs = [int(token) for token in one.tokens], [float(number) for number in one.logprobs]
                sampled_logprobs.append(logprobs)
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
        rewards.append(sum(step_rewards) / len(step_rewards))
        # Both are submitted before a result is read.
        forward = training.forward_backward(datums, loss_fn=("importance_sampling", "cispo")[step % 2])
        update = training.optim_step(types.AdamParams(learning_rate=float(os.environ.get("SDK_RATE", "0.1"))))
        outputs = forward.result().loss_fn_outputs
        update.result()
        gaps += [
            abs(float(trained) - sampled)
            for output, logprobs in zip(outputs, sampled_logprobs, strict=True)
            for trained, sampled in zip(list(output["logprobs"].data)[-len(logprobs) :], logprobs, strict=True)
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


def unreadable(url: str, name: str) -> dict[str, Any]:
    """Calls with bodies that the service does not read: each raises, at once, and the numbers after it are used."""
    _, training = client(url, name)
    many_parts = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[3])] * (1 << 17))
    long_row = {"target_tokens": [5] * (1 << 17), "weights": [1.0] * (1 << 17)}
    huge_row = {"target_tokens": [5] * (3 << 20), "weights": [1.0] * (3 << 20)}
    calls = {
        "parts": lambda: training.forward_backward(
            [types.Datum(model_input=many_parts, loss_fn_inputs=long_row)], "cross_entropy"
        ),
        "bytes": lambda: training.forward_backward(
            [types.Datum(model_input=types.ModelInput.from_ints([3] * (3 << 20)), loss_fn_inputs=huge_row)],
            "cross_entropy",
        ),
        "metadata": lambda: training.save_state("saved", user_metadata={"text": "," * (2 << 20)}),
    }
    errors: dict[str, str] = {}
    start = time.monotonic()
    for label, call in calls.items():
        try:
            call().result()
        except Exception as error:
            errors[label] = f"{type(error).__name__}: {error}"
        # The next step fails, and the one after it runs.
        for number in range(2):
            forward = training.forward_backward([datum(TEXT)], "cross_entropy")
            step = training.optim_step(types.AdamParams(learning_rate=1e-4))
            forward.result()
            try:
                step.result()
            except Exception as error:
                errors[f"{label}, step {number}"] = f"{type(error).__name__}: {error}"
    return {"errors": errors, "seconds": time.monotonic() - start}


def chunks(url: str, name: str) -> dict[str, Any]:
    """A call in many chunks, which the SDK sends in another order: the gradients of one call."""
    _, training = client(url, name)
    many = [datum(TEXT) for _ in range(2500)]
    for _ in range(int(os.environ.get("SDK_CALLS", "1"))):
        forward = training.forward_backward(many, "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=1e-4))
    return {"loss": forward.result().metrics["loss:sum"], "metrics": step.result().metrics}


def sampling(url: str, name: str) -> dict[str, Any]:
    """All forms of a sampling request: log-probs of the most likely tokens, stops, seeds, and refused values."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-one")
    sampler = service.create_sampling_client(base_model=name)
    prompt = types.ModelInput.from_ints(TEXT)

    def sample(num_samples: int = 1, sampler: Any = sampler, prompt: Any = prompt, **values: Any) -> Any:
        names = ("include_prompt_logprobs", "topk_prompt_logprobs", "topk_sample_logprobs", "prompt_logprobs_last_n",
                 "prompt_alt_tokens_k", "target_prompt_logprobs")  # fmt: skip
        further = {key: values.pop(key) for key in names if key in values}
        params = types.SamplingParams(**({"max_tokens": 6, "seed": 3} | values))
        return sampler.sample(prompt=prompt, num_samples=num_samples, sampling_params=params, **further).result()

    def tokens(reply: Any) -> list[list[int]]:
        return [[int(token) for token in one.tokens] for one in reply.sequences]

    full = sample(
        2, include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=4, prompt_logprobs_last_n=5
    )
    one = full.sequences[0]
    [plain] = tokens(sample())
    stops: dict[str, Any] = {"token": [plain[2]], "nothing": [], "other": [plain[2] + 1, plain[2]]}
    if folder := os.environ.get("SDK_TOKENIZER"):
        from transformers import AutoTokenizer

        stops["text"] = ["never sampled", AutoTokenizer.from_pretrained(folder).decode(plain[2:3])]
    stopped = {label: sample(stop=stop).sequences[0] for label, stop in stops.items()}
    refused: dict[str, Any] = {
        "temperature": {"temperature": 3.0}, "cold": {"temperature": 0.001}, "empty stop": {"stop": [""]},
        "foreign stop": {"stop": [10**6]}, "many stops": {"stop": list(range(65))}, "top": {"topk_sample_logprobs": 21},
        "prompt top": {"topk_prompt_logprobs": 129}, "alternatives": {"prompt_alt_tokens_k": 2},
        "last": {"include_prompt_logprobs": True, "prompt_logprobs_last_n": 8},
        "samples": {"num_samples": 0}, "length": {"prompt": types.ModelInput.from_ints([1] * 4000)},
    }  # fmt: skip
    errors: dict[str, str] = {}
    start = time.monotonic()
    for label, values in refused.items():
        try:
            sample(**values)
        except Exception as error:
            errors[label] = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    # A session that ends while its calls wait must not take the service with it.
    _, training = client(url, name)
    waiting = [training.forward([datum(TEXT)], "cross_entropy") for _ in range(3)]
    waiting += [
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True) for _ in range(3)
    ]
    address = f"{url}/api/v1/sessions/{training.model_id.split(':')[0]}/finish"
    headers = {"X-API-Key": "tml-one"}
    urllib.request.urlopen(urllib.request.Request(address, b"{}", headers, method="POST")).read()
    [plain_after] = tokens(sample())
    return {
        "plain after": plain_after,
        "refused": sorted(refused),
        "errors": errors,
        "seconds": seconds,
        "plain": plain,
        "seeds": [tokens(full), tokens(sample(2)), tokens(sample(2, seed=4))],
        "stopped": {label: [[int(token) for token in end.tokens], end.stop_reason] for label, end in stopped.items()},
        "prompt_logprobs": full.prompt_logprobs,
        "topk_prompt_logprobs": full.topk_prompt_logprobs,
        "topk": one.topk_logprobs,
        "logprobs": [float(number) for number in one.logprobs],
        "tokens": [int(token) for token in one.tokens],
    }


def damaged(url: str, name: str) -> dict[str, Any]:
    """Damaged checkpoints: each request for one fails at once, and the client goes on. SDK_FOLDER has them all."""
    service, training = client(url, name)
    training.forward_backward([datum(TEXT)], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=0.1)).result()
    good = training.save_state("good").result().path
    errors: dict[str, str] = {}

    def sample(path: str) -> Any:
        return service.create_sampling_client(model_path=path).compute_logprobs(types.ModelInput.from_ints(TEXT))

    for label, (file, damage) in DAMAGES.items():
        path = training.save_state(label).result().path
        [damaged_file] = Path(os.environ["SDK_FOLDER"], path.removeprefix("tinker://")).glob(file)
        damage(damaged_file)
        load = sample if label == "sampled" else service.create_training_client_from_state_with_optimizer
        try:
            load(path).result()
        except Exception as error:
            errors[label] = f"{type(error).__name__}: {error}"
    resumed = service.create_training_client_from_state_with_optimizer(good).result()
    before, after = (
        one.forward([datum(TEXT)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
        for one in (training, resumed)
    )
    forward = [[float(number) for number in numbers] for numbers in (before, after)]
    return {"errors": errors, "labels": list(DAMAGES), "forward": forward}


def flip_bit(file: Path) -> None:
    """Change one bit in the middle of a file: of a tensor's elements, not of a record of their place."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 64
    file.write_bytes(content)


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "cut": ("*_0.distcp", lambda file: os.truncate(file, file.stat().st_size // 2)),
    "flipped": ("*_0.distcp", flip_bit),
    "header": (".metadata", lambda file: file.write_bytes(b"x" * 16 + file.read_bytes()[16:])),
    "sampled": ("*_0.distcp", lambda file: os.truncate(file, file.stat().st_size // 2)),
}
"""Name to the file of a checkpoint, and a function that damages it."""


def resumed(url: str, name: str) -> dict[str, Any]:
    """Train and save a model, or load the checkpoint SDK_PATH. Then take one more step."""
    path = os.environ.get("SDK_PATH")
    if path is None:
        _, training = client(url, name)
    else:
        service = tinker.ServiceClient(base_url=url, api_key="tml-one")
        training = service.create_training_client_from_state_with_optimizer(path).result()

    def step() -> None:
        training.forward_backward([datum(TEXT)], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=0.1)).result()

    if path is None:
        step()
        path = training.save_state("saved").result().path
    step()
    output = training.forward([datum(TEXT)], "cross_entropy").result().loss_fn_outputs[0]
    return {"path": path, "logprobs": [float(number) for number in output["logprobs"].data]}


def moving(url: str, name: str) -> dict[str, Any]:
    """A sampling client whose weights move with the model, next to one with fixed weights."""
    _, training = client(url, name)
    prompt = types.ModelInput.from_ints(TEXT)
    clients = {kind: training.save_weights_and_get_sampling_client(kind=kind) for kind in ("inflight", "snapshot")}

    def scores() -> dict[str, list[float]]:
        return {kind: one.compute_logprobs(prompt).result()[1:] for kind, one in clients.items()}

    before = scores()
    training.forward_backward([datum(TEXT)], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=0.1)).result()
    trained = scores()
    # A request while a save is under way runs on the weights before or after it.
    saving = training.save_weights_and_get_sampling_client(kind="inflight")
    meanwhile = [clients["inflight"].compute_logprobs(prompt) for _ in range(8)]
    newest = saving.result().compute_logprobs(prompt).result()[1:]
    return {
        "before": before, "trained": trained, "saved": scores(), "newest": newest,
        "meanwhile": [one.result()[1:] for one in meanwhile],
    }  # fmt: skip


def listing(url: str, name: str) -> dict[str, Any]:
    """The SDK's RestClient: what a key has, lifetimes, deletion, and refusals. SDK_OTHER is another key."""
    service, training = client(url, name)
    state = training.save_state("first", user_metadata={"note": "x"}).result().path
    sampler_path = training.save_weights_for_sampler("second", ttl_seconds=7200).result().path
    rest = service.create_rest_client()
    run = training.model_id
    texts: dict[str, Any] = {
        "runs": rest.list_training_runs().result().model_dump(mode="json"),
        "run": rest.get_training_run(run).result().model_dump(mode="json"),
        "by path": rest.get_training_run_by_tinker_path(state).result().training_run_id,
        "of run": rest.list_checkpoints(run).result().model_dump(mode="json"),
        "page": rest.list_user_checkpoints(limit=1, offset=1).result().model_dump(mode="json"),
        "sessions": rest.list_sessions().result().sessions,
        "info": rest.get_weights_info_by_tinker_path(state).result().lora_rank,
    }
    texts["session"] = rest.get_session(texts["sessions"][0]).result().model_dump(mode="json")
    other = tinker.ServiceClient(base_url=url, api_key=os.environ["SDK_OTHER"]).create_rest_client()
    texts["foreign"] = [
        other.list_training_runs().result().training_runs, other.list_user_checkpoints().result().checkpoints
    ]  # fmt: skip
    calls = {
        "foreign run": lambda: other.get_training_run(run),
        "foreign checkpoints": lambda: other.list_checkpoints(run),
        "foreign session": lambda: other.get_session(texts["sessions"][0]),
        "foreign delete": lambda: other.delete_checkpoint_from_tinker_path(state),
        "foreign ttl": lambda: other.set_checkpoint_ttl_from_tinker_path(state, 7200),
        "publish": lambda: rest.publish_checkpoint_from_tinker_path(state),
        "unpublish": lambda: rest.unpublish_checkpoint_from_tinker_path(state),
        "copy": lambda: rest.copy_weights(state, destination_project_id="p"),
        "download": lambda: rest.get_external_weights_urls(state.replace("/weights/", "/external_weights/")),
        "project": lambda: rest.list_training_runs(project_id="p"),
        "ttl": lambda: rest.set_checkpoint_ttl_from_tinker_path(state, 5),
        "external": lambda: training.save_weights_external("exported"),
    }
    errors: dict[str, str] = {}
    for label, call in calls.items():
        try:
            call().result()
        except Exception as error:
            errors[label] = f"{type(error).__name__}: {error}"
    # A refused numbered call has used its number, so the next one runs.
    training.forward([datum(TEXT)], "cross_entropy").result()
    rest.set_checkpoint_ttl_from_tinker_path(sampler_path, None).result()
    rest.set_checkpoint_ttl_from_tinker_path(state, 3600).result()
    texts["lifetimes"] = [one.expires_at is None for one in rest.list_checkpoints(run).result().checkpoints]
    rest.delete_checkpoint_from_tinker_path(state).result()
    texts["left"] = [one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints]
    return texts | {"errors": errors, "paths": [state, sampler_path], "run id": run}


if __name__ == "__main__":
    programs = {
        "supervised": supervised, "reinforce": reinforce, "errors": errors, "chunks": chunks, "sampling": sampling,
        "moving": moving, "listing": listing, "unreadable": unreadable, "damaged": damaged, "resumed": resumed,
    }  # fmt: skip
    print(json.dumps(programs[sys.argv[2]](sys.argv[1], sys.argv[3])), flush=True)
    # The SDK's threads would wait for their heartbeat.
    os._exit(0)
