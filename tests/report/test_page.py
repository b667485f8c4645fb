from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megarl.cli import main
from megarl.report.page import write_report
from megarl.types import ConfigError
from tests.report.made_runs import lines, make_run

HOSTILE = "</script><script>document.title='hit'</script><img src=x onerror=\"document.title='hit'\"><!--\u2028${1}"


# A reader who opens and presses everything, and points at every curve.
READER = """<script>
const seen = [];
const press = (text) => {
  for (const button of document.querySelectorAll("button")) {
    if (button.textContent === text && button.isConnected) {
      button.click();
      seen.push(document.querySelector("#samples").textContent.length);
    }
  }
};
document.querySelectorAll("details").forEach((fold) => { fold.open = true; });
["light", "strong", "training time", "best", "worst", "most changed", "turn by turn", "token by token", "log-prob gap",
 "surprise", "weight version", "turn", "advantage", "second", "none", "step", "colours: auto"].forEach(press);
document.querySelectorAll("svg").forEach((svg) => {
  const box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top + 5 }));
});
document.querySelectorAll(".tokens span").forEach((token) => {
  token.dispatchEvent(new PointerEvent("pointerover", { bubbles: true }));
});
const tips = document.querySelectorAll(".tip:not([hidden])").length;
document.documentElement.dataset.read = `${tips} ${seen.length} ${new Set(seen).size}`;
document.querySelectorAll("svg").forEach((svg) => svg.dispatchEvent(new PointerEvent("pointerleave")));
</script>"""


def content(page: Path) -> dict:
    """Return the data that the page embeds, as its script reads it."""
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    return json.loads(text)


def test_two_runs_are_drawn_in_a_browser(tmp_path: Path, opened: Callable[[Path], str]) -> None:
    runs = [make_run(tmp_path / "first"), make_run(tmp_path / "second", seed=5, rate=1e-4)]
    for step in (5, 40):
        record = json.loads((runs[0] / f"samples/step_{step:06d}.jsonl").read_text().splitlines()[0])
        hostile = dict.fromkeys(("completion", "answer", "finish_reason"), HOSTILE)
        turn = {"completion": HOSTILE, "observation": [{"role": HOSTILE, "content": HOSTILE}]}
        record |= hostile | {"reward": 9.0, "prompt": [{"role": HOSTILE, "content": HOSTILE}]}
        lines(runs[0] / f"samples/step_{step:06d}.jsonl", [record, {**record, "turns": [turn, turn]}])
        lines(runs[0] / f"tokens/step_{step:06d}.jsonl", [{**record, "columns": {"text": [HOSTILE, "b"]}}])
    (runs[0] / "config.yaml").write_text(json.dumps({"name": HOSTILE, "loop": "rl", "model": {HOSTILE: HOSTILE}}))
    (runs[0] / "metrics.jsonl").open("a").write(json.dumps({"step": 41, f"reward/{HOSTILE}": 1.0}) + "\n")
    page, _, _ = write_report(runs, tmp_path / "report.html")
    found = opened(page)
    assert int(re.findall(r'data-ready="(\d+)"', found)[0]) >= 2 * 12
    assert len(re.findall(r'<path class="curve k1" d="M[\d. L]+"', found)) >= 12
    assert len(re.findall(r'<path class="fill p0" d="M', found)) == 2
    assert html.escape(HOSTILE, quote=False).split("\u2028")[0] in found
    assert "<img" not in found and f"<title>megarl: {html.escape(HOSTILE, quote=False)[:20]}" in found


def test_all_that_can_be_pressed_and_pointed_at_works(tmp_path: Path, opened: Callable[[Path], str]) -> None:
    runs = [make_run(tmp_path / "first"), make_run(tmp_path / "second", seed=5)]
    page, _, _ = write_report(runs, tmp_path / "report.html")
    text = re.sub("<meta http-equiv[^>]*>", "", page.read_text("utf-8"))
    page.write_text(text.replace("</body>", f"{READER}</body>"), "utf-8")
    found = opened(page)
    tips, pressed, different = map(int, re.findall(r'data-read="(\d+) (\d+) (\d+)"', found)[0])
    assert tips >= 14 and pressed == 17 and different >= 9
    assert 'data-theme="light"' in found and len(re.findall(r'aria-label="train/[a-z_]+"', found)) >= 5
    assert re.search(r'<span class="tokenline">advantage -1.2 . engine [^<]+</span>', found)


