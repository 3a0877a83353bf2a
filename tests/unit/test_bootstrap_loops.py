"""The same scenarios on other loops: uvloop, and asyncio's with eager tasks."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import pytest
import test_bootstrap_faults as faults
import test_bootstrap_join as joins
import test_bootstrap_session as sessions
import uvloop
from support import meeting
from support.proxy import Faults

SCENARIOS: list[Callable[[], None]] = [
    lambda: joins.test_all_ranks_know_all_hellos_and_the_payload(4),
    joins.test_a_late_rank_0_and_late_others_are_waited_for,
    joins.test_missing_ranks_are_named_to_all_who_came,
    joins.test_different_sizes_are_named_on_all_ranks_also_the_late_ones,
    joins.test_a_failed_check_reaches_all_ranks_and_sees_the_hellos_in_rank_order,
    joins.test_a_rank_with_the_right_secret_takes_the_place_of_the_refused_one,
    joins.test_the_next_attempt_can_use_the_port_while_the_first_session_lives,
    lambda: sessions.test_a_rank_that_failed_is_named_to_the_others_at_once(1),
    lambda: sessions.test_a_loss_is_told_to_every_other_rank(0),
    lambda: sessions.test_a_loss_is_told_to_every_other_rank(2),
    sessions.test_a_goodbye_is_no_loss,
    sessions.test_a_cancelled_close_still_closes,
    sessions.test_questions_of_several_ranks_at_once_do_not_mix,
    lambda: faults.test_slow_and_dripping_connections_are_waited_for(Faults(piece=1)),
    faults.test_a_flood_of_silent_connections_does_not_keep_ranks_out,
    faults.test_the_cancelled_rank_is_named_at_once,
    *(
        lambda seed=seed: faults.test_a_cancelled_join_leaves_nothing_and_the_others_hear_of_it(
            seed
        )
        for seed in range(3)
    ),
]


def eager_loop() -> asyncio.AbstractEventLoop:
    """Return a loop whose tasks run at once up to their first wait."""
    loop = asyncio.new_event_loop()
    loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
    return loop


LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop}
if sys.version_info >= (3, 12):
    LOOPS["eager"] = eager_loop


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_on_another_loop(
    scenario: Callable[[], None],
    loop: Callable[[], asyncio.AbstractEventLoop],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting, "make_loop", loop)
    scenario()
