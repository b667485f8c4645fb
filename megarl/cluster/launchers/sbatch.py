"""Slurm jobs of recipes: a batch script from `launch/slurm/` with the recipe's sizes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megarl.config import Recipe
from megarl.config.secrets import HIDDEN, holds_secret, secret_items
from megarl.config.sections.cluster import ClusterConfig, NodeGroup
from megarl.files.shipped import home, is_clone
from megarl.platform.commands import run_command
from megarl.tracking.run_folder import run_path
from megarl.tracking.run_record import RunRecord
from megarl.types import ConfigError, DataError, FaultyNodeError

_OPTIONS = ("cluster", "sbatch_options")
"""The recipe field with options of sbatch. Its checks also check the options on the command line."""
_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,252}")
"""Name or address of one host, without lists (a,b), ranges (n[1-9]), options (--x) and characters of a shell.

The owner of a run starts the script. Other people who can write the run folder must not be able to write its lines.
"""


def render(recipe: Recipe, *, arguments: Sequence[str], options: Sequence[str] = ()) -> str:
    """Return the batch script for a recipe and its launcher.

    `arguments` are those of `megarl train`. `options` of sbatch for the trainers' nodes, such as `--partition=gpu`,
    override the recipe's.

    Jobs of one name wait for each other, so two never write to one run folder. Faulty nodes in the run's status.json
    are excluded. Raises ConfigError for Ray with `cluster.groups.engines`, and DataError for a status.json with other
    values than nodes.
    """
    check_options(options)
    cluster = recipe.cluster
    if cluster.launcher == "ray" and cluster.groups.engines is not None:
        raise ConfigError(
            "cluster.groups.engines: a Ray cluster inside a Slurm job has nodes of one kind; set cluster.launcher=slurm"
        )
    script = home() / "launch/slurm" / ("ray.sbatch" if cluster.launcher == "ray" else "train.sbatch")
    template = _replace_options(script.read_text(encoding="utf-8"), recipe)
    # After the template's own options, because sbatch takes the last of equal options. A function as replacement,
    # because `re.sub` would interpret backslashes in a text.
    option_block = "".join(f"{line}\n" for line in _list_further_options(recipe, options))
    template = re.sub(r"(?m)^MEGARL_HOME=", lambda _: f"{option_block}MEGARL_HOME=", template, count=1)
    template = re.sub(r"(?s)^(#!\S+[^\n]*\n).*?(?=#SBATCH)", lambda match: match[1] + _make_header(recipe), template)
    return re.sub(r"(?m)^MEGARL_HOME=.*$", lambda _: _make_assignments(cluster, arguments), template)


def _replace_options(template: str, recipe: Recipe) -> str:
    """Replace the template's own options by the recipe's. Add those that let the job survive lost nodes."""
    cluster = recipe.cluster
    if cluster.device == "cpu":
        template = re.sub(r"(?m)^#SBATCH --gpus-per-node=.*\n", "", template)
    bad_nodes = _list_excluded_nodes(recipe)
    option_values = _make_size_options(cluster, cluster.device != "cpu") | {
        "job-name": recipe.name,
        "signal": f"B:USR1@{cluster.signal_seconds}",
    }
    option_values["nodes"] = cluster.nodes + cluster.spare_nodes
    for option, value in option_values.items():
        template = re.sub(rf"(?m)^#SBATCH --{option}=.*$", f"#SBATCH --{option}={value}", template)
    recovery_options = [f"exclude={','.join(bad_nodes)}"] if bad_nodes else []
    # Otherwise Slurm ends the job as soon as it sees a dead node.
    recovery_options += ["no-kill"] if cluster.recover != "stop" else []
    recovery_lines = "".join(f"#SBATCH --{option}\n" for option in recovery_options)
    return re.sub(r"(?m)^#SBATCH --requeue$", f"{recovery_lines}#SBATCH --requeue", template)


def _list_further_options(recipe: Recipe, options: Sequence[str]) -> list[str]:
    """Return the lines of the user's `options`, then those of the engines' nodes (a second component of the job)."""
    cluster = recipe.cluster
    option_lines = [f"#SBATCH {shlex.quote(option)}" for option in options]
    if (engines := cluster.groups.engines) is not None:
        # Components of the same name would wait for each other, as jobs do.
        engine_options = _make_size_options(engines, cluster.device != "cpu") | {"job-name": f"{recipe.name}-engines"}
        engine_arguments = [
            *(f"--{option}={value}" for option, value in engine_options.items()),
            "--exclusive",
            "--mem=0",
        ]
        option_lines += [f"#SBATCH {option}" for option in ["hetjob", *engine_arguments, *engines.sbatch_options]]
    return option_lines


def _make_assignments(cluster: ClusterConfig, arguments: Sequence[str]) -> str:
    """Return the lines that set the script's variables, and the arguments of `megarl train`."""
    assignments = f"MEGARL_HOME={shlex.quote(str(home()))}\nset -- {shlex.join(arguments)}"
    if cluster.launcher != "ray":
        # Always, so that a value of the submitting shell does not count.
        assignments += f"\nMEGARL_SPARE_NODES={cluster.spare_nodes}"
    if not is_clone():
        # A wheel has no .venv next to launch/: the job uses this command's environment.
        assignments = f"MEGARL_VENV=${{MEGARL_VENV:-{shlex.quote(sys.prefix)}}}\n{assignments}"
    return assignments


