"""The catalogue of faults: the injected fault, the promise, and its tests.

A row counts as held when all its tests pass and a bug planted in the tool (plants.py) turns them red.
"""

# ruff: noqa: E501  a row reads as a row

from __future__ import annotations

from dataclasses import dataclass

PROMISES = {
    1: "Old or new, never half",
    2: "Visible means verified",
    3: "One checkpoint for all ranks",
    4: "At most the steps since the last save are lost",
    5: "Resume is invisible",
    6: "Another world size reads the same rows in the same order",
    7: "A signal saves first",
    8: "No stray process",
    9: "Nothing hangs",
    10: "No silent wrong number",
    11: "Every failure has one message and a documented exit code",
    12: "Only what the tool made is deleted",
    13: "No data file runs code",
    14: "No secret in any file",
    15: "Merge is exact and bounded",
}
COSTS = {"p": "pure Python", "t": "one process with torch", "r": "ranks", "n": "nightly"}
SURVIVED, REFUSED = "survived", "refused"
LATER = "belongs to a part that does not exist yet"


@dataclass(frozen=True)
class Row:
    id: str
    cost: str
    promise: int
    injection: str
    ends: str
    """survived: as if nothing had happened, or the documented stop; refused: a clear error, everything as it
    was."""
    tests: tuple[str, ...]
    """`tests/…/file.py::function`; all its parameters are run, the slow ones too."""
    absent: str = ""
    """Why there are no tests."""


def _row(id_: str, cost: str, promise: int, ends: str, injection: str, *tests: str, absent: str = "") -> Row:
    named = tuple(f"tests/{test.split('::')[0]}.py::test_{test.split('::')[1]}" for test in tests)
    return Row(id_, cost, promise, injection, ends, named, absent)


