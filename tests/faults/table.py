"""The faults that megarl survives or names, and the tests that prove it. `tools/check.py faults` runs them."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One fault, and what its tests assert.

    `seconds` is the time limit for its detection; 0: it is found before or while the run starts. `exit_code` and
    `state` are those of the driver and of status.json; empty if the run goes on. `cause` is what status.json or the
    error names. `left` is what remains afterwards. `proofs` are the tests, by their ids without parameters.
    """

    number: int
    fault: str
    seconds: float
    exit_code: str
    state: str
    cause: str
    left: str
    proofs: tuple[str, ...]


_CLUSTER, _DATA, _END = "tests/cluster", "tests/data", "tests/end_to_end"
_HANGS, _TRAINERS, _SAVES = (
    "tests/faults/test_hangs.py::",
    "tests/faults/test_trainers.py::",
    "tests/faults/test_saves.py::",
)
_ENGINES, _RECOVERIES = "tests/faults/test_engines.py::", "tests/faults/test_recoveries.py::"
_LOST = "processes and shared memory none; checkpoints intact"

ROWS = (
    Row(1, "trainer rank killed in mid-step", 30, "76", "failed", "the rank, its signal, the call", _LOST, (
        f"{_TRAINERS}test_row_1_a_rank_killed_between_forward_and_backward_pass",
        f"{_END}/test_train.py::test_a_killed_worker_ends_the_run_and_is_named",
        f"{_END}/recovery/test_resume.py::test_a_run_that_is_killed_again_and_again_ends_bit_equal",
    )),
    Row(2, "trainer rank stopped", 50, "76", "failed", "the first silent rank, the call, the limit", _LOST, (
        f"{_TRAINERS}test_row_2_a_rank_stopped_in_an_update",
        f"{_HANGS}test_row_2_a_stopped_rank_is_named_with_the_stacks_of_all",
        f"{_HANGS}test_a_stopped_fork_server_is_named_and_replaced",
        f"{_CLUSTER}/agents/test_agents.py::test_a_stopped_process_is_named_by_what_does_not_answer",
    )),
    Row(3, "trainer rank raises", 30, "70", "failed", "the rank's error once, not its peers'", _LOST, (
        f"{_TRAINERS}test_row_3_a_rank_that_raises",
        f"{_CLUSTER}/launchers/test_local.py::test_the_first_cause_is_named_and_not_the_echo",
    )),
    Row(4, "driver and all ranks killed", 30, "-9", "running", "none: nobody is left to write it", _LOST, (
        f"{_CLUSTER}/launchers/test_local.py::test_ranks_die_with_the_driver",
        f"{_END}/recovery/test_resume.py::test_a_run_that_is_killed_again_and_again_ends_bit_equal",
    )),
    Row(5, "killed during a save", 30, "76", "failed", "the rank and its signal", "a partial save, removed on resume", (
        f"{_END}/recovery/test_resume.py::test_a_run_that_is_killed_again_and_again_ends_bit_equal",
    )),
    Row(6, "killed between data, manifest and latest", 0, "-9", "running", "none: the driver died", "a partial save", (
        f"{_SAVES}test_row_6_killed_between_data_manifest_and_latest",
    )),
    Row(7, "truncated shard of a checkpoint", 0, "", "", "the file, its bytes", "NAME.damaged, to be inspected", (
        f"{_END}/recovery/test_resume.py::test_a_damaged_checkpoint_is_named_and_the_one_before_it_used",
        "tests/checkpoint/test_convert_refusals.py::test_damage_is_refused_by_name",
    )),
    Row(8, "bit flipped in a checkpoint", 0, "", "", "the file, its sha256", "NAME.damaged, to be inspected", (
        f"{_END}/recovery/test_resume.py::test_a_damaged_checkpoint_is_named_and_the_one_before_it_used",
        "tests/checkpoint/test_convert_refusals.py::test_a_flipped_bit_of_weights_fails_the_hash_or_the_checksum_of_its_chunk",
    )),
    Row(9, "shard missing, or of another step", 0, "", "", "the file, its sha256", "NAME.damaged, to be inspected", (
        f"{_SAVES}test_row_9_a_shard_of_another_step",
        "tests/checkpoint/test_convert_refusals.py::test_damage_is_refused_by_name",
        f"{_END}/recovery/test_resume.py::test_a_damaged_checkpoint_is_named_and_the_one_before_it_used",
    )),
    Row(10, "disk full during a save", 0, "74", "failed", "the folder, bytes needed and free", "older checkpoints", (
        "tests/training/state/test_checkpoint.py::test_a_full_disk_is_named_before_and_while_it_is_written_to",
        "tests/tracking/test_full_disk.py::test_status_is_true_although_its_own_disk_is_full",
        f"{_CLUSTER}/launchers/test_local.py::test_a_full_disk_in_a_rank_is_a_full_disk_in_the_driver",
    )),
    Row(11, "disk read-only, over quota or silent", 33, "76 or 74", "failed", "the rank, the file", "checkpoints", (
        f"{_SAVES}test_row_11_a_file_system_that_does_not_answer",
        "tests/tracking/test_full_disk.py::test_a_run_folder_that_is_denied_from_now_on_ends_the_run_with_74",
        "tests/files/test_atomic.py::test_another_fault_of_the_storage_ends_with_74_and_the_path",
        "tests/files/test_atomic.py::test_a_full_disk_ends_with_74_and_the_path",
    )),
    Row(12, "the only good checkpoint, and the next save fails", 30, "74", "failed", "the disk", "the good one", (
        f"{_SAVES}test_row_12_a_failed_save_never_removes_the_only_good_checkpoint",
        f"{_END}/recovery/test_resume.py::test_a_damaged_checkpoint_is_named_and_the_one_before_it_used",
    )),
    Row(13, "resume, bit for bit", 0, "0", "done", "none", "nothing", (
        f"{_END}/recovery/test_resume.py::test_a_run_that_is_asked_to_stop_saves_and_goes_on_bit_equal",
        f"{_END}/recovery/test_resume_turns.py::test_turns_and_truncated_sampling_of_a_mixture_go_on_bit_equal_after_a_kill",
        "tests/training/state/test_checkpoint.py::test_a_run_goes_on_bit_equal_at_the_same_layout",
    )),
    Row(14, "resume with other tp, pp, ep, dp", 0, "0", "done", "none", "nothing", (
        "tests/training/state/test_checkpoint.py::test_a_checkpoint_is_read_at_any_layout",
        "tests/training/experts/test_routed_experts.py::test_held_experts_survive_a_checkpoint_in_a_world_of_another_size",
    )),
    Row(15, "resume with changed data or recipe", 0, "2 or 65", "failed", "the field or file", "nothing", (
        "tests/loops/saving/test_resume.py::test_changes_are_named_and_another_model_is_refused",
        "tests/loops/saving/test_resume.py::test_changed_training_data_is_refused_and_changed_validation_data_told",
        "tests/loops/saving/test_resume.py::test_other_records_left_out_are_refused",
    )),
    Row(16, "SIGTERM to ranks or driver", 0, "75", "stopped", "the signal; saved after which step", "nothing", (
        f"{_CLUSTER}/calls/test_ask.py::test_a_signal_to_a_rank_is_reported_with_its_next_answer",
        f"{_END}/recovery/test_resume.py::test_a_run_that_is_asked_to_stop_saves_and_goes_on_bit_equal",
        "tests/loops/test_stopping.py::test_the_first_signal_ends_a_run_with_75",
    )),
    Row(17, "SIGTERM or SIGINT twice", 10, "130", "interrupted", "both signals; not saved", "no partial checkpoint", (
        f"{_END}/recovery/test_resume.py::test_a_second_signal_ends_a_run_at_once",
        "tests/loops/test_stopping.py::test_a_second_ctrl_c_ends_a_run_at_once",
    )),
    Row(18, "Slurm's time limit", 0, "75", "stopped", "SIGUSR1; saved after which step", "nothing", (
        f"{_CLUSTER}/launchers/test_slurm.py::test_a_job_that_is_stopped_is_queued_again_and_ends_as_a_run_alone",
    )),
    Row(19, "Slurm preempts the job", 0, "75", "stopped", "SIGTERM; saved after which step", "nothing", (
        f"{_CLUSTER}/launchers/test_slurm.py::test_a_job_that_is_stopped_is_queued_again_and_ends_as_a_run_alone",
    )),
    Row(20, "Slurm loses a node", 30, "76", "failed", "a rank and its node", "nothing on the other nodes", (
        f"{_CLUSTER}/launchers/test_slurm.py::test_a_lost_rank_and_a_lost_node_cost_the_steps_since_the_checkpoint",
    )),
    Row(21, "requeued again and again without progress", 0, "70", "failed", "restarts, the step", "nothing", (
        "tests/tracking/test_run_folder.py::test_a_resumed_folder_forgets_what_came_after_its_checkpoint",
    )),
    Row(22, "two runs in one folder", 0, "73", "", "host and process of the owner", "the owner's run, untouched", (
        "tests/tracking/test_run_folder.py::test_a_folder_in_use_is_refused_until_its_owner_dies",
    )),
    Row(23, "engine killed while it samples", 12, "", "running", "the rank and its signal", "no process", (
        f"{_END}/recovery/test_lost_engines.py::test_the_run_goes_on_and_the_engine_comes_back",
    )),
    Row(24, "engine stopped while it samples", 90, "76", "failed", "the rank, `advance`, the limit", _LOST, (
        f"{_ENGINES}test_row_24_a_stopped_engine",
        f"{_END}/recovery/test_lost_engines.py::test_the_run_goes_on_and_the_engine_comes_back",
    )),
    Row(25, "engine dies during a weight update", 30, "", "running", "the rank, in `reshard`", "no process", (
        "tests/distributed/test_broken_reshard.py::test_the_others_have_the_newest_weights",
        f"{_CLUSTER}/test_run_ranks.py::test_nobody_waits_in_a_cross_world_group_for_a_lost_rank",
        "tests/distributed/test_overlapping_reshard.py::test_each_version_is_that_of_a_run_without_and_a_killed_replica_comes_back",
    )),
    Row(26, "every engine dies", 30, "76", "failed", "the last engine's rank, with the end of its log", _LOST, (
        f"{_END}/recovery/test_lost_engines.py::test_without_any_engine_the_run_ends",
    )),
    Row(27, "wrong weights after a reshard", 0, "70", "failed", "the first wrong parameter", "nothing", (
        "tests/distributed/test_reshard.py::test_verification_names_the_parameter_that_differs",
        "tests/distributed/test_reshard.py::test_the_probe_finds_spoiled_weights_of_an_engine_that_converts_them",
        f"{_END}/recovery/test_bit_flips.py::test_a_flip_in_an_engine_is_named_before_its_samples_are_trained",
    )),
    Row(28, "prompt longer than the limit", 0, "65", "", "the line; or counted in data/dropped", "nothing", (
        "tests/preflight/test_formats.py::test_what_is_too_long_is_left_out_and_counted_where_that_is_wanted",
        f"{_DATA}/kinds/test_problems.py::test_a_prompt_at_the_limit_passes_and_one_above_is_refused",
        "tests/rollout/test_attempt.py::test_case_n1_a_prompt_that_does_not_fit_ends_its_attempt_and_no_other",
    )),
    Row(29, "empty prompt, special tokens, bad Unicode, no template", 0, "65", "", "the line and field", "nothing", (
        f"{_DATA}/test_records.py::test_faulty_messages",
        f"{_DATA}/test_records.py::test_bytes_that_are_not_utf8",
        f"{_DATA}/test_chat.py::test_special_tokens_in_messages_are_text_and_the_templates_are_tokens",
        f"{_DATA}/test_chat.py::test_templates_that_can_serve_nobody",
    )),
    Row(30, "bad line of JSON, truncated Parquet", 0, "65", "", "the file and line", "nothing", (
        f"{_DATA}/test_records.py::test_faulty_files",
        f"{_DATA}/sources/test_rows.py::test_faulty_files",
        f"{_DATA}/test_survey.py::test_all_faults_are_told_with_their_lines",
    )),
    Row(31, "empty data set, fewer rows than a batch", 0, "2 or 65", "", "the field and file", "nothing", (
        "tests/preflight/test_sources.py::test_faults_of_recipe_and_files_come_together",
        f"{_DATA}/test_streamed.py::test_an_empty_source_and_faults",
        f"{_DATA}/test_sampler.py::test_each_epoch_holds_every_item_once",
    )),
    Row(32, "tokenizer does not fit the model", 0, "65", "", "the token and the vocabulary", "nothing", (
        "tests/preflight/model/test_models.py::test_a_token_beyond_the_vocabulary",
        "tests/files/test_model_folder.py::test_the_largest_token",
    )),
    Row(33, "reward function raises", 0, "", "running", "the first failure, with an example", "nothing", (
        "tests/rewards/scoring/test_reward_pool.py::test_a_failure_is_told_and_scores_zero",
        "tests/rollout/test_evaluate.py::test_completions_that_could_not_be_scored_are_counted_and_end_a_run_where_they_are_too_many",
    )),
    Row(34, "reward function hangs and ignores signals", 10, "", "running", "the limit", "none of what it started", (
        "tests/rewards/scoring/test_limits.py::test_a_hang_that_ignores_signals_is_killed_with_what_it_started",
        "tests/rewards/scoring/test_limits.py::test_a_computation_that_never_returns_to_python_is_killed",
        f"{_HANGS}test_row_34_a_stopped_reward_process",
        f"{_HANGS}test_a_stopped_environment_process",
    )),
    Row(35, "reward is NaN, None, huge or of a wrong form", 0, "", "running", "the value, the sample", "nothing", (
        "tests/rewards/scoring/test_results.py::test_what_is_no_reward_is_refused",
        "tests/rewards/scoring/test_results.py::test_a_score_that_float32_cannot_hold_sums_of_is_refused",
        "tests/rewards/scoring/test_results.py::test_a_reply_that_is_no_reward_is_refused",
    )),
    Row(36, "reward service fails, hangs or drops calls", 10, "", "running", "kinds, counted", "no connection", (
        "tests/rewards/scoring/test_http_rewards.py::test_errors_and_hangs_are_counted_exactly",
        "tests/rewards/scoring/test_http_rewards.py::test_a_failure_of_either_side_fails_the_completion",
    )),
    Row(37, "attacks by code that a model wrote", 10, "", "running", "reward 0", "no file, process or setting", (
        "tests/sandbox/test_attacks.py::test_an_attack_is_contained",
        "tests/rewards/functions/test_code.py::test_an_attack_earns_nothing",
        f"{_HANGS}test_a_stopped_sandbox",
    )),
    Row(38, "loss or gradient not finite", 0, "70", "failed", "the norm, the number of updates", "older checkpoints", (
        "tests/training/test_training_engine.py::test_updates_that_are_no_numbers_are_skipped_and_then_end_the_run",
    )),
    Row(39, "all rewards are equal", 0, "", "running", "none: a step without gradient, and a warning", "nothing", (
        "tests/rollout/test_buffer.py::test_groups_that_teach_nothing_are_replaced_and_what_is_left_over_waits",
        "tests/rollout/step/test_batch_advantages.py::test_advantages_of_tokens",
        f"{_END}/test_health.py::test_a_run_that_cannot_learn_stops_and_a_resume_does_not_warn_twice",
    )),
    Row(40, "silent corruption of a weight", 0, "70", "failed", "the tensor, layer and rank", "older checkpoints", (
        f"{_END}/recovery/test_bit_flips.py::test_a_flip_in_the_trainer_is_named_before_the_update",
        "tests/reshard/checks/test_version_checksums.py::test_the_majority_names_the_wrong_copy_and_two_copies_name_both",
    )),
    Row(41, "one rank is slow", 0, "0", "done", "none: a notice names rank and call", "nothing", (
        f"{_TRAINERS}test_row_41_a_slow_rank_is_reported_with_its_call",
        "tests/rollout/pool/test_stragglers.py::test_who_is_slow_is_reported_once_with_numbers_and_counted_while_it_lasts",
    )),
    Row(42, "host memory runs out", 30, "76", "failed", "the rank, out of memory", _LOST, (
        f"{_TRAINERS}test_row_42_host_memory_runs_out",
    )),
    Row(43, "port taken, /dev/shm full, too few descriptors", 0, "2", "", "the port, folder or limit", "nothing", (
        "tests/preflight/test_monitoring.py::test_a_port_in_use_is_refused",
        "tests/platform/memory/test_shared_memory.py::test_what_is_wrong_is_named",
        "tests/processes/test_process_tree.py::test_an_agent_raises_the_limit_of_open_files_or_names_it",
    )),
    Row(44, "tracker's folder or service fails", 10, "", "running", "the tracker, once", "nothing", (
        "tests/tracking/test_tracker.py::test_tensorboard_that_fails_later_does_not_stop_the_run",
        "tests/tracking/test_tracker.py::test_a_tracker_of_one_s_own_hears_everything_until_it_fails",
        "tests/tracking/test_wandb.py::test_a_run_is_written_offline",
    )),
    Row(45, "pickles in checkpoints, weights and dumps", 0, "65", "", "the file and the class", "nothing was run", (
        f"{_END}/recovery/test_resume.py::test_a_damaged_checkpoint_is_named_and_the_one_before_it_used",
        "tests/checkpoint/test_convert_refusals.py::test_damage_is_refused_by_name",
        "tests/training/state/test_optimizer_state.py::test_extra_states_that_are_pickles_are_not_loaded",
        "tests/groups/test_signed.py::test_a_forged_message_is_refused_and_not_unpickled",
    )),
    Row(46, "model folder with code or paths outside", 0, "65", "", "the file and the path", "nothing was read", (
        "tests/architecture/test_house.py::test_nothing_from_a_folder_is_executed",
        "tests/files/test_model_folder.py::test_each_damage_is_the_only_line_and_names_the_file",
        "tests/reshard/test_transport.py::test_broken_folders_are_refused",
    )),
    Row(47, "secrets in the environment", 0, "2", "", "the field, not the value", "no secret in files or logs", (
        "tests/config/test_recipe.py::test_a_secret_in_clear_is_refused_and_not_repeated",
        "tests/config/test_recipe.py::test_what_comes_from_the_environment_is_written_as_a_reference",
        "tests/serving/agents/test_agents.py::test_a_program_gets_the_variables_that_are_named_and_no_others",
        "tests/sandbox/test_attacks.py::test_an_attack_is_contained",
    )),
    Row(48, "strangers connect to control or engine ports", 0, "", "running", "nothing: they are ignored", "nothing", (
        f"{_CLUSTER}/agents/test_agents.py::test_strangers_neither_delay_nor_enter",
        f"{_CLUSTER}/launchers/test_local.py::test_ranks_of_one_machine_listen_on_loopback_only",
        f"{_CLUSTER}/test_run_ranks.py::test_a_group_with_another_key_cannot_join_a_cross_world_group",
        "tests/serving/test_endpoint.py::test_who_has_no_session_or_a_wrong_key_is_told_so",
    )),
    Row(49, "clock steps, daylight saving time", 12, "", "running", "nothing: deadlines are monotonic", "nothing", (
        f"{_HANGS}test_row_49_deadlines_do_not_follow_the_wall_clock",
        f"{_HANGS}test_row_49_few_modules_read_the_wall_clock",
    )),
    Row(50, "leftovers", 20, "", "", "each process, file and segment", "nothing", (
        "tests/self_tests/test_leftovers.py::test_what_tests_leave_fails_the_run_and_is_removed",
        "tests/cluster/launchers/test_local.py::test_temporary_files_of_ranks_are_private_and_go_with_the_group",
        "tests/engine/test_engine.py::test_no_shared_memory_is_held_that_a_kill_would_leave",
    )),
    Row(51, "random faults over one run", 50, "0", "done", "each fault's own", "nothing; metrics and weights equal", (
        "tests/faults/test_soak.py::test_row_51_random_faults",
    )),
    Row(52, "ranks killed while the run recovers from a loss", 30, "", "running", "each lost rank", "the copies", (
        f"{_RECOVERIES}test_rows_52_to_55_losses_and_a_signal_during_a_recovery",
    )),
    Row(53, "SIGTERM while the run recovers", 0, "75", "stopped", "the signal; saved after which step", "nothing", (
        f"{_RECOVERIES}test_rows_52_to_55_losses_and_a_signal_during_a_recovery",
        "tests/loops/test_stopping.py::test_a_signal_during_a_recovery_is_a_request_to_save",
    )),
    Row(54, "monitor's port wanted by others between attempts", 0, "", "running", "nothing: it stays open", "nothing", (
        f"{_RECOVERIES}test_rows_52_to_55_losses_and_a_signal_during_a_recovery",
    )),
    Row(55, "recovery without a checkpoint", 0, "", "running", "the step, in status.json", "nothing", (
        f"{_RECOVERIES}test_rows_52_to_55_losses_and_a_signal_during_a_recovery",
        "tests/loops/saving/test_resume.py::test_a_recovery_from_copies_reads_no_checkpoint",
    )),
    Row(56, "loss soon after a recovery", 30, "", "running", "the lost rank", "a new copy of the state, at once", (
        "tests/loops/saving/test_state_replication.py::test_a_restored_state_is_copied_again_at_once",
    )),
    Row(57, "bit flipped in a copy in memory", 0, "", "running", "the copy's node, rank and step", "other copies", (
        f"{_CLUSTER}/agents/test_memory_files.py::test_files_outlive_their_rank_and_damaged_ones_are_found_and_dropped",
        f"{_CLUSTER}/agents/test_memory_files.py::test_each_rank_reads_the_copies_of_its_node_also_those_of_a_node_that_leaves",
    )),
    Row(58, "data or model changed before a recovery", 0, "2 or 65", "failed", "the field or file", "nothing", (
        "tests/loops/saving/test_resume.py::test_a_recovery_refuses_what_a_resume_refuses",
    )),
)  # fmt: skip
NUM_ROWS = 58
UNPROVED: dict[int, str] = {}
"""Rows without a test: the reason, by number."""
