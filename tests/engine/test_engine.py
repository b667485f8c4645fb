"""One scenario on real engines at four layouts, judged by Hugging Face and by the engines' own other answers."""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config import RolloutConfig, SamplingConfig
from megarl.tracking.metrics import values
from megarl.types import Completion, ConfigError, Request, SamplingSettings
from tests.rank_pool import RankPool

NEW_TOKENS = 12
LAYOUTS = [
    pytest.param(1, 1, id="tp1"),
    pytest.param(2, 2, id="tp2"),
    pytest.param(2, 1, id="two_replicas_of_tp1"),
    pytest.param(4, 2, id="two_replicas_of_tp2"),
]
GREEDY = SamplingSettings(NEW_TOKENS, temperature=0.0)
SAMPLED = SamplingSettings(NEW_TOKENS, temperature=0.7)
NUCLEUS = SamplingSettings(NEW_TOKENS, temperature=1.3, top_p=0.9, top_k=20)
MIN_P = SamplingSettings(NEW_TOKENS, temperature=1.3, min_p=0.3)
ALL_CUTS = SamplingSettings(NEW_TOKENS, temperature=1.3, top_p=0.9, top_k=20, min_p=0.2)
PENALISED = SamplingSettings(NEW_TOKENS, temperature=0.7, repetition_penalty=1.5)
TAGS = {"g": GREEDY, "s": SAMPLED, "n": NUCLEUS, "m": MIN_P, "c": ALL_CUTS, "p": PENALISED}
"""Sampling of the requests that run together, by the first letter of their names."""


def request(name: str, prompt: Sequence[int], sampling: SamplingSettings, seed: int = 0) -> Request:
    return Request(name, np.array(prompt, np.int32), sampling, seed)


def prompts(replica: int) -> list[tuple[int, ...]]:
    """Replica r gets other prompts than replica 0, and more of them; two share a prefix longer than a block."""
    shared = tuple(range(100, 140))
    return [(7, 11, 13), (5 + replica, 17), (*shared, 3), (*shared, 29 + replica), *[(31, 37)] * (2 * replica)]


def requests(replica: int, tag: str, sampling: SamplingSettings) -> list[Request]:
    return [request(f"{tag}{i}", p, sampling, seed=1000 + i) for i, p in enumerate(prompts(replica))]


