"""``Reused``: each thing has one owner at a time, and is used again once that is gone."""

import gc
import threading

import pytest
from loaders import within

from gpuprefetch._reused import Reused

pytestmark = pytest.mark.windows


class Owner:
    pass


@pytest.fixture
def things():
    made = []
    return Reused(lambda: made.append(object()) or made[-1]), made


def test_things_are_made_once_and_used_again(things):
    reused, made = things
    first, second = Owner(), Owner()
    one, other = reused.take(first, 2), reused.take(second, 3)
    assert [*one, *other] == made and len(made) == 5
    del first
    third = reused.take(second, 4)
    assert set(one) < set(third) and not set(third) & set(other) and len(made) == 7


def test_a_cycle_keeps_them_until_it_is_collected(things):
    reused, made = things
    owner = Owner()
    owner.itself = owner
    reused.take(owner, 1)
    del owner
    gc.collect()
    assert reused.take(Owner(), 1) == made[:1]


def test_a_collection_in_the_middle_may_take_some():
    """In a finalizer that runs while things are made."""
    made, inner, kept, once = [], [], Owner(), iter([True])

    def make():
        if len(made) == 1 and next(once, False):
            inner.extend(reused.take(kept, 2))
        made.append(object())
        return made[-1]

    reused, owner = Reused(make), Owner()
    outer = reused.take(owner, 3)
    assert len(inner) == 2 and len({*outer, *inner}) == len(made) == 5


def test_a_collection_anywhere_may_take_some():
    """Each allocation that may start one gets its turn."""

    class Takes:
        def __init__(self):
            self.itself = self

        def __del__(self):
            kept.append(Owner())
            reused.take(kept[-1], 1)

    reused, kept, pairs = Reused(object), [], []
    owners = [Owner() for _ in range(10)]
    for owner in owners:
        reused.take(owner, 1)
    for number in range(2000):
        Takes()
        pairs.append([(number, i) for i in range(30)])  # else new pairs come from a free list, without an allocation
        reused.take(Owner(), 1)
        if len(pairs) > 300:
            pairs.clear()
        if len(kept) > 20:
            kept.clear()


def test_no_two_threads_have_the_same(things):
    reused, made = things
    meeting = threading.Barrier(8)
    clashes = []
    held = {}

    def run():
        meeting.wait(20)
        for _ in range(300):
            owner = Owner()
            for thing in reused.take(owner, 2):
                clashes.append(held.setdefault(thing, owner) is not owner)
            for thing in [thing for thing, holder in list(held.items()) if holder is owner]:
                del held[thing]

    runners = [threading.Thread(target=run, daemon=True) for _ in range(8)]
    for runner in runners:
        runner.start()
    for runner in runners:
        within(30, runner.join)
    assert not any(clashes) and len(clashes) == 8 * 300 * 2
    assert 2 <= len(made) <= 200, "each was made anew"
