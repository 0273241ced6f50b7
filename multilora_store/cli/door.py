"""The door: takes the line apart, helps Hydra where it needs help, runs the command, turns failures into lines.

What Hydra 1.3 cannot do as typed is done here and nowhere else: verbs, flags in any order, names that its grammar
misreads, folders it would leave behind, errors it would print over many lines, sweeps that an exit code would stop.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from multilora_store.cli.argv import CommandLine, parse
from multilora_store.cli.catalogue import COMMANDS, Command
from multilora_store.cli.failures import document_of, exit_code, lines_of, wants_traceback, worst
from multilora_store.cli.outcome import Outcome
from multilora_store.cli.ranks import first_to_say
from multilora_store.cli.terminal import Terminal, rank_of_environment
from multilora_store.errors import UsageError

__all__ = ["run"]

_QUIET_HYDRA = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
    "hydra.sweep.subdir=.",
)


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; nothing but a failure of the interpreter escapes."""
    typed = list(sys.argv[1:] if argv is None else argv)
    terminal = Terminal(
        command=next((word for word in typed if word in COMMANDS), ""),
        json=any(word.lstrip("+") == "output=json" for word in typed),
        quiet=any(word.lstrip("+").lower() == "quiet=true" for word in typed),
        rank=rank_of_environment(),
    )
    full = wants_traceback()  # asked before the variable is set for Hydra
    verbose = any(word.lstrip("+").lower() == "verbose=true" for word in typed)
    with terminal.warnings_as_lines(), _log_as_lines(terminal, verbose=verbose):
        try:
            return _dispatch(parse(typed, COMMANDS), terminal, full=full)
        except SystemExit as leaving:
            return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except BrokenPipeError:  # the reader of a pipe has left (`| head`): not a failure
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except (Exception, KeyboardInterrupt) as error:
            return _report(error, terminal, full=full)


def _dispatch(line: CommandLine, terminal: Terminal, *, full: bool) -> int:
    if line.version:
        from multilora_store import __version__

        print(f"multilora_store {__version__}")
        return 0
    if line.completion:
        from multilora_store.cli.complete import complete

        return complete(line.overrides)
    if line.help or (line.verb is None and not line.overrides and not line.shows):
        from multilora_store.cli.help import help_text

        if terminal.rank == 0:
            print(help_text(line))
        return 0
    if line.verb is None:
        raise UsageError(
            "no command was given", remedy=f"commands: {', '.join(COMMANDS)}; e.g. assemble +adapters=[a,b]"
        )
    return _through_hydra(line, COMMANDS[line.verb], terminal, full=full)


def _words_as_overrides(line: CommandLine, command: Command) -> list[str]:
    from multilora_store.cli.overrides import quoted

    if len(line.words) > len(command.words):
        taken = " ".join(name.upper() for name in command.words)
        raise UsageError(
            f"{line.words[len(command.words)]!r} is not an override",
            why=f"usage: {command.name} {taken} key=value ..." if taken else f"{command.name} takes key=value only",
            remedy=f"see {command.name} --help",
        )
    return [f"{key}={quoted(word)}" for key, word in zip(command.words, line.words, strict=False)]


def _through_hydra(line: CommandLine, command: Command, terminal: Terminal, *, full: bool) -> int:
    """Hand the prepared line to Hydra and run the command on what it composes, once or for each job of a sweep."""
    from multilora_store.cli.choices import GROUPS
    from multilora_store.cli.declared import check_adapter_files
    from multilora_store.cli.demo import demo_overrides
    from multilora_store.cli.options import options_of
    from multilora_store.cli.overrides import chosen, prepare
    from multilora_store.cli.plugins import load_plugins
    from multilora_store.cli.process import through_hydra
    from multilora_store.cli.sources import conf_folder, register

    options = options_of(command.schema)
    text_keys = {option.key for option in options if option.text} | {"base.path", "base.target", "merge.into"}
    open_keys = {option.key for option in options if option.type == "mapping"} - {"adapters", *GROUPS}
    typed = [*_words_as_overrides(line, command), *line.overrides]
    own_set = bool(line.config_dirs or line.config_name)
    overrides = prepare(typed, text_keys=text_keys, open_keys=open_keys, multirun=line.multirun, own_set=own_set)
    demo = demo_overrides(line, command, overrides)

    def known() -> None:
        load_plugins(overrides, line.config_dirs, line.config_name or command.name)
        register(before=line.config_dirs, behind=[conf_folder() / "demo"] if demo else [])

    def job(cfg: Any) -> tuple[int, Mapping[str, Any]]:
        known()  # again: the launcher of a sweep may be in another process by now
        try:
            outcome = _command(command, cfg, terminal)
        except Exception as error:
            codes.append(_report(error, terminal, full=full))
            return codes[-1], {}
        codes.append(outcome.code)
        return outcome.code, outcome.row

    known()
    check_adapter_files(chosen(overrides, "adapters"), line.config_dirs)
    codes: list[int] = []
    with ExitStack() as stack:
        sweeps = stack.enter_context(tempfile.TemporaryDirectory(prefix="multilora-sweep-"))
        if terminal.rank != 0 and line.shows:
            stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        quiet = [*_QUIET_HYDRA, f"hydra.sweep.dir={sweeps}"]
        given = {word.lstrip("+").partition("=")[0] for word in overrides}
        ours = [word for word in quiet if word.partition("=")[0] not in given]
        flags = [*line.flags, *(["--config-name", line.config_name] if line.config_name else [])]
        config = [] if "--hydra-help" in flags else [*demo, *overrides]  # Hydra's own help composes no config of ours
        returned = through_hydra(
            [*flags, *ours, *config],
            command.name,
            job,
            failed=lambda error: (_report(error, terminal, full=full), {}),
        )
    codes += [code for code, _ in returned]
    if rows := [row for _, row in returned if row]:
        terminal.show(_side_by_side(rows, worst(codes)))
    return worst(codes)


def _side_by_side(rows: Sequence[Mapping[str, Any]], code: int) -> Outcome:
    """What the jobs of a sweep came to, wherever its launcher ran them."""
    from multilora_store.cli.compared import merge_table

    return Outcome(document={"sweep": rows}, view=["", merge_table(rows)], code=code)


def _command(command: Command, cfg: Any, terminal: Terminal) -> Outcome:
    from multilora_store.cli.typed import typed

    options = typed(command, cfg)
    outcome = command.function()(options, terminal)
    terminal.show(outcome)
    return outcome


def _report(error: BaseException, terminal: Terminal, *, full: bool) -> int:
    code, lines = exit_code(error), lines_of(error, terminal.command)
    if not first_to_say("\n".join(lines)):
        return code
    if full:
        traceback.print_exception(error)
    terminal.fail(lines, document_of(error, terminal.command), code)
    return code


class _Lines(logging.Handler):
    def __init__(self, terminal: Terminal) -> None:
        super().__init__()
        self.terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        self.terminal.note(f"{record.levelname.lower()}: {' '.join(record.getMessage().split())}")


@contextmanager
def _log_as_lines(terminal: Terminal, *, verbose: bool) -> Iterator[None]:
    """The library's log on stderr: warnings, and with `verbose` everything from INFO on."""
    logger, root = logging.getLogger("multilora_store"), logging.getLogger()
    handler, level = _Lines(terminal), logger.level
    others, root_level = root.handlers[:], root.level  # `--info` makes Hydra add a handler on today's stdout
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        root.handlers[:] = others
        root.setLevel(root_level)