def scenario(model_path: str, tp: int) -> dict[str, Any]:
    """Sample on one rank. Only leaders return completions."""
    from safetensors.torch import load_file

    from megarl.engine.engine import RolloutEngine
    from megarl.engine.sleep import unrestored_tensors

    set_num_threads, random_state = torch.set_num_threads, _random_state()
    engine = RolloutEngine(
        model_path,
        RolloutConfig(
            tp=tp,
            kv_cache_gib=0.05,
            max_concurrent_requests=32,
            sampling=SamplingConfig(top_p=NUCLEUS.top_p, top_k=NUCLEUS.top_k),
        ),
        max_model_len=128,
        dtype="float32",
        seed=3,
    )
    weights = load_file(f"{model_path}/model.safetensors")
    engine.model.load_weights(weights.items())

    def run(
        new: list[Request],
        aborts: tuple[str, ...] = (),
        budget: float = float("inf"),
        leave_after: int | None = None,
    ) -> dict[str, Completion]:
        done = engine.advance(new if engine.is_leader else (), aborts, budget, leave_after=leave_after)
        return {completion.request_id: completion for completion in done}

    result: dict[str, Any] = {"replica": engine.replica, "is_leader": engine.is_leader}
    together = [r for tag, sampling in TAGS.items() for r in requests(engine.replica, tag, sampling)]
    result["together"] = run(together)
    result["metrics"] = [values(engine.metrics()), values(engine.metrics())]

    # The same requests by and by: each call makes one step and brings one more.
    late: dict[str, Completion] = {}
    for one in together:
        late |= run([one], budget=0.0)
    result["unfinished_between"] = len(engine.sampled_so_far())
    result["late"] = late | run([])

    greedy = result["together"]["g0"].token_ids.tolist() if engine.is_leader else [0] * NEW_TOKENS
    result["stop_text"] = _stop_text(model_path, greedy)
    by_text = SamplingSettings(NEW_TOKENS, 0.0, stop=(result["stop_text"],))
    by_token = SamplingSettings(NEW_TOKENS, 0.0, stop_token_ids=(greedy[3],))
    stop, token_stop = request("stop", (7, 11, 13), by_text), request("token_stop", (7, 11, 13), by_token)
    result["stops"] = run([stop, token_stop])

    # Beside requests of four and of forty tokens, some that vLLM refuses: too long, empty, with an unknown token.
    short, long = (request(name, (7, 11, 13), SamplingSettings(n, 0.0)) for name, n in (("short", 4), ("long", 40)))
    refused = [request(f"refused{i}", p, GREEDY) for i, p in enumerate([(5,) * 200, (), (3, 10**9)])]
    result["refused"] = run([*refused, *requests(engine.replica, "r", SAMPLED)])
    with _counted_steps(engine) as steps:
        result["early"] = [run([short, long], leave_after=1), run([], leave_after=1)]
        result["early_steps"] = list(steps)
    with _counted_steps(engine) as steps:
        run([short, long])
        result["at_once_steps"] = list(steps)

    result["stalled"] = _stalled(engine, run)
    # An abort, and new weights (the same ones) in the midst of a completion.
    begun = [
        r for tag, s in zip("akb", (SAMPLED, SAMPLED, NUCLEUS), strict=True) for r in requests(engine.replica, tag, s)
    ]
    run(begun, budget=0.0)
    run([], budget=0.0)
    result["aborted"] = run([], aborts=("a0", "a1", "b0", "unknown"), budget=0.0)
    result["running"] = len(engine.sampled_so_far())
    engine.metrics()
    engine.weights_updated()
    engine.sleep()
    engine.wake()
    result["kept"] = run([])
    result["metrics"].append(values(engine.metrics()))
    result["unfinished_after"] = len(engine.sampled_so_far())
    result["unrestored_tensors"] = [unrestored_tensors(engine.model)]
    engine.model.get_submodule("model.norm").scale = torch.ones(1)
    result["unrestored_tensors"].append(unrestored_tensors(engine.model))
    result["kept_random_state"] = _random_state() == random_state
    result["kept_thread_control"] = torch.set_num_threads is set_num_threads

    result["shared_memory"] = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/psm_" in line]

    result["unseen_writes"] = [name for name, _ in _parameters(engine) if not _write_is_seen(engine, name, run)]
    result["restored"] = run(requests(engine.replica, "g", GREEDY))
    engine.close()
    result["num_frozen"] = gc.get_freeze_count()
    result["world_survives"] = torch.distributed.get_world_size()
    return result


@contextmanager
def _counted_steps(engine: Any) -> Iterator[list[int]]:
    """The unfinished requests before each step of the leader's engine."""
    steps: list[int] = []
    if not engine.is_leader:
        yield steps
        return
    step = engine._requests.engine.step

    def counted() -> Any:
        steps.append(len(engine.sampled_so_far()))
        return step()

    engine._requests.engine.step = counted
    yield steps
    del engine._requests.engine.step


def _stalled(engine: Any, run: Callable[..., dict[str, Completion]]) -> tuple[str, dict[str, Completion]]:
    """The error of an engine whose scheduler schedules nothing, and what it samples once it does."""
    from vllm.v1.core.sched.interface import PauseState

    error = ""
    engine._progress.stall_seconds = 0.2
    if engine.is_leader:
        scheduler = engine._requests.engine.engine_core.engine_core.scheduler
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        scheduler.set_pause_state = lambda state: None
    # Each of the calls is shorter than the limit.
    for new in [request("stalled", (7, 11, 13), GREEDY)], []:
        try:
            run(new, budget=0.15)
        except TimeoutError as raised:
            error = f"{bool(new)}: {raised}"
    engine._progress.stall_seconds = 300.0
    if engine.is_leader:
        del scheduler.set_pause_state
        scheduler.set_pause_state(PauseState.UNPAUSED)
    return error, run([])


