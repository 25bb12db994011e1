"""The commands `spark start`, `status` and `stop` of the warm engine."""

from typing import TYPE_CHECKING

from sr_assets.adapters import times
from sr_assets.cli.base import cli, configured, echo
from sr_assets.domain.durations import duration
from sr_assets.domain.errors import ConfigurationError

if TYPE_CHECKING:
    from sr_assets.settings import Settings


@cli.group()
def spark() -> None:
    """Start, show or stop the warm Spark engine of this home."""


@spark.command("start", epilog="Example: sr-assets spark start")
@configured
def spark_start(settings: "Settings") -> None:
    """Start the engine, so that the first run need not wait for it."""
    from sr_assets.adapters.spark.engine import start_engine

    if settings.spark.mode != "connect-local":
        raise ConfigurationError(
            f"spark.mode is {settings.spark.mode.partition(':')[0]}; only connect-local has a warm engine"
        )
    engine = start_engine(settings.spark, settings.home.resolve())
    echo(f"running: pid {engine.pid}, port {engine.port}")


@spark.command("status", epilog="Example: sr-assets spark status")
@configured
def spark_status(settings: "Settings") -> int:
    """Show whether the engine runs; exit code 1 if it does not."""
    from sr_assets.adapters.spark.engine import engine_status

    engine = engine_status(settings.home.resolve())
    echo(
        f"running: pid {engine.pid}, port {engine.port}, for {duration(int(times.time() - engine.started_at))}"
        if engine
        else "not running"
    )
    return 0 if engine else 1


@spark.command("stop", epilog="Example: sr-assets spark stop")
@configured
def spark_stop(settings: "Settings") -> None:
    """Stop the engine; the next run starts a new one."""
    from sr_assets.adapters.spark.engine import stop_engine

    echo("stopped" if stop_engine(settings.home.resolve()) else "was not running")
