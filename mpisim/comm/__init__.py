"""Messages: transports, the rings built on them, and the groups that run them.

transport.py      the protocol every transport meets, and the checks all of them share
local.py          ranks as threads of one process, for tests
mpi.py            ranks as MPI processes (the only module that imports mpi4py)
faulty.py         wraps any transport and plants faults
emulated.py       wraps any transport and holds messages until they could have arrived
boundary.py       messages between stages of a pipeline
frames.py         what such a message says of itself; codecs.py: what makes it smaller
collectives.py    step tables compiled to resumable programs of sends, receives and sums
communicator.py   a group on one mesh axis: all_reduce, reduce_scatter, all_gather, gather
"""
