"""Adapter of Harbor (agents in containers), run in the child process: makes trials, its word for attempts."""

import asyncio
import contextlib
import fcntl
import importlib
import json
import os
import pathlib
import signal
import sys
import tempfile
import time

KEY_NAME = "OPENAI_API_KEY"
CHILD_SECONDS = 10.0
"""Seconds for `docker compose up` to end after SIGTERM."""
LIMIT_FIELDS = ("network_mode", "allowed_hosts", "cpus", "memory_mb", "storage_mb", "gpus", "gpu_types", "tpu", "os")
"""Fields of a task that not every environment can honour."""
LIVE = ".live"
"""Folder, inside the folder of trials, with a file for each running trial. The trial's process locks its file."""


class Library:
    """Trials of Harbor, and the stop of their environments.

    One class has both: its attributes are the modules of Harbor, which only the child process can import.
    """

    is_forked = True

    def __init__(self, settings, load_file):
        """Load Harbor and its tasks, and refuse before the run what a trial would refuse."""
        self.process_tree = load_file("processes/process_tree.py")
        os.environ["HARBOR_TELEMETRY"] = "0"
        self.task_class = importlib.import_module("harbor.models.task.task").Task
        self.configs = importlib.import_module("harbor.models.trial.config")
        self.paths_class = importlib.import_module("harbor.models.trial.paths").TrialPaths
        self.task_configs = importlib.import_module("harbor.models.task.config")
        self.trial_class = importlib.import_module("harbor.trial.trial").Trial
        self.settings = settings["trial"]
        folders = [path.parent for path in sorted(pathlib.Path(settings["tasks"]).glob("*/task.toml"))]
        # Read each task, so that a broken one is refused before the run.
        tasks = [self.task_class(folder) for folder in folders]
        self.tasks = [str(task.task_dir) for task in tasks]
        environment = self.configs.EnvironmentConfig.model_validate(self.settings["environment"])
        self.environments = importlib.import_module("harbor.environments.factory").EnvironmentFactory
        self.environments.run_preflight(environment.type, environment.import_path, kwargs=environment.kwargs)
        agent = self.configs.AgentConfig.model_validate(self.settings["agent"])
        self.refuse_podman_compose(environment)
        agent_factory = importlib.import_module("harbor.agents.factory").AgentFactory
        agent_class = agent_factory.get_agent_class_from_config(agent)
        # Agents that call a model have a connection.
        self.has_connection = agent_class.MODEL_CONNECTION is not None
        self.refuse_tasks(tasks)
        installed_class = importlib.import_module("harbor.agents.installed.base").BaseInstalledAgent
        # Harbor installs these agents inside the environment of the trial.
        is_installed_agent = environment.type is not None and issubclass(agent_class, installed_class)
        # Containers of singularity have the network of the machine.
        runs_elsewhere = is_installed_agent and environment.type != "singularity"
        self.introduction = {"num_tasks": len(self.tasks), "runs_elsewhere": runs_elsewhere}

    def refuse_podman_compose(self, environment):
        """Raise ValueError if Harbor would use podman-compose, which does not remove the networks of trials."""
        if environment.type != "podman":
            return
        # Harbor passes this option to podman-compose only.
        if "--in-pod=false" in self.environments.get_environment_class("podman").runtime().compose:
            raise ValueError(
                "environment = podman: Harbor finds podman-compose only, which leaves the network of each trial; "
                "install podman 4.7 or newer with Docker Compose 2, or set environment to docker"
            )

    def refuse_tasks(self, tasks):
        """Raise ValueError for a task that the environment cannot run: its network modes or its resources.

        Harbor checks a task when it creates a trial, so one trial of each kind (equal LIMIT_FIELDS) is created, but not
        started.
        """
        os.environ[KEY_NAME] = "check"
        task_number_by_limits = {}
        for task_number, task in enumerate(tasks):
            config = task.config
            phase_parts = [part for step in (config, *(config.steps or ())) for part in (step.agent, step.verifier)]
            config_parts = [config.environment, config.verifier.environment, *phase_parts]
            limits = [[getattr(part, name, None) for name in LIMIT_FIELDS] for part in config_parts]
            task_number_by_limits.setdefault(repr(limits), task_number)
        with tempfile.TemporaryDirectory(prefix="megarl-harbor-") as folder:
            for task_number in task_number_by_limits.values():
                config = self.make_config(task_number, f"check-{task_number}", "http://127.0.0.1:9/v1", folder)
                try:
                    asyncio.run(self.trial_class.create(config))
                    self.create_verifier_environment(tasks[task_number], config)
                except Exception as error:
                    name = self.settings["environment"].get("type") or self.settings["environment"]["import_path"]
                    raise ValueError(
                        f"{self.tasks[task_number]}/task.toml: environment = {name} cannot run this task: "
                        f"{error!s:.400}; change the task, or choose another environment"
                    ) from error

    def create_verifier_environment(self, task, config):
        """Create the environment of a task's verifier, if it has its own. Harbor itself creates this one only after the
        agent has ended.
        """
        verifier_mode = importlib.import_module("harbor.models.task.verifier_mode")
        definition = verifier_mode.resolve_verifier_environment_definition(task.config, task.paths)
        if definition is None:
            return
        network_policy = importlib.import_module("harbor.trial.network_policy")
        baseline = definition.config.resolve_baseline()
        phase = network_policy.resolve_verifier_phase_policy(task.config, baseline=baseline)
        self.environments.create_environment_from_config(
            config=config.environment,
            environment_dir=definition.directory,
            environment_name=task.short_name,
            session_id=f"{config.trial_name}__verifier",
            trial_paths=self.paths_class(pathlib.Path(config.trials_dir, config.trial_name)),
            task_env_config=definition.config,
            network_policy=baseline,
            phase_network_policies=[phase],
        )

    def make_config(self, task_number, trial_name, base_url, trials_folder=None):
        """Return Harbor's config of a trial. The agent calls the model at `base_url`."""
        agent = dict(self.settings["agent"])
        # Agents that call no model, such as oracle, refuse these fields.
        if self.has_connection:
            # Harbor takes the model's provider from its name. The endpoint has one model, under any name.
            agent |= {"model_name": "openai/policy", "base_url": base_url, "model_api_key_name": KEY_NAME}
        config_values = self.settings | {
            "agent": agent,
            "task": {"path": self.tasks[task_number]},
            "trial_name": trial_name,
            "trials_dir": trials_folder or self.settings["trials_dir"],
        }
        # Harbor would silently ignore an unknown field.
        if unknown := sorted(config_values.keys() - self.configs.TrialConfig.model_fields.keys()):
            raise ValueError(f"trial.{unknown[0]}: Harbor's TrialConfig has no such field")
        return self.configs.TrialConfig.model_validate(config_values)

    def play(self, request):
        """Make a trial of the task `request["task"]` against the endpoint `base_url`.

        Returns its rewards by name, and `notes`: errors of the trial that leave the verifier's rewards valid.
        """
        # Agents outside the environment read these variables.
        os.environ[KEY_NAME] = request["api_key"]
        os.environ["OPENAI_BASE_URL"] = os.environ["OPENAI_API_BASE"] = request["base_url"]
        config = self.make_config(request["task"], request["trial_name"], request["base_url"])

        async def make_trial():
            trial_task = asyncio.current_task()
            assert trial_task is not None
            loop = asyncio.get_running_loop()

            def cancel_once():
                # A second cancellation would end the wait for the stop of the environments.
                loop.add_signal_handler(signal.SIGTERM, lambda: None)
                trial_task.cancel()

            # A launcher may signal all processes of a job. The parent ends this trial by SIGTERM.
            for signal_number in self.process_tree.ENDING_SIGNALS:
                loop.add_signal_handler(signal_number, cancel_once if signal_number == signal.SIGTERM else lambda: None)
            notes = await self.stop_leftovers()
            with self.live_trial(request["trial_name"]) as live_trial:
                rewards, errors = await self.make_trial(config, live_trial)
            return {"rewards": rewards, "notes": [*notes, *errors]}

        return asyncio.run(make_trial())

    async def make_trial(self, config, live_trial):
        """Make a trial. Returns the verifier's rewards by name, and the trial's errors.

        Each environment is recorded in `live_trial` before it starts, and when it has stopped. Raises RuntimeError
        with the errors of a trial without rewards.
        """
        create = self.environments.create_environment_from_config
        stop_tasks = set()
        # This process makes one trial only.
        self.environments.create_environment_from_config = self.wrap_environment_factory(create, live_trial, stop_tasks)
        try:
            result = await (await self.trial_class.create(config)).run()
        finally:
            self.environments.create_environment_from_config = create
            # Harbor does not wait for the stop if the trial is cancelled meanwhile.
            stop_results = await asyncio.gather(*stop_tasks, return_exceptions=True)
        errors = [f"{error.exception_type}: {error.exception_message}" for error in result.recorded_exceptions()]
        # Harbor does not record the error of a verifier's environment.
        stop_errors = [f"{type(error).__name__}: {error}" for error in stop_results if error is not None]
        errors += [error for error in stop_errors if error not in errors]
        rewards = None if result.verifier_result is None else result.verifier_result.rewards
        # A verifier also judges an agent that ran out of time. After the verdict the environment may fail to stop.
        if errors and not rewards:
            raise RuntimeError("; ".join(errors))
        return rewards, errors

    def wrap_environment_factory(self, create, live_trial, stop_tasks):
        """Return a `create` that records each environment in `live_trial` when it is created and when it has stopped.

        Each stop runs in a task of its own, added to `stop_tasks`, so that a cancelled trial does not cancel it.
        """

        def create_and_record(*arguments, **options):
            environment = create(*arguments, **options)
            session = options["session_id"]
            live_trial.record(session, self.describe_environment(options))
            stop = self.make_stop_function(environment)

            async def stop_and_record(delete):
                await stop(delete)
                live_trial.record(session, None)

            async def stop_in_own_task(delete):
                stop_task = asyncio.create_task(stop_and_record(delete))
                stop_tasks.add(stop_task)
                await asyncio.shield(stop_task)

            environment.stop = stop_in_own_task
            return environment

        return create_and_record

    def describe_environment(self, options):
        """Return what another process needs to stop an environment created with these options, as JSON values."""
        policies = options.get("network_policy"), *(options.get("phase_network_policies") or ())
        return {
            "extra_docker_compose": [str(path) for path in options["config"].extra_docker_compose],
            "environment_dir": str(options["environment_dir"]),
            "environment_name": options["environment_name"],
            # Harbor has made this old field a network mode.
            "task_env_config": options["task_env_config"].model_dump(mode="json", exclude={"allow_internet"}),
            "network_policies": [policy and policy.model_dump(mode="json") for policy in policies],
        }

    @contextlib.contextmanager
    def live_trial(self, trial_name):
        """Keep a locked file while a trial runs. Yields a LiveTrial.

        The file stays, without a lock, if the trial is killed or one of its environments does not stop. The next trial
        stops these environments (`stop_leftovers`).
        """
        folder = pathlib.Path(self.settings["trials_dir"], LIVE)
        folder.mkdir(parents=True, exist_ok=True)
        hidden_path = folder / f".{trial_name}"
        with hidden_path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                hidden_path.unlink()
                raise RuntimeError(
                    f"trials = {folder.parent}: its disk has no file locks ({error.strerror}); choose a folder on "
                    "another disk"
                ) from error
            trial_facts = {"machine": os.uname().nodename, "environment": self.settings["environment"]}
            file.write(json.dumps(trial_facts) + "\n")
            file.flush()
            # Lock the file before the rename shows it to `stop_leftovers`.
            path = hidden_path.rename(folder / trial_name)
            live_trial = LiveTrial(file)
            try:
                yield live_trial
            finally:
                if all(values is None for values in live_trial.environments.values()):
                    path.unlink()

    async def stop_leftovers(self):
        """Stop the environments that ended trials have left on this machine. Returns the errors."""
        errors = []
        for path in pathlib.Path(self.settings["trials_dir"], LIVE).glob("[!.]*"):
            # NFS locks only files that are open for writing.
            with contextlib.suppress(FileNotFoundError), path.open("r+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                # The trial may have ended between `open` and `flock`.
                if os.fstat(file.fileno()).st_nlink == 0:
                    continue
                try:
                    facts, unstopped = read_live_trial(file)
                    is_here = facts["machine"] == os.uname().nodename
                # A crash of the machine may leave an empty file. It must not stop all later trials.
                except (ValueError, TypeError, KeyError) as error:
                    errors.append(
                        f"the file of the ended trial {path.name} is damaged: {error!r:.200}; it is deleted. Stop the "
                        "environment of this trial if it still runs"
                    )
                    path.unlink()
                    continue
                if not is_here:
                    continue
                try:
                    for session_id, description in unstopped.items():
                        await self.stop_environment(path.name, facts["environment"], session_id, description)
                # The environment may be a user's class and raise anything.
                except Exception as error:
                    print(f"{path}: {error!r}", file=sys.stderr)
                    errors.append(f"the environment of the ended trial {path.name} does not stop: {error!r:.200}")
                    continue
                path.unlink()
        return errors

    async def stop_environment(self, trial_name, settings, session_id, description):
        """Stop an environment that another process started. Its containers have the session's id.

        `description` comes from `describe_environment`: the environment of a verifier has other files than the task's.
        """
        extra_files = {"extra_docker_compose": description["extra_docker_compose"]}
        config = self.configs.EnvironmentConfig.model_validate(settings | extra_files)
        policy_class = self.task_configs.NetworkPolicy
        network_policy, *phase_policies = (
            policy and policy_class.model_validate(policy) for policy in description["network_policies"]
        )
        environment = self.environments.create_environment_from_config(
            config=config,
            environment_dir=pathlib.Path(description["environment_dir"]),
            environment_name=description["environment_name"],
            session_id=session_id,
            trial_paths=self.paths_class(pathlib.Path(self.settings["trials_dir"], trial_name)),
            task_env_config=self.task_configs.EnvironmentConfig.model_validate(description["task_env_config"]),
            network_policy=network_policy,
            phase_network_policies=phase_policies,
        )
        await self.make_stop_function(environment)(config.delete)

    def make_stop_function(self, environment):
        """Return the `stop` of an environment. It raises the error of docker compose that Harbor only logs."""
        stop = environment.stop
        run_compose = getattr(environment, "_run_docker_compose_command", None)
        if run_compose is None:
            return stop
        errors = []

        async def run_compose_and_keep_error(command, *arguments, **options):
            try:
                return await run_compose(command, *arguments, **options)
            except asyncio.CancelledError:
                # Harbor does not end its docker compose. Containers that `up` starts after `down` would stay.
                if command[0] == "up":
                    await self.end_children()
                raise
            except Exception as error:
                if command[0] in ("down", "stop"):
                    errors.append(error)
                raise

        async def stop_or_raise(delete):
            # Harbor also calls `down` before a start, where nothing may run.
            errors.clear()
            await stop(delete)
            if errors:
                raise errors[0]

        environment._run_docker_compose_command = run_compose_and_keep_error
        return stop_or_raise

    async def end_children(self):
        """End all child processes with SIGTERM, and after `CHILD_SECONDS` with SIGKILL."""
        deadline = time.monotonic() + CHILD_SECONDS
        signal_number = signal.SIGTERM
        while children := [*self.process_tree.descendants(os.getpid())]:
            if signal_number is not None:
                for pid in children:
                    with contextlib.suppress(ProcessLookupError):
                        self.process_tree.send_signal(pid, signal_number)
            # After the first SIGTERM send nothing more until the deadline.
            signal_number = signal.SIGKILL if time.monotonic() > deadline else None
            await asyncio.sleep(0.05)


class LiveTrial:
    """The environments of a trial, by session: their description while they may run, else None. The trial's file has a
    line for each change.
    """

    def __init__(self, file):
        self.file = file
        self.environments = {}

    def record(self, session, values):
        self.environments[session] = values
        self.file.write(json.dumps([session, values]) + "\n")
        self.file.flush()


def read_live_trial(file):
    """Return a trial's facts, and the descriptions of its unstopped environments, by session.

    Raises ValueError or TypeError for a damaged file.
    """
    facts, *changes = map(json.loads, file)
    unstopped = {
        session_id: description for session_id, description in dict(changes).items() if description is not None
    }
    if not all(isinstance(description, dict) for description in unstopped.values()):
        raise TypeError("an environment has no description")
    return facts, unstopped
