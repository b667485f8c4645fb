from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from megarl.config import LoraConfig, RolloutConfig
from megarl.config.recipe import load, recipe_changes, to_yaml
from tests.config.refusals import failure

BOMB = (
    "{l0: &l0 [x, x, x, x, x, x, x, x, x, x], "
    + ", ".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 10))
    + "}"
)
"""Ten levels of ten aliases, which stand for ten thousand million values."""


def written(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_overrides_are_read_as_yaml_and_the_last_one_wins(small: Path) -> None:
    recipe = load(
        small,
        [
            "train.steps=7",
            "optimizer.learning_rate=1e-5",
            "train.steps=11",
            "reward.functions=[boxed,my.module:score]",
            "data.validation.hard=a=b.jsonl",
            "trainer.megatron.init_method_std=0.02",
            "trainer.dp=null",
            "runs_folder=${model.path}/runs",
        ],
    )
    assert (recipe.train.steps, recipe.optimizer.learning_rate, recipe.trainer.dp) == (11, 1e-5, None)
    assert [function.name for function in recipe.reward.functions] == ["boxed", "my.module:score"]
    assert recipe.data.validation == {"hard": "a=b.jsonl"}
    assert recipe.trainer.megatron == {"init_method_std": 0.02}
    assert recipe.runs_folder == "m/runs"


def test_all_errors_come_in_one_page(tmp_path: Path) -> None:
    path = written(tmp_path, "name: x\nloop: rll\nmodel: {path: m}\ntrainer: {tp: 0}\nrewrd: {}\n")
    page = failure(path, "rollout.sampling.top_p=2")
    assert page.splitlines()[0] == f"{path}: 5 errors"
    for start in (
        "loop = 'rll': must be 'rl', 'sft', 'preference', 'reward_model' or 'distillation'",
        "data.train: missing; add it",
        "trainer.tp = 0: must be greater than 0",
        "rollout.sampling.top_p = 2: must be less than or equal to 1",
        "rewrd = {}: unknown key; did you mean reward?",
    ):
        assert f"\n  {start}" in page


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        pytest.param("trainer.tpp=2", "did you mean trainer.tp?", id="misspelt"),
        pytest.param("trainer.steps=2", "it belongs under train: train.steps", id="wrong section"),
        pytest.param(
            "tp=2", "it belongs under trainer or rollout or distillation: trainer.tp", id="without its section"
        ),
        pytest.param("train.spare_nodes=2", "it belongs under cluster: cluster.spare_nodes", id="other section"),
        pytest.param("model.learning_rte=2", "did you mean optimizer.learning_rate", id="misspelt elsewhere"),
        pytest.param("model.qqq=2", "known are model.path, model.dtype", id="nothing near"),
    ],
)
def test_an_unknown_key_says_where_it_may_belong(small: Path, override: str, hint: str) -> None:
    key, _, value = override.partition("=")
    assert f"  {key} = {value}: unknown key; {hint}" in failure(small, override)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        pytest.param("train.steps", "'train.steps': not an override; write section.field=value", id="no ="),
        pytest.param("=3", "'=3': not an override", id="no key"),
        pytest.param("train..steps=3", "'train..steps=3': not an override", id="empty part"),
        pytest.param("train.steps =3", "'train.steps =3': not an override", id="space"),
        pytest.param("train.steps=[1,", "'train.steps=[1,': while parsing", id="broken YAML"),
        pytest.param(
            "train.steps=${train.stps}", "train.steps: Interpolation key 'train.stps' not found", id="reference"
        ),
        pytest.param("train.steps=${train", "'train.steps=${train':", id="broken reference"),
        pytest.param("train.steps=???", "train.steps: Missing mandatory value", id="to be given"),
        pytest.param("train.steps=.nan", "train.steps = nan: must be a finite number", id="not a number"),
        pytest.param("optimizer.learning_rate=.inf", "optimizer.learning_rate = inf: must be a finite", id="infinite"),
        pytest.param("name=../x", "name = '../x': String should match pattern", id="name that leaves the folder"),
        pytest.param(
            "reward.functions=boxed", "reward.functions = 'boxed': must be a list, such as [a, b]", id="no list"
        ),
        pytest.param(
            "trainer=null", "trainer = None: is a section; leave it out or set trainer.tp", id="empty section"
        ),
        pytest.param(
            "rollout.sampling.stop=['']", "rollout.sampling.stop.0 = '': String should have at least 1", id="stop"
        ),
        pytest.param(
            "evaluation.sampling.stop=[a,'']",
            "evaluation.sampling.stop.1 = '': String should have at least 1",
            id="empty stop string of an evaluation",
        ),
        pytest.param("data.validation.a/b=x", "data.validation.a/b: bad name 'a/b'; use letters", id="validation name"),
        pytest.param("train.steps=true", "train.steps = True: is true or false", id="true as number"),
        pytest.param("optimizer.betas=[true, 0.9]", "optimizer.betas = [True, 0.9]: is true or false", id="in a list"),
        pytest.param(f"train.steps={'1' * 5000}", "train.steps = 111", id="more digits than are read"),
        pytest.param("train.steps=1:30", "train.steps = 1:30: YAML reads this as 90 (base 60); write 90", id="base 60"),
        pytest.param("train.steps=010", "train.steps = 010: YAML reads this as 8 (base 8); write 8", id="octal"),
        pytest.param("seed=-0_17", "seed = -0_17: YAML reads this as -15", id="negative octal"),
        pytest.param("name=on", "name = on: YAML reads this as true; write true, or text in quotes", id="on"),
        pytest.param("rollout.sampling.stop=[No]", "rollout.sampling.stop.0 = No: YAML reads this as false", id="no"),
        pytest.param("data.validation={yes: a}", "the key of data.validation.yes = yes: YAML reads", id="key"),
        pytest.param('data.system_prompt="\\ud800"', "half of a surrogate pair", id="surrogate"),
        pytest.param("data.system_prompt=a\udcff", "unacceptable character #xdcff", id="broken byte"),
        pytest.param("rollout.vllm=" + "[" * 60 + "]" * 60, "nested deeper than 32 levels", id="deep"),
        pytest.param("rollout.vllm=" + "{a: " * 2000 + "}" * 2000, "nested deeper than 32 levels", id="very deep"),
        pytest.param("train.hf_token=geheim", "train.hf_token = '<hidden>': unknown key", id="secret"),
        pytest.param('cluster.srun_options=["--a\\nb"]', "cluster.srun_options.0", id="line end in an option"),
        pytest.param(
            'cluster.groups.engines={sbatch_options: ["--a\\n#SBATCH --b"]}',
            "cluster.groups.engines.sbatch_options.0",
            id="line end in an option of sbatch",
        ),
        pytest.param("data.validation={a: &a [x, x], b: *a}", "data.validation.a", id="an alias or two is no bomb"),
        pytest.param(f"rollout.vllm={BOMB}", "more than 100000 values", id="alias bomb"),
    ],
)
def test_a_faulty_override_is_named(small: Path, override: str, told: str) -> None:
    assert told in failure(small, override)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param("name: a\nloop: [rl\nseed: 1\n", "recipe.yaml:3: not valid YAML", id="syntax"),
        pytest.param("name: a\nloop: rl\nname: b\n", "recipe.yaml:3: not valid YAML: found duplicate key", id="twice"),
        pytest.param("name: !!python/object:os.system x\n", "recipe.yaml:1: not valid YAML", id="python object"),
        pytest.param("- a\n- b\n", "this is a list", id="list"),
        pytest.param("", "name: missing", id="empty"),
        pytest.param("rl\n", "unknown key", id="one word"),
        pytest.param("a: " + "[" * 5000, "nested deeper than 32 levels", id="deep"),
        pytest.param(f"a: {BOMB}\n", "more than 100000 values", id="alias bomb"),
        pytest.param("a: [" + "[]," * 10**6 + "]\n", "more than 100000 values", id="many values"),
        pytest.param(f"train: {{steps: -{'1' * 5000}}}", "train.steps = -111", id="more digits than are read"),
        pytest.param("train:\n  steps: 1:30\n  updates_per_step: 07\n", "train.updates_per_step = 07:", id="doubtful"),
    ],
)
def test_a_broken_file_is_told_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    assert told in failure(written(tmp_path, text))