def check_options(options: Sequence[str]) -> None:
    """Raise ConfigError for an sbatch option of the command line with a secret or several lines."""
    secrets = secret_items(_OPTIONS, options)
    for index, option in enumerate(options):
        if index in secrets or holds_secret((*_OPTIONS, index), option):
            # sbatch's command line and the job's options are shown to all users of the cluster.
            raise ConfigError(
                f"--sbatch={HIDDEN}: a secret must not stand in an option of sbatch; export it in the submitting shell "
                "and name its variable alone, as in --sbatch=--export=ALL or --sbatch=--export=HF_TOKEN"
            )
        if not option.isprintable():
            raise ConfigError(f"--sbatch={option!r}: has a control character; an option of sbatch is one line of text")


def _list_excluded_nodes(recipe: Recipe) -> list[str]:
    """Return the faulty nodes in the run's status.json. Raises DataError for a value that is not a host name.

    Empty under Ray: Slurm does not know Ray's node names, and the run itself avoids these nodes.
    """
    if recipe.cluster.launcher == "ray":
        return []
    folder = run_path(recipe)
    return [check_host_name(node, f"{folder / 'status.json'}: bad_nodes") for node in RunRecord.read(folder).bad_nodes]


def _make_size_options(nodes: ClusterConfig | NodeGroup, has_gpus: bool) -> dict[str, object]:
    per_node = nodes.ranks_per_node
    sizes: dict[str, object] = {"nodes": nodes.nodes, "ntasks-per-node": per_node}
    return sizes | ({"gpus-per-node": per_node} if has_gpus else {})


def _make_header(recipe: Recipe) -> str:
    return (
        f"# The job of run {recipe.name}, written by megarl slurm: recipe, nodes and ranks are set.\n"
        f"# The site's settings are in {home()}/launch/slurm/site.env, or in the file named by MEGARL_SITE.\n"
    )


@contextmanager
def reporting_bad_nodes() -> Iterator[None]:
    """Context that writes the nodes of a FaultyNodeError to the file in MEGARL_BAD_NODES_FILE, one per line.

    `launch/slurm/job.sh` sets the variable, and excludes these nodes when it queues the job again. Nodes of Ray are
    left out: Slurm does not know their names.
    """
    try:
        yield
    except FaultyNodeError as error:
        # The exit code cannot name the nodes, so list them in a file.
        nodes = [node for node in error.nodes if is_host_name(node)]
        if (file := os.environ.get("MEGARL_BAD_NODES_FILE")) and nodes:
            # "x": a file that somebody else has put there is refused.
            with Path(file).open("x", encoding="utf-8") as names:
                names.writelines(f"{node}\n" for node in nodes)
        raise


def require_sbatch() -> None:
    if shutil.which("sbatch") is None:
        raise ConfigError("sbatch: not found; submit from a node that has Slurm's commands, or use megarl slurm render")


def submit(script: str, options: Sequence[str]) -> str:
    """Submit a batch script with sbatch `options`, after a trial with --test-only. Return sbatch's output.

    Raises ConfigError if Slurm refuses the job.
    """
    require_sbatch()
    for trial_options in (["--test-only"], []):
        process = run_command(["sbatch", *trial_options, *options], stdin=script)
        if process.returncode:
            raise ConfigError(f"sbatch refuses the job: {process.stderr.strip()}")
    return process.stdout.strip()


def is_host_name(value: object) -> bool:
    return isinstance(value, str) and _HOST_NAME.fullmatch(value) is not None


def check_host_name(value: object, field: str) -> str:
    """Return the value if it names one host. Raises DataError with its `field` otherwise."""
    if not isinstance(value, str) or not is_host_name(value):
        raise DataError(
            f"{field} = {value!r:.80}: is not the name of a host (letters, digits and . _ : -); write the name that "
            "the scheduler uses, or remove the entry"
        )
    return value
