"""The fleet that the simulator is measured with: M = 8, half of them full, half compressed in four stages."""

EIGHT = """
[[replicas]]
name = "rack"
count = 4
[[replicas]]
name = "edge"
kind = "pipelined"
count = 4
stages = 4
compression = "1/8"
"""
