"""Objects and open files between two processes, and how the end of the other one is noticed."""

import os
import socket
import threading
import time

import pytest

from verl.utils.child_process.channel import POLL_S, Channel, ChannelClosed


@pytest.fixture
def ends():
    left, right = socket.socketpair()
    channels = [Channel(end, lambda: True, stuck_s=0.3) for end in (left, right)]
    yield channels
    for channel in channels:
        channel.close()


def test_what_is_sent_arrives_in_order_with_its_files(ends):
    left, right = ends
    reading, writing = os.pipe()
    left.send({"first": [1, None]}, [writing])
    left.send("second")
    message, (fd,) = right.receive_with_files()
    os.write(fd, b"through the file that was handed over")
    assert os.read(reading, 100) == b"through the file that was handed over"
    assert message == {"first": [1, None]}
    assert right.receive_with_files() == ("second", [])
    for file in (reading, writing, fd):
        os.close(file)


def test_a_message_longer_than_the_socket_holds_arrives():
    left, right = (Channel(end, lambda: True) for end in socket.socketpair())
    message = os.urandom(5_000_000)
    sender = threading.Thread(target=left.send, args=(message,))
    sender.start()
    assert right.receive(timeout_s=60) == message
    sender.join()
    left.close()
    right.close()


def test_a_reader_that_does_not_read_is_not_waited_for(ends):
    with pytest.raises(ChannelClosed, match="timed out"):
        ends[0].send(bytes(5_000_000))


def test_hanging_up_is_noticed_within_a_message_too(ends):
    left, right = ends
    socket.socket(fileno=os.dup(left.fileno())).sendall((1000).to_bytes(8, "big") + b"the beginning")
    left.close()
    with pytest.raises(ChannelClosed, match="in the middle of a message"):
        right.receive()
    with pytest.raises(ChannelClosed):
        right.send("anybody?")


def test_the_end_of_the_other_process_is_noticed_though_somebody_holds_its_socket():
    left, right = socket.socketpair()
    died_at = time.monotonic() + 0.1
    channel = Channel(left, lambda: time.monotonic() < died_at)
    Channel(right, lambda: True).send("its last words")
    assert channel.receive() == "its last words"
    with pytest.raises(ChannelClosed, match="gone"):
        channel.receive(timeout_s=10 * POLL_S)
    channel.close()
    right.close()
