"""`python -m shardwright` is `shardwright`."""

from shardwright.cli import main

main()
