"""Where a frontend's time for one token goes: each stage of its way, by the real parts, one after the other.

python bench/frontend_profile.py

256 rows with one token each, as in frontend_rate.py. Microseconds of CPU time a token; the system call is
measured on real loopback connections. What the stages leave out (the event loop's turn, zmq's own thread, the
kernel's work for the reader) is the difference to frontend_rate.py's figure.
"""

import asyncio
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from frontend_rate import FIRST_WORD, STOPS
from vocabulary import write_directory

from mlxhost.frontend.generation import Choice, Ending
from mlxhost.frontend.openai.format import Answer, ChatFormat
from mlxhost.frontend.rows import Call, Row
from mlxhost.frontend.text.detokenizer import PieceTable
from mlxhost.frontend.text.stops import StopMatcher
from mlxhost.wire import data
from mlxhost.wire.codec import decode, encode

ROWS, STEPS, ROUNDS, VOCABULARY = 256, 60, 9, 150_000


def per_token(work: Callable[[int], object]) -> float:
    """Microseconds of CPU a token: median over rounds of STEPS steps of all rows."""
    times = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        for step in range(STEPS):
            work(step)
        times.append((time.thread_time() - began) / (STEPS * ROWS) * 1e6)
    return statistics.median(times)


def connections() -> tuple[list[socket.socket], list[socket.socket]]:
    """(sending ends, receiving ends) of as many loopback connections as there are rows."""
    with socket.create_server(("127.0.0.1", 0), backlog=ROWS) as server:
        readers = [socket.create_connection(server.getsockname()) for _ in range(ROWS)]
        writers = [server.accept()[0] for _ in range(ROWS)]
    for end in writers:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setblocking(False)
    return writers, readers


async def stages(directory: Path) -> list[tuple[str, float]]:
    """(stage, microseconds a token)."""
    rng = random.Random(1)
    tokenizer = write_directory(directory, VOCABULARY)
    table = PieceTable(tokenizer, {"type": "ByteLevel"})
    size = VOCABULARY - FIRST_WORD
    steps = [[FIRST_WORD + int(size ** rng.random()) - 1 for _ in range(ROWS)] for _ in range(STEPS)]
    handles, ones, zeros = list(range(ROWS)), [1] * ROWS, [0] * ROWS
    messages = [encode(data.Out(1, i, data.Load(), handles, ones, ids, zeros)) for i, ids in enumerate(steps)]
    for ids in steps:
        for token_id in ids:
            table.piece(token_id)

    detokenizers = [table.detokenizer() for _ in range(ROWS)]
    matchers = [StopMatcher(STOPS) for _ in range(ROWS)]
    texts = [[d.push([i]) for d, i in zip(detokenizers, ids, strict=True)] for ids in steps]
    answer = ChatFormat(Answer("chatcmpl-0123456789", 1, "bench", False, [[1]], [""], 1))
    call = Call()
    rows = [Row.__new__(Row) for _ in range(ROWS)]
    for row in rows:
        row.call, row.index = call, 0
        row.attempt, row.finish = 1, data.Finish.RUNNING
    ending = Ending(stops=STOPS)
    choices = [Choice(row, table, ending) for row in rows]
    events = [[answer.delta(0, text) for text in row_texts] for row_texts in texts]

    def match(step: int) -> None:
        for matcher, text in zip(matchers, texts[step], strict=True):
            matcher.push(text)

    def detokenize(step: int) -> None:
        for detokenizer, token_id in zip(detokenizers, steps[step], strict=True):
            detokenizer.push([token_id])

    def extend(step: int) -> None:
        for choice, token_id in zip(choices, steps[step], strict=True):
            choice.extend([token_id])

    def shape(step: int) -> None:
        for text in texts[step]:
            answer.delta(0, text)

    def frame(step: int) -> None:
        for event in events[step]:
            joined = b"".join([event])
            b"%x\r\n%b\r\n" % (len(joined), joined)

    writers, readers = connections()
    loop = asyncio.get_running_loop()
    transports = [(await loop.connect_accepted_socket(asyncio.Protocol, w))[0] for w in writers]

    def drain() -> None:
        for reader in readers:
            reader.recv(1 << 20)

    def measure_writes(write: Callable[[int], object]) -> float:
        times = []
        for step in range(STEPS):
            began = time.thread_time()
            write(step)
            times.append((time.thread_time() - began) / ROWS * 1e6)
            drain()
        return statistics.median(times)

    def send(step: int) -> None:
        for writer, event in zip(writers, events[step], strict=True):
            writer.send(event)

    def write(step: int) -> None:
        for transport, event in zip(transports, events[step], strict=True):
            transport.write(event)

    sent, written = measure_writes(send), measure_writes(write)
    told = [
        ("decode the OUT", per_token(lambda step: decode(messages[step]))),
        ("detokenize", per_token(detokenize)),
        ("look for stop strings", per_token(match)),
        ("count and combine the two", 0.0),
        ("JSON and event", per_token(shape)),
        ("HTTP chunk", per_token(frame)),
        ("asyncio's write around the system call", written - sent),
        ("system call send, loopback TCP", sent),
    ]
    both = per_token(extend)
    told[3] = ("count and combine the two", both - told[1][1] - told[2][1])
    for transport in transports:
        transport.close()
    for reader in readers:
        reader.close()
    return told


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        told = asyncio.run(stages(Path(directory)))
    for name, microseconds in told:
        sys.stdout.write(f"{name:42} {microseconds:6.2f} us\n")
    sys.stdout.write(f"{'sum':42} {sum(us for _, us in told):6.2f} us a token\n")


if __name__ == "__main__":
    main()