RECIPE_AND_INPUT = (
    _row(
        "F001", "p", 11, REFUSED, "tab indent, unclosed brace, two documents, empty file, a list at top",
        "recipe/test_yaml_source::invalid_yaml_is_reported_with_line_and_column", "recipe/test_yaml_source::recipe_that_is_not_a_mapping_is_refused",
    ),
    _row(
        "F002", "p", 11, REFUSED, "duplicate key, top and nested, through a merge key",
        "recipe/test_yaml_source::duplicate_keys_are_reported_with_both_lines_at_every_depth", "recipe/test_yaml_source::merge_key_adds_keys_and_never_overrides",
    ),
    _row("F003", "p", 11, REFUSED, "twelve errors of twelve kinds at once", "recipe/test_loader::twelve_kinds_of_mistakes_are_reported_together_with_their_lines"),
    _row(
        "F004", "p", 10, REFUSED, "2e-5, 0123, no, 1_000, .nan, .inf, 1e400, a string for a number",
        "core/test_units_scalars::plain_scalars_follow_yaml_1_2", "core/test_units_scalars::numbers_that_no_key_can_hold_are_refused",
        "recipe/test_loader::wrong_value_is_reported_with_the_accepted_values",
    ),
    _row("F005", "p", 11, REFUSED, "an alias bomb", "recipe/test_yaml_source::alias_bomb_is_refused_within_a_second_and_100_mb"),
    _row("F006", "p", 11, REFUSED, "3,000 levels of nesting", "recipe/test_yaml_source::deep_nesting_is_refused_without_a_recursion_error"),
    _row("F007", "p", 13, REFUSED, "tags that run code, any unknown tag", "recipe/test_yaml_source::tags_are_all_reported_and_run_nothing"),
    _row(
        "F008", "p", 11, REFUSED, "UTF-16, latin-1, NUL, 50 GB, FIFO, " "/dev/zero, directory, " "dangling link " "as a recipe",
        "recipe/test_yaml_source::file_that_is_not_utf8_text_is_refused", "recipe/test_yaml_source::path_that_is_not_a_regular_file_is_refused_without_blocking",
        "recipe/test_yaml_source::sparse_50_gib_file_is_refused_without_reading_it",
    ),
    _row(
        "F009", "p", 11, REFUSED, "--set on an unknown key, of a wrong type, twice the same",
        "recipe/test_overrides::mistake_names_the_override", "recipe/test_overrides::duplicate_override_is_refused",
    ),
    _row(
        "F010", "p", 11, REFUSED, "contradictory keys", "recipe/test_contradictions::contradiction_is_reported_with_both_lines",
        "recipe/test_world::indivisible_batch_names_sizes_that_work",
    ),
    _row("F011", "p", 12, REFUSED, "output_dir is a file, the root, home, " "inside data, inside the package", "recipe/test_resolve::harmful_output_directory_is_refused"),
    _row(
        "F012", "p", 11, REFUSED, "a line of JSON malformed, cut, or a bare scalar",
        "data/test_readers::bad_line_is_reported_with_column_and_reading_continues",
        "data/test_preparation::bad_rows_are_named_with_line_and_column_and_all_are_counted",
    ),
    _row(
        "F013", "p", 10, SURVIVED, "U+2028 inside a string, CRLF, byte order mark, no last newline",
        "data/test_readers::rows_do_not_depend_on_line_endings",
    ),
    _row(
        "F014", "p", 11, REFUSED, "text null, a number, a list, an " "unpaired surrogate", "data/test_formats::non_text_value_is_refused_by_column",
        "data/test_readers::bad_line_is_reported_with_column_and_reading_continues",
    ),
    _row("F015", "p", 11, REFUSED, "NaN in JSON, a duplicate key in a row, " "5,000 digits", "data/test_readers::bad_line_is_reported_with_column_and_reading_continues"),
    _row(
        "F016", "p", 11, REFUSED, "columns that differ between files; a row without the column",
        "data/test_preparation::files_with_differing_columns_are_named", "data/test_formats::missing_column_of_one_row_is_named",
    ),
    _row(
        "F017", "p", 11, REFUSED, "compressed data: cut, broken, a bomb, of another kind",
        "data/test_readers::file_of_another_kind_is_refused_with_reason",
        "data/test_readers::row_beyond_the_limit_is_skipped_in_bounded_memory",
    ),
    _row(
        "F018", "p", 11, REFUSED, "Parquet and Arrow cut or damaged; CSV with an odd quote",
        "data/test_readers::damaged_parquet_row_group_is_named", "data/test_readers::arrow_file_and_stream_are_read_and_truncation_refused",
        "data/test_readers::csv_lines_with_wrong_field_count_are_named",
    ),
    _row(
        "F019", "p", 10, REFUSED, "no data; none after filtering; fewer " "rows than a " "global batch; an " "empty eval split",
        "data/test_preparation::empty_split_is_an_error_with_the_counts", "data/test_preparation::fewer_rows_than_a_global_batch_is_an_error_with_the_counts",
        "data/test_sets::holding_out_all_rows_is_refused",
    ),
    _row(
        "F020", "p", 10, SURVIVED, "rows longer than max_length; all of them; one row beyond any limit",
        "data/test_preparation::truncated_rows_are_counted_and_train_no_eos", "data/test_sets::drop_removes_and_lists_rows",
        "data/test_readers::row_beyond_the_limit_is_skipped_in_bounded_memory",
    ),
    _row(
        "F021", "t", 10, REFUSED, "no trained token: in rows, in a rank's " "micro-batch, in a " "whole step, " "everywhere",
        "faults/test_numbers::rows_without_targets_match_one_rank",
        "faults/test_numbers::step_without_targets_is_an_error",
        "data/test_preparation::data_without_targets_is_an_error_with_counts",
    ),
    _row(
        "F022", "p", 11, REFUSED, "last turn not the assistant's, empty completion, unknown role",
        "data/test_formats::broken_conversation_is_refused_with_the_message", "data/test_formats::empty_completion_is_refused",
    ),
    _row(
        "F023", "p", 10, SURVIVED, "a tokenizer without padding or end; padding that is the end",
        "data/test_tokenizer::padding_is_the_end_of_sequence_when_nothing_is_unused",
        "data/test_tokenizer::missing_eos_token_is_an_error_fixed_by_naming_one",
        "data/test_store::padding_is_not_trained_even_when_it_is_the_end_of_sequence",
    ),
    _row(
        "F024", "t", 11, REFUSED, "token ids beyond the embedding; a tokenizer that grew",
        "model/test_model_files::vocabulary_beyond_the_embedding_is_refused_with_both_sizes",
        "cli/test_validate::tokenizer_larger_than_embedding_is_an_error",
    ),
    _row(
        "F025", "p", 9, REFUSED, "a template that fails, does not terminate, differs between calls",
        "data/test_chat::endless_template_is_stopped", "data/test_chat::nondeterministic_template_is_refused",
    ),
    _row(
        "F026", "t", 11, REFUSED, "no network", "data/test_tokenizer::missing_network_is_detected_within_seconds",
        "data/test_sources::unreachable_hub_id_error_names_the_resource_and_alternatives",
        "core/test_hub_doors::unreachable_hub_error_names_resource_and_alternatives",
    ),
    _row("F027", "t", 11, REFUSED, "hub answers 401, 403, 404, 429, 503, " "cut and slow bodies", "faults/test_strangers::hub_errors_are_distinguished_and_never_contain_the_token"),
    _row(
        "F028", "p", 10, SURVIVED, "data that change between preparing and training, or while they are read",
        "data/test_cache::changed_file_gets_new_entry_and_old_one_is_kept",
        "data/test_cache::file_modified_while_read_is_refused", "launch/test_resume::changed_data_are_refused_on_resume",
    ),
    _row(
        "F029", "p", 1, SURVIVED, "two processes prepare one cache; killed " "at every " "operation; a disk that fails at every " "operation",
        "data/test_cache::concurrent_processes_build_one_store",
        "data/test_cache::kill_at_any_operation_leaves_no_partial_store_and_is_cleaned_up",
        "data/test_cache::disk_failure_at_any_operation_leaves_no_partial_store",
    ),
)  # fmt: skip

