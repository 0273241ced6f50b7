"""One module per command, each with one function: `run(options, terminal) -> Outcome`."""
