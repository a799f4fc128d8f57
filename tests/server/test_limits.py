"""RateLimiter and room: what is taken on never exceeds what is allowed."""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idml.server import limits as module
from idml.server.limits import Budget, RateLimiter, whole_seconds


@given(st.floats(0.1, 100), st.integers(1, 20), st.lists(st.floats(0, 3), max_size=60))
def test_a_client_never_gets_more_than_its_rate(rate, burst, pauses):
    now, passed = 0.0, []
    rates = RateLimiter(rate, burst, clock=lambda: now)
    for pause in pauses:
        now += pause
        missing = rates.take("10.0.0.1")
        assert missing >= 0
        if missing == 0:
            passed.append(now)
        else:  # who waits so long is served
            now += missing * (1 + 1e-9) + 1e-9
            assert rates.take("10.0.0.1") == 0
            passed.append(now)
    for i, start in enumerate(passed):  # in every window
        for j in range(i, len(passed)):
            assert j - i + 1 <= burst + rate * (passed[j] - start) + 1e-6


def test_clients_have_separate_rates():
    rates = RateLimiter(1.0, 1, clock=lambda: 0.0)
    assert [rates.take(f"10.0.0.{n}") for n in range(9)] == [0.0] * 9
    assert rates.take("10.0.0.0") == 1.0


def test_an_ipv6_network_is_one_client():
    rates = RateLimiter(1.0, 1, clock=lambda: 0.0)
    assert rates.take("2001:db8::1") == 0
    assert rates.take("2001:db8::ffff:2") == 1
    assert rates.take("2001:db8:0:1::1") == 0


def test_the_number_of_stored_addresses_is_limited(monkeypatch):
    monkeypatch.setattr(module, "_MAX_ADDRESSES", 10)
    rates = RateLimiter(1.0, 1, clock=lambda: 0.0)
    for n in range(100):
        assert rates.take(f"10.0.0.{n}") == 0
    assert len(rates) == 10
    assert rates.take("10.0.0.99") == 1  # the latest are known


@pytest.mark.parametrize(("seconds", "header"), [(0.001, 1), (1.0, 1), (1.2, 2)])
def test_whole_seconds(seconds, header):
    assert whole_seconds(seconds) == header


def test_a_budget_is_never_exceeded_and_fully_returned():
    async def run(seed):
        chance, room, held, most = random.Random(seed), Budget(10), 0, 0

        async def user(amount):
            nonlocal held, most
            async with room.reserve(amount):
                held += min(amount, 10)
                most = max(most, held)
                assert held <= 10
                try:
                    await asyncio.sleep(chance.random() / 1000)
                finally:
                    held -= min(amount, 10)

        tasks = [asyncio.create_task(user(chance.randrange(1, 15))) for _ in range(60)]
        for task in chance.sample(tasks, 20):  # some give up, waiting or holding
            await asyncio.sleep(chance.random() / 2000)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert room.free == 10
        assert not room._waiting
        return most

    assert max(asyncio.run(run(seed)) for seed in range(5)) == 10


def test_a_budget_is_given_in_order():
    async def run():
        room, order = Budget(4), []

        async def user(name, amount):
            async with room.reserve(amount):
                order.append(name)
                await asyncio.sleep(0)

        await asyncio.gather(user("a", 3), user("large", 4), user("small", 1))
        return order

    assert asyncio.run(run()) == ["a", "large", "small"]  # the small one would fit, but it came later