LAUNCH = (
    _row("F030", "r", 11, REFUSED, "the rendezvous port is taken", "launch/test_ports::used_port_is_refused_before_launch"),
    _row(
        "F031", "r", 9, REFUSED, "a machine of the run never joins", "launch/test_rendezvous_coordination::first_machine_that_never_comes_is_named",
        "launch/test_rendezvous_coordination::missing_machine_is_named",
    ),
    _row("F032", "r", 10, REFUSED, "ranks differ in recipe, data or versions", "worker/test_rank_identity::differing_ranks_are_named_with_versions"),
    _row("F033", "r", 11, SURVIVED, "a conflicting default accelerate config", "launch/test_accelerate_real::conflicting_default_config_is_ignored"),
    _row(
        "F034", "r", 11, SURVIVED, "stale RANK, MASTER_PORT, FSDP_*, PET_* in the environment",
        "launch/test_accelerate::leftovers_of_another_job_are_removed_and_listed",
        "launch/test_accelerate_real::ranks_are_spawned_on_the_cpu_with_their_environment",
    ),
    _row(
        "F035", "r", 11, REFUSED, "CUDA_VISIBLE_DEVICES empty, of one, by UUID; more ranks than devices",
        "core/test_devices::visible_devices_follow_cuda_semantics", "cuda/test_failures::devices_are_counted_as_torch_does_whatever_is_visible",
        "cuda/test_failures::hidden_gpus_are_named_with_the_variable", "recipe/test_resolve::more_ranks_than_devices_are_refused_with_the_counts",
        "recipe/test_resolve::cpu_is_never_chosen_silently", "cuda/test_failures::machine_with_fewer_gpus_is_refused_and_the_other_names_it_missing",
    ),
    _row(
        "F036", "r", 11, REFUSED, "a rank dies at import, before it " "can report", "launch/test_supervisor_early::ranks_wait_for_the_run_directory_and_are_watched_like_others",
        "launch/test_supervisor::rank_that_dies_early_shows_its_exception",
    ),
    _row("F037", "r", 9, REFUSED, "a rank is stopped (SIGSTOP)", "launch/test_supervisor::stopped_rank_is_late_and_its_location_is_reported"),
    _row(
        "F038", "p", 12, REFUSED, "a second train on a live directory; a " "dead owner; a " "reused pid; " "another host",
        "run/test_directory_lock::second_command_error_names_the_owner", "run/test_directory_lock::reused_pid_is_not_the_owner",
        "run/test_directory_lock::lock_of_a_dead_owner_is_taken_over_with_a_notice",
        "run/test_directory_lock::owner_on_another_machine_is_live_until_300_seconds_after_its_last_sign",
        "launch/test_resume::live_run_is_refused",
    ),
    _row("F039", "r", 11, REFUSED, "the current directory is deleted", "cli/test_screen::removed_current_directory_is_reported"),
    _row("F040", "p", 11, SURVIVED, "accelerate missing from PATH, another " "Python first", "launch/test_accelerate::launcher_runs_with_current_interpreter"),
    _row(
        "F041", "r", 4, SURVIVED, "a rank killed repeatedly, with automatic restarts",
        "launch/test_attempts_real::twenty_kills_equal_uninterrupted_run",
        "launch/test_attempts_real::restarts_after_kill_and_failure_equal_uninterrupted_run",
        "launch/test_attempts::killed_rank_restarts_the_run_with_a_message_and_a_metrics_event",
    ),
)  # fmt: skip

