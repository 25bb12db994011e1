"""One attempt to send a notification by HTTP, command or mail; each ends within seconds."""

import http.client
import json
import smtplib
import ssl
import subprocess
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
        raise NotSentError(f"answered {error.code} {error.reason}") from None
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


_OPENER: Final = urllib.request.build_opener(_NoRedirection)


def _post(url: str, message: Message) -> None:
    ids = ",".join(event.id for event in message.events[:1])
    request = urllib.request.Request(  # noqa: S310  the settings allow only http and https
        url,
        json.dumps(message.body).encode(),
        {"Content-Type": "application/json", "User-Agent": "sr-assets", "Idempotency-Key": ids},
    )
    with _OPENER.open(request, timeout=_ANSWER_SECONDS):
        pass


def _run(command: tuple[str, ...], message: Message) -> None:
    """Run a command with the JSON on its stdin."""
    ended = subprocess.run(
        command, input=json.dumps(message.body).encode(), capture_output=True, timeout=_ANSWER_SECONDS, check=False
    )
    if ended.returncode:
        errors = ended.stderr.decode(errors="replace").strip().splitlines()
        raise NotSentError(f"ended with exit code {ended.returncode}{f': {errors[-1]}' if errors else ''}")


def _mail(email: EmailSettings, message: Message) -> None:
    mail = EmailMessage()
    mail["Subject"], mail["From"], mail["To"] = " ".join(message.subject.split()), email.sender, ", ".join(email.to)
    # The same for a repeated message, so that mail servers and readers can drop duplicates.
    mail["Message-ID"] = f"<{message.events[0].id}.{len(message.events)}@sr-assets>"
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