def test_a_run_that_has_just_begun_is_drawn(tmp_path: Path, opened: Callable[[Path], str]) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "status.json").write_text(json.dumps({"state": "starting", "step": 0}))
    (folder / "config.yaml").write_text("name: new\nloop: sft\n")
    text = opened(write_report([folder])[0])
    assert "This run has not logged a step yet." in text and "No step was timed yet." in text
    assert "metrics.jsonl is not there yet" in text


def test_nothing_but_its_own_script_may_run(tmp_path: Path) -> None:
    page, size, _ = write_report([make_run(tmp_path / "run", steps=8)])
    assert page == tmp_path / "run/report.html" and size == page.stat().st_size
    text = page.read_text("utf-8")
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    assert not re.findall(
        r"<link|<iframe|\bsrc=|@import|url\(|innerHTML|outerHTML|insertAdjacent|document\.write", text
    )
    # The one address is the name of SVG's elements.
    assert set(re.findall(r"https?://[\w./]+", text)) == {"http://www.w3.org/2000/svg"}


def test_the_page_of_a_long_run_is_small(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "long", steps=10)
    row = {f"group{number % 9}/metric_{number}": 0.123456789 * number for number in range(40)}
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(10_000):
            file.write(json.dumps({"step": step, "reward/mean": step / 7, "time/step_seconds": 1.3, **row}) + "\n")
    record = json.loads((folder / "samples/step_000010.jsonl").read_text().splitlines()[0])
    long = [{**record, "completion": "word " * 9_000, "prompt": "x" * 50_000}] * 6
    for step in range(100, 150):
        lines(folder / f"samples/step_{step:06d}.jsonl", long)
    page, size, _ = write_report([folder, make_run(tmp_path / "short", steps=10)], tmp_path / "report.html")
    assert size < 2_000_000
    first = content(page)["runs"][0]
    assert first["series"]["is_thinned"] and (first["samples"]["read"], first["samples"]["there"]) == (40, 61)


def test_runs_of_different_loops_share_a_page(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "rl", steps=8), make_run(tmp_path / "sft", steps=8, loop="sft")]
    rows = [{"step": step, "train/loss": 1.0 / step, "time/step_seconds": 1.0} for step in range(1, 9)]
    lines(runs[1] / "metrics.jsonl", rows)
    shutil.rmtree(runs[1] / "samples")
    shown = content(write_report([*runs, runs[0]], tmp_path / "both.html")[0])
    assert [run["loop"] for run in shown["runs"]] == ["rl", "sft"], "a run that is given twice is shown once"
    assert {"reward/mean", "train/loss"} <= {chart["metric"] for chart in shown["charts"]}
    assert {"field": "loop", "values": ["rl", "sft"]} in shown["config"]


def test_samples_that_a_page_shows(tmp_path: Path) -> None:
    shown = content(write_report([make_run(tmp_path / "run")])[0])["runs"][0]["samples"]
    for step in {sample["step"] for sample in shown["worst"]}:
        best, worst = ([s["reward"] for s in shown[kind] if s["step"] == step] for kind in ("best", "worst"))
        assert min(best) >= max(worst) and len(best) == 5 and best == sorted(best, reverse=True)
    assert shown["changed"][0]["change"] == 1 and shown["changed"][0]["before"]["step"] == 0
    assert [turn.get("reward") for turn in shown["turns"][0]["turns"]] == [0, 1]
    assert shown["turns"][0]["turns"][0]["observation"] == [{"role": "tool", "text": "The tea costs 6 euros."}]
    columns = shown["tokens"][0]["columns"]
    assert {len(values) for values in columns.values()} == {len(columns["text"])} and columns["advantage"][0] == 0.7


def test_large_files_are_read_to_their_end(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=8)
    shutil.rmtree(folder / "samples")
    for step, chosen in ((1, 0.25), (8, 0.75)):
        training = [{"prompt": f"p{number}", "completion": "x" * 50_000, "reward": number} for number in range(200)]
        held_out = {"set": "a", "source": "", "problem": 1, "completion": f"{step}", "reward": chosen}
        lines(folder / f"samples/step_{step:06d}.jsonl", [*training, held_out])
    shown = content(write_report([folder])[0])["runs"][0]["samples"]
    assert [sample["reward"] for sample in shown["best"]] == [199, 198, 197, 196, 195] * 2
    assert [sum(counts) for counts in shown["rewards"]["counts"]] == [200, 200]
    assert [pair["change"] for pair in shown["changed"]] == [0.5]


