"""`python -m lowbit_lab` is the command `lowbit`, also where neither package is installed."""

from lowbit.cli import main
from lowbit_lab.cli import load

load()
main()