RUN = (
    _row(
        "F042", "r", 4, SURVIVED, "a rank killed while it fetches, computes, reduces, logs, evaluates, saves",
        "faults/test_train::rank_killed_in_any_phase_ends_the_others_and_the_run_resumes",
        "launch/test_supervisor::killed_rank_ends_the_others_and_is_named",
    ),
    _row("F043", "r", 4, SURVIVED, "all ranks killed at once", "faults/test_train::run_with_all_ranks_killed_resumes"),
    _row(
        "F044", "r", 9, REFUSED, "a rank stopped, in a deadlock, holding the GIL",
        "launch/test_supervisor::stopped_rank_is_late_and_its_location_is_reported",
        "launch/test_supervisor::hanging_rank_is_named_with_its_location",
        "launch/test_supervisor::stack_request_does_not_kill_rank_without_handler",
        "launch/test_attempts_real::hanging_rank_is_named_and_the_run_restarts",
    ),
    _row("F045", "r", 9, SURVIVED, "a slow rank", "launch/test_supervisor::waiting_for_slow_rank_is_not_a_hang",
         "worker/observe/test_stragglers::slow_rank_is_named"),
    _row("F046", "r", 9, REFUSED, "a rank skips a collective, or " "calls another", "launch/test_hang_diagnosis::ranks_in_different_collectives_are_reported_with_sequence_numbers",
         "launch/test_hang_diagnosis::late_rank_is_distinguished_from_waiting_ranks"),
    _row("F047", "r", 11, REFUSED, "the host is out of memory", "faults/test_numbers::out_of_memory_error_names_rank_and_memory",
         "launch/test_attempts_real::run_out_of_host_memory_restarts_and_out_of_device_memory_does_not"),
    _row("F048", "r", 11, REFUSED, "a device is out of memory on one rank", "faults/test_numbers::out_of_memory_error_names_rank_and_memory",
         "cuda/test_failures::device_without_memory_is_reported_with_the_module_and_what_was_live"),
    _row("F049", "r", 10, REFUSED, "NaN on one rank", "faults/test_numbers::nonfinite_gradient_on_one_rank_stops_all_before_the_update"),
    _row("F050", "r", 10, REFUSED, "an infinite gradient in one shard, " "infinite weights", "faults/test_numbers::nonfinite_gradient_on_one_rank_stops_all_before_the_update"),
    _row("F051", "r", 9, REFUSED, "a worker of the data loader dies, fails", "faults/test_numbers::failing_loader_worker_ends_the_run"),
    _row(
        "F052", "r", 1, REFUSED, "a file size limit (RLIMIT_FSIZE), also for writes from C++",
        "faults/test_save::limit_on_file_sizes_fails_the_save_and_keeps_the_older_checkpoint",
        "merge/test_merging_faults::file_size_limit_ends_in_one_error_and_nothing_left",
        "worker/observe/test_metrics::file_size_limit_is_reported_and_the_torn_line_is_cut",
    ),
    _row(
        "F053", "r", 1, REFUSED, "ENOSPC, EDQUOT, EIO, EROFS, ESTALE, " "EMFILE at " "every operation, once and " "permanently; short " "and interrupted writes",
        "faults/test_save::disk_refusing_any_of_a_few_operations_is_reported_and_the_next_save_succeeds",
        "faults/test_save::disk_refusing_any_operation_is_reported_and_the_next_save_succeeds",
        "faults/test_save::short_and_interrupted_writes_are_completed",
    ),
    _row("F054", "r", 11, REFUSED, "metrics cannot be written while " "training is fine", "faults/test_numbers::unwritable_metrics_end_the_run_after_saving"),
    _row("F055", "r", 12, REFUSED, "the run directory is removed, renamed, " "replaced", "faults/test_numbers::deleted_run_directory_ends_the_run_and_is_not_recreated",
         "launch/test_supervisor::vanished_run_directory_is_reported_and_not_recreated", "worker/observe/test_heartbeat::deleted_run_directory_ends_the_rank"),
    _row(
        "F056", "r", 4, SURVIVED, "disk full at a save, free at the next", "faults/test_train::save_succeeds_after_disk_space_is_freed",
        "worker/checkpoint/test_save::failed_write_on_one_rank_leaves_no_checkpoint_and_the_next_save_succeeds",
    ),
    _row("F057", "r", 5, SURVIVED, "the wall clock jumps one day back, ten " "years forward", "faults/test_worlds::clock_jump_changes_neither_numbers_nor_order"),
    _row("F058", "r", 7, SURVIVED, "SIGTERM to the launcher", "launch/test_accelerate_real::agent_passes_signals_on_and_waits_for_the_save",
         "cli/test_train::stopped_run_resumes_and_equals_uninterrupted_run",
         "launch/test_accelerate::agent_gets_signals_and_shutdown_timeout"),
    _row("F059", "r", 7, SURVIVED, "SIGUSR1 to the launcher", "launch/test_accelerate_real::agent_passes_signals_on_and_waits_for_the_save",
         "launch/test_accelerate::agent_gets_signals_and_shutdown_timeout"),
    _row(
        "F060", "r", 7, SURVIVED, "SIGINT of the terminal, SIGHUP, a " "terminal that closes", "launch/test_supervisor::signal_is_passed_on_and_the_ranks_save",
        "launch/test_supervisor::every_stop_signal_is_recorded",
        "launch/test_supervisor::signal_that_was_ignored_at_the_start_stays_ignored",
        "cli/test_screen::closed_pipe_does_not_stop_a_command",
    ),
    _row(
        "F061", "r", 7, SURVIVED, "signals to ranks at different times around a step",
        "faults/test_train::signals_at_different_times_stop_both_ranks_at_one_step",
        "parity/test_resume::signal_to_one_rank_saves_on_all_and_resume_continues",
    ),
    _row("F062", "r", 7, SURVIVED, "a signal to the data loader's processes", "worker/test_rank_identity::stop_signal_does_not_end_the_loaders_processes"),
    _row(
        "F063", "r", 7, SURVIVED, "signals two and three times", "launch/test_supervisor::duplicate_signal_counts_once",
        "launch/test_supervisor::second_signal_stops_immediately_and_fails",
        "faults/test_train::signals_at_different_times_stop_both_ranks_at_one_step",
    ),
    _row(
        "F064", "r", 7, SURVIVED, "a signal during start-up, a save, the " "last steps", "faults/test_train::signal_during_a_save_stops_after_it",
        "launch/test_supervisor::signal_before_handlers_exits_with_its_code",
        "faults/test_train::signal_in_last_steps_keeps_final_checkpoint",
    ),
    _row(
        "F065", "r", 7, REFUSED, "the save requested by a signal fails", "faults/test_train::failed_save_on_stop_exits_1_and_keeps_older_checkpoint",
        "launch/test_supervisor::save_that_fails_after_a_signal_is_exit_1",
    ),
    _row(
        "F066", "r", 8, REFUSED, "SIGKILL to the command, to accelerate, " "to the agent", "faults/test_launcher::no_process_survives_killed_launcher_for_five_seconds",
        "launch/test_supervisor::no_process_survives_killed_supervisor", "launch/test_supervisor::no_process_survives_killed_launcher",
    ),
    _row("F067", "r", 8, REFUSED, "a rank that ignores SIGTERM", "launch/test_supervisor::rank_hanging_in_cleanup_does_not_block_the_run",
         "launch/test_supervisor::killed_rank_ends_the_others_and_is_named"),
    _row("F068", "r", 7, SURVIVED, "preempted at the last step", "faults/test_train::signal_in_last_steps_keeps_final_checkpoint"),
    _row("F069", "r", 4, SURVIVED, "a tracker that raises, that hangs", "faults/test_numbers::tracker_that_fails_or_hangs_is_a_warning",
         "worker/observe/test_trackers::failing_tracker_is_disabled", "worker/observe/test_trackers::hanging_tracker_is_abandoned"),
)  # fmt: skip

