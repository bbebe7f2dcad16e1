"""`mdps bench`: our backends beside what a user would run instead, in one interleaved run.

Each competitor lives in a process of its own (`worker`), so that none shares threads, allocator or peak memory with
another; the parent (`run`) asks them in turns for one image at a time.
"""
