"""What a machine can do before it joins: its devices, disk and clock, its bucket and its links."""
