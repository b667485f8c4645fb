"""Checks of the agent program (environment `command`), and of its container."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.config import Recipe
from megarl.config.sections.rollout import LOOPBACK, AgentConfig
from megarl.data.sources.harbor import TASK_FILE, task_image
from megarl.datasets.reading import harbor_tasks
from megarl.preflight.registry import Cost, checks
from megarl.sandbox.containers.container import ContainerSettings, find_start_fault
from megarl.sandbox.containers.outliving import socket_folder
from megarl.sandbox.layers import REMEDIES

# Endings of script files. An argument with such an ending must be an existing file.
_SCRIPTS = (".py", ".sh", ".bash", ".js", ".mjs", ".ts", ".rb", ".pl", ".lua", ".jl")

_START_REMEDIES = {
    "sandbox": REMEDIES["namespaces"],
    "apptainer": f"`apptainer exec --containall --overlay FOLDER IMAGE true` must work; {REMEDIES['namespaces']}",
}
"""Remedies for containers that do not start, by `rollout.agent.sandbox`."""


_ENDING_LAUNCHERS = {
    # The job's steps end with the batch script, in both of Slurm's modes (linuxproc, cgroups). It ends with the driver.
    "slurm": "a Slurm job ends all its processes with its driver, so attempts begin again after a restart of the job",
    # A node's agent is an actor, and an actor dies with its driver (Ray 2, lifetimes of actors).
    "ray": "Ray ends the agents of the nodes with their driver, and a later driver has other ones",
}
"""Launchers whose programs end with the driver, and why."""


def command_faults(agent: AgentConfig) -> Iterator[str]:
    """Yield an error if the program of the agents is missing, or its script is not found where it will run."""
    command = agent.command
    assignment = f"rollout.agent.command = {list(command)!r}"
    if not command:
        yield "rollout.agent.command: is missing; give the program of environment command as a list: [python, agent.py]"
    elif agent.sandbox != "process":
        if (script := _find_script(command)) is not None and not os.path.isabs(script):
            yield (
                f"{assignment}: the container has a working folder of its own, without {script!r}; give its absolute "
                "path, and its folder in rollout.agent.folders"
            )
    elif shutil.which(command[0]) is None:
        yield f"{assignment}: there is no program {command[0]!r}; give its full path"
    elif (script := _find_script(command)) is not None and not Path(script).is_file():
        yield (
            f"{assignment}: there is no file {script!r}; give its path from the folder "
            f"that megarl is started in ({Path.cwd()}), or an absolute one"
        )


def _find_script(command: Sequence[str]) -> str | None:
    """Return the script that an interpreter runs: the first argument with a script's ending, or None.

    Arguments after -m or -c belong to a module or to code.
    """
    for argument in command[1:]:
        if argument in ("-m", "-c"):
            return None
        if not argument.startswith("-") and argument.endswith(_SCRIPTS):
            return argument
    return None


@checks("rollout")
def check_endpoint_address(recipe: Recipe) -> Iterator[str]:
    """Yield an error if other nodes cannot reach the endpoint of the model."""
    rollout = recipe.rollout
    is_elsewhere = rollout.agent.nodes == "all" and recipe.cluster.launcher != "local"
    if is_elsewhere and rollout.endpoint.host in LOOPBACK:
        yield (
            f"rollout.agent.nodes = all: other nodes cannot reach rollout.endpoint.host = {rollout.endpoint.host}; set "
            "rollout.endpoint.host=0.0.0.0, and rollout.endpoint.token to ${oc.env:NAME}"
        )


@checks("rollout")
def check_outliving_programs(recipe: Recipe) -> Iterator[str]:
    """Yield errors of settings with which agent programs could not continue with the next driver."""
    rollout = recipe.rollout
    assignment = f"rollout.agent.outlive_seconds = {rollout.agent.outlive_seconds}"
    if rollout.agent.outlive_seconds is None:
        return
    if (reason := _ENDING_LAUNCHERS.get(recipe.cluster.launcher)) is not None:
        yield f"{assignment}: cluster.launcher = {recipe.cluster.launcher}: {reason}; leave out outlive_seconds"
    if rollout.endpoint.port == 0:
        yield (
            f"{assignment}: programs look for the next driver at the same port; set rollout.endpoint.port to a free one"
        )
    if rollout.agent.sandbox != "process" and rollout.agent.reach == "host":
        yield (
            f"{assignment}: with rollout.agent.network = host nothing holds the connections of programs while the "
            "driver is away; set rollout.agent.network=endpoint, or leave out outlive_seconds"
        )
    if recipe.rollout.stragglers == "park":
        yield (
            f"{assignment}: rollout.stragglers = park pauses completions, and a program cannot go on with a paused "
            "one; set rollout.stragglers=wait, or leave out outlive_seconds"
        )


@checks("rollout", Cost.FILES)
def check_containers(recipe: Recipe) -> Iterator[str]:
    """Yield errors of the container: missing folders, or a machine on which no container starts."""
    agent = recipe.rollout.agent
    tasks = harbor_tasks(recipe)
    if tasks and (recipe.rollout.environment != "command" or agent.sandbox == "process"):
        yield (
            f"data.train has tasks with verifiers ({tasks[0]['folder']}), which run in the container of a program; set "
            "rollout.environment=command and rollout.agent.sandbox=sandbox"
        )
    if tasks and agent.credit == "by_turn":
        yield "rollout.agent.credit = by_turn: the verifier of a task gives one reward; choose attempt or final_segment"
    if recipe.rollout.environment != "command" or agent.sandbox == "process":
        return
    faults = [
        f"rollout.agent.folders.{index} = {folder}: there is no such folder; give an absolute path"
        for index, folder in enumerate(agent.folders)
        if not (os.path.isabs(folder) and os.path.exists(folder))
    ]
    faults += [fault for index, folder in enumerate(agent.folders) if (fault := _find_socket_fault(index, folder))]
    task_images = [task_image(task, agent.image, is_file=agent.images_are_files) for task in tasks]
    images = dict.fromkeys(task_images or [agent.image])
    faults += [fault for task in tasks for fault in _find_task_faults(task, agent)]
    faults += [fault for image in images if (fault := _find_image_fault(image, agent)) is not None]
    yield from faults
    # With these errors a trial start would fail too, with a less clear message.
    if not faults:
        # One unpacked image is enough: the others would start too. Each image by name may be missing.
        yield from _find_start_faults(agent, list(images)[: 1 if agent.images_are_files else None])


def _find_start_faults(agent: AgentConfig, images: Sequence[str | None]) -> Iterator[str]:
    """Yield an error for each image with which no container starts here."""
    for image in images:
        settings = ContainerSettings(
            kind=agent.sandbox,
            name=f"megarl-check-{os.getpid()}",
            # Any address will do, because the trial starts no program.
            address=("127.0.0.1", 9),
            image=image,
            folders=agent.folders,
            network=agent.reach,
        )
        if (fault := find_start_fault(settings)) is not None:
            remedy = _START_REMEDIES.get(agent.sandbox, f"{agent.sandbox} run must work; pull or build the image")
            yield f"rollout.agent.sandbox = {agent.sandbox}, image {image}: no container starts ({fault}); {remedy}"


def _find_socket_fault(folder_number: int, folder: str) -> str | None:
    """Return an error if a shared folder would expose the sockets of containers to a program, else None."""
    shared_folder, sockets = Path(folder).resolve(), socket_folder().resolve()
    if not (sockets.is_relative_to(shared_folder) or shared_folder.is_relative_to(sockets)):
        return None
    # Through another attempt's socket, a program could run commands in that attempt's container.
    return (
        f"rollout.agent.folders.{folder_number} = {folder}: has {sockets}, where containers that outlive a driver "
        "listen; give the folder of the program alone"
    )


def _find_image_fault(image: str | None, agent: AgentConfig) -> str | None:
    """Return why no container can start from an image, with the remedy, or None."""
    if agent.sandbox != "sandbox":
        if shutil.which(agent.sandbox) is None:
            return (
                f"rollout.agent.sandbox = {agent.sandbox}: it is not installed; install it, or set "
                "rollout.agent.sandbox=sandbox, which needs no daemon"
            )
        if not image:
            return f"rollout.agent.image is missing; {agent.sandbox} needs the name of an image"
        if agent.sandbox == "apptainer" and not os.path.exists(image):
            return (
                f"rollout.agent.image = {image}: there is no such file or folder; build one with `apptainer build "
                f"{image} docker-archive:IMAGE.tar` for example, on a file system of all nodes"
            )
        return None
    # /bin/sh may be an absolute link. Outside of the image it is broken.
    if image is None or os.path.lexists(Path(image, "bin/sh")):
        return None
    return (
        f"rollout.agent.image = {image}: is not a folder with an unpacked image (it has no bin/sh); unpack "
        "one there, with `docker export CONTAINER | tar -x -C FOLDER` for example, or leave the field out"
    )


def _find_task_faults(task: Mapping[str, Any], agent: AgentConfig) -> Iterator[str]:
    """Yield the errors of one task of the data: its limits, its image and its network."""
    task_file = f"{task['folder']}/{TASK_FILE}"
    yield from _find_limit_faults(task, agent, task_file)
    is_known = task["image"] is not None and not agent.images_are_files
    if agent.image is None and not is_known and (task["has_dockerfile"] or task["image"]):
        yield (
            f"{task_file}: the task has an image of its own, which is not built or downloaded; set "
            "rollout.agent.image to "
            "it, unpacked in a folder for sandbox=sandbox. {task} in it stands for the task's name"
        )
    if task["needs_network"] and agent.reach != "host":
        yield (
            f"{task_file}: environment.network_mode = public: the container reaches the endpoint only; set "
            "rollout.agent.network=host, or the task's network_mode to no-network"
        )


def _find_limit_faults(task: Mapping[str, Any], agent: AgentConfig, task_file: str) -> Iterator[str]:
    """Yield an error for each resource of which a task asks for more than the recipe or this machine allows."""
    task_limits = (
        ("agent.timeout_sec", task["agent_seconds"], 1, "rollout.agent.timeout_seconds", agent.timeout_seconds),
        ("environment.memory_mb", task["memory_bytes"], 1 << 20, "rollout.agent.memory_gib", agent.memory_gib),
        ("environment.storage_mb", task["storage_bytes"], 1 << 20, "rollout.agent.disk_gib", agent.disk_gib),
    )
    for name, task_value, unit, recipe_field, recipe_value in task_limits:
        # Seconds need no conversion. Memory and files are in bytes in the task, in GiB in the recipe.
        recipe_limit = None if recipe_value is None else recipe_value * (1 if unit == 1 else 1 << 30)
        if task_value is not None and recipe_limit is not None and task_value > recipe_limit:
            yield (
                f"{task_file}: {name} = {task_value / unit:g}: is more than {recipe_field} = {recipe_value:g}; raise "
                f"{recipe_field}, or lower the task's limit"
            )
    if task["storage_bytes"] is not None and agent.sandbox != "sandbox":
        yield (
            f"{task_file}: environment.storage_mb: {agent.sandbox} has no limit of new files; set "
            "rollout.agent.sandbox=sandbox, or remove it from the task"
        )
    num_cpus = len(os.sched_getaffinity(0))
    # Other nodes may have more CPUs. If not, their containers report the error.
    if task["cpus"] is not None and agent.nodes == "driver" and task["cpus"] > num_cpus:
        yield (
            f"{task_file}: environment.cpus = {task['cpus']:g}: this machine has {num_cpus} cores; lower it, or remove "
            "the task"
        )