def _parameters(engine: Any) -> list[tuple[str, torch.Tensor]]:
    return [item for item in engine.model.named_parameters() if "layers.1." not in item[0]]


def _write_is_seen(engine: Any, name: str, run: Callable[..., dict[str, Completion]]) -> bool:
    """Whether a change of one live parameter changes a log-prob; every rank of the engine changes its part."""
    parameter = dict(engine.model.named_parameters())[name]
    before = parameter.detach().clone()
    probe = [request("probe", (7, 11, 13), SamplingSettings(1, 0.0))]

    def logprobs() -> list[float]:
        engine.weights_updated()
        return [float(v) for c in run(probe).values() for v in c.rollout_logprobs]

    reference = logprobs()
    parameter.data.copy_(before.roll(1, -1) * 3)
    changed = logprobs()
    parameter.data.copy_(before)
    restored = logprobs()
    return not engine.is_leader or (changed != reference and restored == reference)


def _random_state() -> list[Any]:
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


def _stop_text(model_path: str, token_ids: list[int]) -> str:
    """The text of the first token after two that is a text of its own."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    return next(text for text in map(tokenizer.decode, token_ids[2:]) if text.isascii() and text)


@pytest.fixture(scope="module")
def model_path(tiny_model: Callable[..., Path]) -> str:
    return str(tiny_model(num_layers=2, tie_word_embeddings=False, initializer_range=0.1))


@pytest.fixture(scope="module")
def outcome(model_path: str, ranks: RankPool) -> Callable[[int, int], list[dict[str, Any]]]:
    return cache(lambda n, tp: ranks.run(scenario, model_path, tp, world_size=n))


@pytest.fixture(scope="module")
def reference_logits(model_path: str) -> Callable[..., torch.Tensor]:
    """Hugging Face's logits of a request's completion [new_tokens, vocabulary]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)

    def logits(request: Request, token_ids: np.ndarray) -> torch.Tensor:
        tokens = torch.tensor([[*request.prompt_token_ids, *token_ids.tolist()]])
        with torch.no_grad():
            return model(tokens).logits[0, len(request.prompt_token_ids) - 1 : -1]

    return logits


@pytest.fixture(scope="module")
def reference_logprobs(reference_logits: Callable[..., torch.Tensor]) -> Callable[..., np.ndarray]:
    """Hugging Face's log-probs of a request's completion, under the sampling distribution."""

    def logprobs(request: Request, token_ids: np.ndarray, *, greedy: bool) -> np.ndarray:
        logits = reference_logits(request, token_ids)
        if greedy:
            assert logits.argmax(-1).tolist() == token_ids.tolist()
            return _taken(logits.log_softmax(-1), token_ids)
        logits = _penalised(logits, [*request.prompt_token_ids], token_ids, request.sampling.repetition_penalty)
        return _taken(_kept(logits / request.sampling.temperature, request.sampling).log_softmax(-1), token_ids)

    return logprobs


@pytest.fixture(scope="module")
def reference_kept(reference_logits: Callable[..., torch.Tensor]) -> Callable[..., list[list[int]]]:
    """The tokens that a request's sampling keeps of Hugging Face's distribution, at each token of its completion."""

    def kept(request: Request, token_ids: np.ndarray) -> list[list[int]]:
        logits = _kept(reference_logits(request, token_ids) / request.sampling.temperature, request.sampling)
        return [row.isfinite().nonzero()[:, 0].tolist() for row in logits]

    return kept


def _taken(logprobs: torch.Tensor, token_ids: np.ndarray) -> np.ndarray:
    return logprobs[torch.arange(len(token_ids)), torch.from_numpy(token_ids)].numpy()


