"""Adapter of verifiers (its `v1`), run in the child process: plays tasks of a taskset against an endpoint."""

import asyncio
import importlib
import itertools
import os
import sys


class Library:
    is_forked = True

    def __init__(self, settings, load_file):
        # Through PATH the harness finds programs of the interpreter's environment, such as uv.
        os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        self.environment = loaders.load_environment(loaders.resolve_env_config(settings["env"]))
        self.tasks = list(itertools.islice(self.environment.taskset, settings["max_tasks"]))
        self.introduction = {"num_tasks": len(self.tasks)}

    def play(self, request):
        """Play the task `request["task"]` against the endpoint `base_url`, and return its reward."""
        os.environ["OPENAI_API_KEY"] = request["api_key"]
        task = self.tasks[request["task"]]
        return {"reward": asyncio.run(play_task(self.environment, task, request["base_url"]))}


async def play_task(environment, task, base_url):
    """Play a task and return its reward. Raises RuntimeError with the errors of the episode."""
    verifiers = importlib.import_module("verifiers.v1")
    client = verifiers.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
    context = verifiers.ModelContext(client=client, model="policy", sampling=verifiers.SamplingConfig())
    async with environment.serving():
        episode = await environment.run_episode(task, context)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed")
    return float(sum(trace.reward for trace in episode.traces))
