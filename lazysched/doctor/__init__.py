"""``lazysched doctor``: does this machine have what training needs, and if not, what mends it?

    lazysched doctor --dir /mnt/nvme --model MODEL_FOLDER

Each probe looks at one thing and finds it ``ok``, a ``problem`` with its remedy, or ``unknown`` with why it could not
be looked at: a file that is absent or may not be read, a tool that is missing or does not answer, a probe that fails.
What could not be looked at is never ok.

===========  ======================================================================================================
probe        what it looks at
===========  ======================================================================================================
python       version, against what the installed lazysched asks for
packages     everything that lazysched needs: installed, and in the range of pyproject.toml
torch        whether it loads; version and build
gpu          the GPU that torch takes: name, free memory, bf16
driver       version of the driver, and whether torch's CUDA runs on it
link         PCI Express generation and lanes while copies run (at rest a GPU lets them fall), against card and slot
numa         the memory node that the GPU (by PCI address, ``CUDA_VISIBLE_DEVICES`` respected) is attached to,
             against the nodes that this process may run on, and whether ``train`` will keep to cores beside the GPU
pinning      page-locks up to half of the free host memory, 34 GB at most, in a process that ends then
host_memory  free memory, within the limits of control groups of both versions
memlock      ``ulimit -l``, and whether page-locking goes by it
wsl          WSL, and how much Windows lets it page-lock
threads      cores of this process; ``OMP_NUM_THREADS=1``, which launchers set
optimizer    the variant of the update that runs here; its results against the reference, to the bit
graphs       beside a GPU: whether a function can be compiled for it
disk         kind of disk under ``--dir``: NVMe, solid-state, hard disk, network, memory
direct_io    whether files there can be written past the page cache
free_space   room there, with ``--model`` for its trained weights
tokenizer    with ``--model``: whether rows begin with more than one start token
vocabulary   with ``--model``: whether the embedding has a row for every token
===========  ======================================================================================================

``driver``, ``link``, ``numa`` and ``pinning`` are left out where no GPU is wanted (``--device cpu``), or where torch
finds none and none of NVIDIA's is on the PCI bus. Everything that loads torch runs in child processes with a time
limit. No probe uses the network.

Exit codes: 0 every finding is ok; 1 there is a problem, or something is unknown (unless ``--allow-unknown``); 2 wrong
usage. ``--json`` prints a :class:`Report`:

    {"version": 1, "findings": [{"probe": "memlock", "status": "problem", "detail": "...", "remedy": "..."}, ...]}

``remedy`` is null but for problems. Names of probes and statuses stay as they are; new probes may come.
"""

from lazysched.doctor.report import Finding, Report, Status, print_report

__all__ = ["Finding", "Report", "Status", "print_report"]