CHECKPOINT = (
    _row(
        "F070", "t", 1, SURVIVED, "a rank killed before, in and after every file operation of a save",
        "faults/test_save::rank_killed_at_any_of_a_few_operations_leaves_old_or_new", "faults/test_save::rank_killed_at_any_operation_leaves_old_or_new",
        "faults/test_save::save_operations_are_deterministic",
        "faults/test_train::rank_killed_at_a_file_operation_of_a_save_resumes",
        "faults/test_kill_points::new_run_killed_anywhere_is_absent_or_complete",
        "faults/test_kill_points::run_killed_while_updating_its_files_resumes",
    ),
    _row(
        "F071", "p", 1, SURVIVED, "power cut at every operation: " "un-fsynced " "writes dropped " "or torn, " "renames lost",
        "faults/test_power::power_cut_during_a_save_and_its_rotation_leaves_old_or_new",
        "faults/test_power::power_cut_while_replacing_a_file_leaves_old_or_new",
        "faults/test_power::power_cut_while_publishing_a_directory_is_atomic",
    ),
    _row("F072", "t", 2, REFUSED, "a bit flipped at 64 offsets of " "every file", "faults/test_damage::every_flipped_bit_is_detected",
         "parity/test_resume::flipped_bit_is_detected_before_loading"),
    _row("F073", "t", 2, REFUSED, "every file truncated by a byte or by " "half, emptied, zero-filled, appended to", "faults/test_damage::every_truncated_emptied_or_removed_file_is_detected"),
    _row("F074", "t", 2, REFUSED, "every file removed in turn", "faults/test_damage::every_truncated_emptied_or_removed_file_is_detected"),
    _row("F075", "t", 2, SURVIVED, "extra files, a stale shard", "faults/test_damage::extra_files_in_checkpoint_are_ignored"),
    _row("F076", "t", 2, REFUSED, "a shard, a state, a part of another step", "faults/test_damage::file_of_another_step_is_detected"),
    _row(
        "F077", "t", 2, REFUSED, "manifests that are missing, empty, of " "another run, newer, edited", "faults/test_damage::mismatched_manifest_is_not_a_checkpoint",
        "faults/test_damage::invalid_manifest_is_not_a_checkpoint",
        "faults/test_damage::changed_manifest_field_is_detected", "parity/test_resume::directory_without_a_manifest_is_not_a_checkpoint",
    ),
    _row("F078", "r", 3, REFUSED, "the newest checkpoint is damaged or missing on one rank only",
         "faults/test_worlds::damage_found_by_one_rank_is_agreed_by_all"),
    _row("F079", "r", 12, REFUSED, "two runs in one directory", "launch/test_resume::two_new_runs_of_one_name_do_not_mix", "run/test_directory_lock::second_command_error_names_the_owner"),
    _row(
        "F080", "p", 2, REFUSED, "links, a loop of links, manifest paths " "that lead out", "faults/test_damage::file_replaced_by_link_is_detected",
        "faults/test_damage::misnamed_checkpoint_directory_is_reported", "faults/test_damage::mismatched_manifest_is_not_a_checkpoint",
    ),
    _row("F081", "p", 1, SURVIVED, "a file system that shows files of " "another machine " "late: in " "listings, by name",
         "faults/test_worlds::machine_waits_until_checkpoint_files_are_visible",
         "faults/test_kill_points::rotation_with_a_stale_listing_deletes_too_few_and_never_the_newest"),
    _row(
        "F082", "p", 12, SURVIVED, "rotation among directories, links and " "files of others", "faults/test_kill_points::rotation_deletes_only_own_checkpoints_and_never_the_newest",
        "worker/checkpoint/test_save::rotation_deletes_only_own_complete_checkpoints",
    ),
    _row("F083", "p", 1, SURVIVED, "rotation killed at every operation", "faults/test_kill_points::rotation_killed_anywhere_shows_no_half_deleted_checkpoint"),
    _row(
        "F084", "r", 10, REFUSED, "a checkpoint of another model, data, " "seed, optimizer", "parity/test_resume::checkpoint_of_another_model_is_refused_by_name",
        "launch/test_recipe_changes::changed_keys_of_completed_steps_are_refused", "launch/test_recipe_changes::all_refused_keys_are_reported_at_once",
    ),
    _row("F085", "t", 11, REFUSED, "a run of another version; a checkpoint " "of Accelerate or the Trainer", "launch/test_resume::run_directory_of_another_version_is_named",
         "launch/test_resume::path_that_is_not_a_checkpoint_is_refused_naming_the_newest"),
    _row("F086", "r", 5, SURVIVED, "another sharding, full and sharded " "state dicts, FSDP1", "faults/test_train::resume_with_other_sharding_equals_uninterrupted_run",
         "faults/test_worlds::full_and_sharded_checkpoints_load_into_each_other"),
    _row("F087", "r", 9, SURVIVED, "a save slower than the hang timeout", "worker/observe/test_heartbeat::bytes_moved_outside_a_step_are_progress"),
    _row("F088", "n", 9, SURVIVED, "hundreds of saves", "faults/test_train::repeated_saves_leak_nothing"),
    _row("F089", "p", 12, SURVIVED, "leftovers of five crashes", "faults/test_kill_points::leftovers_are_removed_and_links_not_followed",
         "worker/checkpoint/test_save::only_crash_leftovers_are_removed"),
    _row("F090", "t", 5, SURVIVED, "a checkpoint copied elsewhere, " "read-only, without mtimes", "faults/test_damage::read_only_copy_without_mtimes_resumes"),
)  # fmt: skip

