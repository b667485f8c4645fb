"""The real SDK against the routes, with a trainer of tables: loops run, chunks count once, errors come at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.service.fake_trainer import FakeTrainer
from tests.service.served import check_sampling, run_program, serving


async def test_a_supervised_loop_trains_saves_samples_and_resumes(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    async with serving(trainer, tmp_path) as url:
        found = await run_program(url, "supervised")
    assert all(later < earlier for earlier, later in zip(found["losses"], found["losses"][1:], strict=False))
    assert found["metrics"].keys() == {"grad_norm:mean"}
    assert [path.split("/")[3] for path in found["paths"]] == ["weights", "sampler_weights"]
    assert found["tokens"] == found["again"] and [len(one) for one in found["tokens"]] == [5, 5]
    assert found["scores"][0] is None and np.allclose(found["scores"][1:], found["forward"][0], atol=1e-6)
    assert found["forward"][0] == found["forward"][1]


async def test_a_reinforcement_loop_trains_on_what_it_sampled(tmp_path: Path) -> None:
    async with serving(FakeTrainer(), tmp_path) as url:
        found = await run_program(url, "reinforce", SDK_RATE="0.2")
    assert found["rewards"][-1] > found["rewards"][0] + 0.1
    assert found["gap"] < 1e-5


async def test_refused_calls_raise_at_once_and_the_client_goes_on(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    async with serving(trainer, tmp_path) as url:
        found = await run_program(url, "errors")
    errors = found["errors"]
    assert "importance_sampling" in errors["loss"] and "cispo" in errors["loss"]
    assert "forward_backward 1 failed" in errors["dropped"]
    for label, text in (("vocabulary", "0 to 31"), ("long", "63"), ("rank", "rank 8"), ("base", "Qwen/Qwen3-8B")):
        assert errors[label].startswith("RequestFailedError") and text in errors[label]
    assert "does not exist" in errors["path"]
    assert found["step"]["grad_norm:mean"] > 0


async def test_a_call_that_cannot_be_read_raises_at_once_and_uses_its_number(tmp_path: Path) -> None:
    async with serving(FakeTrainer(), tmp_path) as url:
        results = await run_program(url, "unreadable")
    errors = results["errors"]
    for label, number, text in (("parts", 1, "131072 datums"), ("bytes", 6, "the limit is")):
        refusal, failed_step = errors.pop(label), errors.pop(f"{label}, step 0")
        assert refusal.startswith("RequestFailedError") and text in refusal
        assert f"no optimizer step: request {number} was refused" in failed_step and text in failed_step
    save = errors.pop("metadata")
    assert save.startswith("RequestFailedError") and "values" in save
    assert errors == {}, "the second step after each of them runs, and the first after a save"
    # The numbers after a missing one would wait for 15 minutes, and the SDK repeats some statuses for five.
    assert results["seconds"] < 60


async def test_sampling_requests_are_honoured_or_refused_at_once(tmp_path: Path) -> None:
    async with serving(FakeTrainer(), tmp_path) as url:
        check_sampling(await run_program(url, "sampling"))


async def test_a_moving_sampling_client_follows_the_saves_of_its_model(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    async with serving(trainer, tmp_path) as url:
        found = await run_program(url, "moving")
        # Each kind has one copy: weights that were replaced are forgotten.
        assert len(trainer.versions) == 3
    before, trained, saved = found["before"], found["trained"], found["saved"]
    assert before == trained and before["inflight"] == before["snapshot"] == saved["snapshot"]
    assert saved["inflight"] == found["newest"] != before["inflight"]
    assert all(scores in (before["inflight"], found["newest"]) for scores in found["meanwhile"])


async def test_chunks_of_one_call_are_counted_once(tmp_path: Path) -> None:
    trainer = FakeTrainer()
    async with serving(trainer, tmp_path) as url:
        found = await run_program(url, "chunks")
    names = [name for name, _ in trainer.calls]
    assert names == ["create", "forward_backward", "forward_backward", "forward_backward", "optim_step"]
    assert np.isclose(found["loss"], 2500 * 7 * np.log(32), rtol=0.02)
