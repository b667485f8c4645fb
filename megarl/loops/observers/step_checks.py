"""Checks of each logged step: tools never called, log-prob mismatch beyond its limit, broken health rules."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.config import Recipe
from megarl.loops.observers.step_observer import StepObserver
from megarl.loops.step import Step
from megarl.preflight.algorithm.learning import find_unusual_learning_rate, select_health_rules
from megarl.rollout.step.updates import mismatch_exceeded_message
from megarl.rollout.tool_use import ToolUse, uncalled_text
from megarl.tracking.health import LEARNING_RATE, Health
from megarl.tracking.outcomes import StepOutcome
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.tracker import Tracker
from megarl.types import MegarlError, UnhealthyError


class StepChecks(StepObserver):
    """Checks a run's steps. Warns, or ends the run after a step."""

    def __init__(self, recipe: Recipe, folder: RunFolder, tracker: Tracker) -> None:
        """Restore the state of the health rules from the steps logged before this start."""
        self._recipe, self._train, self._folder, self._tracker = recipe, recipe.train, folder, tracker
        self._tool_use = ToolUse()
        self._health = Health(select_health_rules(recipe))
        self._health.replay(folder.logged_steps())
        # A step after the checkpoint may have caused a warning. The step is trained again, but the warning is not
        # repeated.
        self._health.warned.update(finding["rule"] for finding in folder.findings)

    def check_learning_rate(self) -> None:
        """Warn of an unusual learning rate, before the first step.

        With train.on_unhealthy = stop, raises UnhealthyError: there is nothing to save yet.
        """
        if not self._health.takes(LEARNING_RATE):
            return
        finding = find_unusual_learning_rate(self._recipe, self._folder.resumed_step)
        if finding is None:
            return
        self._health.warned.add(finding.rule)
        self._tracker.unhealthy(finding)
        if self._train.on_unhealthy == "stop":
            raise UnhealthyError(f"train.on_unhealthy = stop: {finding.text}")

    def find_fault(self, step: Step) -> MegarlError | None:
        """Warn of uncalled tools and empty updates. Return the error of a mismatch or health rule that ends the run."""
        self._tool_use.add_counts(step.metrics)
        for tool in self._tool_use.never_called:
            text = uncalled_text([tool], f"up to step {step.number}", self._samples_hint)
            self._tracker.notice_once(f"tool {tool} is not called", text)
        if step.outcome.has_empty_update:
            self._report_empty_update(step.number)
        faults = self._check_mismatch(step.number, step.outcome), self._check_health(step.number, step.metrics)
        return next((fault for fault in faults if fault is not None), None)

    def end_run(self) -> None:
        if tools := self._tool_use.never_called:
            self._tracker.notice(uncalled_text(tools, "in this start of the run", self._samples_hint))

    @property
    def _samples_hint(self) -> str:
        return f"megarl samples {self._folder.path}"

    @property
    def _resume_hint(self) -> str:
        return f"The state after the step is saved; go on with: megarl train {self._folder.path} --resume"

    def _report_empty_update(self, step: int) -> None:
        """Warn once that an update had no token to train, with the likely cause."""
        cause = "no turn of its records is trained. Check the weights of the data's messages"
        if self._recipe.is_on_policy:
            truncated = " or was truncated (algorithm.mask_truncated)" if self._recipe.algorithm.mask_truncated else ""
            cause = (
                f"each of its attempts has no reward{truncated}. Look at {self._samples_hint}; then repair the "
                "rewards, or raise rollout.sampling.max_new_tokens"
            )
        self._tracker.notice_once(
            "empty update",
            f"step {step}: an update was skipped (train/update_skipped), because it has no trained token: {cause}",
        )

    def _check_mismatch(self, step: int, outcome: StepOutcome) -> MegarlError | None:
        """Return the error that ends the run because trainer and engine log-probs differ too much, or None.

        With train.on_logprob_gap = skip, warn once.
        """
        message = mismatch_exceeded_message(outcome.excess_mismatch, self._recipe.logprob_gap_limit, step)
        if message is None:
            return None
        if self._train.on_logprob_gap == "stop":
            return MegarlError(f"{message}. {self._resume_hint}")
        self._tracker.notice_once("mismatch", f"{message} (train/gap_exceeded counts such steps)")
        return None

    def _check_health(self, step: int, metrics: Mapping[str, float]) -> MegarlError | None:
        """Warn of broken health rules. Return an error for the first if train.on_unhealthy = stop."""
        findings = self._health.observe(step, metrics)
        for finding in findings:
            self._tracker.unhealthy(finding)
        if not findings or self._train.on_unhealthy != "stop":
            return None
        return UnhealthyError(f"train.on_unhealthy = stop: {findings[0].text} {self._resume_hint}")
