"""All replicas of a recipe in this process, on one device, with byte-exact payloads.

May import config, layout, planner, runlog, data, model, subspace, sparse, outer, replica and page.
"""
