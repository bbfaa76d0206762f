"""`python -m pipedejavu`: the command line, for launchers that start modules."""

from pipedejavu.cli.main import main

main()
