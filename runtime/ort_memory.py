"""Where ONNX Runtime's sessions on the processor take their memory: one arena, which takes what is asked for.

The library's own arenas, one a session, double as they grow and leave gaps: a guided step of a large network
touches a tenth more memory than it needs.
"""

import threading
from typing import Any

import numpy as np

_SAME_AS_REQUESTED = 1  # OrtArenaCfg's number of that way to grow
_IDENTITY = bytes.fromhex(  # an ONNX model, y [1] = x [1]
    "08093a370a100a017812017922084964656e746974791201675a0f0a0178120a0a08080112040a020801620f0a0179120a0a08080112040a02"
    "080142040a001011"
)
_LOCK = threading.Lock()
_made = False


def share_arena(library: Any, options: Any) -> None:
    """Lets the sessions with these options take their memory from the one arena of this process."""
    global _made
    with _LOCK:
        if not _made:
            place = library.OrtMemoryInfo(
                "Cpu", library.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, library.OrtMemType.DEFAULT
            )
            library.create_and_register_allocator(place, library.OrtArenaCfg(0, _SAME_AS_REQUESTED, -1, -1))
            _made = True
            _run_least(library)  # the arena never gives its first piece back: let that be a small one
    _take_from_arena(options)


def give_back(library: Any) -> None:
    """Returns to the system what no session holds: the arena outlives each, and frees memory after a run only."""
    asked = library.RunOptions()
    asked.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    _run_least(library, asked)


def _run_least(library: Any, asked: Any = None) -> None:
    options = library.SessionOptions()
    options.intra_op_num_threads = 1
    _take_from_arena(options)
    session = library.InferenceSession(_IDENTITY, options, providers=["CPUExecutionProvider"])
    session.run(None, {"x": np.zeros(1, np.float32)}, asked)


def _take_from_arena(options: Any) -> None:
    options.add_session_config_entry("session.use_env_allocators", "1")
