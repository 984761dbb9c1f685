"""The compiled part of the package; everything else is in pyproject.toml.

Without a C++ compiler the package installs all the same: the optimizer then runs in torch operations, slower, and says
so on first use.
"""

from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("runtime/csrc")

setup(
    ext_modules=[
        Extension(
            "lazysched.runtime._kernels",
            sources=sorted(str(path) for path in SOURCES.glob("*.cpp")),
            depends=sorted(str(path) for path in SOURCES.iterdir()),
            language="c++",
            # Contraction would fuse multiply and add where the specification does not; traps and errno stand in the
            # way of vector instructions and change no result.
            extra_compile_args=[
                "-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
                "-fvisibility=hidden", "-pthread", "-Wno-uninitialized", "-Wno-maybe-uninitialized",
            ],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)  # fmt: skip