def test_values_are_taken_as_they_are_written(small: Path) -> None:
    """What looks like the doubtful values but is not: quoted, or no number at all."""
    recipe = load(
        small,
        [
            "rollout.sampling.stop=['on', '010', \"1:30\", a:1]",
            "data.system_prompt='no'",
            "optimizer.learning_rate=1e-6",
            "train.steps=1e3",
            "seed=0",
            "trainer.sequence_parallel=true",
            "rollout.vllm={a: true, b: 0x10, c: 0.5, d: 0}",
        ],
    )
    assert recipe.rollout.sampling.stop == ("on", "010", "1:30", "a:1")
    assert (recipe.data.system_prompt, recipe.optimizer.learning_rate, recipe.train.steps) == ("no", 1e-6, 1000)
    assert recipe.rollout.vllm == {"a": True, "b": 16, "c": 0.5, "d": 0}


def test_a_missing_file_and_a_folder_are_config_errors(tmp_path: Path) -> None:
    assert "absent.yaml: recipe not found" in failure(tmp_path / "absent.yaml")
    assert "cannot be read" in failure(tmp_path)


@pytest.mark.parametrize("comments", [False, True])
def test_yaml_reads_back_as_the_same_recipe(small: Path, comments: bool) -> None:
    recipe = load(
        small,
        [
            r'data.system_prompt="Sag: \\${x} {é}\n\n  # kein Kommentar\n "',
            "rollout.sampling.stop=['</answer>', ': ']",
            "rollout.sampling.max_new_tokens=17",
            "optimizer.learning_rate=3e-7",
            "data.validation={easy: e.jsonl, '2024': y.jsonl}",
            "rollout.vllm={stop_token_ids: [1, 2]}",
        ],
    )
    assert recipe.data.system_prompt == "Sag: ${x} {é}\n\n  # kein Kommentar\n "
    again = load(written(small.parent, to_yaml(recipe, comments=comments)))
    assert again == recipe
    assert again.evaluation_sampling.max_new_tokens == 17