def _penalised(logits: torch.Tensor, prompt: list[int], token_ids: np.ndarray, penalty: float) -> torch.Tensor:
    """Logits of which those of tokens that came before are divided by the penalty above 0, and multiplied below."""
    logits = logits.clone()
    for place, row in enumerate(logits):
        seen = sorted({*prompt, *token_ids[:place].tolist()})
        row[seen] = torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
    return logits


def _kept(logits: torch.Tensor, sampling: SamplingSettings) -> torch.Tensor:
    """Logits with minus infinity where min-p cuts, then outside top-k, then outside the nucleus of what is left."""
    least = sampling.min_p * logits.softmax(-1).amax(-1, keepdim=True)
    logits = logits.masked_fill(logits.softmax(-1) < least, -torch.inf)
    if sampling.top_k:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[:, -1:], -torch.inf)
    if sampling.top_p == 1:
        return logits
    ordered, order = logits.softmax(-1).sort(descending=True)
    outside = ordered.cumsum(-1) - ordered >= sampling.top_p
    return logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)


@pytest.mark.parametrize(("world_size", "tp"), LAYOUTS)
def test_logprobs_are_hugging_faces(world_size, tp, outcome, reference_logprobs) -> None:
    for rank, result in enumerate(outcome(world_size, tp)):
        assert (result["replica"], result["is_leader"]) == (rank // tp, rank % tp == 0)
        if not result["is_leader"]:
            assert result["together"] == {}
            continue
        for tag, sampling in TAGS.items():
            for request in requests(result["replica"], tag, sampling):
                completion = result["together"][request.request_id]
                expected = reference_logprobs(request, completion.token_ids, greedy=tag == "g")
                np.testing.assert_allclose(completion.rollout_logprobs, expected, atol=1e-5, rtol=0)
                assert completion.finish_reason == ("length" if len(completion.token_ids) == NEW_TOKENS else "stop")
                assert not completion.weight_versions.any()


@pytest.mark.parametrize(("world_size", "tp"), LAYOUTS)
def test_what_the_cuts_kept_is_recorded(world_size, tp, outcome, reference_kept) -> None:
    for result in filter(lambda r: r["is_leader"], outcome(world_size, tp)):
        for tag in "gsp":
            assert all(result["together"][r.request_id].retained_sets is None for r in requests(0, tag, GREEDY))
        for tag in "nmc":
            sizes = set()
            for request in requests(result["replica"], tag, TAGS[tag]):
                completion = result["together"][request.request_id]
                expected = reference_kept(request, completion.token_ids)
                assert completion.retained_sets.counts.tolist() == [len(kept) for kept in expected]
                assert completion.retained_sets.token_ids.tolist() == [token for kept in expected for token in kept]
                sizes.update(completion.retained_sets.counts.tolist())
            assert len(sizes) > 1 and (max(sizes) < 20 or tag == "m")
        # An aborted one has those of the tokens that it has.
        whole, part = result["together"]["n0"].retained_sets, result["aborted"]["b0"].retained_sets
        assert part.counts.tolist() == whole.counts[: len(result["aborted"]["b0"].token_ids)].tolist()
        assert part.token_ids.tolist() == whole.token_ids[: part.counts.sum()].tolist()


@pytest.mark.parametrize(("world_size", "tp"), LAYOUTS)
def test_a_request_is_sampled_alike_in_any_company(world_size, tp, outcome) -> None:
    first = outcome(1, 1)[0]["together"]
    for result in filter(lambda r: r["is_leader"], outcome(world_size, tp)):
        assert 0 < result["unfinished_between"] <= len(result["together"])
        assert result["late"].keys() == result["together"].keys()
        for name, completion in result["together"].items():
            np.testing.assert_array_equal(result["late"][name].token_ids, completion.token_ids)
        for name in ("s0", "s2", "n0", "n2"):  # prompts that all replicas share
            np.testing.assert_array_equal(result["together"][name].token_ids, first[name].token_ids)


def test_equal_prompts_with_other_seeds_differ(outcome) -> None:
    together = outcome(2, 1)[1]["together"]
    assert together["s4"].token_ids.tolist() != together["s5"].token_ids.tolist()


@pytest.mark.parametrize(("world_size", "tp"), LAYOUTS)
def test_stops_end_a_completion_and_stay_part_of_it(world_size, tp, outcome, model_path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    for result in filter(lambda r: r["is_leader"], outcome(world_size, tp)):
        full = result["together"]["g0"].token_ids.tolist()
        assert result["stops"]["token_stop"].token_ids.tolist() == full[: full.index(full[3]) + 1]
        expected = next(n for n in range(1, NEW_TOKENS) if result["stop_text"] in tokenizer.decode(full[:n]))
        assert result["stops"]["stop"].token_ids.tolist() == full[:expected]
        assert {c.finish_reason for c in result["stops"].values()} == {"stop"}


@pytest.mark.parametrize(("world_size", "tp"), LAYOUTS)
def test_the_use_of_the_cache_and_lost_places_are_measured(world_size, tp, outcome) -> None:
    for result in outcome(world_size, tp):
        if not result["is_leader"]:
            assert result["metrics"] == [{}, {}, {}]
            continue
        sampled, nothing, begun_anew = result["metrics"]
        assert 0 < sampled["memory/kv_usage"] < 1 and sampled["perf/preemptions"] == 0
        assert nothing == {"memory/kv_usage": 0.0, "perf/preemptions": 0.0}
        # New weights take the cache of all that run.
        assert begun_anew["perf/preemptions"] == result["running"] > 0


@pytest.mark.parametrize(("world_size", "tp"), LAYOUTS)
def test_a_call_returns_with_the_first_that_finished(world_size, tp, outcome) -> None:
    for result in filter(lambda r: r["is_leader"], outcome(world_size, tp)):
        first, second = result["early"]
        assert first.keys() == {"short"} and second.keys() == {"long"}
        assert len(first["short"].token_ids) <= 4 < len(second["long"].token_ids) <= 40
        assert result["early_steps"] == result["at_once_steps"] and len(result["early_steps"]) <= 40


@pytest.mark.parametrize(("world_size", "tp"), LAYOUTS)
def test_a_request_that_vllm_refuses_comes_back_and_its_neighbours_go_on(world_size, tp, outcome) -> None:
    for result in filter(lambda r: r["is_leader"], outcome(world_size, tp)):
        refused = {name: c for name, c in result["refused"].items() if name.startswith("refused")}
        assert refused.keys() == {"refused0", "refused1", "refused2"}
        for completion, word in zip(refused.values(), ("200", "empty", str(10**9)), strict=True):
            assert completion.finish_reason == "error" and completion.error and word in completion.error
            assert len(completion.token_ids) == len(completion.rollout_logprobs) == 0
        for i in range(len(prompts(result["replica"]))):
            expected = result["together"][f"s{i}"].token_ids
            np.testing.assert_array_equal(result["refused"][f"r{i}"].token_ids, expected)


@pytest.mark.parametrize(("world_size", "tp"), LAYOUTS)
def test_an_engine_that_computes_no_token_is_lost(world_size, tp, outcome) -> None:
    for result in filter(lambda r: r["is_leader"], outcome(world_size, tp)):
        error, completions = result["stalled"]
        # The seconds depend on the machine's load.
        assert re.match(r"False: the engine computed no token for \d+ s \(limit: ", error) and "1 requests are" in error
        assert len(completions["stalled"].token_ids) == NEW_TOKENS


@pytest.mark.parametrize(("world_size", "tp"), LAYOUTS)
def test_aborted_requests_return_what_they_have(world_size, tp, outcome) -> None:
    for result in filter(lambda r: r["is_leader"], outcome(world_size, tp)):
        aborted = {name: c for name, c in result["aborted"].items() if c.finish_reason == "abort"}
        assert aborted.keys() == {"a0", "a1", "b0"}
        for name, completion in aborted.items():
            assert 1 <= len(completion.token_ids) == len(completion.rollout_logprobs) < NEW_TOKENS
            full = result["together"][name.replace("a", "s").replace("b", "n")]
            np.testing.assert_array_equal(completion.token_ids, full.token_ids[: len(completion.token_ids)])
        assert result["unfinished_after"] == 0


@pytest.mark.parametrize(("world_size", "tp"), LAYOUTS)
def test_completions_go_on_after_an_update_of_the_weights(world_size, tp, outcome) -> None:
    for result in filter(lambda r: r["is_leader"], outcome(world_size, tp)):
        kept = {name: c for name, c in result["kept"].items() if name.startswith("k")}
        assert len(kept) == len(prompts(result["replica"]))
        for name, completion in kept.items():
            full = result["together"][name.replace("k", "s")]
            np.testing.assert_array_equal(completion.token_ids, full.token_ids)
            np.testing.assert_allclose(completion.rollout_logprobs, full.rollout_logprobs, atol=1e-5, rtol=0)
            assert not completion.weight_versions.any()


@pytest.mark.parametrize(("world_size", "tp"), LAYOUTS)
def test_writes_to_live_parameters_are_seen(world_size, tp, outcome) -> None:
    for result in outcome(world_size, tp):
        assert result["unseen_writes"] == []
        for name, completion in result["restored"].items():
            np.testing.assert_array_equal(completion.token_ids, result["together"][name].token_ids)
            assert len(set(completion.weight_versions.tolist())) == 1 and completion.weight_versions[0] > 1


@pytest.mark.parametrize(("world_size", "tp"), LAYOUTS)
def test_the_trainers_process_is_left_as_it_was(world_size, tp, outcome) -> None:
    for result in outcome(world_size, tp):
        assert result["kept_random_state"] and result["kept_thread_control"]
        assert result["world_survives"] == world_size
        assert result["num_frozen"] > 0, "each later collection goes through all libraries"


@pytest.mark.parametrize(("world_size", "tp"), LAYOUTS)
def test_no_shared_memory_is_held_that_a_kill_would_leave(world_size, tp, outcome) -> None:
    """vLLM's message queues would be 24 MiB of it; none of them carries anything here."""
    assert [result["shared_memory"] for result in outcome(world_size, tp)] == [[]] * world_size


def test_a_tensor_that_a_deep_sleep_would_lose_is_noticed(outcome) -> None:
    assert outcome(1, 1)[0]["unrestored_tensors"] == [[], ["model.norm.scale"]]


def vllm_field_error(model_path: str, fields: dict[str, Any]) -> str:
    from megarl.engine.vllm_arguments import engine_arguments

    try:
        engine_arguments(model_path, RolloutConfig(vllm=fields), max_model_len=64, dtype="float32", seed=0)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"enforce_eagre": True}, "rollout.vllm.enforce_eagre: .* mean enforce_eager", id="unknown"),
        pytest.param({"kv_transfer_config": {}}, "rollout.vllm.kv_transfer_config: .*; remove it", id="refused"),
        pytest.param({"max_logprobs": 5}, "^$", id="known"),
    ],
)
def test_fields_of_vllm_are_checked(fields, message, model_path, ranks) -> None:
    (error,) = ranks.run(vllm_field_error, model_path, fields, world_size=1)
    assert re.search(message, error)


