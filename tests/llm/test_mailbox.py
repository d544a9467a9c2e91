"""The mailbox: messages from any thread reach their task in order, with one wake-up of the event loop for many."""

from __future__ import annotations

import asyncio
import threading

from onedraw.llm.mailbox import LoopWakeup, Mailbox


class Counted(asyncio.SelectorEventLoop):
    """An event loop that counts how often other threads wake it."""

    wakeups = 0

    def call_soon_threadsafe(self, *args, **kwargs):
        self.wakeups += 1
        return super().call_soon_threadsafe(*args, **kwargs)


def test_messages_of_many_mailboxes_arrive_in_order() -> None:
    async def main() -> list[list[int]]:
        wakeup = LoopWakeup(asyncio.get_running_loop())
        mailboxes = [Mailbox[int](wakeup) for _ in range(20)]

        def write() -> None:
            for message in range(500):
                for mailbox in mailboxes:
                    mailbox.put(message)

        async def read(mailbox: Mailbox[int]) -> list[int]:
            got: list[int] = []
            while len(got) < 500:
                messages = await mailbox.take()
                assert messages
                got += messages
            return got

        thread = threading.Thread(target=write)
        thread.start()
        read_by_all = await asyncio.gather(*(read(mailbox) for mailbox in mailboxes))
        thread.join()
        return list(read_by_all)

    assert asyncio.run(main()) == [list(range(500))] * 20


def test_a_long_backlog_is_delivered_in_parts_and_other_tasks_run_in_between() -> None:
    async def main() -> tuple[list[int], list[int]]:
        mailbox = Mailbox[int](LoopWakeup(asyncio.get_running_loop()))
        for message in range(1000):
            mailbox.put(message)
        others: list[int] = []

        async def other() -> None:
            while True:
                others.append(len(got))
                await asyncio.sleep(0)

        got: list[int] = []
        sizes: list[int] = []
        working = asyncio.ensure_future(other())
        while len(got) < 1000:
            messages = await mailbox.take()
            sizes.append(len(messages))
            got += messages
        working.cancel()
        assert got == list(range(1000))
        return sizes, others

    sizes, others = asyncio.run(main())
    assert sizes == [256, 256, 256, 232]
    assert {0, 256, 512} <= set(others)


def test_one_wakeup_serves_many_mailboxes() -> None:
    async def main() -> tuple[int, list[list[str]]]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Counted)
        mailboxes = [Mailbox[str](wakeup) for wakeup in [LoopWakeup(loop)] for _ in range(50)]
        readers = [asyncio.ensure_future(mailbox.take()) for mailbox in mailboxes]
        await asyncio.sleep(0)
        before = loop.wakeups
        for mailbox in mailboxes:  # while the event loop is busy, as when the engine delivers the events of a whole step
            mailbox.put("first")
            mailbox.put("second")
        return loop.wakeups - before, await asyncio.gather(*readers)

    with asyncio.Runner(loop_factory=Counted) as runner:
        wakeups, messages = runner.run(main())
    assert wakeups == 1
    assert messages == [["first", "second"]] * 50


def test_messages_of_a_cancelled_task_wake_no_other_task() -> None:
    async def main() -> list[str]:
        wakeup = LoopWakeup(asyncio.get_running_loop())
        gone, here = Mailbox[str](wakeup), Mailbox[str](wakeup)
        left = asyncio.ensure_future(gone.take())
        await asyncio.sleep(0)
        left.cancel()
        gone.put("for a cancelled task")
        here.put("for me")
        return await here.take()

    assert asyncio.run(main()) == ["for me"]


def test_messages_to_a_closed_loop_are_dropped() -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox[str](LoopWakeup(loop))
    loop.close()
    mailbox.put("too late")
