"""The one part that is compiled: everything else about the build is in pyproject.toml.

It is optional: without a C compiler the build says so and goes on, and memory is then measured
with tracemalloc (see mpisim/memory/tracker.py).
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "mpisim.memory._allocator",
            ["mpisim/memory/_allocator.c"],
            extra_compile_args=["-std=c11"],
            optional=True,
        )
    ]
)
