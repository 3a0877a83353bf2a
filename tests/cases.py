"""Which test covers the class of which known case, by the case's number in the list of cases.

Parts A (loops, completion, cancellation), C (errors, abort, teardown) and D (buffers, types,
captures, libraries). A case has the tests
of its class, as ``folder/file::function``, or one sentence that says why it cannot be tried
here, or which step has it. tests/source/test_cases.py sees to it that the tests exist.
"""

from __future__ import annotations

COVERED: dict[int, tuple[str, ...]] = {
    # ---- A: loops, completion, cancellation
    1: ("loops/test_heartbeat.py::test_an_init_that_takes_5_s",),
    2: (
        "loops/test_idle.py::test_a_long_wait_costs_little",
        "binding/test_deadlines.py::test_what_a_deadline_error_says",
        "faults/test_faults.py::test_a_fault_ends_in_time",
    ),
    3: (
        "loops/test_completion.py::test_a_deadline_beside_a_held_interpreter",
        "loops/test_heartbeat.py::test_a_driver_that_is_busy_elsewhere",
    ),
    4: ("loops/test_heartbeat.py::test_only_quick_calls_are_made_on_the_loop",),
    5: (
        "loops/test_completion.py::test_callbacks_that_never_come",
        "faults/test_faults.py::test_what_does_not_end_the_operation",
    ),
    6: (
        "loops/test_completion.py::test_an_error_of_the_stream",
        "faults/test_faults.py::test_a_lost_context",
    ),
    7: (
        "loops/test_completion.py::test_a_communicator_that_fails",
        "faults/test_faults.py::test_no_success_after_a_failure",
    ),
    8: (
        "loops/test_peers.py::test_operations_that_end_within_the_spin",
        "binding/test_noop.py::test_an_await_of_finished_work_asks_nothing",
    ),
    9: ("binding/test_noop.py::test_an_operation_is_one_call_and_one_event",),
    11: (
        "faults/test_process_end.py::test_a_loop_that_is_closed_with_work_in_flight",
        "loops/test_threads.py::test_a_loop_that_goes_while_others_wait",
    ),
    12: (
        "loops/test_cancel.py::test_cancelled_at_a_random_moment",
        "leaks/test_buffers.py::test_an_array_dies_soon_after_the_end",
    ),
    13: ("loops/test_threads.py::test_none_is_lost_and_none_comes_twice",),
    14: (
        "binding/test_issue.py::test_a_call_returns_at_once_and_an_await_when_it_is_done",
        "streams/test_streams.py::test_a_stream_waits_for_a_work",
    ),
    15: (
        "binding/test_order.py::test_what_follows_a_deferred_call_sees_its_result",
        "streams/test_streams.py::test_timed_operations",
    ),
    16: (
        "binding/test_work.py::test_what_a_work_says_of_itself",
        "binding/test_work.py::test_awaited_by_several_tasks",
        "binding/test_work.py::test_awaited_on_two_loops",
    ),
    17: ("binding/test_issue.py::test_operations_run_in_call_order",),
    18: (
        "streams/test_ordered.py::test_an_agreed_order_passes_when_it_is_chained",
        "streams/test_ordered.py::test_different_orders_deadlock",
    ),
    20: ("loops/test_idle.py::test_naps_are_short_beside_the_wait",),
    21: (
        "loops/test_fairness.py::test_operations_that_end_at_once",
        "binding/test_noop.py::test_many_need_few_queries",
    ),
    22: ("faults/test_faults.py::test_an_init_that_narrows_the_affinity",),
    23: (
        "loops/test_idle.py::test_nobody_wakes_up_when_nothing_is_pending",
        "loops/test_idle.py::test_a_long_wait_costs_little",
    ),
    # ---- C: errors, abort, teardown
    50: ("faults/test_teardown.py::test_several_are_aborted_in_one_native_group",),
    51: (
        "faults/test_leftovers.py::test_what_does_not_come_back_is_named",
        "faults/test_teardown.py::test_operations_raise_before_the_abort_returns",
        "faults/test_teardown.py::test_an_abort_without_a_time_out_is_given_up_too",
    ),
    52: (
        "faults/test_teardown.py::test_close_that_does_not_end_aborts",
        "faults/test_faults.py::test_a_fault_ends_in_time",
    ),
    53: ("faults/test_process_end.py::test_collected_in_any_order",),
    55: (
        "faults/test_unseen.py::test_it_is_reported_once",
        "faults/test_faults.py::test_a_fault_ends_in_time",
    ),
    56: (
        "loops/test_completion.py::test_a_deadline_beside_a_busy_driver",
        "loops/test_completion.py::test_a_deadline_beside_a_held_interpreter",
        "faults/test_faults.py::test_a_fault_ends_in_time",
    ),
    58: ("abi/test_engine.py::test_a_result_becomes_an_exception",),
    60: (
        "streams/test_groups.py::test_an_exception_inside_issues_nothing",
        "streams/test_depth.py::test_a_leaked_depth_is_repaired",
    ),
    61: (
        "streams/test_groups.py::test_a_group_over_the_ranks_of_one_process",
        "streams/test_groups.py::test_awaiting_inside_says_why_not",
    ),
    62: (
        "streams/test_groups.py::test_two_tasks_in_turn_make_two_clean_groups",
        "streams/test_groups.py::test_threads_have_their_own_groups",
        "streams/test_groups.py::test_others_issue_normally_meanwhile",
    ),
    63: (
        "leaks/test_steady.py::test_nothing_grows",
        "faults/test_leftovers.py::test_a_hundred_deadlines",
    ),
    64: (
        "faults/test_process_end.py::test_a_fork",
        "faults/test_process_end.py::test_a_fork_after_the_import_alone",
    ),
    # ---- D: buffers, DLPack, dtypes, counts
    67: (
        "arrays/test_hand_off.py::test_the_stream_on_which_it_runs",
        "arrays/test_hand_off.py::test_the_callers_stream_is_the_one",
        "arrays/test_hand_off.py::test_without_sync_it_is_told_so",
        "arrays/test_hand_off.py::test_jax_takes_every_number_for_a_handle",
    ),
    68: (
        "arrays/test_hand_off.py::test_a_table_is_put_in_order",
        "arrays/test_hand_off.py::test_deferred_operations_have_a_stream_aside",
    ),
    69: (
        "arrays/test_producers.py::test_a_type_is_looked_at_once",
        "arrays/test_lifetime.py::test_calls_keep_nothing",
    ),
    70: (
        "arrays/test_producers.py::test_every_type_of_element",
        "binding/test_arrays.py::test_types_that_numpy_does_not_know",
        "operations/test_results.py::test_jax_takes_its_results_as_they_are",
    ),
    71: (
        "binding/test_arrays.py::test_what_can_only_be_moved",
        "operations/test_table.py::test_the_table_in_the_readme",
    ),
    73: ("operations/test_properties.py::test_numpys_result_or_the_documented_refusal",),
    75: (
        "arrays/test_libraries.py::test_numpys_read_only_arrays_are_inputs",
        "arrays/test_libraries.py::test_jax_takes_results_without_a_copy",
        "arrays/test_hand_off.py::test_what_cannot_be_written_gets_memory_of_the_gpu",
    ),
    77: (
        "arrays/test_given_back.py::test_it_comes_back_once",
        "arrays/test_given_back.py::test_at_exit",
    ),
    79: (
        "operations/test_strided.py::test_every_operation_there_and_back",
        "operations/test_properties.py::test_numpys_result_or_the_documented_refusal",
    ),
    80: (
        "host/test_nccl_faults.py::test_a_mismatch_names_both_sides",
        "host/test_nccl_faults.py::test_a_mismatch_of_messages",
    ),
    82: (
        "binding/test_misuse_arrays.py::test_in_place_as_nccl_has_it_is_no_overlap",
        "ranks/test_collectives.py::test_in_place_is_where_nccl_wants_it",
        "operations/test_properties.py::test_numpys_result_or_the_documented_refusal",
    ),
    84: (
        "arrays/test_lifetime.py::test_nothing_is_touched_after_its_end",
        "binding/test_own_memory.py::test_an_operation_holds_it",
    ),
    85: (
        "host/test_nccl_faults.py::test_a_mismatch_of_a_message_and_a_collective",
        "operations/test_results.py::test_messages_that_differ",
    ),
    88: (
        "arrays/test_hand_off.py::test_the_stream_on_which_it_runs",
        "arrays/test_hand_off.py::test_null_is_the_legacy_default_stream",
    ),
    90: (
        "binding/test_captures.py::test_a_global_capture_survives_what_pynccl_does",
        "binding/test_captures.py::test_a_query_that_is_not_relaxed_breaks_it",
    ),
    91: (
        "binding/test_captures.py::test_a_stream_that_is_captured_is_refused",
        "arrays/test_hand_off.py::test_a_producers_stream_that_is_captured_is_refused",
        "host/test_nccl_capture.py::test_a_captured_all_reduce_runs_at_each_launch",
    ),
    92: (
        "binding/test_registration.py::test_once_for_each_allocation",
        "binding/test_registration.py::test_beside_a_running_collective",
        "binding/test_windows.py::test_where_there_are_no_windows",
    ),
    93: (
        "binding/test_engines.py::test_a_library_that_is_none",
        "binding/test_engines.py::test_a_library_that_lacks_a_function",
        "binding/test_engines.py::test_two_engines_live_in_one_process",
    ),
    94: (
        "source/test_exports.py::test_import_is_free",
        "binding/test_engines.py::test_without_a_driver_it_says_what_is_missing",
    ),
    99: (
        "host/test_driver_temper.py::test_launch_blocking",
        "loops/test_heartbeat.py::test_launches_that_block",
    ),
    101: ("binding/test_testing.py::test_the_journal_has_what_was_called",),
}

