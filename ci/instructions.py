"""Divides the instructions that callgrind counted (`--dump-instr=yes`) between the records of a step's calls and its
resolves and gathers; ci/instructions runs it.

Only the line tables name an inlined function: each address has all functions that contain it, one inside the other. The
instructions of a call count for the calling address.
"""

import collections
import re
import subprocess
import sys

# The functions that record calls on the host and on the device, and the work that both are compared with.
HOST = re.compile(r"forebay::step::enqueued::")
DEVICE = re.compile(r"forebay::device::host::marks::")
WORK = re.compile(r"forebay::device::host::resolve::")


def counted(path, program):
    """By address of the program: its own instructions, and those of its calls by the called function."""
    own, calls = collections.Counter(), collections.Counter()
    inside, called = False, None
    for line in open(path):
        if line.startswith("ob="):
            inside = line[3:].strip().endswith(program)
        elif line.startswith("cfn="):
            called = line[4:].strip()
        elif line.startswith("calls="):
            continue
        elif line.startswith("0x") and inside:
            address, _, cost = line.split()[:3]
            if called is None:
                own[int(address, 16)] += int(cost)
            else:
                calls[int(address, 16), called] += int(cost)
            called = None
        elif line.startswith("0x"):
            called = None
    return own, calls


def stacks(program, addresses):
    """By address: the functions that contain it, joined."""
    asked = "\n".join(hex(address) for address in addresses)
    command = ["addr2line", "--exe", program, "--addresses", "--functions", "--inlines", "--demangle"]
    told = subprocess.run(command, input=asked, capture_output=True, text=True, check=True).stdout
    found, address = collections.defaultdict(list), None
    for line in told.splitlines():
        if line.startswith("0x"):
            address = int(line, 16)
        else:
            found[address].append(line)
    return {address: "\n".join(lines) for address, lines in found.items()}


def sums(path, program):
    """Instructions of one run, by kind."""
    own, calls = counted(path, program)
    at = stacks(program, sorted({*own, *(address for address, _ in calls)}))
    found = collections.Counter()
    for address, cost in own.items():
        found[kind(at[address])] += cost
    for (address, called), cost in calls.items():
        # A called function that is itself of one of these kinds has been counted there.
        if kind(called) is None:
            found[kind(at[address])] += cost
    return found


def kind(stack):
    """Returns the kind of a function from its stack."""
    kinds = [("host", HOST), ("device", DEVICE), ("work", WORK)]
    return next((name for name, pattern in kinds if pattern.search(stack)), None)


def main():
    program, few, few_layers, many, many_layers = sys.argv[1:]
    layers = int(many_layers) - int(few_layers)
    few, many = sums(few, program), sums(many, program)
    each = {name: (many[name] - few[name]) / layers for name in ["host", "device", "work"]}
    if min(each.values()) <= 0:
        sys.exit(f"ci/instructions: nothing was found of one of these: {each}")
    share = (each["host"] + each["device"]) / each["work"]
    print(f"{each['host']:.0f} on the host and {each['device']:.0f} on the host device, "
          f"beside {each['work']:.0f} of resolve and gather: {100 * share:.2f}%")


main()