def passes_without_a_toolkit(model_path: str) -> list[Any]:
    """vLLM's passes on a GPU without a CUDA toolkit. The recipe changes other settings, or asks for fusion."""
    from megarl.engine.vllm_arguments import engine_arguments

    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: True)
        patch.setattr("megarl.platform.device.cuda_toolkit", lambda: None)
        for passes in ({"fuse_norm_quant": True}, {"fuse_allreduce_rms": True}):
            config = RolloutConfig(vllm={"compilation_config": {"pass_config": passes}})
            try:
                arguments = engine_arguments(model_path, config, max_model_len=64, dtype="float32", seed=0)
            except ConfigError as error:
                found.append(str(error))
            else:
                settings = arguments.compilation_config.pass_config
                found.append((settings.fuse_norm_quant, settings.fuse_allreduce_rms))
    return found


def test_a_recipes_compilation_keeps_megarls_guard(model_path, ranks) -> None:
    ((fused, error),) = ranks.run(passes_without_a_toolkit, model_path, world_size=1)
    assert fused == (True, False)
    assert error.startswith("rollout.vllm.compilation_config.pass_config.fuse_allreduce_rms = True: ")


REFUSED = [
    (
        {"vllm": {"max_num_batched_tokens": "many"}},
        "rollout.vllm.max_num_batched_tokens = 'many'. vLLM refuses it: Inp",
    ),
    ({"vllm": {"block_size": "x", "enforce_eager": True}}, "rollout.vllm.block_size = 'x'. vLLM refuses it: Input"),
    ({"vllm": {"compilation_config": {"mode": "x"}}}, "rollout.vllm.compilation_config = {'mode': 'x'}. vLLM refuses"),
    ({"vllm": {"attention_backend": "NO"}}, "rollout.vllm.attention_backend = 'NO'. vLLM refuses it: Unknown att"),
    ({"kv_cache_gib": 1e-5}, "rollout.kv_cache_gib = 1e-05: too small for one sequence of 128 tokens"),
]


