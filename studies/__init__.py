"""Questions about pauses that the simulator answers: with tables, findings and pictures. The engine knows none of them.

Beside the wheel, run from a clone as `python -m studies`; pictures and tables need `pip install '.[studies]'`.
"""
