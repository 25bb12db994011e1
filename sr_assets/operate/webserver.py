"""`python -m sr_assets.operate.webserver`: Dagster's UI with access control, a child process of `services`."""

import argparse
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sr_assets.domain.clusters import is_loopback
from sr_assets.operate.documents import DocumentsMiddleware
from sr_assets.operate.ui_access import Access, AccessMiddleware, Logins, ui_sockets, user_number

#: The defaults of `dagster-webserver`: statement timeout in ms, connection recycling in s, pool overflow.
_DATABASE = (15_000, 3_600, 20)
_POLL_MS = 2_000


def _main() -> None:
    """Serve the UI until SIGTERM."""
    import uvicorn

    parser = argparse.ArgumentParser(prog="sr_assets.operate.webserver")
    parser.add_argument("workspace", type=Path)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--trust-proxy")
    parser.add_argument("--public-host", action="append", default=[])
    parser.add_argument("--read-only", action="store_true")
    parser.add_argument("--auth-file", type=Path)
    parser.add_argument("--log-level", default="info")
    arguments = parser.parse_args()
    logging.basicConfig(level=arguments.log_level.upper())
    logins = Logins(arguments.auth_file) if arguments.auth_file else None
    hosts = frozenset(host.lower() for host in arguments.public_host)
    any_host = not hosts and (arguments.trust_proxy is not None or not is_loopback(arguments.host))
    proxy_user = user_number(arguments.trust_proxy) if arguments.trust_proxy else None
    access = Access(logins, any_host, proxy_user, hosts)
    with _dagster_ui(arguments.workspace, read_only=arguments.read_only) as application:
        # Access control needs the connection's own addresses, not those in a client's headers.
        guarded = AccessMiddleware(DocumentsMiddleware(application), access)
        config = uvicorn.Config(guarded, log_level="warning", proxy_headers=False)
        uvicorn.Server(config).run(sockets=ui_sockets(arguments.host, arguments.port))


@contextlib.contextmanager
def _dagster_ui(workspace: Path, *, read_only: bool) -> Iterator[Any]:
    """Yield Dagster's UI as an ASGI application.

    The command `dagster-webserver` accepts no middleware, so this repeats its start with private modules of Dagster. The
    tests of `up` run it.
    """
    from dagster import DagsterInstance
    from dagster._core.workspace.context import WorkspaceProcessContext
    from dagster._core.workspace.load_target import WorkspaceFileTarget
    from dagster_webserver.app import create_app_from_workspace_process_context
    from dagster_webserver.version import __version__

    with DagsterInstance.get() as instance:
        instance.optimize_for_webserver(*_DATABASE)
        target = WorkspaceFileTarget([str(workspace)])
        with WorkspaceProcessContext(instance, target, version=__version__, read_only=read_only) as context:
            yield create_app_from_workspace_process_context(context, "", _POLL_MS)


if __name__ == "__main__":
    _main()
