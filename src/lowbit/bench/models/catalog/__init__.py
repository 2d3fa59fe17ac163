"""The networks, one file each (a family one), which make themselves known in `models`."""
