"""The plan: a list of typed ops per rank, read by check, predict and run alike.

    ops.py        one frozen class per kind of op
    schedules.py  the order of forwards and backwards, nothing else
    partition.py  which blocks make a stage, which gradients are reduced together
    passes.py     functions that add ops to a list
    build.py      the passes in their one fixed order
    text.py       plan <-> text, one line per op
    grid.py       the plan as rank x slot, also in errors
    check.py      proves a plan with sets instead of arrays: order, matching, deadlock, leaks
    check_pipeline.py  its rules of messages, stages and tied tables; walk.py: what they share
    forecast.py   predicted bytes of a rank, category by category

Data and pure functions: no arrays, no messages.
"""