def refusals(model_path: str) -> list[str]:
    """The messages of the ConfigErrors that engines with faulty settings end in."""
    from megarl.engine.engine import RolloutEngine

    found = []
    for settings, _ in REFUSED:
        config = RolloutConfig.model_validate({"kv_cache_gib": 0.05, "max_concurrent_requests": 32} | settings)
        with pytest.raises(ConfigError) as caught:
            RolloutEngine(model_path, config, max_model_len=128, dtype="float32", seed=3)
        found.append(str(caught.value))
    return found


def refused_caches() -> list[str]:
    """The messages for errors that vLLM raises on other machines: on a GPU, and on a CPU without AVX-512."""
    from megarl.engine.parts.choice import EngineFeatures, build_parts
    from megarl.engine.vllm_arguments import name_refused_field

    found = []
    for settings, text in (
        ({"gpu_memory_utilization": 0.25}, "No available memory for the cache blocks."),
        ({"kv_cache_dtype": "fp8"}, "FP8 KV cache on CPU requires x86 with AVX-512 or AMX."),
        ({"kv_cache_dtype": "fp8", "kv_cache_gib": 0.5}, "To serve one request, 2 GiB KV cache is needed."),
    ):
        config = RolloutConfig.model_validate(settings)
        parts = list(build_parts("", config, None, EngineFeatures()))
        with pytest.raises(ConfigError) as caught, name_refused_field(config, 128, parts, ValueError):
            raise ValueError(text)
        found.append(str(caught.value))
    return found


def test_a_cache_that_vllm_refuses_is_named_by_its_field(ranks) -> None:
    (errors,) = ranks.run(refused_caches, world_size=1)
    assert errors[0].startswith("rollout.gpu_memory_utilization = 0.25: too small for one sequence of 128 tokens")
    assert errors[1].startswith("rollout.kv_cache_dtype = fp8: choose auto. vLLM refuses it: FP8 KV cache")
    assert errors[2].startswith("rollout.kv_cache_gib = 0.5: too small for one sequence of 128 tokens")


@pytest.mark.distributed
def test_what_vllm_refuses_is_told_as_a_fault_of_the_recipe(model_path) -> None:
    with RankPool(1) as own:  # half an engine is left behind
        (found,) = own.run(refusals, model_path, world_size=1)
    assert [message[: len(told)] for message, (_, told) in zip(found, REFUSED, strict=True)] == [
        told for _, told in REFUSED
    ]
