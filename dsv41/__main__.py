"""``python -m dsv41``: demo, doctor, parity, plan, bench, eplb."""

import argparse
import importlib
import sys

# Command: (module with add_arguments(parser) and run(args) -> exit code, what it does).
COMMANDS = {
    "demo": ("dsv41.demo", "run the whole model on real text and check every stage"),
    "bench": ("dsv41.bench", "measure; see bench --help for the parts"),
    "doctor": ("dsv41.doctor", "versions, devices, the kernel every op would take, and what is missing"),
    "parity": ("dsv41.parity_cli", "kernels against the reference on a checkpoint, layer by layer"),
    "plan": ("dsv41.memory", "memory of one rank by part, and how many requests fit"),
    "eplb": ("dsv41.eplb.cli", "plan expert placements from measured loads"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit code. What is refused ends it with a sentence in SystemExit."""
    parser = argparse.ArgumentParser(prog="python -m dsv41", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(COMMANDS) + "}")
    arguments = sys.argv[1:] if arguments is None else arguments
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if arguments[:1] == [name]:  # only the chosen command is imported
            importlib.import_module(module).add_arguments(command)
    args = parser.parse_args(arguments)
    try:
        return importlib.import_module(COMMANDS[args.command][0]).run(args)
    except (ValueError, OSError) as error:
        if isinstance(error, ValueError) and ": expected " not in str(error):
            raise  # nobody's refusal
        raise SystemExit(str(error)) from error


def program() -> int:
    """`main` for a shell: a refusal is one line on stderr and exit code 2, as argparse's own."""
    try:
        return main()
    except SystemExit as end:
        if not isinstance(end.code, str):
            raise
        print(end.code, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(program())
