"""One attempt to send a notification by HTTP, command or mail; each ends within seconds."""

import contextlib
import http.client
import json
import smtplib
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from email.message import EmailMessage
from typing import Final

from sr_assets.operate.notify.messages import Message
from sr_assets.settings import EmailSettings, NotifySettings

#: Time limit of a server's response and of a command.
_ANSWER_SECONDS: Final = 10.0


class NotSentError(Exception):
    """A failed attempt; the text is one line without a secret."""


def send(target: NotifySettings, message: Message) -> None:
    """Send a notification. Raises NotSentError."""
    try:
        if target.webhook is not None:
            _post(target.webhook, message)
        elif target.email is not None:
            _mail(target.email, message)
        else:
            _run(target.command, message)
    except urllib.error.HTTPError as error:
        error.close()
        # The server's own phrase may repeat the URL.
        phrase = http.client.responses.get(error.code, "")
        raise NotSentError(f"answered {error.code} {phrase}".rstrip()) from None
    except urllib.error.URLError as error:
        raise NotSentError(_line(error.reason)) from None
    except subprocess.TimeoutExpired:
        raise NotSentError(f"did not end within {_ANSWER_SECONDS:.0f} s") from None
    except http.client.HTTPException as error:
        # The exception's text quotes the response.
        raise NotSentError(f"the response is not HTTP ({type(error).__name__})") from None
    except (OSError, smtplib.SMTPException, ValueError) as error:
        raise NotSentError(_line(error)) from None


def _line(error: object) -> str:
    if isinstance(error, TimeoutError):
        return f"no response within {_ANSWER_SECONDS:.0f} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not trusted ({error.verify_message})"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """Turns a redirect into an error: urllib would follow it by GET, without the body."""

    def redirect_request(self, *_: object) -> None:
        """Return None, so that the redirect is not followed."""


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_bounded(http.client.HTTPConnection), request)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_bounded(http.client.HTTPSConnection), request)


def _bounded(kind: type[http.client.HTTPConnection]) -> type[http.client.HTTPConnection]:
    """Return a class whose connections end after `_ANSWER_SECONDS`; the limit of urllib is one between two packets."""

    class Bounded(kind):  # type: ignore[misc,valid-type]
        def connect(self) -> None:
            super().connect()
            timer = threading.Timer(_ANSWER_SECONDS, _shut, [self.sock])
            timer.daemon = True
            timer.start()

    return Bounded


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


_OPENER: Final = urllib.request.build_opener(_NoRedirection, _Http, _Https)


def _post(url: str, message: Message) -> None:
    request = urllib.request.Request(  # noqa: S310  the settings allow only http and https
        url,
        json.dumps(message.body).encode(),
        {"Content-Type": "application/json", "User-Agent": "sr-assets", "Idempotency-Key": message.key},
    )
    deadline = time.monotonic() + _ANSWER_SECONDS
    try:
        with _OPENER.open(request, timeout=_ANSWER_SECONDS):
            pass
    except http.client.HTTPException:
        if time.monotonic() < deadline:
            raise
        raise TimeoutError from None


def _run(command: tuple[str, ...], message: Message) -> None:
    """Run a command with the JSON on its stdin."""
    ended = subprocess.run(
        command, input=json.dumps(message.body).encode(), capture_output=True, timeout=_ANSWER_SECONDS, check=False
    )
    if ended.returncode:
        errors = ended.stderr.decode(errors="replace").strip().splitlines()
        last = f": {''.join(filter(str.isprintable, errors[-1]))}" if errors else ""
        raise NotSentError(f"ended with exit code {ended.returncode}{last}")


def _mail(email: EmailSettings, message: Message) -> None:
    mail = EmailMessage()
    mail["Subject"], mail["From"], mail["To"] = " ".join(message.subject.split()), email.sender, ", ".join(email.to)
    # The same for a repeated message, so that mail servers and readers can drop duplicates.
    mail["Message-ID"] = f"<{message.key}@sr-assets>"
    ids = "\n".join(event.id for event in message.events)
    mail.set_content(f"{message.body['text']}\n\nevent ids:\n{ids}\n")
    with _mail_server(email) as server:
        if email.tls == "starttls":
            server.starttls(context=ssl.create_default_context())
        if email.user is not None:
            server.login(email.user, email.password or "")
        server.send_message(mail)


def _mail_server(email: EmailSettings) -> smtplib.SMTP:
    if email.tls == "tls":
        # smtplib's default context verifies no certificate.
        verified = ssl.create_default_context()
        return smtplib.SMTP_SSL(email.host, email.port, timeout=_ANSWER_SECONDS, context=verified)
    return smtplib.SMTP(email.host, email.port, timeout=_ANSWER_SECONDS)