RESUME = (
    _row("F091", "r", 5, SURVIVED, "stopped and resumed at every step", "faults/test_train::stop_and_resume_at_any_step_continues_losses",
         "parity/test_resume::resume_on_the_same_ranks_is_bitwise_equal"),
    _row("F092", "r", 5, SURVIVED, "a crash in the middle of accumulation", "faults/test_train::rank_killed_in_any_phase_ends_the_others_and_the_run_resumes"),
    _row("F093", "r", 6, SURVIVED, "resumed on other numbers of ranks", "faults/test_train::two_resumes_on_other_numbers_of_ranks_follow_the_reference",
         "parity/test_resume::metrics_line_spanning_a_checkpoint_is_complete", "recipe/test_world::indivisible_batch_names_sizes_that_work"),
    _row("F094", "r", 6, SURVIVED, "stopped around the end of an epoch; " "resumed when finished", "faults/test_train::stop_and_resume_at_any_step_continues_losses",
         "launch/test_resume::finished_run_has_nothing_to_do_unless_more_steps_are_requested"),
    _row("F095", "r", 5, REFUSED, "each part of the state removed", "faults/test_train::stop_and_resume_at_any_step_continues_losses"),
    _row("F096", "r", 5, SURVIVED, "generators of ranks on another " "world size", "faults/test_train::ranks_of_another_world_size_have_own_random_streams"),
    _row("F097", "r", 5, SURVIVED, "recomputation with dropout, resumed", "faults/test_train::recomputation_draws_same_dropout_masks_after_resume"),
    _row("F098", "r", 5, SURVIVED, "the recipe changed", "parity/test_resume::more_steps_continue_a_finished_run",
         "launch/test_recipe_changes::changed_keys_of_later_steps_are_accepted_and_reported", "launch/test_recipe_changes::execution_and_logging_keys_may_change_on_resume"),
    _row("F099", "r", 5, SURVIVED, "metrics beyond the checkpoint, " "torn, missing", "faults/test_train::metrics_are_truncated_to_the_checkpoint_and_hold_each_step_once",
         "worker/observe/test_metrics::resumed_file_is_truncated_to_the_checkpoint"),
    _row("F100", "r", 4, SURVIVED, "five crashes in a row", "faults/test_train::five_crashes_in_a_row_lose_nothing",
         "faults/test_soak::random_sequence_of_faults_loses_nothing"),
    _row("F101", "r", 9, REFUSED, "a crash at the same step repeatedly", "launch/test_attempts_real::three_failures_at_one_step_end_the_run_and_name_rows",
         "launch/test_attempts::third_failure_at_one_step_ends_run_and_names_rows", "launch/test_attempts::three_failures_without_progress_end_the_run"),
)  # fmt: skip

MERGE = (
    _row("F102", "t", 1, SURVIVED, "a merge killed at every operation, and " "by signals", "merge/test_merging_faults::after_any_last_operation_the_output_is_absent_or_complete",
         "merge/test_merging_faults::full_disk_at_any_operation_is_one_error_and_leaves_nothing_partial",
         "merge/test_merging_faults::killed_replacement_keeps_the_old_or_has_the_new", "merge/test_merging_faults::signal_leaves_no_partial_model",
         "faults/test_kill_points::merge_killed_anywhere_leaves_no_model_or_a_complete_one"),
    _row("F103", "t", 11, REFUSED, "limits on file sizes; too little space", "merge/test_merging_faults::file_size_limit_ends_in_one_error_and_nothing_left",
         "merge/test_merging_faults::too_little_space_is_refused_before_a_byte_is_written"),
    _row("F104", "t", 2, REFUSED, "a shard missing, cut, flipped; an " "incomplete checkpoint", "merge/test_source_damage::damaged_shard_is_named",
         "merge/test_source_damage::checkpoint_that_is_not_complete_is_refused_and_can_be_forced"),
    _row("F105", "t", 11, SURVIVED, "a run, a checkpoint, its shards, " "nonsense", "merge/test_merging_values::run_and_checkpoint_and_shards_give_the_same_weights",
         "merge/test_source_damage::directory_that_is_not_a_checkpoint_is_described"),
    _row("F106", "t", 10, REFUSED, "NaN and infinite weights, weights " "beyond fp16", "merge/test_gather_numbers::weights_that_are_not_finite_are_counted_by_tensor",
         "merge/test_gather_numbers::values_beyond_fp16_are_refused_but_fit_bf16"),
    _row("F107", "t", 15, SURVIVED, "tied, strided, empty, scalar and " "uneven tensors", "merge/test_ties::tied_head_is_written_once_and_restored",
         "merge/test_reader::strides_of_every_kind_are_merged", "merge/test_gather_property::any_mesh_merges_to_the_full_tensors"),
    _row("F108", "n", 15, SURVIVED, "twelve gigabytes of tensors, one larger " "than a shard", "merge/test_write_bounded_memory::sparse_checkpoint_of_twelve_gigabytes_is_merged_within_the_bound",
         "merge/test_write_bounded_memory::tensors_larger_than_the_bound_are_merged_within_it"),
    _row("F109", "t", 12, REFUSED, "an output that exists, or that is, " "contains or is inside the source", "merge/test_output_directory::output_linking_to_source_is_refused",
         "merge/test_output_directory::existing_output_is_refused_with_alternatives", "merge/test_output_directory::source_is_not_modified"),
    _row("F110", "t", 15, SURVIVED, "the source is rotated during the merge", "merge/test_merging_faults::source_rotated_during_merge_is_merged_completely",
         "merge/test_merging_faults::source_of_too_many_files_that_is_rotated_away_is_one_error"),
    _row("F111", "t", 15, SURVIVED, "umask, setgid directories", "merge/test_output_directory::files_follow_the_umask_and_directories_their_parent"),
    _row("F112", "t", 15, SURVIVED, "LoRA: merged and exported; the base " "missing or another", "merge/test_adapt::adapter_is_added_to_base_weights",
         "merge/test_adapt::mismatched_adapter_is_one_error_and_writes_nothing", "merge/test_adapt::without_a_base_the_alternatives_are_reported",
         "merge/test_adapt::merged_model_computes_like_the_adapted_one"),
    _row("F113", "t", 15, SURVIVED, "dtypes compared with an oracle, tensor " "by tensor", "merge/test_gather_dtypes::conversion_rounds_as_torch_does",
         "merge/test_gather_numbers::dtype_option_converts_floats_only", "merge/test_gather_numbers::config_agrees_with_the_weights"),
)  # fmt: skip

