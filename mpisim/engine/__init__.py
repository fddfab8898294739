"""Runs a plan: arrays, messages, time stamps.

state.py      what a rank holds between ops, and how it is built
handlers.py   op kind -> function; each says what running that op means
emulate.py    blocks that sleep instead of computing
update.py     check, agree, commit or skip; the transaction around an update
loss_scale.py the loss scale as a state machine
step.py       the loop: look up the handler, stamp, advance started collectives
metrics.py    a rank's figures of one step, in the order of `layouts.metrics`
"""
