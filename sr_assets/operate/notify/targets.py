"""One attempt to send a notification by HTTP, command or mail; each ends within seconds."""

import contextlib
import http.client
import json
import os
import signal
import smtplib
import socket
import ssl
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping
from email.message import EmailMessage
from typing import Final, TypeVar

from sr_assets.adapters import times
from sr_assets.adapters.logs import print_warning
from sr_assets.domain.foreign_text import chat, visible
from sr_assets.operate.bounded import shut_after
from sr_assets.operate.notify.content import Message
from sr_assets.settings import EmailSettings, NotifySettings

#: Time limit of a server's response and of a command.
_ANSWER_SECONDS: Final = 10.0
#: Time limit of a mail; each response has the limit above.
_MAIL_SECONDS: Final = 60.0
#: A command's error is looked for in so many bytes at the end of its stderr.
_LAST_BYTES: Final = 4096
#: A command has these variables even if the configuration refers to them.
_HARMLESS: Final = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TMPDIR")
#: HTTP's statuses below 500 that ask for a repetition: a timeout and too many requests.
_LATER: Final = (408, 429)
#: SMTP's first status of a permanent refusal.
_PERMANENT: Final = 500

Mailer = TypeVar("Mailer", bound=smtplib.SMTP)


class NotSentError(Exception):
    """A failed attempt; the text is one line without a secret."""


class RefusedError(NotSentError):
    """The receiver answers, and refuses this message."""


def send(target: NotifySettings, message: Message, hidden: Collection[str] = ()) -> None:
    """Send a notification; a command does not get the variables in `hidden` unless its `environment` names them.

    Raises NotSentError, RefusedError if the receiver refuses this message.
    """
    try:
        if target.webhook is not None:
            _post(target.webhook, message)
        elif target.email is not None:
            _mail(target.email, message)
        else:
            environ = {
                name: value
                for name, value in os.environ.items()
                if name not in hidden or name in _HARMLESS or name in target.environment
            }
            _run(target.command, message, environ)
    except urllib.error.HTTPError as error:
        error.close()
        # The server's own phrase may repeat the URL.
        phrase = http.client.responses.get(error.code, "")
        refused = 400 <= error.code < 500 and error.code not in _LATER
        raise (RefusedError if refused else NotSentError)(f"answered {error.code} {phrase}".rstrip()) from None
    except urllib.error.URLError as error:
        raise NotSentError(_line(error.reason)) from None
    except subprocess.TimeoutExpired:
        raise NotSentError(f"did not end within {_ANSWER_SECONDS:.0f} s") from None
    except http.client.HTTPException as error:
        # The exception's text quotes the response.
        raise NotSentError(f"the response is not HTTP ({type(error).__name__})") from None
    except smtplib.SMTPDataError as error:
        raise (RefusedError if error.smtp_code >= _PERMANENT else NotSentError)(_line(error)) from None
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
            # Not `self.sock` later: urllib hands the socket over to the response.
            sock = self.sock
            shut_after(_ANSWER_SECONDS, lambda: sock)

    return Bounded


_OPENER: Final = urllib.request.build_opener(_NoRedirection, _Http, _Https)


def _post(url: str, message: Message) -> None:
    text = str(message.body["text"])
    request = urllib.request.Request(  # noqa: S310  the settings allow only http and https
        url,
        json.dumps({**message.body, "text": chat(text), "plain_text": text}).encode(),
        {"Content-Type": "application/json", "User-Agent": "sr-assets", "Idempotency-Key": message.key},
    )
    deadline = times.monotonic() + _ANSWER_SECONDS
    try:
        with _OPENER.open(request, timeout=_ANSWER_SECONDS):
            pass
    except (OSError, http.client.HTTPException) as error:
        # After the deadline the socket is shut; this may surface as any of these errors.
        if isinstance(error, urllib.error.HTTPError) or times.monotonic() < deadline:
            raise
        raise TimeoutError from None


def _run(command: tuple[str, ...], message: Message, environ: Mapping[str, str]) -> None:
    """Run a command with the JSON on its stdin. Its background processes may continue; if it hangs, they are killed with it."""
    # Not pipes: a background process would hold them open.
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=output, process_group=0, env=environ
        ) as process,
    ):
        try:
            process.communicate(json.dumps(message.body).encode(), _ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        if process.returncode:
            output.seek(max(0, output.seek(0, os.SEEK_END) - _LAST_BYTES))
            errors = output.read().decode(errors="replace").strip().splitlines()
            last = f": {visible(errors[-1])}" if errors else ""
            raise RefusedError(f"ended with exit code {process.returncode}{last}")


def _mail(email: EmailSettings, message: Message) -> None:
    """Send a mail. If the server refuses only some recipients, that is a warning."""
    mail = EmailMessage()
    mail["Subject"], mail["From"], mail["To"] = " ".join(message.subject.split()), email.sender, ", ".join(email.to)
    # The same for a repeated message, so that mail servers and readers can drop duplicates.
    mail["Message-ID"] = f"<{message.key}@sr-assets>"
    ids = "\n".join(visible(event.id) for event in message.events)
    mail.set_content(f"{message.body['text']}\n\nevent ids:\n{ids}\n")
    deadline = times.monotonic() + _MAIL_SECONDS
    try:
        refused = _deliver(email, mail)
    except (OSError, smtplib.SMTPException):
        if times.monotonic() < deadline:
            raise
        raise NotSentError(f"did not take the mail within {_MAIL_SECONDS:.0f} s") from None
    if refused:
        print_warning(f"notify: the mail server {email.host} refused these recipients: {', '.join(refused)}")


def _deliver(email: EmailSettings, mail: EmailMessage) -> list[str]:
    """Send a mail and return the refused recipients."""
    server = _mail_server(email)
    try:
        if email.tls == "starttls":
            server.starttls(context=ssl.create_default_context())
        if email.user is not None:
            server.login(email.user, email.password or "")
        return list(server.send_message(mail))
    finally:
        # The server has taken the mail, whatever it answers now.
        with contextlib.suppress(OSError, smtplib.SMTPException):
            server.quit()
        server.close()


def _mail_server(email: EmailSettings) -> smtplib.SMTP:
    if email.tls == "tls":
        # smtplib's default context verifies no certificate.
        verified = ssl.create_default_context()
        return _bounded_mail(smtplib.SMTP_SSL)(email.host, email.port, timeout=_ANSWER_SECONDS, context=verified)
    return _bounded_mail(smtplib.SMTP)(email.host, email.port, timeout=_ANSWER_SECONDS)


def _bounded_mail(kind: type[Mailer]) -> type[Mailer]:
    """Return a class whose connections end after `_MAIL_SECONDS`; it overrides the only method between open and greeting."""

    class Bounded(kind):  # type: ignore[misc,valid-type]
        def _get_socket(self, host: str, port: int, timeout: float) -> socket.socket:
            opened: socket.socket = super()._get_socket(host, port, timeout)
            # STARTTLS replaces the socket.
            shut_after(_MAIL_SECONDS, lambda: self.sock)
            return opened

    return Bounded