SECURITY = (
    _row("F114", "t", 13, REFUSED, "code in a checkpoint's metadata, " "pickles and states", "worker/checkpoint/test_storage::metadata_cannot_run_code",
         "worker/checkpoint/test_storage::metadata_allows_only_listed_classes", "merge/test_source_damage::damaged_table_of_contents_is_refused",
         "faults/test_worlds::pickled_code_in_rank_state_is_not_run"),
    _row("F115", "t", 13, REFUSED, "attempts to bypass the unpickling " "allow-list", "core/test_plain_pickle::hostile_pickles_are_refused", "core/test_plain_pickle::single_opcode_cannot_exhaust_memory",
         "worker/checkpoint/test_storage::metadata_allows_only_listed_classes"),
    _row("F116", "p", 13, REFUSED, "paths in an index, a manifest or " "metadata that point outside the " "directory", "merge/test_source_damage::damaged_index_is_refused",
         "faults/test_damage::mismatched_manifest_is_not_a_checkpoint"),
    _row("F117", "p", 13, REFUSED, "hostile safetensors headers", "merge/test_source_damage::damaged_safetensors_file_is_refused"),
    _row("F118", "t", 13, REFUSED, "a model with custom code", "cli/test_train::remote_code_needs_the_command_line_option",
         "cli/test_app_allowed_code::command_runs_no_code_for_a_recipe_alone", "merge/test_integrity::custom_code_is_never_run"),
    _row("F119", "p", 13, REFUSED, "templates that try to escape " "their sandbox", "faults/test_strangers::template_is_rendered_in_sandbox"),
    _row("F120", "p", 14, SURVIVED, "tokens in environment, arguments, --set " "and URLs", "launch/test_accelerate::secrets_are_not_written",
         "core/test_secrets::hub_tokens_are_masked_anywhere_in_text"),
    _row("F121", "p", 14, REFUSED, "names with shell and YAML in them, in " "jobs for clusters", "cluster/test_slurm::any_word_reaches_the_command_unchanged",
         "cluster/test_slurm::names_that_sbatch_would_split_are_refused"),
    _row("F122", "p", 13, SURVIVED, "HTML in names and metrics", "pages/test_report_page::text_of_runs_stays_text",
         "pages/test_report_page::only_the_two_scripts_of_the_page_may_run"),
    _row("F123", "p", 12, REFUSED, "lock or stage planted as a symbolic link", "run/test_directory_lock::link_instead_of_the_lock_is_refused",
         "faults/test_kill_points::leftovers_are_removed_and_links_not_followed"),
    _row("F124", "p", 13, SURVIVED, "terminal escapes in rows, names, errors", "cli/test_screen::terminal_escapes_are_printed_escaped",
         "recipe/test_loader::long_values_are_escaped_and_shortened_in_errors", "cli/test_prepare::control_characters_of_a_row_are_printed_escaped"),
)  # fmt: skip

ADAPTERS = (
    _row("F125", "r", 1, SURVIVED, "a rank killed while it saves an adapter",
         "faults/test_adapted_runs::rank_killed_while_it_saves_an_adapter_leaves_the_previous_checkpoint_and_the_run_resumes"),
    _row("F126", "r", 1, REFUSED, "the disk is full at the save of an " "adapter, and at any " "operation of " "its export",
         "faults/test_adapted_runs::full_disk_at_the_save_of_an_adapter_leaves_the_previous_checkpoint_and_the_next_save_succeeds",
         "faults/test_adapted_runs::full_disk_at_any_operation_of_an_export_leaves_no_adapter_or_a_complete_one"),
    _row("F127", "t", 10, REFUSED, "an adapter of another base: by name, shape, weights",
         "model/test_adapter_files::adapter_of_another_kind_is_refused", "model/test_adapter_files::adapter_of_other_weights_of_the_same_name_is_refused",
         "merge/test_adapt::mismatched_adapter_is_one_error_and_writes_nothing"),
    _row("F128", "r", 10, REFUSED, "the base changed on disk between training, resume and merge",
         "cli/test_train_lora::adapter_is_trained_merged_and_continued_on_its_base_alone", "run/test_base_model::other_weights_of_the_same_size_differ",
         "run/test_base_model::change_at_either_end_of_a_large_file_is_noticed"),
    _row("F129", "t", 10, REFUSED, "an adapter_config.json of another " "method, or with " "arithmetic that is " "not supported",
         "model/test_adapter_files::adapter_of_another_kind_is_refused", "merge/test_adapt::adapters_beyond_plain_lora_are_refused_by_name"),
    _row("F130", "t", 10, REFUSED, "a target that hits nothing, shares its " "weight or is " "smaller than " "the rank",
         "model/test_lora_targets::refusal_names_what_is_wrong_and_what_to_write"),
    _row("F131", "r", 10, REFUSED, "a target that the model never calls", "worker/test_setup_models::adapters_of_modules_that_the_model_never_calls_stop_the_run",
         "worker/readback/test_trained::kind_of_module_that_the_model_never_calls_is_an_error"),
    _row("F132", "r", 10, REFUSED, "adapters outside of the units, scaled " "twice, not updated, with equal dropout " "on all ranks; one " "rank's slice of an adapter",
         "parity/test_breaks::run_stops_at_a_planted_bug_of_its_adapters", "parity/test_breaks::merge_and_resume_refuse_one_rank_s_slice_of_an_adapter"),
)  # fmt: skip

