"""Whom a gateway takes for the leading Conductor, and whose answers it accepts."""

from __future__ import annotations

from gateway.conductor_link import LeaderView


def test_the_lease_says_who_leads() -> None:
    view = LeaderView()
    assert view.read("a", 1) and not view.read("a", 1)
    assert view.read("b", 2)
    assert (view.address, view.epoch) == ("b", 2)


def test_what_a_deposed_leader_answers_is_not_accepted() -> None:
    view = LeaderView()
    view.read("a", 1)
    assert view.accepts(1)
    view.read("b", 2)
    assert not view.accepts(1) and view.accepts(2) and view.accepts(3)


def test_the_only_conductor_of_a_cluster_has_no_epoch_and_is_accepted() -> None:
    assert LeaderView(epoch=3).accepts(0)


def test_a_standby_points_to_the_leader_unless_its_news_are_old() -> None:
    view = LeaderView()
    assert view.hinted("a", "b", 4)
    assert not view.hinted("c", "a", 3)
    assert (view.address, view.epoch, view.doubted) == ("b", 4, False)


def test_a_leader_that_says_it_does_not_lead_is_doubted_until_it_decides_again() -> None:
    view = LeaderView()
    view.read("a", 1)
    assert not view.hinted("a", "", 1)
    assert view.doubted
    view.read("a", 1)
    assert view.doubted, "the lease still names it, which is no news"
    assert not view.answered("a", 1)
    assert not view.doubted


def test_only_the_loss_of_the_leader_raises_doubt() -> None:
    view = LeaderView()
    view.read("a", 1)
    view.lost("b")
    assert not view.doubted
    view.lost("a")
    assert view.doubted
    assert view.read("b", 2) and not view.doubted


def test_the_leader_is_in_doubt_while_nobody_is_known_and_while_who_is_known_does_not_answer() -> None:
    view = LeaderView()
    assert view.in_doubt
    view.read("a", 1)
    assert not view.in_doubt
    view.lost("a")
    assert view.in_doubt
    view.answered("b", 2)
    assert not view.in_doubt


def test_a_lease_of_a_lower_epoch_is_asked_but_not_believed() -> None:
    view = LeaderView()
    view.read("a", 7)
    view.read("b", 2)
    assert (view.address, view.epoch) == ("b", 7)
    assert not view.accepts(2)
