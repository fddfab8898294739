"""What happened and when: recorded cheaply, stored per rank, expanded when it is read.

events.py     what the static tables of a trace say, and the expanded event rows
recorder.py   the running side: clock readings appended to lists, spilled to the rank's file
store.py      the file format: framed records that a killed rank leaves readable
"""
