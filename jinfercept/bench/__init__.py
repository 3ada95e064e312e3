"""What a user measures on a live engine or server: throughput, sessions, replays of workloads.

Knows no pages and no policy.
"""
