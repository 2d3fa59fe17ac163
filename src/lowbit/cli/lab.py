"""The commands of the lab: `lowbit check`, `learn` and `view`."""

from __future__ import annotations

from lowbit.cli.app import command
from lowbit.lab import cli_check, cli_learn, cli_view

command("check", example="check long_softmax --json report.json")(cli_check.check)
command("learn", example="learn 1 --start")(cli_learn.learn)
command("view", example="view long_softmax --html softmax.html")(cli_view.view)