def test_of_samples_too_large_to_read_fewer_steps_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run", steps=8)
    sizes = [path.stat().st_size for path in sorted(folder.glob("samples/*.jsonl"))]
    monkeypatch.setattr("megarl.report.samples.BYTES_READ", sum(sizes) // 2)
    shown = content(write_report([folder])[0])["runs"][0]["samples"]
    assert 2 <= shown["read"] <= 5 and shown["there"] == len(sizes) == 9
    assert shown["rewards"]["steps"][-1] == 8


def test_several_samples_of_a_held_out_problem_are_compared_by_their_means(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    shutil.rmtree(folder / "samples")
    # The samples of problem 1 come in another order alone, those of problem 2 are better.
    # Problem 3 was not scored before, so nothing is known of its change.
    rewards_before, rewards_after = {1: (1, 0, 0), 2: (0, 0, 1), 3: (None,)}, {1: (0, 0, 1), 2: (0, 1, 1), 3: (1,)}
    for step, rewards in ((0, rewards_before), (2, rewards_after)):
        records = [
            {"set": "a", "source": "", "problem": problem, "completion": f"{problem} {reward}", "reward": reward}
            for problem, of_problem in rewards.items()
            for reward in of_problem
        ]
        lines(folder / f"samples/step_{step:06d}.jsonl", records)
    [pair] = content(write_report([folder])[0])["runs"][0]["samples"]["changed"]
    assert pair["change"] == pytest.approx(1 / 3, rel=1e-3)
    assert (pair["gained"], pair["lost"], pair["same"], pair["problems"]) == (1, 0, 0, 3)
    before, after = pair["before"], pair["after"]
    assert (before["completion"], before["samples"], before["mean"]) == ("2 0", 3, 0.3333)
    assert (after["completion"], after["samples"], after["mean"]) == ("2 1", 3, 0.6667)


def test_long_attempts_are_shown_in_part(tmp_path: Path, opened: Callable[[Path], str]) -> None:
    folder = make_run(tmp_path / "run", steps=8)
    shutil.rmtree(folder / "samples")
    shutil.rmtree(folder / "tokens")
    long = {"role": "tool", "content": "y" * 2_000}
    turns = [{"completion": f"{number} " + "x" * 5_000, "observation": [long] * 9} for number in range(1, 101)]
    record = {"prompt": [long] * 99, "reward": 1.0, "turns": turns}
    lines(folder / "samples/step_000008.jsonl", [record] * 2)
    page, size, _ = write_report([folder])
    assert size < 800_000
    sample = content(page)["runs"][0]["samples"]["turns"][0]
    assert [turn["number"] for turn in sample["turns"]] == [*range(1, 21), *range(81, 101)]
    assert sample["turns"][20]["completion"].startswith("81 ")
    text = [message["text"] for message in sample["turns"][0]["observation"]][3]
    assert text == "[... 3 messages left out ...]" and len(sample["turns"][0]["observation"]) == 7
    assert sample["prompt"][20]["text"] == "[... 59 messages left out ...]" and len(sample["prompt"]) == 41
    assert "[... 60 turns left out ...]" in opened(page)


def test_numbers_at_the_edge_of_floating_point_are_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    largest = 1.7976931348623157e308
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "train/loss": largest}) + "\n" for step in (5, 6))
    lines(folder / "samples/step_000004.jsonl", [{"reward": value} for value in (largest, -largest, 10**400, 2)])
    run = content(write_report([folder])[0])["runs"][0]
    assert run["series"]["of"]["train/loss"]["y"][-1] is None
    assert [sample.get("reward") for sample in run["samples"]["best"]][:1] == [2]


def test_starts_tell_what_changed_and_what_they_warned_of(tmp_path: Path) -> None:
    first, second = content(write_report([make_run(tmp_path / "run", steps=8)])[0])["runs"][0]["attempts"]
    assert (first["state"], first["cause"]) == ("failed", "PeerLostError: rank 1 died") and first["changes"] == []
    assert second["changes"] == [["train.prompts_per_step", "8", "16"]] and second["resumed_step"] == "1"
    assert [first["notices"], second["notices"]] == [[{"step": n, "text": f"warning {n}"}] for n in (1, 2)]


