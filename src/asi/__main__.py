"""`python -m asi`, and what `torchrun -m asi train ...` starts."""

from asi.cli import main

main()
