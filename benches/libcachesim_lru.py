"""One run of libCacheSim's LRU for benches/replay.rs.

usage: libcachesim_lru.py FILE OBJECTS

FILE holds one little-endian u64 per access. Prints seconds, accesses and misses. The seconds are the CPU time of the
simulation, minus the most that reading the accesses can have taken.

The package has no call that reads a trace without simulating. So the script also runs as many accesses to one object,
which is reading plus hits in a cache of one object, and subtracts all of that time. This subtracts too much rather than
too little, in libCacheSim's favour.
"""

import os
import sys
import tempfile
import time

import libcachesim as lcs


def simulate(file, objects):
    params = lcs.ReaderInitParam(binary_fmt_str="<Q", ignore_obj_size=True)
    params.obj_id_field = 1
    reader = lcs.TraceReader(file, lcs.TraceType.BIN_TRACE, params)
    cache = lcs.LRU(cache_size=objects, hashpower=20)
    begin = time.process_time()
    miss_ratio, _ = cache.process_trace(reader)
    return time.process_time() - begin, miss_ratio


def main():
    file, objects = sys.argv[1], int(sys.argv[2])
    count = os.path.getsize(file) // 8
    with tempfile.NamedTemporaryFile() as same:
        chunk = (1).to_bytes(8, "little") * (1 << 16)
        for start in range(0, count, 1 << 16):
            same.write(chunk[: 8 * min(1 << 16, count - start)])
        same.flush()
        reading, _ = simulate(same.name, objects)
    took, miss_ratio = simulate(file, objects)
    print(f"{took - reading:.6f} {count} {round(miss_ratio * count)} {took:.6f}")


main()