@pytest.mark.parametrize(
    ("out", "text"),
    [
        pytest.param("no/report.html", "there is no folder", id="no folder"),
        pytest.param("run", "is a folder", id="folder"),
        pytest.param("run/config.yaml", "is not an HTML page", id="other file"),
    ],
)
def test_where_the_page_may_not_be(tmp_path: Path, out: str, text: str) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    with pytest.raises(ConfigError, match=text):
        write_report([folder], tmp_path / out)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main(["report", str(folder)])
        assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"wrote {folder / 'report.html'}: ")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path)])
    assert ended.value.code == 2 and "is not a run folder" in capsys.readouterr().err


def test_runs_of_several_seeds_are_a_mean_and_a_band(tmp_path: Path, opened: Callable[[Path], str]) -> None:
    runs = [make_run(tmp_path / f"grpo-{seed}", seed=seed) for seed in (3, 4, 5)]
    other = make_run(tmp_path / "rloo", seed=3, advantage="rloo")
    rewards = []
    for run in runs:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        rewards.append([row["reward/mean"] for row in rows if row["step"]])
    page, _, _ = write_report([*runs, other], tmp_path / "report.html")
    [group] = content(page)["seeds"]
    assert group["label"] == "grpo, seeds 3, 4, 5" and group["runs"] == [0, 1, 2]
    curve = group["series"]["of"]["reward/mean"]
    assert curve["y"][1:] == pytest.approx(np.mean(rewards, axis=0), rel=1e-4)
    spread = np.std(rewards, axis=0, ddof=1)
    assert np.subtract(curve["high"][1:], curve["y"][1:]) == pytest.approx(spread, abs=1e-4)
    assert np.subtract(curve["y"][1:], curve["low"][1:]) == pytest.approx(spread, abs=1e-4)
    assert group["series"]["final"]["reward/mean"][2] == 3
    # One number has no deviation.
    with (runs[0] / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": 99, "val/late/accuracy": 0.25}) + "\n")
    [group] = content(write_report([*runs, other], tmp_path / "late.html")[0])["seeds"]
    assert group["series"]["final"]["val/late/accuracy"] == [0.25, None, 1]
    assert "0.25 (1 run)" in opened(tmp_path / "late.html")
    found = opened(page)
    assert "mean over seeds" in found and "grpo, seeds 3, 4, 5" in found
    # The mean and the run that is not of the group: two lines in each chart, and the band of the mean.
    [chart] = re.findall(r'<svg[^>]*aria-label="reward/mean".*?</svg>', found)
    assert len(re.findall(r'class="curve k\d"', chart)) == 2 and len(re.findall(r'class="band k0"', chart)) == 1
    assert content(write_report([runs[0], other], tmp_path / "two.html")[0])["seeds"] == []


def test_each_phase_has_a_colour_and_runs_share_a_scale(tmp_path: Path, opened: Callable[[Path], str]) -> None:
    """The second run is three times as slow. Both have phases that the page does not know by name."""
    pages = []
    for name, seconds in (("fast", 1.0), ("slow", 3.0)):
        folder = make_run(tmp_path / name, steps=8)
        phases = dict.fromkeys(("rollout", "start", "export", "canary", "state_copy", "weight_check"), seconds)
        row = {f"time/{phase}_seconds": value for phase, value in phases.items()}
        lines(
            folder / "metrics.jsonl", [{"step": step, **row, "time/step_seconds": 6.5 * seconds} for step in range(9)]
        )
        pages.append(folder)
    text = opened(write_report(pages, tmp_path / "both.html")[0])
    legends = re.findall(r'<span class="chip (p\d+)"></span>(\w+) ', text)
    assert len({name for name, _ in legends}) == len(dict.fromkeys(legends)) == len({of for _, of in legends}) == 7
    charts = re.findall(r'aria-label="seconds of a step by phase">(.*?)</svg>', text)
    marks = [re.findall(r'text-anchor="end">([^<]+)<', chart) for chart in charts]
    assert len(marks) == 2 and marks[0] == marks[1]
