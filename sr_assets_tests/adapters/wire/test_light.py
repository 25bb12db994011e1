"""Light connections: a message that arrives with the end of the login."""

import asyncio

from sr_assets.adapters.wire.frames import Frame, encode_pub
from sr_assets.adapters.wire.light import Dialer, LightConnection
from sr_assets.settings import parse_cluster
from sr_assets_tests.rig import PATIENCE_SECONDS


class Answering:
    """An owner that answers each message with its payload."""

    def received(self, link: LightConnection, frame: Frame) -> None:
        link.send(encode_pub(frame.reply.decode(), b"", b"", frame.payload))

    def denied(self, complaint: str) -> None:
        raise AssertionError(complaint)

    def lost(self, reason: str) -> None:
        raise AssertionError(reason)


async def ask_during_login() -> bytes:
    """Return the answer to a request that comes with the answer to the login."""
    answered = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"headers":true,"max_payload":1048576}\r\n')
        await reader.readuntil(b"PING\r\n")
        writer.write(b"MSG a 1 b 2\r\nhi\r\nPONG\r\n")
        answered.set_result(await reader.readuntil(b"hi\r\n"))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        cluster = parse_cluster(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        link = await Dialer(cluster).open(Answering(), "node", b"SUB a 1\r\n")
        answer: bytes = await asyncio.wait_for(answered, PATIENCE_SECONDS)
        link.close()
    return answer


def test_message_before_the_end_of_the_login_is_answered() -> None:
    assert asyncio.run(ask_during_login()) == b"PUB b 2\r\nhi\r\n"
