# SPDX-License-Identifier: Apache-2.0
"""The `cachemend` command line.

Only typer and rich are imported here: each command imports what it needs when it runs, so that `--help` is quick.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cachemend import ui
from cachemend.commands import answer, ask, corpus, demo, evaluate, loadtest, models, plan, sensitivity, store, train

OWN_PACKAGES = ("cachemend", "cluster", "serve_app", "pipelines", "repair", "engine", "retrieval", "kvcache")

EPILOG = """
[bold]From documents to an answer[/bold]

  1.  cachemend models fetch

  2.  cachemend ingest docs/ --corpus handbook

  3.  cachemend precompute --corpus handbook

  4.  serve run serve_app:app     (in another terminal)

  5.  cachemend ask "Who signs travel costs?" --corpus handbook

Settings come from cachemend.yaml in the working directory (or --config FILE) and from the environment, for example
CACHEMEND_STORE__URI=s3://bucket/caches. kvcache/settings.py lists them all, with defaults and units.
"""


class OneLineErrors(TyperGroup):
    """Turns exceptions into one line on stderr and exit code 1; `--debug` lets them through."""

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.TyperException, typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            ui.error("stopped by Ctrl-C; running the same command again takes up where it left off")
            raise typer.Exit(130) from None
        except Exception as error:
            if ctx.params.get("debug"):
                raise
            ui.error(explain(error))
            raise typer.Exit(1) from None


def explain(error: Exception) -> str:
    """One line for a person: errors of our own packages speak for themselves, others are named."""
    cause = getattr(error, "cause", None)  # Ray wraps what a task raised
    if isinstance(cause, Exception):
        error = cause
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if type(error).__module__.split(".")[0] in OWN_PACKAGES:
        return message
    return f"{type(error).__name__}: {message or 'no message'} (cachemend --debug shows where)"


app = typer.Typer(
    cls=OneLineErrors,
    name="cachemend",
    help="Answer questions over your documents from precomputed, repaired KV caches.",
    epilog=EPILOG,
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def main(
    config: Annotated[
        Path | None,
        typer.Option(
            help="Settings file (YAML) for this command and everything it starts.", exists=True, dir_okay=False
        ),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    if config is not None:
        # Through the environment, so that Ray's workers and the service see the same file.
        os.environ["CACHEMEND_CONFIG"] = str(config.resolve())


app.add_typer(models.app, name="models")
app.command("ingest")(corpus.ingest)
app.command("delete")(corpus.delete)
app.command("precompute")(corpus.precompute)
app.command("ask")(ask.ask)
app.command("answer")(answer.answer)
app.command("demo")(demo.demo)
app.command("plan")(plan.plan)
app.command("train")(train.train)
app.command("evaluate")(evaluate.evaluate)
app.command("sensitivity")(sensitivity.sensitivity)
app.command("loadtest")(loadtest.loadtest)
app.add_typer(store.app, name="store")
