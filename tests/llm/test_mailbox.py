"""The post: letters of any thread reach the reader they are for, in order, and one knock wakes for all of them."""

from __future__ import annotations

import asyncio
import threading

from onedraw.llm.mailbox import LoopWakeup, Mailbox


class Counted(asyncio.SelectorEventLoop):
    """A loop that counts how often other threads woke it."""

    knocks = 0

    def call_soon_threadsafe(self, *args, **kwargs):
        self.knocks += 1
        return super().call_soon_threadsafe(*args, **kwargs)


def test_letters_of_a_crowd_arrive_each_in_its_order() -> None:
    async def main() -> list[list[int]]:
        post = LoopWakeup(asyncio.get_running_loop())
        inboxes = [Mailbox[int](post) for _ in range(20)]

        def write() -> None:
            for letter in range(500):
                for inbox in inboxes:
                    inbox.put(letter)

        async def read(inbox: Mailbox[int]) -> list[int]:
            got: list[int] = []
            while len(got) < 500:
                letters = await inbox.take()
                assert letters
                got += letters
            return got

        thread = threading.Thread(target=write)
        thread.start()
        read_by_all = await asyncio.gather(*(read(inbox) for inbox in inboxes))
        thread.join()
        return list(read_by_all)

    assert asyncio.run(main()) == [list(range(500))] * 20


def test_a_reader_that_was_away_takes_letters_in_parts_and_others_have_their_turn() -> None:
    async def main() -> tuple[list[int], list[int]]:
        inbox = Mailbox[int](LoopWakeup(asyncio.get_running_loop()))
        for letter in range(1000):
            inbox.put(letter)
        others: list[int] = []

        async def other() -> None:
            while True:
                others.append(len(got))
                await asyncio.sleep(0)

        got: list[int] = []
        sizes: list[int] = []
        working = asyncio.ensure_future(other())
        while len(got) < 1000:
            letters = await inbox.take()
            sizes.append(len(letters))
            got += letters
        working.cancel()
        assert got == list(range(1000))
        return sizes, others

    sizes, others = asyncio.run(main())
    assert sizes == [256, 256, 256, 232]
    assert {0, 256, 512} <= set(others)


def test_a_turn_knocks_once_however_many_it_tells() -> None:
    async def main() -> tuple[int, list[list[str]]]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Counted)
        inboxes = [Mailbox[str](post) for post in [LoopWakeup(loop)] for _ in range(50)]
        readers = [asyncio.ensure_future(inbox.take()) for inbox in inboxes]
        await asyncio.sleep(0)
        before = loop.knocks
        for inbox in inboxes:  # while the loop has no turn, as when the engine tells a whole turn
            inbox.put("first")
            inbox.put("second")
        return loop.knocks - before, await asyncio.gather(*readers)

    with asyncio.Runner(loop_factory=Counted) as runner:
        knocks, letters = runner.run(main())
    assert knocks == 1
    assert letters == [["first", "second"]] * 50


def test_a_reader_that_gave_up_leaves_its_letters_to_nobody_and_wakes_none() -> None:
    async def main() -> list[str]:
        post = LoopWakeup(asyncio.get_running_loop())
        gone, here = Mailbox[str](post), Mailbox[str](post)
        left = asyncio.ensure_future(gone.take())
        await asyncio.sleep(0)
        left.cancel()
        gone.put("for nobody")
        here.put("for me")
        return await here.take()

    assert asyncio.run(main()) == ["for me"]


def test_a_loop_that_closed_has_no_reader_left() -> None:
    loop = asyncio.new_event_loop()
    inbox = Mailbox[str](LoopWakeup(loop))
    loop.close()
    inbox.put("too late")