SURROUNDINGS = (
    _row("F133", "t", 13, SURVIVED, "parquet, arrow, csv and tar files with " "pickles, " "one text for all rows, a hundred " "thousand columns",
         "data/test_readers::pickle_in_the_type_of_a_column_is_not_loaded", "data/test_readers::long_text_that_all_rows_share_is_not_decoded_for_all_at_once",
         "data/test_readers::csv_with_many_columns_and_long_fields_is_read_in_time", "data/test_row_stream::members_of_a_tar_are_grouped_and_pickles_are_not_loaded"),
    _row("F134", "p", 8, SURVIVED, "several jobs of a script in " "threads, one " "of which fails; train " "outside of the main thread",
         "core/test_processes::failed_block_ends_no_child_of_another_thread", "core/test_processes::thread_starts_no_child_after_the_block_has_failed",
         "jobs/test_results_api::train_outside_the_main_thread_is_refused"),
    _row("F135", "r", 11, SURVIVED, "standard streams that are closed", "cli/test_screen::closed_descriptors_are_opened_on_dev_null_for_a_command_and_its_children",
         "cli/test_train::run_without_standard_streams_is_complete"),
    _row("F136", "p", 12, SURVIVED, "temporary directories of commands that " "were killed", "run/test_directory_lock::temporary_directory_of_a_killed_process_is_removed_at_the_next_start",
         "run/test_directory_lock::temporary_directory_is_kept_on_demand_and_then_not_swept"),
    _row("F137", "p", 11, REFUSED, "a cache directory that cannot be used, " "a user without home", "jobs/test_recipes::unusable_cache_directory_is_reported_first",
         "jobs/test_recipes::user_without_home_directory_is_told_to_name_a_cache"),
    _row("F138", "p", 9, SURVIVED, "a container with less CPU time than the " "machine has cores", "core/test_cgroups::odd_paths_and_files"),
    _row("F139", "p", 11, SURVIVED, "a full directory for temporary files", "launch/test_supervisor_early::full_temporary_directory_means_no_early_start"),
    _row("F140", "p", 11, REFUSED, "another run on the port of the recipe", "launch/test_ports::used_port_is_refused_before_launch"),
    _row("F141", "r", 4, SURVIVED, "a rank killed while the ranks generate samples",
         "faults/test_train::rank_killed_while_ranks_generate_ends_the_others_and_the_run_resumes"),
    _row("F142", "r", 10, SURVIVED, "two trainings, a merge and a resume in " "one process", "jobs/test_results_api::script_trains_twice_merges_and_resumes_through_the_api"),
)  # fmt: skip

DEVICES = (
    _row("F143", "r", 11, REFUSED, "a GPU fails in the middle of a run: off the bus, by a kernel's fault",
         "cuda/test_failures::gpu_that_falls_off_the_bus_is_named_and_missed_by_the_resume",
         "cuda/test_failures::restart_without_the_lost_gpu_ends_with_what_is_missing", "cuda/test_failures::fault_of_a_kernel_restarts_the_run",
         "cuda/test_amd::error_of_hip_is_a_failed_device", "cuda/test_amd::rank_that_the_runtime_aborts_has_its_message"),
    _row("F144", "r", 9, REFUSED, "a GPU that hangs; a rank that NCCL's " "watchdog ends", "launch/test_end_of_launch::rank_that_the_watchdog_ended_has_its_message",
         "launch/test_end_of_launch::rank_that_was_ended_by_an_error_of_its_device_is_a_failed_device",
         "cuda/test_failures::rank_that_the_watchdog_of_nccl_ends_has_its_message",
         "cuda/test_failures::gpu_that_hangs_is_named_with_the_collective_that_others_wait_in"),
    _row("F145", "r", 11, REFUSED, "the system refuses to pin memory, for a " "save and for " "offloaded " "parameters",
         "cuda/test_failures::memory_that_cannot_be_pinned_is_the_hosts", "model/test_allocation_errors::pinned_allocation_failure_is_host_memory"),
    _row("F146", "t", 11, REFUSED, "a GPU too old for bf16, for fp8, for " "a kernel", "recipe/test_resolve::bf16_on_an_old_gpu_is_a_notice",
         "recipe/test_resolve::fp8_on_an_old_gpu_is_refused_before_ranks_start", "recipe/test_resolve::attention_kernel_is_one_that_the_gpu_has",
         "cuda/test_failures::ranks_use_the_kernel_that_was_validated"),
)  # fmt: skip

GROUPS = {
    "Recipe and input": RECIPE_AND_INPUT,
    "Launch": LAUNCH,
    "Run": RUN,
    "Checkpoint": CHECKPOINT,
    "Resume": RESUME,
    "Merge": MERGE,
    "Security": SECURITY,
    "Adapters": ADAPTERS,
    "Surroundings": SURROUNDINGS,
    "Devices": DEVICES,
}
ROWS = tuple(row for group in GROUPS.values() for row in group)