def test_yaml_explains_every_field(small: Path) -> None:
    lines = to_yaml(load(small), comments=True).splitlines()
    assert lines[lines.index("  pp: 1") - 1].startswith("  # Pipeline-parallel size")


@pytest.mark.parametrize(
    ("override", "place"),
    [
        pytest.param("rollout.vllm.hf_token=geheim", "rollout.vllm.hf_token", id="token"),
        pytest.param("rollout.vllm.hf_tokens=[geheim]", "rollout.vllm.hf_tokens.0", id="tokens"),
        pytest.param("rollout.vllm.api_keys={a: geheim}", "rollout.vllm.api_keys.a", id="keys"),
        pytest.param("rollout.vllm.auth={user: geheim}", "rollout.vllm.auth.user", id="auth"),
        pytest.param("rollout.vllm.nested={apiKey: geheim}", "rollout.vllm.nested.apiKey", id="nested"),
        pytest.param("train.hf_token=geheim", "train.hf_token", id="unknown field"),
        pytest.param("rollout.vllm.url=https://me:geheim@host/x", "rollout.vllm.url", id="password in a URL"),
        pytest.param("runs_folder=https://geheim@host/x", "runs_folder", id="token in a URL"),
        pytest.param("rollout.vllm.url=https://host/x?sig=1&token=geheim", "rollout.vllm.url", id="query"),
        pytest.param("cluster.srun_options=['--export=ALL,HF_TOKEN=geheim']", "cluster.srun_options.0", id="srun"),
        pytest.param("rollout.vllm.url=https://me:geheim@${oc.env:HOST}", "rollout.vllm.url", id="beside a reference"),
    ],
)
def test_a_secret_in_clear_is_refused_and_not_repeated(
    small: Path, override: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST", "example.org")
    page = failure(small, override)
    assert f"  {place} = <hidden>: a secret must not stand in a recipe; refer to it by the name of an env" in page
    assert "${oc.env:NAME}" in page and "geheim" not in page


def test_names_that_only_look_like_a_secrets_are_accepted(small: Path) -> None:
    given = (
        "{max_num_batched_tokens: 64, pad_token: <pad>, hf_token: true, tokenizer_mode: auto, url: 'https://h:80/a@b'}"
    )
    vllm = load(small, [f"rollout.vllm={given}", "data.validation.tokens=t.jsonl"]).rollout.vllm
    assert vllm["pad_token"] == "<pad>"


def test_what_comes_from_the_environment_is_written_as_a_reference(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "geheim")
    monkeypatch.setenv("MY_STEPS", "7")
    overrides = [
        "rollout.vllm.hf_token=${oc.env:MY_TOKEN}",
        "rollout.vllm.url=https://me:${oc.env:MY_TOKEN}@host",
        "rollout.vllm.list=[a, '${oc.env:MY_TOKEN}']",
        "rollout.sampling.stop=['${rollout.vllm.hf_token}']",
        "trainer.megatron=${rollout.vllm}",
        "train.steps=${oc.env:MY_STEPS}",
        "runs_folder=${oc.env:ABSENT,elsewhere}",
        "data.system_prompt=${name}",
    ]
    recipe = load(small, overrides)
    assert recipe.rollout.vllm["url"] == "https://me:geheim@host" and recipe.rollout.sampling.stop == ("geheim",)
    assert (recipe.train.steps, recipe.runs_folder) == (7, "elsewhere")
    text = to_yaml(recipe, comments=True)
    assert "geheim" not in text
    kept = yaml.safe_load(text)
    assert kept["rollout"]["vllm"]["hf_token"] == "${oc.env:MY_TOKEN}"
    assert kept["rollout"]["vllm"]["list"] == ["a", "${oc.env:MY_TOKEN}"]
    assert kept["train"]["steps"] == "${oc.env:MY_STEPS}" and kept["data"]["system_prompt"] == "small"
    # Read again, with what the environment says then.
    assert load(written(small.parent, text)) == recipe
    monkeypatch.setenv("MY_TOKEN", "neu")
    again = load(small.parent / "recipe.yaml")
    assert again.rollout.vllm["hf_token"] == again.trainer.megatron["hf_token"] == "neu"
    assert to_yaml(again, comments=True) == text


def test_an_error_shows_the_reference_and_not_what_it_was_read_as(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "geheim")
    page = failure(small, "train.steps=${oc.env:MY_TOKEN}", "trainer.tpp=${oc.env:MY_TOKEN}")
    assert "train.steps = '${oc.env:MY_TOKEN}'" in page and "geheim" not in page
    monkeypatch.delenv("MY_TOKEN")
    page = failure(small, "rollout.vllm.hf_token=${oc.env:MY_TOKEN}")
    assert "rollout.vllm.hf_token: " in page and "Environment variable 'MY_TOKEN' not found" in page


def test_evaluation_sampling_takes_from_the_rollout_what_it_leaves_out(small: Path) -> None:
    overrides = ["rollout.sampling={max_new_tokens: 5, stop: [a], temperature: 0.7, top_k: 3}"]
    sampling = load(small, overrides).evaluation_sampling
    assert (sampling.max_new_tokens, sampling.stop, sampling.temperature, sampling.top_k) == (5, ("a",), 0.0, 0)
    overrides += ["data.validation.a=b", "evaluation.sampling={stop: [], temperature: 0.3, top_p: 0.5}"]
    own = load(small, overrides).evaluation_sampling
    assert (own.max_new_tokens, own.stop, own.temperature, own.top_p) == (5, (), 0.3, 0.5)


def test_changes_are_named_field_by_field(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "geheim")
    earlier = yaml.safe_load(to_yaml(load(small, ["data.validation={a: a.jsonl}", "train.steps=6"])))
    del earlier["seed"]  # a field that was not known then
    now = load(
        small,
        [
            "optimizer.learning_rate=0.5",
            "train.steps=6",
            "rollout.vllm.hf_token=${oc.env:MY_TOKEN}",
            "rollout.sampling.stop=[x]",
            "data.validation={b: b.jsonl}",
        ],
    )
    changes = recipe_changes(earlier, now)
    before = earlier["optimizer"]["learning_rate"]
    assert set(changes) == {
        f"optimizer.learning_rate: {before} -> 0.5",
        "rollout.vllm.hf_token: (not set) -> ${oc.env:MY_TOKEN}",
        "rollout.sampling.stop: [] -> ['x']",
        "data.validation.a: a.jsonl -> (not set)",
        "data.validation.b: (not set) -> b.jsonl",
    }
    assert recipe_changes(yaml.safe_load(to_yaml(now)), now) == []
    assert recipe_changes({**earlier, "seed": 3}, now)[0] == "seed: 3 -> 0"


def test_another_way_to_write_where_a_run_is_is_no_change(small: Path, tmp_path: Path) -> None:
    """As `megarl train RUN --resume` names the folder by its whole path."""
    earlier = yaml.safe_load(to_yaml(load(small)))
    assert earlier["runs_folder"] == "runs"
    assert recipe_changes(earlier, load(small, [f"runs_folder={tmp_path}/runs"])) == []
    assert recipe_changes(earlier, load(small, [f"runs_folder={tmp_path}/runs", "seed=3"])) == ["seed: 0 -> 3"]


def test_an_attempt_of_a_single_turn_has_one() -> None:
    assert RolloutConfig().turns_of_attempt == 1
    assert RolloutConfig(environment="countdown", max_turns=3).turns_of_attempt == 3


@pytest.mark.parametrize(
    ("given", "targets"),
    [
        (["q_proj", "k_proj", "v_proj", "o_proj"], ("qkv_proj", "o_proj")),
        (["down_proj", "up_proj", "gate_proj"], ("down_proj", "gate_up_proj")),
        (["qkv_proj", "down_proj"], ("qkv_proj", "down_proj")),
        ("all-linear", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    ],
)
def test_lora_takes_peft_s_names(given: object, targets: tuple[str, ...]) -> None:
    assert LoraConfig.model_validate({"targets": given}).targets == targets


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["q_proj", "v_proj"], "has q_proj, v_proj without k_proj, .* all of q_proj, k_proj, v_proj, or none"),
        (["gate_proj"], "has gate_proj without up_proj"),
        (["query"], "'qkv_proj', 'o_proj'"),
    ],
)
def test_a_part_of_a_fused_projection_is_refused(given: list[str], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        LoraConfig.model_validate({"targets": given})
