"""The `penstock` command and its subcommands. An error becomes one line and an exit status.

Only typer is imported at start-up. Each command imports its needs inside, so `--help` stays fast.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, NoReturn, cast

import typer

from penstock import PenstockError, __version__
from penstock.cli.common import Interrupted
from penstock.cli.fleet import fleet
from penstock.cli.gateway import gateway
from penstock.cli.serve import serve
from penstock.cli.sim import sim
from penstock.cli.status import status
from penstock.cli.tinker import tinker, tinker_api
from penstock.cli.train import plot, scenario, train
from penstock.errors import UserError

UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__base__)
"""Click's base class of usage errors. We reach it through typer, because newer typers bundle their own click."""

app = typer.Typer(
    name="penstock",
    help="Rollout inference for reinforcement learning: many vLLM engines seen as one, updated while they generate.",
    add_completion=False,
    invoke_without_command=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="`penstock COMMAND --help` shows examples. Errors are one line; PENSTOCK_DEBUG=1 adds where they come from.",
)
for command in (serve, gateway, tinker, status, train, plot, sim):
    app.command()(command)
app.command("tinker-api")(tinker_api)
app.add_typer(fleet)
app.add_typer(scenario)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    *,
    version: Annotated[  # noqa: ARG001 - its callback does the work
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Show the help if no command is given."""
    show_help(context)


@fleet.callback()
@scenario.callback()
def show_help(context: typer.Context) -> None:
    """Show the help if no command was given."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> NoReturn:
    """Run the command. Exit: 0 done, 1 failed, 2 wrong (not started), 130 Ctrl-C (of a server: 0)."""
    try:
        status_code = app(standalone_mode=False)
    except UsageError as error:
        _fail(" ".join(error.format_message().split()) + _advice(error), 2, error)
    except PenstockError as error:
        _fail(str(error), 2 if isinstance(error, UserError) else 1, error)
    except Interrupted as error:
        sys.exit(error.exit_status)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(status_code if isinstance(status_code, int) else 0)


def _advice(error: typer.BadParameter) -> str:
    """Return the value that was refused, the key for an unknown option such as `--max-model-len 512`, or `--help`."""
    cause: Any = error.__cause__
    if hasattr(cause, "errors"):  # pydantic's, in newer typers
        return f", got {cause.errors()[0]['input']!r}"
    option = getattr(error, "option_name", "")
    command = error.ctx.command if error.ctx else None
    likely = set(getattr(error, "possibilities", None) or ()) - {"--help"}
    takes_keys = command is not None and any(parameter.metavar == "KEY=VALUE" for parameter in command.params)
    if not option.startswith("--") or likely or command is None or not takes_keys:
        return f" `{error.ctx.command_path} --help` shows how." if error.ctx and not option else ""
    key = option[2:].replace("-", "_")
    section = "" if command.name in {"serve", "tinker", "sim"} else "SECTION."
    return f"; as a key it is {section}{key}=VALUE (docs/reference/configuration.md)"


def _fail(message: str, exit_status: int, error: Exception) -> NoReturn:
    if os.environ.get("PENSTOCK_DEBUG") == "1":
        raise error
    typer.echo(f"penstock: {message}", err=True)
    sys.exit(exit_status)
