"""Runs a plan: arrays, messages, time stamps.

state.py      what a rank holds between ops, and how it is built
handlers.py   op kind -> function; each says what running that op means
step.py       the loop: look up the handler, stamp, advance started collectives
metrics.py    a rank's figures of one step, in the order of `layouts.metrics`
"""