NOT_HERE: dict[int, str] = {
    96: "Shrinking and growing of a communicator in a running program come with step 6.",
    66: "The flight recorder and the ranks it names come with the control plane, in step 6.",
}
"""Cases that no test here covers, and why."""

PARTLY: dict[int, str] = {
    8: "Only ratios mean anything without a GPU: `python -m pynccl bench --latency` has them.",
    9: "That host functions serialise streams shows on a GPU only; here: that none is used.",
    23: "The threads of NCCL itself are not there to be counted.",
    69: "Its figures: `python -m pynccl bench --latency`.",
    91: "Operations of pynccl in a capture come with step 5; the engine has them.",
    52: "Captured graphs that hold a communicator come with step 5.",
    55: "A callback of the communicator's failure is not there yet: reports only.",
}
"""What the tests of a case leave open."""

PARTS: dict[str, tuple[int, ...]] = {
    "A": (*range(1, 10), *range(11, 19), *range(20, 24)),
    "C": (50, 51, 52, 53, 55, 56, 58, 60, 61, 62, 63, 64, 66),
    "D": (
        *(67, 68, 69, 70, 71, 73, 75, 77, 79, 80, 82, 84, 85),
        *(88, 90, 91, 92, 93, 94, 96, 99, 101),
    ),
}
"""The numbers of the cases of each part."""
