"""A signal is noted and told at once, wherever it comes; a second one ends at once."""

import os
import signal

import pytest

from verl.utils import signals
from verl.utils.signals import StopRequest, Terminated, interruption, orderly_termination


def test_a_signal_is_told_past_all_buffers_even_while_one_is_being_written(capfd):
    request, before = StopRequest(), signal.getsignal(signal.SIGTERM)

    class Writing:
        """A stream that bears no second writer."""

        def write(self, text: str) -> None:
            raise RuntimeError("reentrant call")

    with request.listening(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", Writing())
        patch.setattr("sys.stdout", Writing())
        assert not request
        os.kill(os.getpid(), signal.SIGTERM)
        assert request
    assert signal.getsignal(signal.SIGTERM) is before
    assert capfd.readouterr().err == "SIGTERM: stopping once this step is done and saved\n"


def test_a_terminal_that_is_closed_sends_its_signal_more_than_once_and_ends_nothing_at_once(capfd):
    with StopRequest().listening() as request:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
        assert request.signal == signal.SIGHUP
    assert interruption(request.signal).number == signal.SIGHUP  # type: ignore[attr-defined]
    assert capfd.readouterr().err == "SIGHUP: stopping once this step is done and saved\n"


def test_a_signal_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with orderly_termination(), StopRequest().listening() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert not request
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)])
def test_a_second_signal_ends_at_once_as_what_it_is(number, kind, capfd):
    def send(*numbers: int) -> None:
        with StopRequest().listening():
            for sent in numbers:
                os.kill(os.getpid(), sent)

    with pytest.raises(kind):
        send(signal.SIGINT, number)
    assert type(interruption(number)) is kind
    assert "Ctrl-C again stops at once" in capfd.readouterr().err


def test_outside_of_the_loop_a_termination_unwinds_what_was_opened():
    closed = []
    before = signal.getsignal(signal.SIGTERM)

    def end() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            closed.append("file")

    with pytest.raises(Terminated), orderly_termination():
        end()
    assert closed == ["file"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_signal_within_the_handler_of_the_first_ends_at_once(monkeypatch):
    sent = []

    def interrupted() -> None:
        if not sent:
            sent.append(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(signals, "_leave_closed_terminal", interrupted)
    with StopRequest().listening() as request, pytest.raises(Terminated):
        os.kill(os.getpid(), signal.SIGINT)
    assert request.signal == signal.SIGINT
