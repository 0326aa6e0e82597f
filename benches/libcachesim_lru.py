"""One run of libCacheSim's LRU for benches/replay.rs.

usage: libcachesim_lru.py FILE OBJECTS

FILE holds one little-endian u64 an access. Prints seconds, accesses and misses: CPU seconds of the
simulation, without what the reader needs to hand out the accesses.
"""

import sys
import time

import libcachesim as lcs


def reader(file):
    params = lcs.ReaderInitParam(binary_fmt_str="<Q", ignore_obj_size=True)
    params.obj_id_field = 1
    return lcs.TraceReader(file, lcs.TraceType.BIN_TRACE, params)


def main():
    file, objects = sys.argv[1], int(sys.argv[2])
    accesses = reader(file)
    count = accesses.get_num_of_req()
    # Every access is read once without a cache: the mapped file is in memory then, and this is what
    # reading costs.
    begin = time.process_time()
    accesses.skip_n_req(count)
    reading = time.process_time() - begin
    accesses.reset()
    cache = lcs.LRU(cache_size=objects, hashpower=20)
    begin = time.process_time()
    miss_ratio, _ = cache.process_trace(accesses)
    took = time.process_time() - begin
    print(f"reading {reading:.3f} s of {took:.3f} s", file=sys.stderr)
    print(f"{max(took - reading, 1e-9):.6f} {count} {round(miss_ratio * count)}")


main()
