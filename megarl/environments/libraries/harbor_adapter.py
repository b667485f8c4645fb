"""Adapter of Harbor for the child process: makes trials of tasks against an endpoint."""

import asyncio
import importlib
import os
import pathlib

KEY_NAME = "OPENAI_API_KEY"


class Library:
    is_forked = True

    def __init__(self, settings, load_file):
        os.environ["HARBOR_TELEMETRY"] = "0"
        task_module = importlib.import_module("harbor.models.task.task")
        self.configs = importlib.import_module("harbor.models.trial.config")
        self.trial_class = importlib.import_module("harbor.trial.trial").Trial
        self.settings = settings["trial"]
        folders = [path.parent for path in sorted(pathlib.Path(settings["tasks"]).glob("*/task.toml"))]
        # Reads each task, so that a broken one is refused before the run.
        self.tasks = [str(task_module.Task(folder).task_dir) for folder in folders]
        environment = self.configs.EnvironmentConfig.model_validate(self.settings["environment"])
        factory = importlib.import_module("harbor.environments.factory").EnvironmentFactory
        factory.run_preflight(environment.type, environment.import_path, kwargs=environment.kwargs)
        agent = self.configs.AgentConfig.model_validate(self.settings["agent"])
        agent_factory = importlib.import_module("harbor.agents.factory").AgentFactory
        self.has_connection = agent_factory.get_agent_class_from_config(agent).MODEL_CONNECTION is not None
        self.make_config(0, "check", "http://127.0.0.1:9/v1")
        self.introduction = {"num_tasks": len(self.tasks)}

    def make_config(self, task, trial_name, base_url):
        """Return the config of a trial of the task with this number."""
        agent = dict(self.settings["agent"])
        # Agents without a model connection, such as oracle, refuse its fields.
        if self.has_connection:
            # Harbor takes the model's provider from its name. The endpoint serves one model, whatever its name.
            agent |= {"model_name": "openai/policy", "base_url": base_url, "model_api_key_name": KEY_NAME}
        values = self.settings | {
            "agent": agent,
            "task": {"path": self.tasks[task] if self.tasks else "."},
            "trial_name": trial_name,
        }
        # An unknown field would be ignored without a word.
        if unknown := sorted(values.keys() - self.configs.TrialConfig.model_fields.keys()):
            raise ValueError(f"trial.{unknown[0]}: Harbor's TrialConfig has no such field")
        return self.configs.TrialConfig.model_validate(values)

    def play(self, request):
        """Make a trial of the task `request["task"]` against the endpoint `base_url`. Returns its rewards by name."""
        # Agents outside of the environment read these variables.
        os.environ[KEY_NAME] = request["api_key"]
        os.environ["OPENAI_BASE_URL"] = os.environ["OPENAI_API_BASE"] = request["base_url"]
        config = self.make_config(request["task"], request["trial_name"], request["base_url"])
        return {"rewards": asyncio.run(self.make_trial(config))}

    async def make_trial(self, config):
        """Make a trial. Returns the verifier's rewards by name. Raises RuntimeError with the errors of the trial."""
        result = await (await self.trial_class.create(config)).run()
        errors = [f"{error.exception_type}: {error.exception_message}" for error in result.recorded_exceptions()]
        if errors:
            raise RuntimeError("; ".join(errors))
        return None if result.verifier_result is None else result.verifier_result.rewards
